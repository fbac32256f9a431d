"""Cached features of scenes, and the vectors that a model or its towers alone make of them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from conjoin import JointEncoderModel
from conjoin.data import load_triplets
from conjoin.evaluation import best_ranks, triplet_wins
from conjoin.retrieval import ModelIdentity
from conjoin.trainers import CachedFeatures, collate_features

VIEWS = ("image", "text", "fused")
ROLES = ("query", "positive", "negative")
WORDS = ("text_features", "attention_mask", "special_tokens_mask")

Vectors = Mapping[str, Tensor]
"""Unit vectors `(N, d)` by view."""


class Outcomes(NamedTuple):
    """Whether each positive is nearer than the negative `(N,)`, its rank `(N,)`, and the candidates of each query."""

    wins: Tensor
    ranks: Tensor
    pool: int


@dataclass
class SceneTriplets:
    """One set of triplets of `make_scenes`.

    Attributes:
        features: Of all queries, then all positives, all negatives, and the variants that exist.
        kinds: The kind of each negative.
        varied: `(N,)` bool, which queries have a variant.
        scenes: Text and truth of the queries, for `score_intersection`.
        items: Picture and text of all queries, positives and negatives.
    """

    features: CachedFeatures
    kinds: list[str]
    varied: Tensor
    scenes: list[dict[str, Any]]
    items: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path, cache: Callable[[str, list[dict[str, Any]]], CachedFeatures]) -> "SceneTriplets":
        """Read a file of triplets; `cache` computes the features of pairs, kept under a name."""
        triplets = load_triplets(path).to_list()
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        varied = [row["variant_text"] is not None for row in triplets]
        items = [(role, row) for role in ROLES for row in triplets]
        items += [("variant", row) for row, has in zip(triplets, varied, strict=True) if has]
        rows = [
            {"id": f"{row['id']} {role}", "image": row[f"{role}_image"], "text": row[f"{role}_text"]}
            for role, row in items
        ]
        scenes = [
            {"text": line["query_text"]} | {name: line[f"query_{name}"] for name in ("image_objects", "text_objects")}
            for line in lines
        ]
        kinds = [row["kind"] for row in triplets]
        return cls(cache(path.stem, rows), kinds, torch.tensor(varied), scenes, rows[: len(ROLES) * len(triplets)])

    def roles(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split vectors of all rows into queries, positives, negatives and variants, `(N, D)` each."""
        count = len(self.kinds)
        query, positive, negative = vectors[: 3 * count].split(count)
        variant = query.clone()
        variant[self.varied] = vectors[3 * count :]
        return query, positive, negative, variant

    def outcomes(self, vectors: Tensor, distractors: Tensor) -> Outcomes:
        """Search each positive among the items of all triplets and the distractors; vectors have length 1."""
        query, positive, negative, variant = self.roles(vectors)
        wins, pool = (
            triplet_wins(query, positive, negative, variant),
            torch.cat([query, positive, negative, distractors]),
        )
        labels = torch.full((len(pool),), -1)
        labels[len(query) : 2 * len(query)] = torch.arange(len(query))
        ranks = (
            best_ranks(query, pool, torch.arange(len(query)), labels) - 1
        )  # less the query itself, which is nearest
        return Outcomes(wins, ranks, len(pool) - 1)

    def text_to_image_ranks(self, views: Vectors, distractors: Vectors) -> Tensor:
        """The rank of the query's picture, searched among all queries' and distractors' by the positive's text."""
        count = len(self.kinds)
        texts, pictures = views["text"][count : 2 * count], views["image"][:count]
        labels = torch.cat([torch.arange(count), torch.full((len(distractors["image"]),), -1)])
        return best_ranks(texts, torch.cat([pictures, distractors["image"]]), labels[:count], labels)


@torch.inference_mode()
def embed_features(
    model: JointEncoderModel,
    features: CachedFeatures,
    dtype: torch.dtype,
    places: Sequence[int] | None = None,
    views: Sequence[str] = VIEWS,
) -> dict[str, Tensor]:
    """Unit vectors `(N, d)` of every row, or of the rows at `places`, by view."""
    model.eval()
    device = model.device
    parts: dict[str, list[Tensor]] = {}
    rows = range(len(features)) if places is None else places
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for start in range(0, len(rows), 128):
            pairs = collate_trimmed([features[row] for row in rows[start : start + 128]])["pairs"]
            pairs = {name: value.to(device) for name, value in pairs.items()}
            embedded = model(**pairs, views=views).embeddings
            for view, vectors in zip(views, embedded.chunk(len(views)), strict=True):
                parts.setdefault(view, []).append(vectors.float().cpu())
    return {view: torch.cat(vectors) for view, vectors in parts.items()}


def tower_vectors(features: CachedFeatures) -> dict[str, Tensor]:
    """Unit vectors `(N, h)` of the towers alone: the picture's global token or mean patch, the mean of the words."""
    image = features.images["image_features"][:, 0]
    words, exists = features.texts["text_features"][:, 1:].float(), features.texts["attention_mask"]
    exists = exists[..., None]
    text = (words * exists).sum(1) / exists.sum(1)
    states = {
        "global": image[:, 0].float(),
        "patches": image[:, 1:].float().mean(1),
        "words": text[features.images["text_rows"][:, 0]],
    }
    return {name: F.normalize(vectors, dim=1) for name, vectors in states.items()}


def collate_trimmed(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Collate cached features without the padding that no text of the batch needs."""
    batch = collate_features(rows)
    pairs = batch["pairs"]
    width = int(pairs["attention_mask"].any(0).nonzero().max()) + 1
    for name in WORDS:
        pairs[name] = pairs[name][:, : width + (name == "text_features")]
    return batch


class FeatureEncoder:
    """The encoder that mining takes, on cached features: items are found by their ids.

    Args:
        name: The name of the model.
        places: The row of each id.
        vectors: Maps a view and places to vectors `(N, d)`.
    """

    device, dtype, batch_size, processing, input_type, truncate_dim = torch.device("cpu"), None, 128, None, "seq", None
    is_symmetric, load_options = True, MappingProxyType({})

    def __init__(self, name: str, places: dict[str, int], vectors: Callable[[str, list[int]], Tensor]) -> None:
        self.name = self.fingerprint = name
        self.identity = ModelIdentity(name, name)
        self.places, self.vectors = places, vectors

    def prompt_of(self, *given: Any) -> None:  # noqa: ANN401 - as of `ItemEncoder`
        """None has a prompt."""

    def encode_batches(self, items: Sequence[Any], ids: Sequence[str], **_: Any) -> Iterator[Any]:  # noqa: ANN401
        """Encode the view that the items have."""
        view = "fused" if len(items[0]) == 2 else next(iter(items[0]))
        vectors = self.vectors(view, [self.places[name] for name in ids])
        yield range(len(items)), range(len(items)), np.ascontiguousarray(vectors.numpy())
