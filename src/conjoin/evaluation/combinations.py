"""The nine modality combinations: {image, text, image + text} queries against candidates of each kind.

*Local*: the gallery holds candidates of one modality. *Global*: the gallery holds candidates of all modalities, and
only those of the named modality are right; a model that ranks by modality first fails. *Any*: the gallery holds
candidates of all modalities, and every candidate of the query's concept is right.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from conjoin.evaluation.metrics import Array, best_ranks, integer_labels
from conjoin.evaluation.results import Cell, Metric, score_ranks

MODALITIES = ("image", "text", "image,text")
SETTINGS = ("local", "global", "any")
MRR_DEPTH = 10


class Embedded(NamedTuple):
    """Embeddings of one modality and the concept that each row shows."""

    embeddings: Array
    """`(N, D)`, normalised or not."""
    concepts: Sequence[Hashable]
    """`N` ids; a candidate is right for a query of the same concept."""


class _Labelled(NamedTuple):
    embeddings: Tensor
    labels: Tensor


def evaluate_combinations(
    queries: Mapping[str, Embedded],
    candidates: Mapping[str, Embedded],
    settings: Sequence[str] = ("local", "global"),
    ks: Sequence[int] = (1, 5, 10, 50),
    keep: Mapping[tuple[str, str], Sequence[bool]] | None = None,
    resamples: int = 10000,
    seed: int = 0,
) -> list[Cell]:
    """Score every combination of query and candidate modality.

    The best rank of the right candidates counts. Ties count as failures. Scores are computed block by block.

    Args:
        queries: By modality (`MODALITIES`); a modality may be left out.
        candidates: By modality.
        settings: Of `SETTINGS`.
        ks: Cut-offs of the hit rates.
        keep: For (query modality, candidate modality) the queries to evaluate, in every setting. Leave out queries
            with a trivial answer, such as a text query whose candidate is the same text. In the setting `"any"` the
            candidate modality is `"any"`.
        resamples: Bootstrap samples per interval.
        seed: Of the bootstrap.

    Returns:
        One `Cell` per setting, query modality and candidate modality: hit rates and MRR@10, each with its bootstrap
        interval over queries and the exact expectation of a random order.

    Raises:
        ValueError: An unknown modality, setting or key of `keep`; a mask of another length; a kept query without a
            right candidate; or embeddings that are not finite.
    """
    _check_names("setting", settings, SETTINGS)
    _check_names("query modality", queries, MODALITIES)
    _check_names("candidate modality", candidates, MODALITIES)
    masks = dict(keep or {})
    _check_names("keep", masks, [(query, target) for query in MODALITIES for target in (*MODALITIES, "any")])
    rows_of_queries, pools = _label(queries, candidates)
    cells = []
    for setting in settings:
        for target, gallery in _galleries(setting, pools):
            for query, rows in rows_of_queries.items():
                mask = _mask(masks.get((query, target)), len(rows.labels), f"keep[{query!r}, {target!r}]")
                kept = _Labelled(rows.embeddings[mask], rows.labels[mask])
                concepts = [key for key, used in zip(queries[query].concepts, mask.tolist(), strict=True) if used]
                metrics = _score(kept, gallery, concepts, f"{setting} {query} -> {target}", ks, resamples, seed)
                cells.append(Cell(setting, query, target, len(concepts), len(gallery.labels), metrics))
    order = {name: index for index, name in enumerate((*MODALITIES, "any"))}
    return sorted(cells, key=lambda cell: (settings.index(cell.setting), order[cell.query], order[cell.candidates]))


def _score(
    queries: _Labelled,
    gallery: _Labelled,
    concepts: Sequence[Hashable],
    name: str,
    ks: Sequence[int],
    resamples: int,
    seed: int,
) -> dict[str, Metric]:
    if not concepts:
        return {}
    sizes = torch.bincount(gallery.labels[gallery.labels >= 0], minlength=int(queries.labels.max()) + 1)
    counts = sizes[queries.labels].numpy()
    lost = [concept for concept, count in zip(concepts, counts, strict=True) if not count]
    if lost:
        raise ValueError(f"{name}: {len(lost)} queries have no right candidate in the gallery, such as {lost[:3]}")
    ranks = best_ranks(queries.embeddings, gallery.embeddings, queries.labels, gallery.labels)
    return score_ranks(ranks, counts, len(gallery.labels), ks, MRR_DEPTH, resamples, seed)


def _label(
    queries: Mapping[str, Embedded], candidates: Mapping[str, Embedded]
) -> tuple[dict[str, _Labelled], dict[str, _Labelled]]:
    """Replace concept ids by integers shared by queries and candidates."""
    groups = [*queries.items(), *candidates.items()]
    labels = integer_labels(*(each.concepts for _, each in groups))
    rows = []
    for (modality, each), numbers in zip(groups, labels, strict=True):
        embeddings = torch.as_tensor(each.embeddings)
        if len(embeddings) != len(numbers):
            raise ValueError(f"{modality}: {len(embeddings)} embeddings but {len(numbers)} concepts")
        rows.append(_Labelled(embeddings, numbers))
    rows_of_queries = dict(zip(queries, rows[: len(queries)], strict=True))
    return rows_of_queries, dict(zip(candidates, rows[len(queries) :], strict=True))


def _galleries(setting: str, pools: Mapping[str, _Labelled]) -> Iterator[tuple[str, _Labelled]]:
    """The galleries of one setting; a candidate that is never right there has the label -1."""
    if setting == "local":
        yield from pools.items()
        return
    embeddings = torch.cat([pool.embeddings for pool in pools.values()])
    if setting == "any":
        yield "any", _Labelled(embeddings, torch.cat([pool.labels for pool in pools.values()]))
        return
    for target in pools:
        labels = [pool.labels if name == target else torch.full_like(pool.labels, -1) for name, pool in pools.items()]
        yield target, _Labelled(embeddings, torch.cat(labels))


def _mask(mask: Sequence[bool] | None, length: int, name: str) -> Tensor:
    chosen = torch.ones(length, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    if chosen.shape != (length,) or chosen.dtype != torch.bool:
        raise ValueError(f"{name} must be {length} booleans, got {chosen.dtype} of shape {tuple(chosen.shape)}")
    return chosen


def _check_names(
    what: str,
    names: Sequence[object] | Mapping[str, object] | Mapping[tuple[str, str], object],
    valid: Sequence[object],
) -> None:
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise ValueError(f"unknown {what} {unknown[0]!r}; expected one of {list(valid)}")
