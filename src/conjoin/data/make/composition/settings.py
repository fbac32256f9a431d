"""How queries are composed."""

import math
from dataclasses import dataclass, field

from .samplers import SAMPLERS

COLD_START = "cold_start"


@dataclass(frozen=True)
class CompositionSettings:
    """How many queries are composed, and by which probabilities.

    Attributes:
        queries: Of the training split.
        test_queries: Of the test split.
        test_share: Of the products (with families: of the families) that are in the test split. 0: no test split.
        samplers: The weight of each sampler, of `SAMPLERS` or `"cold_start"`; by default the authors' (their code).
        conditions: The weight of each number of conditions, before filtering (App. A.3.1).
        stratify: The test split takes its share of each class and language, as B.8's does, not of all products.
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
