"""The three samplers of conditions (MERIT App. A.3.1 to A.3.3).

A sampler draws once: it returns a `Draft`, or the reason why this draw is none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .catalogue import MISSING, Catalogue

MOST_COMPARED = 512
"""Products among which the most similar one is looked for."""


class Condition(NamedTuple):
    """A product of a query and what the target shares with it; indices in the pool and in its attributes."""

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
        exclude_most_frequent: The catalogue's most frequent value of each attribute is no condition (App. A.2.2: "all
            ages").
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
        for index, codes in enumerate(self.codes):
            order = np.argsort(codes, kind="stable").astype(np.int32)
            starts = np.searchsorted(codes[order], np.arange(len(catalogue.values[index]) + 1))
            self._order.append(order)
            self._starts.append(starts)
            counts = np.diff(starts)
            if exclude_most_frequent:
                everywhere = catalogue.codes[index]
                counts[np.bincount(everywhere[everywhere != MISSING]).argmax()] = 0
            self._usable.append(np.flatnonzero(counts > 1))
            usable[index] = np.isin(codes, self._usable[-1])
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
        """Return the products that have all of these attribute values, ascending."""
        lists = sorted((self.products(*pair) for pair in wanted), key=len)
        products = lists[0]
        for attribute, value in wanted:
            products = products[self.codes[attribute, products] == value]
        return products

    def lacking(self, products: np.ndarray, wanted: Sequence[tuple[int, int]]) -> np.ndarray:
        """Those of the products that have another value of at least one of these; an unknown value may be the one."""
        codes = [(self.codes[attribute, products], value) for attribute, value in wanted]
        return products[np.any([(code != value) & (code != MISSING) for code, value in codes], axis=0)]

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
    for index, row in enumerate(rows.tolist()):
        group = groups[row]
        if group is not None:
            members.setdefault(group, []).append(index)
    several = [np.array(indices, dtype=np.int32) for indices in members.values() if len(indices) > 1]
    of = np.full(len(rows), -1, dtype=np.int32)
    for number, indices in enumerate(several):
        of[indices] = number
    return Families(of, several)


class Draft(NamedTuple):
    """A query in the making: its conditions, its positives in order, and hard negatives of the sampler's own."""

    conditions: tuple[Condition, ...]
    positives: np.ndarray
    siblings: np.ndarray


def draw_conventional(pool: Pool, count: int, generator: np.random.Generator) -> tuple[Condition, ...] | str:
    """Products uniformly, then a key of each; frequent keys less often (App. A.3.1)."""
    if len(pool) < count:
        return "too few products"
    conditions: list[Condition] = []
    for product in generator.choice(len(pool), count, replace=False).tolist():
        keys = _without(pool.usable_keys(product), [condition.attribute for condition in conditions])
        if not len(keys):
            return "a product without a further attribute"
        key = pool.draw_key(keys, generator)
        conditions.append(Condition(product, key, int(pool.codes[key, product])))
    return tuple(conditions)


def draw_attribute_uniform(pool: Pool, count: int, generator: np.random.Generator) -> tuple[Condition, ...] | str:
    """Keys uniformly, a value of each uniformly, then a product with it (App. A.3.2)."""
    keys = pool.keys
    if len(keys) < count:
        return "too few attributes"
    conditions: list[Condition] = []
    for key in generator.choice(keys, count, replace=False).tolist():
        value = _one(pool.usable_values(key), generator)
        conditions.append(Condition(_one(pool.products(key, value), generator), key, value))
    return tuple(conditions)


def draw_high_similarity(pool: Pool, count: int, generator: np.random.Generator) -> tuple[Condition, ...] | str:
    """What turns a product into a similar one (App. A.3.3).

    The first condition is a value that both share. Each other one is a value in which the similar product differs, of
    a further product outside of the family.
    """
    first = _draw_of_family(pool, generator)
    similar = find_similar(pool, first, generator)
    if similar is None:
        return "no similar product"
    keys = pool.usable_keys(similar)
    ours, theirs = pool.codes[keys, first], pool.codes[keys, similar]
    shared, differing = keys[ours == theirs], keys[(ours != theirs) & (ours != MISSING)]
    if not len(shared):
        return "similar products that share no value"
    if len(differing) < count - 1:
        return "similar products that differ in too few values"
    key = pool.draw_key(shared, generator)
    conditions = [Condition(first, key, int(pool.codes[key, first]))]
    barred = {first, similar, *pool.family(first).tolist()}
    for _ in range(count - 1):
        key = pool.draw_key(_without(differing, [condition.attribute for condition in conditions]), generator)
        value = int(pool.codes[key, similar])
        product = _one(pool.products(key, value), generator)
        if product in barred:
            return "no other product with a differing value"
        conditions.append(Condition(product, key, value))
    return tuple(conditions)


