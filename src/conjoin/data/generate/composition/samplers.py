"""Samplers of queries: conditions, the products that satisfy them, and hard negatives (MERIT App. A.3)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from PIL import Image

from conjoin.processing import load_image

from .catalogue import Catalogue

VisionModel = Callable[[Sequence[Image.Image], str], str]
"""Answers a prompt about some pictures."""
Drawn = list[tuple[int, int]]
"""Products, each with the attribute whose value is a condition."""
DAMPING = 0.5
"""A key is drawn in proportion to (its number of products) ** -DAMPING (App. A.3.1 suppresses the frequent ones)."""
MOST_COMPARED = 512
"""Products among which the most similar ones are looked for."""
MISSING = -1
"""The code of an attribute that a product does not have."""
ATTRIBUTE_PROMPT = (
    "Compare the two pictures of products. Which one attribute has to change most visibly to turn the first product "
    "into the second? Choose one of: {choices}. Answer with the attribute only."
)
VALUE_PROMPT = (
    "Compare the two pictures of products. Which {attribute} does the second product have, unlike the first? "
    "Choose one of: {choices}. Answer with the value only, or with no if none of them fits."
)
COLD_START = "cold_start"
"""The name of the sampler that needs a `VisionModel`."""


@dataclass(frozen=True)
class CompositionSettings:
    """How many queries are composed, and by which probabilities.

    Attributes:
        queries: Of the training split.
        test_queries: Of the test split.
        test_share: Of the products (with families: of the families) that are in the test split. 0: no test split.
        samplers: The weight of each sampler, of `SAMPLERS` or `"cold_start"`, before filtering; by default the
            authors' (their code).
        conditions: The weight of each number of conditions, before filtering (App. A.3.1).
        max_positive_share: A query with this share of the pool as positives, or more, is not kept (the authors' code).
        hard_negatives: At most, for each query.
        languages: Of the instructions, drawn uniformly.
        templates: JSON files with the templates of further languages, see `load_templates`.
        seed: Of all draws.
    """

    queries: int = 10000
    test_queries: int = 1000
    test_share: float = 0.1
    samplers: dict[str, float] = field(
        default_factory=lambda: {"conventional": 0.3, "attribute_uniform": 0.2, "high_similarity": 0.5}
    )
    conditions: dict[int, float] = field(default_factory=lambda: {2: 0.75, 3: 0.10, 4: 0.15})
    max_positive_share: float = 0.05
    hard_negatives: int = 8
    languages: tuple[str, ...] = ("en",)
    templates: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries={self.queries}; expected at least 1")
        known = (*SAMPLERS, COLD_START)
        if not {*self.samplers} <= {*known}:
            raise ValueError(f"samplers={self.samplers}; expected some of {', '.join(known)}")
        if not self.conditions or min(self.conditions) < 2:
            raise ValueError(f"conditions={self.conditions}; expected at least 2 for each query")
        for name, weights in (("samplers", self.samplers), ("conditions", self.conditions)):
            if min(weights.values(), default=0) < 0 or not 0 < sum(weights.values()) < float("inf"):
                raise ValueError(f"{name}={weights}; expected weights from 0 on, one of them above 0")


class NoQuery(Exception):  # noqa: N818 - it is no fault
    """Why a draw gives no query."""


class Draft(NamedTuple):
    """A query in the making; products are rows of the pool.

    Attributes:
        sampler: That drew it.
        products: Those that are shown.
        conditions: An attribute and a value of each, which the target has too.
        positives: The most similar first.
        negatives: Hard ones, the hardest first.
    """

    sampler: str
    products: list[int]
    conditions: list[tuple[str, str]]
    positives: list[int]
    negatives: list[int]


class Pool:
    """Products among which queries are composed and answered. A product is its row here, an attribute its number.

    `codes` `(A, N)` are the values, `shared` those of each attribute that several products have.

    Args:
        catalogue: All products.
        rows: Which of them.
        vectors: `(N, D)` of all products, L2-normalised, or None.
    """

    def __init__(self, catalogue: Catalogue, rows: np.ndarray, vectors: np.ndarray | None) -> None:
        self.images = catalogue.images.select(rows)
        self.products, self.attributes = catalogue.products.iloc[rows], catalogue.attributes.iloc[rows]
        self.vectors = None if vectors is None else vectors[rows].astype(np.float32)
        self.codes = np.stack([pd.factorize(column)[0] for _, column in self.attributes.items()]).astype(np.int32)
        self.shared = [np.flatnonzero(np.bincount(codes[codes != MISSING]) > 1) for codes in self.codes]
        self.weights = np.maximum((self.codes != MISSING).sum(axis=1), 1.0) ** -DAMPING
        self.family = pd.factorize(self.products["family"])[0]

    def __len__(self) -> int:
        return len(self.family)

    def similar(self, product: int, generator: np.random.Generator) -> np.ndarray:
        """Other products, the first choice first: the variants of this one, else the most similar of some."""
        is_sibling = self.family == self.family[product]
        is_sibling[product] = False
        if is_sibling.any():
            return generator.permutation(np.flatnonzero(is_sibling))
        return self.ranked(_some(np.delete(np.arange(len(self)), product), generator), [product])

    def ranked(self, products: np.ndarray, like: Sequence[int]) -> np.ndarray:
        """Products by their mean similarity to others, best first: of the vectors, else by the values they share."""
        if self.vectors is not None:
            similarities = self.vectors[products] @ self.vectors[list(like)].mean(axis=0)
        else:
            theirs, ours = self.codes[:, products, None], self.codes[:, None, list(like)]
            similarities = ((theirs == ours) & (ours != MISSING)).sum(axis=(0, 2))
        return products[np.argsort(-similarities, kind="stable")]

    def draw_keys(self, keys: np.ndarray, count: int, generator: np.random.Generator) -> list[int]:
        """Different ones of some attributes, the frequent ones less often."""
        weights = self.weights[keys]
        return generator.choice(keys, count, replace=False, p=weights / weights.sum()).tolist()


def draw_conventional(pool: Pool, count: int, generator: np.random.Generator) -> Drawn:
    """Products uniformly, then a key of each; frequent keys less often (App. A.3.1)."""
    drawn: Drawn = []
    for product in generator.choice(len(pool), count, replace=False).tolist():
        keys = np.setdiff1d(np.flatnonzero(pool.codes[:, product] != MISSING), [key for _, key in drawn])
        if not len(keys):
            raise NoQuery("a product without a further attribute")
        drawn.append((product, pool.draw_keys(keys, 1, generator)[0]))
    return drawn


def draw_attribute_uniform(pool: Pool, count: int, generator: np.random.Generator) -> Drawn:
    """Keys uniformly, a value of each uniformly, then a product with it (App. A.3.2)."""
    keys = [key for key, values in enumerate(pool.shared) if len(values)]
    if len(keys) < count:
        raise NoQuery("too few attributes")
    drawn: Drawn = []
    for key in generator.choice(keys, count, replace=False).tolist():
        value = generator.choice(pool.shared[key])
        drawn.append((int(generator.choice(np.flatnonzero(pool.codes[key] == value))), key))
    return drawn


def draw_high_similarity(pool: Pool, count: int, generator: np.random.Generator) -> Drawn:
    """What turns a product into a similar one (App. A.3.3).

    The first condition is a value that both share. Each other one is a value in which the similar product differs, of
    any product.
    """
    first = int(generator.integers(len(pool)))
    ours = pool.codes[:, first]
    for target in pool.similar(first, generator):
        theirs = pool.codes[:, target]
        known = (ours != MISSING) & (theirs != MISSING)
        shared, differing = np.flatnonzero(known & (ours == theirs)), np.flatnonzero(known & (ours != theirs))
        if len(shared) and len(differing) >= count - 1:
            break
    else:
        raise NoQuery("no similar product that shares a value and differs in enough others")
    drawn = [(first, pool.draw_keys(shared, 1, generator)[0])]
    for key in pool.draw_keys(differing, count - 1, generator):
        drawn.append((int(generator.choice(np.flatnonzero(pool.codes[key] == theirs[key]))), key))
    return drawn


SAMPLERS = {
    "conventional": draw_conventional,
    "attribute_uniform": draw_attribute_uniform,
    "high_similarity": draw_high_similarity,
}


def draw_query(
    pool: Pool, settings: CompositionSettings, model: VisionModel | None, generator: np.random.Generator
) -> Draft:
    """Draw conditions and answer them.

    The products that satisfy all conditions are the positives. Hard negatives are in turn: siblings of the first
    product that have another value of a condition, and products that satisfy all conditions but one and have another
    value there, for each condition. An unknown value may be the right one. Of each such list, at most `MOST_COMPARED`
    products are drawn and ranked.

    Raises:
        NoQuery: One product would serve for two conditions, or too few or too many products satisfy them.
    """
    sampler, count = _weighted(settings.samplers, generator), _weighted(settings.conditions, generator)
    if len(pool) < count:
        raise NoQuery("too few products")
    if sampler == COLD_START:
        if model is None:
            raise ValueError("the sampler cold_start needs a vision-language model")
        return draw_cold(pool, model, generator)
    drawn = SAMPLERS[sampler](pool, count, generator)
    products, keys = [product for product, _ in drawn], [key for _, key in drawn]
    codes, values = pool.codes[keys], pool.codes[keys, products]
    satisfied = codes == values[:, None]  # (conditions, products)
    if satisfied[:, products].sum() > count:
        raise NoQuery("two products share the value of a condition")
    positives = np.flatnonzero(satisfied.all(axis=0))
    if not 0 < len(positives) < settings.max_positive_share * len(pool):
        raise NoQuery("as many positives as max_positive_share, or more" if len(positives) else "no positive")
    missed = ~satisfied & (codes != MISSING)
    missed[:, products] = False
    is_sibling = pool.family == pool.family[products[0]]
    near_misses = missed & (satisfied.sum(axis=0) == count - 1)
    lists = []
    for is_in in (is_sibling & missed.any(axis=0), *near_misses):
        lists.append(pool.ranked(_some(np.flatnonzero(is_in), generator), products).tolist())
    turns = dict.fromkeys(product for turn in zip_longest(*lists) for product in turn if product is not None)
    conditions = [(pool.attributes.columns[key], pool.attributes.iat[product, key]) for product, key in drawn]
    return Draft(sampler, products, conditions, pool.ranked(positives, products).tolist(), [*turns])


def draw_cold(pool: Pool, model: VisionModel, generator: np.random.Generator) -> Draft:
    """What turns a product without attributes into a similar one, by a vision-language model (App. A.3.4).

    The choices of the model are the attributes and values that several products of the pool have.

    Raises:
        NoQuery: There is no such product, or none similar to it, or the model names none of the choices.
    """
    cold = np.flatnonzero((pool.codes == MISSING).all(axis=0))
    if not len(cold):
        raise NoQuery("no product without attributes")
    product = int(generator.choice(cold))
    is_sibling = pool.family == pool.family[product]
    if pool.vectors is None and is_sibling.sum() == 1:
        raise NoQuery("no family and no vectors to find a similar product by")
    if is_sibling.sum() > 1:
        target = pool.similar(product, generator)[0]
    else:  # among all products, for one query of a model takes longer
        target = pool.ranked(np.delete(np.arange(len(pool)), product), [product])[0]
    images = [load_image(pool.images[int(row)]["image"]) for row in (product, target)]

    def ask(prompt: str, choices: Iterable[str], **words: str) -> str:
        answer = model(images, prompt.format(choices=", ".join(choices), **words))
        answer = answer.strip().strip("\"'*.").strip().lower()
        if answer not in choices:
            raise NoQuery("the model named none of the choices")
        return answer

    names = {name.lower(): name for name, values in zip(pool.attributes, pool.shared, strict=True) if len(values)}
    attribute = names[ask(ATTRIBUTE_PROMPT, names)]
    column = pool.attributes[attribute]
    counts = column.value_counts()
    value = ask(VALUE_PROMPT, counts.index[counts > 1], attribute=attribute)
    has = (column == value).to_numpy()
    has_another = column.notna().to_numpy() & ~has
    if has_another[target]:
        raise NoQuery("the model named another value than the catalogue has")
    is_sibling[target] = True
    others = np.flatnonzero(has & ~is_sibling)
    if not len(others):
        raise NoQuery("no other product with a differing value")
    conditions = [("product style", "as product image"), (attribute, value)]  # the first as in the published queries
    siblings = np.flatnonzero(is_sibling & has_another).tolist()
    return Draft(COLD_START, [product, int(generator.choice(others))], conditions, [int(target)], siblings)


def _weighted(weights: Mapping[Any, float], generator: np.random.Generator) -> Any:
    """Draw one of several things by their weights."""
    shares = np.array([*weights.values()])
    return [*weights][generator.choice(len(weights), p=shares / shares.sum())]


def _some(products: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """At most `MOST_COMPARED` of some products, in random order."""
    return generator.choice(products, min(len(products), MOST_COMPARED), replace=False)
