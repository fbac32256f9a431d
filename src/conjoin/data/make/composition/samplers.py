"""Products among which queries are composed, and the samplers of conditions (MERIT App. A.3).

A sampler draws once: it returns a draft, or the reason why this draw gives none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from conjoin.processing import load_image

from .catalogue import MISSING, Catalogue

VisionModel = Callable[[Sequence[Image.Image], str], str]
"""Answers a prompt about some pictures."""
DAMPING = 0.5
"""A key is drawn in proportion to (its number of products) ** -DAMPING (App. A.3.1 suppresses the frequent ones)."""
MOST_COMPARED = 512
"""Products among which the most similar one is looked for."""
AS_SHOWN = -1
"""The attribute of a product without attributes: it is asked for as the picture shows it."""
ATTRIBUTE_PROMPT = (
    "Compare the two pictures of products. Which one attribute has to change most visibly to turn the first product "
    "into the second? Choose one of: {choices}. Answer with the attribute only."
)
VALUE_PROMPT = (
    "Compare the two pictures of products. Which {attribute} does the second product have, unlike the first? "
    "Choose one of: {choices}. Answer with the value only, or with no if none of them fits."
)


class Condition(NamedTuple):
    """A product of a query and what the target shares with it; indices in the pool and in its attributes."""

    product: int
    attribute: int
    value: int


class Draft(NamedTuple):
    """A query in the making: its conditions, its positives in order, and hard negatives of the sampler's own."""

    conditions: Sequence[Condition]
    positives: np.ndarray
    siblings: np.ndarray


class Pool:
    """Products among which queries are composed and answered.

    Args:
        catalogue: All products.
        rows: Which of them.
        vectors: `(N, D)` of all products, L2-normalised, or None.
    """

    def __init__(self, catalogue: Catalogue, rows: np.ndarray, vectors: np.ndarray | None) -> None:
        self.catalogue, self.rows = catalogue, rows
        self.codes = np.ascontiguousarray(catalogue.codes[:, rows])
        self.vectors = None if vectors is None else vectors[rows].astype(np.float32)
        self.products: list[list[np.ndarray]] = []  # with each value of each attribute, ascending
        self.usable: list[np.ndarray] = []  # the values of each attribute that several products have
        self.has = np.zeros(self.codes.shape, dtype=bool)  # a usable value
        for index, (codes, values) in enumerate(zip(self.codes, catalogue.values, strict=True)):
            order = np.argsort(codes, kind="stable")
            self.products.append(np.split(order, np.searchsorted(codes[order], np.arange(len(values))))[1:])
            self.usable.append(np.flatnonzero([len(products) > 1 for products in self.products[-1]]))
            self.has[index] = np.isin(codes, self.usable[-1])
        self.all = np.arange(len(rows))
        self.keys = np.flatnonzero([len(values) > 0 for values in self.usable])
        self.weights = np.maximum((self.codes != MISSING).sum(axis=1), 1.0) ** -DAMPING
        members: dict[str, list[int]] = {}
        for index, row in enumerate(rows.tolist()):
            group = catalogue.groups[row] if catalogue.groups else None
            members.setdefault(f"alone {row}" if group is None else f"group {group}", []).append(index)
        self.families = [np.array(variants) for variants in members.values() if len(variants) > 1]
        self._family = {product: variants for variants in self.families for product in variants.tolist()}

    def find(self, wanted: Sequence[Condition]) -> np.ndarray:
        """The products that satisfy all of these conditions, ascending."""
        products = min((self.products[attribute][value] for _, attribute, value in wanted), key=len)
        for _, attribute, value in wanted:
            products = products[self.codes[attribute, products] == value]
        return products

    def lacking(self, products: np.ndarray, wanted: Sequence[Condition]) -> np.ndarray:
        """Those of the products that have another value of at least one of these; an unknown value may be the one."""
        codes = [(self.codes[attribute, products], value) for _, attribute, value in wanted]
        return products[np.any([(code != value) & (code != MISSING) for code, value in codes], axis=0)]

    def family(self, product: int) -> np.ndarray:
        """The other variants of a product, ascending."""
        members = self._family.get(product, np.empty(0, dtype=int))
        return members[members != product]

    def similarities(self, products: Sequence[int], others: np.ndarray) -> np.ndarray:
        """How similar each of the others is to these products on average; without vectors, the values they share."""
        if self.vectors is not None:
            return self.vectors[others] @ self.vectors[np.asarray(products)].mean(axis=0)
        theirs, ours = self.codes[:, others, None], self.codes[:, None, np.asarray(products)]
        return ((theirs == ours) & (ours != MISSING)).sum(axis=(0, 2))

    def ranked(self, products: np.ndarray, like: Sequence[int]) -> np.ndarray:
        """Products by their mean similarity to others, best first; without vectors they keep their order."""
        if self.vectors is None:
            return products
        return products[np.argsort(-self.similarities(like, products), kind="stable")]

    def draw_key(self, keys: np.ndarray, generator: np.random.Generator) -> int:
        """One of some attributes, the frequent ones less often."""
        return int(weighted(keys, self.weights[keys], generator))

    def named(self, condition: Condition) -> tuple[str, str]:
        """The attribute and the value of a condition; of a product without attributes, as in the published queries."""
        if condition.attribute == AS_SHOWN:
            return "product style", "as product image"
        values = self.catalogue.values[condition.attribute]
        return self.catalogue.attributes[condition.attribute], values[condition.value]

    def condition(self, product: int, key: int) -> Condition:
        """The value of a product as a condition."""
        return Condition(product, key, int(self.codes[key, product]))