SAMPLERS = {
    "conventional": draw_conventional,
    "attribute_uniform": draw_attribute_uniform,
    "high_similarity": draw_high_similarity,
}


def _draw_of_family(pool: Pool, generator: np.random.Generator) -> int:
    """A product: of a family drawn uniformly, if there are families."""
    if pool.families is not None and pool.families.members:
        members = pool.families.members
        return _one(members[int(generator.integers(len(members)))], generator)
    return int(generator.integers(len(pool)))


def find_similar(pool: Pool, product: int, generator: np.random.Generator) -> int | None:
    """A product similar to another one, or None.

    One of its family. Without families, the most similar of up to `MOST_COMPARED` products that share one of its
    values: by the vectors, else by the number of values they share. An exact copy is not similar.
    """
    family = pool.family(product)
    if len(family):
        return _one(family, generator)
    keys = pool.usable_keys(product)
    if pool.families is not None or not len(keys):
        return None
    key = _one(keys, generator)
    candidates = pool.products(key, int(pool.codes[key, product]))
    if len(candidates) > MOST_COMPARED:
        candidates = candidates[generator.choice(len(candidates), MOST_COMPARED, replace=False)]
    ours, theirs = pool.codes[:, product, None], pool.codes[:, candidates]
    candidates = candidates[((theirs != ours) & (theirs != MISSING) & (ours != MISSING)).any(axis=0)]
    if not len(candidates):
        return None
    return int(candidates[pool.similarities([product], candidates).argmax()])


def check_conditions(pool: Pool, conditions: Sequence[Condition]) -> str | None:
    """Why these conditions make no query: one product would serve for two of them (App. A.3.1)."""
    products = np.array([condition.product for condition in conditions])
    if len(set(products.tolist())) < len(products):
        return "one product for two conditions"
    for condition in conditions:
        if (pool.codes[condition.attribute, products] == condition.value).sum() > 1:
            return "two products share the value of a condition"
    return None


def recall(pool: Pool, conditions: Sequence[Condition], max_share: float) -> np.ndarray | str:
    """Return the products that satisfy the conditions, ascending, or why there are too few or too many."""
    positives = pool.find([condition[1:] for condition in conditions])
    if not len(positives):
        return "no positive"
    return positives if len(positives) < max_share * len(pool) else "too many positives"


def rank(pool: Pool, conditions: Sequence[Condition], products: np.ndarray) -> np.ndarray:
    """Sort products by their mean similarity to the query's products, best first; ties keep the pool's order."""
    if pool.vectors is None:
        return products
    similarities = pool.similarities([condition.product for condition in conditions], products)
    return products[np.argsort(-similarities, kind="stable")]


def near_misses(pool: Pool, conditions: Sequence[Condition], count: int, generator: np.random.Generator) -> np.ndarray:
    """Products that satisfy all conditions but one, and have another value there.

    Each condition is missed in turn. Of each such list, at most `MOST_COMPARED` products are drawn; by the vectors,
    the most similar to the query's products come first, else the order is random.
    """
    lists = []
    for missed in conditions:
        kept = [condition[1:] for condition in conditions if condition is not missed]
        misses = pool.lacking(pool.find(kept), [missed[1:]])
        if pool.vectors is None:
            misses = generator.permutation(misses)[:MOST_COMPARED]
        elif len(misses) > MOST_COMPARED:
            misses = np.sort(misses[generator.choice(len(misses), MOST_COMPARED, replace=False)])
        lists.append(rank(pool, conditions, misses).tolist())
    barred = {condition.product for condition in conditions}
    chosen: list[int] = []
    for index in range(max(map(len, lists))):
        chosen += [near[index] for near in lists if index < len(near) and near[index] not in barred | set(chosen)]
        if len(chosen) >= count:
            break
    return np.array(chosen[:count], dtype=np.int32)


def _without(keys: np.ndarray, taken: Sequence[int]) -> np.ndarray:
    return keys[~np.isin(keys, taken)] if taken else keys


def _one(values: np.ndarray, generator: np.random.Generator) -> int:
    return int(values[int(generator.integers(len(values)))])
