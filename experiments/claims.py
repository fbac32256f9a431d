"""Make CLAIMS.md from claims.yaml: a verdict follows from the interval, from idle parts, and from the settings."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
DISTANCE = 4
"""How many times larger or smaller than the paper's a setting may be for a negative verdict."""
FEWEST_SEEDS = 3
KEYS = {"claim", "difference", "interval", "note", "seeds", "entry", "settings", "idle"}
HEAD = f"""# Claims

What the papers say, tested at small sizes: towers and language models of 22 to 135 M parameters, drawings, some
hundred training steps on one processor. A verdict is about this test, not about the paper's size, which was not
run. A difference is in the direction of the claim: above zero supports it. Intervals are 95 %, over seeds, and
over queries where the record has them. An entry is a date and a heading in [the log](LOG.md). `claims.py` makes
this page from `claims.yaml` by rules:

* *Yes*: the interval is above zero. *No*: it is below zero, every part of the method was alive, and the
  settings are within a factor of {DISTANCE} of the paper's.
* *Open*: the interval holds zero, or there are fewer than {FEWEST_SEEDS} seeds.
* *No test*: a part was idle, or the result is negative at settings that are further from the paper's or not
  given there.
"""


def verdict(row: Mapping[str, Any]) -> str:
    """Return the verdict of a claim, with its reason where there was no test.

    Raises:
        ValueError: The row has an unknown key, or an interval that does not hold its difference.
    """
    if unknown := set(row) - KEYS:
        raise ValueError(f"{row.get('claim')!r}: unknown keys {sorted(unknown)}; expected {sorted(KEYS)}")
    low, high = row.get("interval") or (float("-inf"), float("inf"))
    if not low <= row["difference"] <= high:
        raise ValueError(f"{row['claim']!r}: the interval {[low, high]} does not hold {row['difference']}")
    if "idle" in row:
        return f"no test: {row['idle']}"
    if row["seeds"] < FEWEST_SEEDS or low <= 0 <= high:
        return "open"
    if low > 0:
        return "yes"
    far = []
    for name, (paper, here) in row.get("settings", {}).items():
        if paper is None:
            far.append(f"{name} {here}, not given in the paper")
        elif not 1 / DISTANCE <= here / paper <= DISTANCE:
            far.append(f"{name} {here:,}, in the paper {paper:,}")
    return f"no test: {'; '.join(far)}" if far else "no"


def _number(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def page(sections: list[dict[str, Any]]) -> str:
    """Return CLAIMS.md."""
    parts = [HEAD]
    for section in sections:
        lines = ["| claim | verdict | difference | seeds | entry |", "|---|---|---|---|---|"]
        for row in section["claims"]:
            cell = _number(row["difference"])
            if "interval" in row:
                cell += f" [{', '.join(_number(end) for end in row['interval'])}]"
            cell += f"; {row['note']}" if "note" in row else ""
            lines.append(f"| {row['claim']} | {verdict(row)} | {cell} | {row['seeds']} | {row['entry']} |")
        parts.append(f"## {section['section']}\n\n{section['about']}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if CLAIMS.md is not what this writes")
    arguments = parser.parse_args()
    made, path = page(yaml.safe_load((FOLDER / "claims.yaml").read_text("utf-8"))), FOLDER / "CLAIMS.md"
    if not arguments.check:
        path.write_text(made, "utf-8")
    elif path.read_text("utf-8") != made:
        sys.exit("CLAIMS.md is not what claims.yaml says: run `python experiments/claims.py`")


if __name__ == "__main__":
    main()