def draw_conventional(pool: Pool, count: int, generator: np.random.Generator) -> list[Condition] | str:
    """Products uniformly, then a key of each; frequent keys less often (App. A.3.1)."""
    if len(pool.rows) < count:
        return "too few products"
    conditions: list[Condition] = []
    for product in generator.choice(len(pool.rows), count, replace=False).tolist():
        keys = np.setdiff1d(np.flatnonzero(pool.has[:, product]), [condition.attribute for condition in conditions])
        if not len(keys):
            return "a product without a further attribute"
        conditions.append(pool.condition(product, pool.draw_key(keys, generator)))
    return conditions


def draw_attribute_uniform(pool: Pool, count: int, generator: np.random.Generator) -> list[Condition] | str:
    """Keys uniformly, a value of each uniformly, then a product with it (App. A.3.2)."""
    if len(pool.keys) < count:
        return "too few attributes"
    conditions: list[Condition] = []
    for key in generator.choice(pool.keys, count, replace=False).tolist():
        value = _one(pool.usable[key], generator)
        conditions.append(Condition(_one(pool.products[key][value], generator), key, value))
    return conditions


def draw_high_similarity(pool: Pool, count: int, generator: np.random.Generator) -> list[Condition] | str:
    """What turns a product into a similar one (App. A.3.3).

    The first condition is a value that both share. Each other one is a value in which the similar product differs, of
    a further product outside of the family.
    """
    families = pool.families
    first = _one(families[int(generator.integers(len(families)))] if families else pool.all, generator)
    similar = _find_similar(pool, first, generator)
    if similar is None:
        return "no similar product"
    keys = np.flatnonzero(pool.has[:, similar])
    ours, theirs = pool.codes[keys, first], pool.codes[keys, similar]
    shared, differing = keys[ours == theirs], keys[(ours != theirs) & (ours != MISSING)]
    if not len(shared) or len(differing) < count - 1:
        return "similar products that share or differ in too few values"
    conditions = [pool.condition(first, pool.draw_key(shared, generator))]
    for _ in range(count - 1):
        key = pool.draw_key(np.setdiff1d(differing, [condition.attribute for condition in conditions]), generator)
        product = _one(pool.products[key][int(pool.codes[key, similar])], generator)
        if product in (first, similar, *pool.family(first).tolist()):
            return "no other product with a differing value"
        conditions.append(pool.condition(product, key))
    return conditions


SAMPLERS = {
    "conventional": draw_conventional,
    "attribute_uniform": draw_attribute_uniform,
    "high_similarity": draw_high_similarity,
}


def _find_similar(pool: Pool, product: int, generator: np.random.Generator) -> int | None:
    """A product similar to another one, or None.

    One of its family. Without families, the most similar of up to `MOST_COMPARED` products that share one of its
    values: by the vectors, else by the number of values they share. An exact copy is not similar.
    """
    if pool.catalogue.groups:
        family = pool.family(product)
        return _one(family, generator) if len(family) else None
    keys = np.flatnonzero(pool.has[:, product])
    if not len(keys):
        return None
    key = _one(keys, generator)
    candidates = _some(pool.products[key][int(pool.codes[key, product])], generator)
    ours, theirs = pool.codes[:, product, None], pool.codes[:, candidates]
    candidates = candidates[((theirs != ours) & (theirs != MISSING) & (ours != MISSING)).any(axis=0)]
    return int(candidates[pool.similarities([product], candidates).argmax()]) if len(candidates) else None


