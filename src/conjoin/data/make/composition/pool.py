"""The products of one split with an inverted index: which have the values of a list of conditions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .catalogue import MISSING, Catalogue


class Condition(NamedTuple):
    """A product of a query and what the target shares with it; places in the pool and in its attributes."""

    product: int
    attribute: int
    value: int


class Pool:
    """Products among which queries are composed and answered.

    Args:
        catalogue: All products.
        rows: Which of them.
        vectors: `(N, D)` of all products, L2-normalised, or None.
        damping: A key is drawn in proportion to (its number of products) ** -damping; 0 does not suppress the
            frequent ones (App. A.3.1 does).
        exclude_most_frequent: The most frequent value of each attribute is no condition (App. A.2.2: "all ages").
    """

    def __init__(
        self,
        catalogue: Catalogue,
        rows: np.ndarray,
        vectors: np.ndarray | None = None,
        damping: float = 0.5,
        exclude_most_frequent: bool = False,
    ) -> None:
        self.rows = rows
        self.codes = np.ascontiguousarray(catalogue.codes[:, rows])
        self.vectors = None if vectors is None else np.ascontiguousarray(vectors[rows], dtype=np.float32)
        self._order, self._starts, self._usable = [], [], []
        usable = np.zeros(self.codes.shape, dtype=bool)
        for place, codes in enumerate(self.codes):
            order = np.argsort(codes, kind="stable").astype(np.int32)
            starts = np.searchsorted(codes[order], np.arange(len(catalogue.values[place]) + 1))
            self._order.append(order)
            self._starts.append(starts)
            counts = np.diff(starts)
            if exclude_most_frequent and len(counts):
                counts[counts.argmax()] = 0
            self._usable.append(np.flatnonzero(counts > 1))
            usable[place] = np.isin(codes, self._usable[-1])
        frequency = (self.codes != MISSING).sum(axis=1)
        self._weights = np.where(frequency > 0, np.maximum(frequency, 1.0) ** -damping, 0.0)
        self._has = np.ascontiguousarray(usable.T)
        self.families = _families(catalogue.groups, rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> np.ndarray:
        """The attributes with a value that several products have."""
        return np.flatnonzero([len(values) > 0 for values in self._usable])

    def usable_values(self, attribute: int) -> np.ndarray:
        """The values of an attribute that several products have."""
        return self._usable[attribute]

    def usable_keys(self, product: int) -> np.ndarray:
        """The attributes of a product whose value another product has too."""
        return np.flatnonzero(self._has[product])

    def products(self, attribute: int, value: int) -> np.ndarray:
        """The products with a value, ascending."""
        first, end = self._starts[attribute][value : value + 2]
        return self._order[attribute][first:end]

    def draw_key(self, keys: np.ndarray, generator: np.random.Generator) -> int:
        """One of these attributes, the frequent ones less often."""
        ends = np.cumsum(self._weights[keys])
        return int(keys[min(np.searchsorted(ends, generator.random() * ends[-1], side="right"), len(keys) - 1)])

    def find(self, wanted: Sequence[tuple[int, int]]) -> np.ndarray:
        """The products that have all of these values of attributes, ascending."""
        lists = sorted((self.products(*pair) for pair in wanted), key=len)
        found = lists[0]
        for attribute, value in wanted:
            found = found[self.codes[attribute, found] == value]
        return found

    def family(self, product: int) -> np.ndarray:
        """The other variants of a product, ascending."""
        if self.families is None or self.families.of[product] < 0:
            return np.empty(0, dtype=np.int32)
        members = self.families.members[self.families.of[product]]
        return members[members != product]

    def similarities(self, products: Sequence[int], others: np.ndarray) -> np.ndarray:
        """How similar each of the others is to these products on average; without vectors, the values they share."""
        chosen = np.asarray(products)
        if self.vectors is not None:
            return self.vectors[others] @ self.vectors[chosen].mean(axis=0)
        theirs, ours = self.codes[:, others], self.codes[:, chosen]
        same = (theirs[:, :, None] == ours[:, None, :]) & (ours[:, None, :] != MISSING)
        return same.sum(axis=(0, 2)) / (len(chosen) * len(self.codes))


class Families(NamedTuple):
    """The family of each product of a pool, or -1, and the products of each family of at least two."""

    of: np.ndarray
    members: list[np.ndarray]


def _families(groups: Sequence[str | None] | None, rows: np.ndarray) -> Families | None:
    if groups is None:
        return None
    members: dict[str, list[int]] = {}
    for place, row in enumerate(rows.tolist()):
        group = groups[row]
        if group is not None:
            members.setdefault(group, []).append(place)
    several = [np.array(places, dtype=np.int32) for places in members.values() if len(places) > 1]
    of = np.full(len(rows), -1, dtype=np.int32)
    for number, places in enumerate(several):
        of[places] = number
    return Families(of, several)
