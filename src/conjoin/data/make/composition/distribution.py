"""How queries are distributed: by attribute, language, number of conditions and positives, before and after."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from .catalogue import MISSING, Catalogue

POSITIVE_BINS = (1, 2, 5, 10, 50, 100, 500, 1000, 5000)
"""Lower ends of the bins of the number of positives."""


class Distribution:
    """Counts over the outcomes of a split, see `Composer.outcome`.

    Args:
        catalogue: All products.
        rows: Those of the split.
    """

    def __init__(self, catalogue: Catalogue, rows: np.ndarray) -> None:
        having = (catalogue.codes[:, rows] != MISSING).sum(axis=1).tolist()
        self.products, self.candidates, self.kept, self.duplicates = len(rows), 0, 0, 0
        self.attributes = {"products": Counter(dict(zip(catalogue.attributes, having, strict=True)))}
        self.attributes |= {name: Counter() for name in ("conventional", "drawn", "kept")}
        self.languages = {"products": Counter(catalogue.languages[row] for row in rows.tolist())}
        self.languages |= {name: Counter() for name in ("conventional", "drawn", "kept", "positives", "instructions")}
        self.conditions: dict[str, Counter[str]] = {"drawn": Counter(), "kept": Counter()}
        self.samplers: dict[str, Counter[str]] = {"drawn": Counter(), "kept": Counter()}
        self.rejected: Counter[str] = Counter()
        self.positives: Counter[str] = Counter()
        self.hard_negatives = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count what was drawn for a number."""
        self.candidates += 1
        self.conditions["drawn"].update(record["conditions"])
        self.rejected.update(record["rejected"])
        if "asked" not in record:
            return
        self.samplers["drawn"][record["sampler"]] += 1
        for name in ("drawn", "conventional") if record["sampler"] == "conventional" else ("drawn",):
            self.attributes[name].update(record["asked"])
            self.languages[name].update(record["shown"])

    def keep(self, record: Mapping[str, Any]) -> None:
        """Count a query that is kept."""
        query = record["query"]
        self.kept += 1
        self.samplers["kept"][record["sampler"]] += 1
        self.conditions["kept"][str(len(query["query"]))] += 1
        self.attributes["kept"].update(record["asked"])
        self.languages["kept"].update(record["shown"])
        self.languages["positives"].update(record["answered"])
        self.languages["instructions"][query["language"]] += 1
        self.positives[str(max(least for least in POSITIVE_BINS if least <= len(query["pos_candidate"])))] += 1
        self.hard_negatives += len(query["hard_negative"])

    def to_dict(self) -> dict[str, Any]:
        """All counts, and the evenness of each distribution over attributes."""
        return vars(self) | {"evenness": {name: evenness(counts) for name, counts in self.attributes.items()}}


def evenness(counts: Mapping[str, int]) -> float | None:
    """The entropy of a distribution over its maximum: 1 if all are as frequent; None without counts of two."""
    total = sum(counts.values())
    if len(counts) < 2 or not total:
        return None
    return -sum(count / total * math.log(count / total) for count in counts.values() if count) / math.log(len(counts))
