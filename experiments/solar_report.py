"""Tables, intervals and paired comparisons from the finished rows of the SOLAR claims.

Every interval resamples seeds and triplets together. What is compared may lie in a folder of rows or in a file such as
`results.json`, which has the outcomes of the test sets.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scenes import NEGATIVES, SAME_UNION, TEST_SETS as TESTS
from solar_rows import ROWS, Row
from solar_training import slug

from conjoin.evaluation import bootstrap_ci

KINDS = (*NEGATIVES, SAME_UNION)
MASKS = ("patch_auroc", "patch_iou", "token_auroc", "token_iou")
Floats = NDArray[np.float64]


def record_path(out: Path, row: str, seed: int) -> Path:
    """Where the record of a row and seed lies."""
    return out / "rows" / slug(row) / f"{seed}.json"


@dataclass
class Finished:
    """The finished seeds of a row.

    Attributes:
        row: The row.
        runs: The record of each finished seed.
    """

    row: Row
    runs: dict[int, dict[str, Any]]

    @classmethod
    def read(cls, row: Row, out: Path, seeds: Sequence[int]) -> "Finished":
        """Read the records that exist, of a folder of rows or of a file with the outcomes."""
        if out.is_file():
            return cls._read_file(row, out, seeds)
        paths = {seed: record_path(out, row.name, seed) for seed in seeds}
        return cls(row, {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.is_file()})

    @classmethod
    def _read_file(cls, row: Row, path: Path, seeds: Sequence[int]) -> "Finished":
        rows = {content["row"]: content for content in json.loads(path.read_text())["rows"]}
        content = rows.get(row.name, {"known": {}})
        stored = content["known"].get("outcomes", {})  # not in the records before 2026-11-23
        found = cls(row, {seed: {"sets": _sets(content, str(seed))} for seed in seeds if str(seed) in stored})
        if found.runs:
            found.readouts = content["readouts"]
        return found

    @cached_property
    def readouts(self) -> dict[str, str]:
        """The readout with the best Avg on the validation set of known and of unseen objects, over all seeds."""
        names = next(iter(self.runs.values()))["sets"]["validation_known"]["readouts"]
        return {
            test: max(names, key=lambda name: self.values("average", f"validation_{test}", readout=name).mean())
            for test in TESTS
        }

    def values(self, metric: str, part: str, seeds: Sequence[int] | None = None, readout: str | None = None) -> Floats:
        """The values `(S, N)` of a metric: of each seed, one per triplet."""
        runs = [self.runs[seed] for seed in (self.runs if seeds is None else seeds)]
        chosen = readout or self.readouts[part.split("_")[1]]
        name = f"{part}_same_union" if metric == SAME_UNION else part
        return np.array([_values(run["sets"][name], metric, chosen) for run in runs])

    def outcomes(self, test: str) -> dict[int, dict[str, dict[str, str]]]:
        """By seed and readout: of each triplet whether Precision counts it, and the positive's rank (b: beyond 10).

        `same_union` is the Precision of the same queries with a negative of `SAME_UNION`.
        """
        found: dict[int, dict[str, dict[str, str]]] = {}
        for seed, run in self.runs.items():
            whole, same = (run["sets"][f"test_{test}{end}"]["readouts"] for end in ("", "_same_union"))
            found[seed] = {
                readout: {
                    "wins": "".join(map(str, outcome["wins"])),
                    "same_union": "".join(map(str, same[readout]["wins"])),
                    "ranks": "".join(f"{min(rank, 11):x}" for rank in outcome["ranks"]),
                }
                for readout, outcome in whole.items()
            }
        return found

    def has(self, metric: str) -> bool:
        """Whether the row was measured by a metric, and what was read holds its outcomes."""
        sets = [run["sets"]["test_known"] for run in self.runs.values()]
        if metric in NEGATIVES:
            return all("kinds" in found for found in sets)
        return not metric.startswith("text_to_image") or all(metric in found for found in sets)


def _sets(content: dict[str, Any], seed: str) -> dict[str, Any]:
    """The test sets of a seed, from what `Finished.outcomes` returned."""
    sets: dict[str, Any] = {}
    for test in TESTS:
        whole, same = {}, {}
        for readout, stored in content[test]["outcomes"][seed].items():
            ranks = [int(rank, 16) for rank in stored["ranks"]]
            whole[readout] = {"wins": [*map(int, stored["wins"])], "ranks": ranks}
            same[readout] = {"wins": [*map(int, stored["same_union"])], "ranks": ranks}
        sets[f"test_{test}"], sets[f"test_{test}_same_union"] = {"readouts": whole}, {"readouts": same}
    return sets


def _values(found: dict[str, Any], metric: str, readout: str) -> Floats:
    if metric.startswith("text_to_image"):
        return (np.array(found[metric]) <= 10).astype(float)
    outcome = found["readouts"][readout]
    wins, ranks = np.array(outcome["wins"], dtype=float), np.array(outcome["ranks"])
    if metric == "precision":
        return wins
    if metric == SAME_UNION:
        return wins
    if metric in NEGATIVES:
        return wins[[kind == metric for kind in found["kinds"]]]
    if metric.startswith("recall@"):
        return (ranks <= int(metric.removeprefix("recall@"))).astype(float)
    recall = np.mean([ranks <= k for k in (1, 5, 10)], axis=0)
    return {"mean_recall": recall, "average": (recall + wins) / 2}[metric]


METRICS = {
    "average": "Avg",
    "precision": "Precision",
    **{kind: kind.replace("_", " ") for kind in KINDS},
    "mean_recall": "mR",
    "recall@1": "R@1",
    "recall@5": "R@5",
    "recall@10": "R@10",
    "text_to_image": "text → image R@10",
    "text_to_image, heads": "with heads",
}
OF_READOUTS = [name for name in METRICS if not name.startswith("text_to_image")]
WITH_INTERVAL = ("average", "precision", SAME_UNION)
BRIEF = [(metric, "known") for metric in ("average", "precision", SAME_UNION, "text_to_image")]
BRIEF += [(metric, "unseen") for metric in ("average", "precision", SAME_UNION)]


def summary(finished: Sequence[Finished]) -> list[dict[str, Any]]:
    """Everything that the tables show, per row."""
    rows = []
    for each in finished:
        found: dict[str, Any] = {"row": each.row.name, "seeds": sorted(each.runs), "readouts": each.readouts}
        for test in TESTS:
            part = f"test_{test}"
            found[test] = {metric: _metric(each, metric, part) for metric in METRICS if each.has(metric)}
            masks = [run["sets"][part].get("masks") for run in each.runs.values()]
            if all(masks):
                found[test]["masks"] = {name: float(np.mean([mask[name] for mask in masks])) for name in MASKS}
            names = next(iter(each.runs.values()))["sets"][part]["readouts"]
            found[test]["readouts"] = {name: _plain(each, name, test) for name in names}
            found[test]["outcomes"] = each.outcomes(test)
        costs = [run["cost"] for run in each.runs.values()]
        found["cost"] = {name: float(np.mean([cost[name] for cost in costs])) for name in costs[0]}
        rows.append(found)
    return rows


def _plain(each: Finished, readout: str, test: str) -> dict[str, float]:
    """The means of one readout, and its Avg on validation."""
    found = {name: float(each.values(name, f"test_{test}", readout=readout).mean()) for name in OF_READOUTS}
    return found | {"validation": float(each.values("average", f"validation_{test}", readout=readout).mean())}


def _metric(each: Finished, metric: str, part: str) -> dict[str, float]:
    values = each.values(metric, part)
    low, high = bootstrap_ci(values)
    per_seed = [each.values(metric, part, [seed]).mean() for seed in each.runs]
    return {"value": float(values.mean()), "low": low, "high": high, "sd": float(np.std(per_seed))}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The summary as Markdown, in %."""
    parts = []
    for test in TESTS:
        parts.append(f"### Test, {test} objects\n")
        header = ["row", "seeds", "readout", *METRICS.values()]
        chance = ["50.0" if metric in ("precision", *KINDS) else "" for metric in METRICS]
        parts.append(_table(header, [["a random order", "", "", *chance], *(_measured(row, test) for row in rows)]))
    parts.append("### Masks, shared against private: AUROC and IoU\n")
    header = ["row", *(f"{test}, {name.replace('_', ' ')}" for test in TESTS for name in MASKS)]
    scored = [row for row in rows if all("masks" in row[test] for test in TESTS)]
    parts.append(
        _table(header, [[row["row"], *(_percent(row[t]["masks"][m]) for t in TESTS for m in MASKS)] for row in scored])
    )
    for test in TESTS:
        parts.append(f"### All readouts, {test} objects\n")
        header = ["row", "readout", "validation Avg", *(METRICS[name] for name in OF_READOUTS)]
        parts.append(_table(header, [line for row in rows for line in _readouts(row, test)]))
    parts.append("### Training: of the row, and in parentheses with the rows it starts from\n")
    header = ["row", "steps", "samples", "seconds", "CPU seconds", "mining seconds", "mining CPU seconds"]
    parts.append(_table(header, [[row["row"], *_cost(row)] for row in rows]))
    return "\n".join(parts)


