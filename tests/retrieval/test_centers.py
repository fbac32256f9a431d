"""A copy whose vectors are centered by kind ranks as the naive computation, with an index or without."""

import numpy as np
import pytest
from PIL import Image

from conjoin.cli.main import main
from conjoin.retrieval import Collection, encode_collection, search_items
from conjoin.retrieval.collection_copy import copy_collection
from tiny_encoder import tiny_encoder, tiny_rows

RED = Image.new("RGB", (5, 5), "red")
QUERIES = {"text": "thing 7", "image": RED, "both": {"image": RED, "text": "thing 7"}}


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("index", [None, "ivf_flat"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_centered_copy_ranks_as_the_naive_computation(tmp_path, index, dtype):
    encoder, rows = tiny_encoder(), tiny_rows(60)
    plain = encode_collection(rows, encoder, tmp_path / "plain", dtype=dtype)
    if index is not None:
        plain.index(index, probes=99)
    copy = copy_collection(plain, tmp_path / "copy", center="kind")
    assert copy.metadata["index"] == plain.metadata["index"]
    kinds = np.array(["both" if row["image"] and row["text"] else "image" if row["image"] else "text" for row in rows])
    vectors = plain.vectors([row["id"] for row in rows]).astype(np.float64)
    means = {kind: vectors[kinds == kind].mean(axis=0) for kind in QUERIES}
    moved = unit(vectors - np.stack([means[kind] for kind in kinds])).astype(dtype)
    asked = unit(encoder.encode([*QUERIES.values()]) - np.stack([means[kind] for kind in QUERIES]))
    found = search_items(copy, encoder, [*QUERIES.values()], k=9, ranking="vectors")
    for hits, scores in zip(found, asked @ moved.astype(np.float64).T, strict=True):
        order = np.argsort(-scores)[:9]
        np.testing.assert_allclose(
            [hit.score for hit in hits], scores[order], atol=1e-3 if dtype == "float16" else 1e-5
        )
        assert hits[0].id == rows[order[0]]["id"]
    part = search_items(copy, encoder, [QUERIES["both"]], k=1, ranking="vectors", weights={"image": 0.0, "text": 1.0})
    assert part[0][0].score == pytest.approx(found[0][0].score, abs=1e-5), "each part has the mean of its kind"
    assert copy.rows(copy.ids) == plain.rows(copy.ids)
    again = copy_collection(copy, tmp_path / "again")
    hits, others = (search_items(each, encoder, ["thing 7"], ranking="vectors")[0] for each in (copy, again))
    assert hits == others and hits[:9] == found[0]


def test_what_cannot_be_centered(tmp_path, capsys):
    encoder = tiny_encoder()
    rows = [row for row in tiny_rows(30) if row["image"] is not None]
    plain = encode_collection(rows, encoder, tmp_path / "plain")
    assert main(["copy", str(tmp_path / "plain"), str(tmp_path / "copy"), "--center", "kind"]) == 0
    copy = Collection(tmp_path / "copy")
    with pytest.raises(ValueError, match="the kind 'text' has no mean to subtract; there are those of image, both"):
        search_items(copy, encoder, ["thing"])
    with pytest.raises(ValueError, match="was made with center 'kind'"):
        encode_collection(rows, encoder, tmp_path / "copy")
    with pytest.raises(ValueError, match="are centered already"):
        copy_collection(copy, tmp_path / "again", center="kind")
    one = encode_collection(rows[:1], encoder, tmp_path / "one")
    with pytest.raises(ValueError, match="equals the mean of its kind"):
        copy_collection(one, tmp_path / "none", center="kind")
    assert len(plain) == len(copy)
