"""The nine modality combinations: {image, text, image + text} queries against candidates of each kind.

*Local*: the gallery holds candidates of one modality. *Global*: the gallery holds candidates of all modalities, and
only those of the named modality are right; a model that ranks by modality first fails.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from conjoin.evaluation.metrics import Array, best_ranks, integer_labels
from conjoin.evaluation.results import Cell, score_ranks

MODALITIES = ("image", "text", "image,text")
SETTINGS = ("local", "global")
MRR_DEPTH = 10


class Embedded(NamedTuple):
    """Embeddings of one modality and the concept that each row shows."""

    embeddings: Array
    """`(N, D)`, normalised or not."""
    concepts: Sequence[Hashable]
    """`N` ids; a candidate is right for a query of the same concept."""


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
            with a trivial answer, such as a text query whose candidate is the same text.
        resamples: Bootstrap samples per interval.
        seed: Of the bootstrap.

    Returns:
        One `Cell` per setting, query modality and candidate modality: hit rates and MRR@10, each with its bootstrap
        interval over queries and the exact expectation of a random order.

    Raises:
        ValueError: An unknown modality, setting or key of `keep`; a mask of another length; a kept query without a
            right candidate; or embeddings that are not finite.
    """
    masks = dict(keep or {})
    _check_names("setting", settings, SETTINGS)
    _check_names("query modality", queries, MODALITIES)
    _check_names("candidate modality", candidates, MODALITIES)
    _check_names("keep", masks, list(itertools.product(MODALITIES, MODALITIES)))
    for modality, each in (*queries.items(), *candidates.items()):
        if len(each.embeddings) != len(each.concepts):
            raise ValueError(f"{modality}: {len(each.embeddings)} embeddings but {len(each.concepts)} concepts")
    labels = integer_labels(*(each.concepts for each in (*queries.values(), *candidates.values())))
    of_query = dict(zip(queries, labels, strict=False))
    pools = {
        name: (torch.as_tensor(each.embeddings), numbers)
        for (name, each), numbers in zip(candidates.items(), labels[len(queries) :], strict=True)
    }
    cells = []
    for setting in settings:
        for target, (gallery, gallery_labels) in _galleries(setting, pools):
            for query, each in queries.items():
                mask = torch.as_tensor(masks.get((query, target), [True] * len(each.concepts)))
                if mask.shape != (len(each.concepts),) or mask.dtype != torch.bool:
                    got = f"{mask.dtype} of shape {tuple(mask.shape)}"
                    raise ValueError(f"keep[{query!r}, {target!r}] must be {len(each.concepts)} booleans, got {got}")
                wanted, metrics = of_query[query][mask], {}
                if len(wanted):
                    sizes = torch.bincount(gallery_labels[gallery_labels >= 0], minlength=int(wanted.max()) + 1)
                    counts = sizes[wanted]
                    lost = [each.concepts[row] for row in mask.nonzero().flatten()[counts == 0].tolist()]
                    if lost:
                        name = f"{setting} {query} -> {target}"
                        raise ValueError(
                            f"{name}: {len(lost)} queries have no right candidate in the gallery, such as {lost[:3]}"
                        )
                    ranks = best_ranks(torch.as_tensor(each.embeddings)[mask], gallery, wanted, gallery_labels)
                    metrics = score_ranks(ranks, counts.numpy(), len(gallery), ks, MRR_DEPTH, resamples, seed)
                cells.append(Cell(setting, query, target, len(wanted), len(gallery), metrics))
    order = MODALITIES.index
    return sorted(cells, key=lambda each: (settings.index(each.setting), order(each.query), order(each.candidates)))


def _galleries(
    setting: str, pools: Mapping[str, tuple[Tensor, Tensor]]
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """The embeddings and labels of each gallery of a setting; a candidate that is never right has the label -1."""
    if setting == "local":
        yield from pools.items()
        return
    everything = torch.cat([embeddings for embeddings, _ in pools.values()])
    for target in pools:
        labels = [own if name == target else torch.full_like(own, -1) for name, (_, own) in pools.items()]
        yield target, (everything, torch.cat(labels))


def _check_names(what: str, names: Iterable[object], valid: Sequence[object]) -> None:
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise ValueError(f"unknown {what} {unknown[0]!r}; expected one of {list(valid)}")