def _measured(row: dict[str, Any], test: str) -> list[str]:
    cells = [row["row"], str(len(row["seeds"])), row["readouts"][test]]
    for metric in METRICS:
        found = row[test].get(metric)
        if found is None:
            cells.append("–")
            continue
        text = _percent(found["value"])
        if len(row["seeds"]) > 1:
            text += f" ± {_percent(found['sd'])}"
        if metric in WITH_INTERVAL:
            text += f" [{_percent(found['low'])}, {_percent(found['high'])}]"
        cells.append(text)
    return cells


def _readouts(row: dict[str, Any], test: str) -> list[list[str]]:
    return [
        [row["row"], name, *(_percent(found[metric]) for metric in ("validation", *OF_READOUTS))]
        for name, found in row[test]["readouts"].items()
    ]


def _cost(row: dict[str, Any]) -> list[str]:
    cost = row["cost"]
    return [f"{value:.0f} ({cost[f'total_{name}']:.0f})" for name, value in cost.items() if f"total_{name}" in cost]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def unfinished(rows: Sequence[Row], out: Path, seeds: Sequence[int]) -> list[str]:
    """What is missing, by row."""
    found = []
    for row in rows:
        missing = [seed for seed in seeds if not record_path(out, row.name, seed).is_file()]
        if missing:
            found.append(f"{row.name}: seeds {', '.join(map(str, missing))} are missing")
    return found


