"""Collections of given vectors, what a collection holds, and the ranking by sorting everything."""

from types import SimpleNamespace

import numpy as np
import torch

from conjoin.processing import parse_items
from conjoin.retrieval import Collection, ItemEncoder, encode_collection
from tiny_encoder import TinyConfig


class Lookup(torch.nn.Module):
    """Gives the vector whose number an item's text begins with."""

    def __init__(self, vectors):
        super().__init__()
        self.config = TinyConfig(width=vectors.shape[1])
        self.weight = torch.nn.Parameter(torch.from_numpy(vectors))

    def forward(self, numbers):
        return SimpleNamespace(embeddings=self.weight[numbers])


def _numbers(items):
    texts = [" ".join(item.texts) for item in parse_items(items)]
    return {"numbers": torch.tensor([0 if text == "dimension" else int(text.split()[0]) for text in texts])}


def lookup_encoder(vectors):
    return ItemEncoder(Lookup(vectors), _numbers, batch_size=64)


def unit(count, dimension, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(count, dimension, seed=0):
    """Vectors around 50 centres, as embeddings are, not spread evenly."""
    vectors = unit(50, dimension, 99)[np.arange(count) % 50] + 0.7 * unit(count, dimension, seed)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def names(count, start=0):
    return [f"doc/{number:05d}" for number in range(start, start + count)]


def lookup_rows(count, start=0, kept=None):
    """Rows whose vectors `lookup_encoder` looks up; `kept` makes the kept columns of a number."""
    rows = [{"id": id_, "text": str(number)} for number, id_ in enumerate(names(count, start), start)]
    return rows if kept is None else [row | {"metadata": kept(number)} for number, row in enumerate(rows, start)]


def made(folder, vectors, kept=None, count=None, **options):
    """A collection of the first vectors, or of all."""
    rows = lookup_rows(len(vectors) if count is None else count, kept=kept)
    return encode_collection(rows, lookup_encoder(vectors), folder, **options)


def naive(vectors, queries, k, ids=None):
    """Ids and scores by sorting; equal scores in the order of the ids."""
    ids = names(len(vectors)) if ids is None else ids
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    order = np.stack([np.lexsort((np.array(ids), -row)) for row in scores])[:, :k]
    return [[ids[place] for place in row] for row in order], np.take_along_axis(scores, order, 1)


def check(collection, vectors, queries, k=8, ids=None, **options):
    """Make sure that a search gives what `naive` gives."""
    right, scores = naive(vectors, queries, k, ids)
    found = collection.rank(queries, k, **options)
    assert found.ids == right
    np.testing.assert_array_equal(found.scores, scores)


def state(uri):
    """The vector and what else is known of every row, by id."""
    collection = Collection(uri)
    ids, vectors = collection.ids, collection.vectors()
    assert len(set(ids)) == len(ids) == len(collection) == len(vectors)
    return {id_: (vector.tobytes(), row) for id_, vector, row in zip(ids, vectors, collection.rows(ids), strict=True)}


def files(folder):
    """Contents and times of all files, less the lock."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
