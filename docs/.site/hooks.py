"""Pages of the site that lie outside `docs`, the links to them, and a list of the links that leave the site."""

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
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE.txt",
    "benchmarks/README.md": "benchmarks/README.md",
    "experiments/README.md": "experiments/README.md",
    "experiments/CLAIMS.md": "experiments/CLAIMS.md",
    "experiments/LOG.md": "experiments/LOG.md",
    "experiments/emoji.md": "experiments/emoji.md",
    "experiments/mini_merit.md": "experiments/mini_merit.md",
    "experiments/scenes.md": "experiments/scenes.md",
    "experiments/results/gcl.svg": "experiments/results/gcl.svg",
}
"""By its path in the repository: the place of a file in the site."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)")
_EXTERNAL = re.compile(r'href="(https?://[^"]+)"')
_external: dict[str, set[str]] = {}


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
    """Turn the links of the repository, such as `../CONTRIBUTING.md`, into those of the site.

    The search finds guides before the reference and the logs.
    """
    place = page.file.src_uri
    if place.startswith(("reference/", "experiments/", "benchmarks/", "changelog")):
        page.meta["search"] = {"boost": 0.2}
    origin = {place: source for source, place in OUTSIDE.items()}.get(place, f"docs/{place}")

    def rewrite(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2]))
        target = OUTSIDE.get(target, target.removeprefix("docs/"))
        return found[1] + posixpath.relpath(target, posixpath.dirname(place) or ".")

    return _LINK.sub(rewrite, markdown)


def on_page_content(html: str, page: Page, **_: Any) -> str:  # noqa: ANN401 - mkdocs passes more
    """Collect the links that leave the site; the build does not fetch them."""
    for url in _EXTERNAL.findall(html):
        _external.setdefault(url, set()).add(page.file.src_uri)
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Write `external_links.txt`: each link that leaves the site, and the pages that have it."""
    lines = [f"{url}\t{' '.join(sorted(pages))}" for url, pages in sorted(_external.items())]
    (Path(config.site_dir) / "external_links.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
