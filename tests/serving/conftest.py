"""An index of pictures of one colour, with a tiny model."""

import pytest

from conjoin.retrieval import build_index, encode_corpus
from conjoin.serving.searcher import Searcher
from tiny_encoder import tiny_encoder
from tiny_serving import COLOURS, LIMITS, png


@pytest.fixture(scope="session")
def make_searcher(tmp_path_factory):
    """`make_searcher(seed)` searches an index of the same pictures with another model."""

    def make(seed=0, limits=LIMITS):
        folder = tmp_path_factory.mktemp("serving")
        rows = []
        for price, colour in enumerate(COLOURS):
            path = folder / f"{colour}.png"
            path.write_bytes(png(colour))
            kept = {"price": price, "kind": "<b>warm</b>" if colour in ("red", "yellow") else "cold"}
            rows.append({"id": f"id-{colour}", "image": str(path), "kept": {"text": f"a {colour} thing", **kept}})
        encoder = tiny_encoder(seed)
        index = build_index(encode_corpus(rows, encoder, folder / "store", show_progress=False))
        index.save(folder / "index")
        return Searcher(encoder, index, limits, str(folder / "index"))

    return make


@pytest.fixture(scope="session")
def searcher(make_searcher):
    return make_searcher()