def draw_cold(pool: Pool, model: VisionModel, generator: np.random.Generator) -> Draft | str:
    """What turns a product without attributes into a similar one, by a vision-language model (App. A.3.4).

    The choices of the model are the attributes and values that several products of the pool have.
    """
    catalogue, cold = pool.catalogue, np.flatnonzero((pool.codes == MISSING).all(axis=0))
    if not len(cold):
        return "no product without attributes"
    product = _one(cold, generator)
    family = pool.family(product)
    if len(family):
        target = _one(family, generator)
    elif pool.vectors is None:
        return "no similar product"
    else:
        target = int(pool.ranked(np.delete(pool.all, product), [product])[0])
    images = [load_image(catalogue.rows[int(pool.rows[each])]["image"]) for each in (product, target)]
    keys = {catalogue.attributes[key].lower(): key for key in pool.keys.tolist()}
    key = keys.get(_answer(model(images, ATTRIBUTE_PROMPT.format(choices=", ".join(keys)))))
    if key is None:
        return "the model named no attribute"
    values = {catalogue.values[key][value]: value for value in pool.usable[key].tolist()}
    prompt = VALUE_PROMPT.format(attribute=catalogue.attributes[key], choices=", ".join(values))
    value = values.get(_answer(model(images, prompt)))
    if value is None or len(pool.lacking(np.array([target]), [Condition(target, key, value)])):
        return "the model named no value, or another one than the catalogue has"
    siblings = family[family != target]
    products = _some(np.setdiff1d(pool.products[key][value], [product, target, *siblings]), generator)
    if not len(products):
        return "no other product with a differing value"
    other = _one(products, generator) if pool.vectors is None else int(pool.ranked(products, [target])[0])
    conditions = [Condition(product, AS_SHOWN, AS_SHOWN), Condition(other, key, value)]
    return Draft(conditions, np.array([target]), pool.lacking(siblings, conditions[1:]))


def draw_draft(pool: Pool, conditions: Sequence[Condition], max_share: float) -> Draft | str:
    """A draft of conditions, unless one product would serve for two of them, or too few or too many satisfy them."""
    shown = [condition.product for condition in conditions]
    if any((pool.codes[condition.attribute, shown] == condition.value).sum() > 1 for condition in conditions):
        return "two products share the value of a condition"
    positives = pool.find(conditions)
    if not 0 < len(positives) < max_share * len(pool.rows):
        return "too many positives" if len(positives) else "no positive"
    siblings = pool.lacking(pool.family(shown[0]), conditions)
    return Draft(conditions, pool.ranked(positives, shown), siblings[~np.isin(siblings, shown)])


def hard_negatives(pool: Pool, draft: Draft, count: int, generator: np.random.Generator) -> list[int]:
    """Siblings, at most half of all if there are near misses, then near misses, then more siblings.

    A near miss satisfies all conditions but one, and has another value there. Each condition is missed in turn. Of
    each such list, at most `MOST_COMPARED` products are drawn; by the vectors, the most similar to the query's
    products come first, else the order is random.
    """
    siblings: list[int] = draft.siblings.tolist()
    if draft.conditions[0].attribute == AS_SHOWN:
        return siblings[:count]
    shown = [condition.product for condition in draft.conditions]
    lists = []
    for missed in draft.conditions:
        near = pool.lacking(pool.find([other for other in draft.conditions if other is not missed]), [missed])
        near = generator.permutation(near)[:MOST_COMPARED] if pool.vectors is None else np.sort(_some(near, generator))
        lists.append(pool.ranked(near, shown).tolist())
    turns = [near[turn] for turn in range(count + len(shown)) for near in lists if turn < len(near)]
    misses = [product for product in turns if product not in shown][:count]
    misses = [product for product in misses if product not in siblings]
    first = siblings[: max(count // 2, count - len(misses))]
    return [*first, *misses, *siblings[len(first) :]][:count]


def weighted(things: Any, weights: Any, generator: np.random.Generator) -> Any:
    """Draw one of several things by their weights."""
    ends = np.cumsum(weights)
    return things[min(int(np.searchsorted(ends, generator.random() * ends[-1], side="right")), len(things) - 1)]


def _some(products: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """At most `MOST_COMPARED` of some products."""
    if len(products) <= MOST_COMPARED:
        return products
    return products[generator.choice(len(products), MOST_COMPARED, replace=False)]


def _one(values: np.ndarray, generator: np.random.Generator) -> int:
    return int(values[int(generator.integers(len(values)))])


def _answer(text: str) -> str:
    return text.strip().strip("\"'*.").strip().lower()
