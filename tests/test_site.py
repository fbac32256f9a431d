"""The documentation site builds strictly without a network: every link, anchor and name of the reference resolves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
RESOURCE = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_pages_need_nothing_from_other_hosts(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 30
    assert {path.name: found for path, page in pages.items() if (found := RESOURCE.findall(page))} == {}
    sheets = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert sheets and not any(re.search(r"url\(['\"]?https?:|@import", sheet) for sheet in sheets)


def test_the_readme_is_the_start_and_its_links_stay_in_the_site(site):
    start = (site / "index.html").read_text(encoding="utf-8")
    assert "Universal multimodal retrieval" in start
    assert 'href="own_data.html"' in start and 'href="contributing.html"' in start
    assert 'href="docs/' not in start


def test_the_reference_documents_every_public_name(site):
    import conjoin

    page = (site / "reference/conjoin.html").read_text(encoding="utf-8")
    missing = [name for name in conjoin.__all__ if not name.startswith("_") and f"<code>{name}</code>" not in page]
    assert not missing
    signatures = (site / "reference/losses.html").read_text(encoding="utf-8")
    assert 'id="conjoin.losses.gcl"' in signatures and "exclude_same_modality" in signatures


def test_the_search_finds_guides_before_the_reference(site):
    pages = json.loads((site / "search/search_index.json").read_text())["docs"]
    boosts = {page["location"].partition("#")[0]: page.get("boost", 1) for page in pages}
    assert boosts["start.html"] == 1 and boosts["reference/losses.html"] == boosts["experiments/LOG.html"] == 0.2


def test_links_to_other_hosts_are_listed(site):
    listed = dict(line.split("\t") for line in (site / "external_links.txt").read_text().splitlines())
    assert all(url.startswith(("https://", "http://")) for url in listed)
    assert "serving.md" in listed["https://github.com/huggingface/text-embeddings-inference/issues/669"]
