"""Pages of the site that lie outside `docs`, and the links to them."""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
    "benchmarks/claims/results/gcl.svg": "results/gcl.svg",
}
"""By its path in the repository: the place of a file in the site."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie outside `docs`."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "reference/conjoin.md", content=public_names()))
    return files


def public_names() -> str:
    """The page of the names that `conjoin` exports, each a link to where the reference documents it."""
    parts = ["# Public names", "`from conjoin import NAME` imports each of these names when it is first used."]
    for line in ast.parse((ROOT / "src/conjoin/__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(line, ast.ImportFrom):
            names = [f"* [`{name.name}`][{line.module}.{name.name}]" for name in line.names]
            parts += [f"## {line.module}", "\n".join(names)]
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:  # noqa: ANN401 - mkdocs passes more
    """Turn the links of the repository, such as `../CONTRIBUTING.md`, into those of the site."""
    place = page.file.src_uri
    origin = {place: source for source, place in OUTSIDE.items()}.get(place, f"docs/{place}")

    def rewrite(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2]))
        target = OUTSIDE.get(target, target.removeprefix("docs/"))
        return found[1] + posixpath.relpath(target, posixpath.dirname(place) or ".")

    return _LINK.sub(rewrite, markdown)