def compare(
    first: str, second: str, out: Path, other: Path, seeds: Sequence[int], readouts: Sequence[str] | None = None
) -> str:
    """Paired differences of a row in `out` and one in `other`.

    With 95 % intervals over seeds and triplets.

    Args:
        first: Name of the row.
        second: Name of the other row.
        out: Folder of rows, or file of outcomes.
        other: That of the second row.
        seeds: Those that both rows have of these are compared.
        readouts: Of the first and the second row; those that validation chose by default.

    Raises:
        ValueError: A row or readout does not exist, or no seed of both is finished.
    """
    unknown = [name for name in (first, second) if name not in ROWS]
    if unknown:
        raise ValueError(f"no row {unknown[0]!r}; rows: {'; '.join(ROWS)}")
    a, b = Finished.read(ROWS[first], out, seeds), Finished.read(ROWS[second], other, seeds)
    both = sorted(set(a.runs) & set(b.runs))
    if not both:
        raise ValueError(f"{first!r} has the seeds {sorted(a.runs)} and {second!r} {sorted(b.runs)}: none in common")
    lines = [f"### {first} − {second}; seeds {', '.join(map(str, both))}\n"]
    rows = []
    for test in TESTS:
        read = readouts or (a.readouts[test], b.readouts[test])
        for each, readout in zip((a, b), read, strict=True):
            known = each.runs[both[0]]["sets"][f"test_{test}"]["readouts"]
            if readout not in known:
                raise ValueError(f"{each.row.name!r} has no readout {readout!r}; readouts: {'; '.join(known)}")
        lines.append(f"{test} objects: {read[0]}, and {read[1]}\n")
        for metric, label in METRICS.items():
            if not (a.has(metric) and b.has(metric)):
                continue
            left, right = (
                each.values(metric, f"test_{test}", both, readout) for each, readout in zip((a, b), read, strict=True)
            )
            low, high = bootstrap_ci(left - right)
            verdict = "above 0" if low > 0 else "below 0" if high < 0 else "not significant"
            interval = f"{_percent((left - right).mean())} [{_percent(low)}, {_percent(high)}]"
            rows.append([test, label, _percent(left.mean()), _percent(right.mean()), interval, verdict])
    return "\n".join(lines) + "\n" + _table(["objects", "metric", first, second, "difference", "95 % interval"], rows)


def brief(rows: Sequence[Row], out: Path, seeds: Sequence[int]) -> str:
    """One table for each group of rows, and the paired difference of each ablation from what it changes, in %."""
    parts = []
    for group in dict.fromkeys(row.group for row in rows):
        lines = []
        for row in rows:
            each = Finished.read(row, out, seeds)
            if row.group != group or not each.runs:
                continue
            steps = np.mean([run["cost"]["total_steps"] for run in each.runs.values()])
            line = [row.name, str(len(each.runs)), f"{steps:.0f}"]
            for metric, test in BRIEF:
                value = each.values(metric, f"test_{test}").mean() if each.has(metric) else None
                line.append("" if value is None else _percent(value))
            reference = Finished.read(ROWS[_changes(row)], out, seeds)
            both = sorted(set(each.runs) & set(reference.runs)) if reference.row != row else []
            lines.append([*line, *(_difference(each, reference, test, both) for test in TESTS)])
        if not lines:
            continue
        header = [f"{test}: {METRICS[metric]}" for metric, test in BRIEF]
        changes = [f"{test}: change of Avg" for test in TESTS]
        parts.append(f"### {group}\n\n" + _table(["row", "seeds", "steps", *header, *changes], lines))
    return "\n".join(parts)


def _changes(row: Row) -> str:
    """The row that an ablation changes; the row itself if it is none."""
    for separator in (" after ", ", "):
        name = row.name.split(separator)[0]
        if row.group.endswith("ablations") and name != row.name and name in ROWS:
            return name
    return row.name


def _difference(each: Finished, reference: Finished, test: str, seeds: Sequence[int]) -> str:
    if not seeds:
        return ""
    left, right = (row.values("average", f"test_{test}", seeds) for row in (each, reference))
    low, high = bootstrap_ci(left - right)
    return f"{_percent((left - right).mean())} [{_percent(low)}, {_percent(high)}]"
