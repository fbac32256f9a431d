"""Several captions of one image: a pair for each, all in one group."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import datasets

from conjoin.data.image_columns import strings


def number_pairs(ids: Iterable[str]) -> list[str]:
    """Number the pairs that share an id, from 0: `a`, `b#0`, `b#1`."""
    ids = list(ids)
    if len(set(ids)) == len(ids):
        return ids
    counts, seen = Counter(ids), Counter[str]()
    numbered = []
    for name in ids:
        numbered.append(name if counts[name] == 1 else f"{name}#{seen[name]}")
        seen[name] += 1
    return numbered


def group_rows(ids: Sequence[str], images: Sequence[Hashable], owners: Sequence[int]) -> Sequence[str] | None:
    """Return the group of each row, the id of the first row with its image; None if every pair is a group of its own.

    Args:
        ids: Of the rows.
        images: What names the image of each row.
        owners: The row of each pair.
    """
    first: dict[Hashable, str] = {}
    groups = [first.setdefault(image, row_id) for image, row_id in zip(images, ids, strict=True)]
    return groups if len({groups[row] for row in owners}) < len(owners) else None


def join_pairs(
    images: datasets.Dataset, owners: Sequence[int], columns: Mapping[str, Sequence[str | None]]
) -> datasets.Dataset:
    """Join the columns of pairs with the images of their rows, which are read from where they lie, never repeated.

    Args:
        images: The column `image` of N rows.
        owners: The row of each of M pairs.
        columns: Of the pairs, M values each.
    """
    if isinstance(owners, range):  # a pair for each row
        return _beside(strings(columns), images)
    seen = Counter[int]()
    layers: list[datasets.Dataset] = []
    places = [0] * len(owners)
    start = 0
    rounds: list[list[int]] = []
    for pair, row in enumerate(owners):
        if seen[row] == len(rounds):
            rounds.append([])
        rounds[seen[row]].append(pair)
        seen[row] += 1
    for pairs in rounds:  # the first pairs of all rows, the second pairs ...
        rows: Sequence[int] = [owners[pair] for pair in pairs]
        chosen = images
        if 2 * len(rows) < len(images):
            chosen, rows = images.select(rows), range(len(rows))
        cells: dict[str, list[str | None]] = {name: [None] * len(chosen) for name in columns}
        for pair, row in zip(pairs, rows, strict=True):
            places[pair] = start + row
            for name, values in columns.items():
                cells[name][row] = values[pair]
        layers.append(_beside(strings(cells), chosen))
        start += len(chosen)
    return datasets.concatenate_datasets(layers).select(places)


def _beside(left: datasets.Dataset, right: datasets.Dataset) -> datasets.Dataset:
    return datasets.concatenate_datasets([left, right], axis=1)
