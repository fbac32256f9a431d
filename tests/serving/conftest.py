"""A collection of pictures of one colour, with a tiny model."""

import os

import pytest

from conjoin.retrieval import encode_collection, open_collection
from conjoin.retrieval.search import SERVED_BYTES
from conjoin.serving.searcher import Searcher
from tiny_encoder import tiny_encoder
from tiny_serving import COLOURS, LIMITS, png


@pytest.fixture(scope="session")
def make_searcher(tmp_path_factory):
    """`make_searcher(seed)` searches a collection of the same pictures, which may be shown, with another model."""
    patch = pytest.MonkeyPatch()

    def make(seed=0, limits=LIMITS, keep_pictures=None):
        folder = tmp_path_factory.mktemp("serving")
        patch.setenv("CONJOIN_ROOTS", str(folder), prepend=os.pathsep)
        rows = []
        for price, colour in enumerate(COLOURS):
            path = folder / f"{colour}.png"
            path.write_bytes(png(colour))
            kept = {"price": price, "kind": "<b>warm</b>" if colour in ("red", "yellow") else "cold"}
            rows.append({"id": f"id-{colour}", "image": str(path), "metadata": {"text": f"a {colour} thing", **kept}})
        encoder = tiny_encoder(seed)
        encode_collection(rows, encoder, folder / "collection", keep_pictures=keep_pictures)
        return Searcher(encoder, open_collection(folder / "collection", memory=SERVED_BYTES), limits)

    yield make
    patch.undo()


@pytest.fixture(scope="session")
def searcher(make_searcher):
    return make_searcher()
