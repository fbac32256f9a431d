"""One split's queries: each is a function of the seed, the split and its number."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .catalogue import DEFAULT_CLASS, MISSING, Catalogue
from .cold_start import AS_SHOWN, cold_products, difference, draw_cold, other_with
from .instructions import Template
from .judges import Case, Judge, Product, VisionModel
from .pool import Condition, Pool
from .samplers import SAMPLERS, Draft, check_conditions, near_misses, rank, recall
from .settings import COLD_START, CompositionSettings

ATTEMPTS = 100
"""Draws of one number, of which the first that makes a query counts."""


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
        self._cold = cold_products(pool)
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
        found = recall(self.pool, conditions, self.settings.max_positive_share)
        if isinstance(found, str):
            return found
        siblings = self.pool.family(conditions[0].product)
        codes = [(self.pool.codes[key, siblings], value) for _, key, value in conditions]
        differs = np.any([(code != value) & (code != MISSING) for code, value in codes], axis=0)
        shown = np.isin(siblings, [condition.product for condition in conditions])
        return Draft(conditions, rank(self.pool, conditions, found), siblings[differs & ~shown])

    def _draw_cold(self, generator: np.random.Generator) -> Draft | str:
        drawn = draw_cold(self.pool, self._cold, generator)
        if isinstance(drawn, str) or self.cold_start is None:
            return drawn if isinstance(drawn, str) else "no model for the cold start"
        product, target, siblings = drawn
        found = difference(self.cold_start, self.catalogue, self.pool, self._product(product), self._product(target))
        if isinstance(found, str):
            return found
        barred = [product, target, *siblings.tolist()]
        other = other_with(self.pool, *found, target, barred, generator)
        if other is None:
            return "no other product with a differing value"
        conditions = (Condition(product, -1, -1), Condition(other, *found))
        return Draft(conditions, np.array([target]), siblings)

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
                accepted = [one for one in accepted if judge.accepts(case._replace(positive=self._product(one)))]
            if not accepted or not (judge.of_positives or judge.accepts(case)):
                record["rejected"][f"judge {judge.name}"] += 1
                return None
        return accepted

    def _negatives(self, draft: Draft, generator: np.random.Generator) -> list[int]:
        """Siblings first, at most half of them if there are also near misses, then near misses, then more siblings."""
        count = self.settings.hard_negatives
        siblings: list[int] = draft.siblings.tolist()
        if draft.conditions[0].attribute < 0:
            return siblings[:count]
        misses = [
            one for one in near_misses(self.pool, draft.conditions, count, generator).tolist() if one not in siblings
        ]
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
        place = np.searchsorted(self._ends, generator.random() * self._ends[-1], side="right")
        return self._things[min(int(place), len(self._things) - 1)]
