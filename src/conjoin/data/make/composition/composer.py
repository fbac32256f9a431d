"""One split's queries: each is a function of the seed, the split and its number."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .catalogue import DEFAULT_CLASS, Catalogue
from .instructions import Template
from .judges import Case, Judge, Product, VisionModel
from .samplers import MOST_COMPARED, SAMPLERS, Condition, Draft, Pool, check_conditions, near_misses, rank, recall

ATTEMPTS = 100
"""Draws of one number, of which the first that makes a query counts."""
COLD_START = "cold_start"
AS_SHOWN = ("product style", "as product image")
"""The condition of a product without attributes, as in the published queries."""
ATTRIBUTE_PROMPT = (
    "Compare the two pictures of products. Which one attribute has to change most visibly to turn the first product "
    "into the second? Choose one of: {choices}. Answer with the attribute only."
)
VALUE_PROMPT = (
    "Compare the two pictures of products. Which {attribute} does the second product have, unlike the first? "
    "Choose one of: {choices}. Answer with the value only, or with no if none of them fits."
)


@dataclass(frozen=True)
class CompositionSettings:
    """How many queries are composed, and by which probabilities.

    Attributes:
        queries: Of the training split.
        test_queries: Of the test split.
        test_share: Of the products (with families: of the families) that are in the test split. 0: no test split.
        samplers: The weight of each sampler, of `SAMPLERS` or `"cold_start"`; by default the authors' (their code).
        conditions: The weight of each number of conditions, before filtering (App. A.3.1).
        stratify: The test split takes its share of each class and language; B.8's does so of queries, not products.
        damping: See `Pool`.
        exclude_most_frequent: See `Pool`.
        max_positive_share: A query with this share of the pool as positives, or more, is not kept (the authors' code).
        hard_negatives: At most, for each query.
        languages: Of the instructions, drawn uniformly.
        seed: Of all draws.
    """

    queries: int = 10000
    test_queries: int = 1000
    test_share: float = 0.1
    samplers: dict[str, float] = field(
        default_factory=lambda: {"conventional": 0.3, "attribute_uniform": 0.2, "high_similarity": 0.5}
    )
    conditions: dict[int, float] = field(default_factory=lambda: {2: 0.75, 3: 0.10, 4: 0.15})
    stratify: bool = False
    damping: float = 0.5
    exclude_most_frequent: bool = False
    max_positive_share: float = 0.05
    hard_negatives: int = 8
    languages: tuple[str, ...] = ("en",)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("queries", 1), ("test_queries", 0), ("hard_negatives", 0), ("seed", 0)):
            if vars(self)[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {vars(self)[name]}")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must be in [0, 1), got {self.test_share}")
        if not 0 < self.max_positive_share <= 1:
            raise ValueError(f"max_positive_share must be in (0, 1], got {self.max_positive_share}")
        if not (self.damping >= 0 and math.isfinite(self.damping)):
            raise ValueError(f"damping must be at least 0, got {self.damping}")
        _check_weights("samplers", self.samplers)
        _check_weights("conditions", self.conditions)
        unknown = [name for name in self.samplers if name not in (*SAMPLERS, COLD_START)]
        if unknown:
            raise ValueError(f"unknown sampler {unknown[0]!r}; expected one of {', '.join((*SAMPLERS, COLD_START))}")
        if min(self.conditions) < 2:
            raise ValueError(f"a query has at least 2 conditions, got {min(self.conditions)}")

    @property
    def splits(self) -> dict[str, int]:
        """The number of queries of each split."""
        has_test = self.test_share > 0 and self.test_queries > 0
        return {"train": self.queries} | ({"test": self.test_queries} if has_test else {})


def _check_weights(name: str, weights: dict[str, float] | dict[int, float]) -> None:
    wrong = [(key, weight) for key, weight in weights.items() if not (weight >= 0 and math.isfinite(weight))]
    if wrong or sum(weights.values()) <= 0:
        raise ValueError(f"{name}: expected weights of at least 0 with a positive sum, got {weights}")


class Composer:
    """Composes the queries of a split.

    Args:
        catalogue: All products.
        pool: Those of the split.
        split: The number of the split, for the draws.
        settings: How.
        templates: Of the instructions, by language.
        judges: Filters, in the order in which they judge.
        cold_start: Compares products without attributes.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        pool: Pool,
        split: int,
        settings: CompositionSettings,
        templates: Mapping[str, Template],
        judges: Sequence[Judge] = (),
        cold_start: VisionModel | None = None,
    ) -> None:
        self.catalogue, self.pool, self.split, self.settings = catalogue, pool, split, settings
        self.templates, self.judges, self.cold_start = list(templates.values()), judges, cold_start
        self._cold = np.flatnonzero((pool.codes < 0).all(axis=0))  # products without any attribute
        weights = {name: weight for name, weight in settings.samplers.items() if name != COLD_START or len(self._cold)}
        if not sum(weights.values()):
            raise ValueError("the only sampler is cold_start, and every product has attributes")
        self._samplers, self._conditions = _Choice(weights), _Choice(settings.conditions)
        self._languages, languages = np.unique(catalogue.languages, return_inverse=True)
        self._classes, classes = np.unique(catalogue.classes, return_inverse=True)
        self._language, self._class = languages[pool.rows], classes[pool.rows]
        integers = all(pid.isascii() and pid.isdigit() and str(int(pid)) == pid for pid in catalogue.ids)
        self._names: list[Any] = [int(catalogue.ids[row]) if integers else catalogue.ids[row] for row in pool.rows]

    def outcome(self, number: int) -> dict[str, Any]:
        """What becomes of a number.

        Returns:
            `sampler`; `conditions`: the draws by number of conditions; `rejected`: by reason; `asked`: the attributes
            of the draw that passed; `shown` and `answered`: the languages of its products and positives; and `query`:
            a row of the published layout, or None.
        """
        generator = np.random.default_rng([self.settings.seed, self.split, number])
        sampler = self._samplers.draw(generator)
        rejected: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        record: dict[str, Any] = {"sampler": sampler, "conditions": counts, "rejected": rejected, "query": None}
        for _ in range(1 if sampler == COLD_START else ATTEMPTS):
            count = 2 if sampler == COLD_START else self._conditions.draw(generator)
            counts[str(count)] += 1
            draft = self._draw_cold(generator) if sampler == COLD_START else self._draw(sampler, count, generator)
            if isinstance(draft, Draft):
                self._finish(record, draft, generator)
                break
            rejected[draft] += 1
        return record

    def _draw(self, sampler: str, count: int, generator: np.random.Generator) -> Draft | str:
        conditions = SAMPLERS[sampler](self.pool, count, generator)
        if isinstance(conditions, str):
            return conditions
        problem = check_conditions(self.pool, conditions)
        if problem:
            return problem
        positives = recall(self.pool, conditions, self.settings.max_positive_share)
        if isinstance(positives, str):
            return positives
        family = self.pool.family(conditions[0].product)
        siblings = self.pool.lacking(family, [condition[1:] for condition in conditions])
        shown = np.isin(siblings, [condition.product for condition in conditions])
        return Draft(conditions, rank(self.pool, conditions, positives), siblings[~shown])

    def _draw_cold(self, generator: np.random.Generator) -> Draft | str:
        drawn = _draw_cold(self.pool, self._cold, generator)
        if isinstance(drawn, str) or self.cold_start is None:
            return drawn if isinstance(drawn, str) else "no model for the cold start"
        product, target, siblings = drawn
        pair = difference(self.cold_start, self.catalogue, self.pool, self._product(product), self._product(target))
        if isinstance(pair, str):
            return pair
        if len(self.pool.lacking(np.array([target]), [pair])):
            return "the model named another value than the catalogue has"
        barred = [product, target, *siblings.tolist()]
        other = _other_with(self.pool, *pair, target, barred, generator)
        if other is None:
            return "no other product with a differing value"
        conditions = (Condition(product, -1, -1), Condition(other, *pair))
        return Draft(conditions, np.array([target]), self.pool.lacking(siblings, [pair]))

    def _finish(self, record: dict[str, Any], draft: Draft, generator: np.random.Generator) -> None:
        """Write the query of a draft into its record, unless a judge rejects it."""
        catalogue, pool = self.catalogue, self.pool
        products = [condition.product for condition in draft.conditions]
        asked = tuple(self._named(condition) for condition in draft.conditions)
        record["asked"] = [attribute for attribute, _ in asked]
        record["shown"] = self._count_languages(products)
        template = self.templates[int(generator.integers(len(self.templates)))]
        classes = self._class[draft.positives]
        class_name = str(self._classes[classes[0]]) if (classes == classes[0]).all() else None
        instruction = template.write(
            record["asked"],
            [catalogue.titles[pool.rows[product]] for product in products],
            None if class_name == DEFAULT_CLASS else class_name,
            generator,
        )
        case = Case(instruction, asked, tuple(map(self._product, products)))
        positives = self._judged(record, case, draft.positives)
        if positives is None:
            return
        record["answered"] = self._count_languages(positives)
        record["query"] = {
            "query": {
                str(self._names[product]): {attribute: value}
                for product, (attribute, value) in zip(products, asked, strict=True)
            },
            "pos_candidate": [self._names[product] for product in positives],
            "hard_negative": [self._names[product] for product in self._negatives(draft, generator)],
            "query instruction": instruction,
            "sampler": record["sampler"],
            "language": template.language,
        }

    def _judged(self, record: dict[str, Any], case: Case, positives: np.ndarray) -> list[int] | None:
        """The positives that the judges accept; None if they accept no query."""
        accepted: list[int] = positives.tolist()
        for judge in self.judges:
            if judge.of_positives:
                accepted = [
                    product for product in accepted if judge.accepts(case._replace(positive=self._product(product)))
                ]
            if not accepted or not (judge.of_positives or judge.accepts(case)):
                record["rejected"][f"judge {judge.name}"] += 1
                return None
        return accepted

    def _negatives(self, draft: Draft, generator: np.random.Generator) -> list[int]:
        """Choose siblings, at most half of all if there are near misses, then near misses, then more siblings."""
        count = self.settings.hard_negatives
        siblings: list[int] = draft.siblings.tolist()
        if draft.conditions[0].attribute < 0:
            return siblings[:count]
        misses = near_misses(self.pool, draft.conditions, count, generator).tolist()
        misses = [product for product in misses if product not in siblings]
        first = siblings[: max(count // 2, count - len(misses))]
        return [*first, *misses, *siblings[len(first) :]][:count]

    def _named(self, condition: Condition) -> tuple[str, str]:
        """The attribute and value of a condition."""
        if condition.attribute < 0:
            return AS_SHOWN
        return (
            self.catalogue.attributes[condition.attribute],
            self.catalogue.values[condition.attribute][condition.value],
        )

    def _product(self, product: int) -> Product:
        row = int(self.pool.rows[product])
        catalogue = self.catalogue
        return Product(catalogue.ids[row], catalogue.titles[row], lambda: catalogue.rows[row]["image"])

    def _count_languages(self, products: Sequence[int]) -> dict[str, int]:
        counts = np.bincount(self._language[products], minlength=len(self._languages)).tolist()
        return {language: count for language, count in zip(self._languages.tolist(), counts, strict=True) if count}


class _Choice:
    """Draws one of several things by their weights."""

    def __init__(self, weights: Mapping[Any, float]) -> None:
        self._things = [thing for thing, weight in weights.items() if weight > 0]
        self._ends = np.cumsum([weights[thing] for thing in self._things])

    def draw(self, generator: np.random.Generator) -> Any:  # noqa: ANN401
        index = np.searchsorted(self._ends, generator.random() * self._ends[-1], side="right")
        return self._things[min(int(index), len(self._things) - 1)]


def _draw_cold(pool: Pool, cold: np.ndarray, generator: np.random.Generator) -> tuple[int, int, np.ndarray] | str:
    """A product without attributes, a similar product as the target, and the siblings that are neither."""
    if pool.vectors is None and pool.families is None:
        raise ValueError("cold-start expansion needs families of products, or vectors to find similar products by")
    product = int(cold[int(generator.integers(len(cold)))])
    family = pool.family(product)
    if len(family):
        target = int(family[int(generator.integers(len(family)))])
        return product, target, family[family != target]
    if pool.vectors is None:
        return "no similar product"
    scores = pool.vectors @ pool.vectors[product]
    scores[product] = -np.inf
    return product, int(scores.argmax()), family


def difference(
    model: VisionModel, catalogue: Catalogue, pool: Pool, first: Product, second: Product
) -> tuple[int, int] | str:
    """What turns the first product into the second by the answers of a model: an attribute and its value.

    The choices are the attributes and values that several products of the pool have.
    """
    names = {catalogue.attributes[key].lower(): key for key in pool.keys.tolist()}
    images = [first.image, second.image]
    key = names.get(_answer(model.ask(images, ATTRIBUTE_PROMPT.format(choices=", ".join(names)))))
    if key is None:
        return "the model named no attribute"
    values = {catalogue.values[key][value]: value for value in pool.usable_values(key).tolist()}
    prompt = VALUE_PROMPT.format(attribute=catalogue.attributes[key], choices=", ".join(values))
    value = values.get(_answer(model.ask(images, prompt)))
    return "the model named no value" if value is None else (key, value)


def _other_with(
    pool: Pool, key: int, value: int, target: int, barred: Sequence[int], generator: np.random.Generator
) -> int | None:
    """Return the product with this value that is most similar to the target, among `MOST_COMPARED` at most."""
    products = pool.products(key, value)
    products = products[~np.isin(products, barred)]
    if not len(products):
        return None
    if len(products) > MOST_COMPARED:
        products = products[generator.choice(len(products), MOST_COMPARED, replace=False)]
    if pool.vectors is None:
        return int(products[int(generator.integers(len(products)))])
    return int(products[pool.similarities([target], products).argmax()])


def _answer(text: str) -> str:
    return text.strip().strip("\"'*.").strip().lower()
