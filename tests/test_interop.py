"""The retrievers of docs/interop.md find what `search_items` finds."""

import re
import shutil
from pathlib import Path

import pytest

from conjoin import load_encoder, open_collection, search_items
from conjoin.cli.main import main

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "docs" / "interop.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def found(own_export, pictures, tmp_path, monkeypatch):
    """What the searches of the page find, in a folder as it assumes."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(own_export[0], "runs/demo/model")
    lines = ["id,image,text"]
    for number, picture in enumerate(pictures):
        picture.save(f"p{number}.png")
        lines.append(f"row{number},p{number}.png,a picture {number}")
    Path("photos.csv").write_text("\n".join(lines))
    pictures[0].save("photo.jpg")
    assert main(["encode", "runs/demo/model", "photos.csv", "--out", "runs/photos", "--quiet"]) == 0
    items = ["a red apple", {"image": "photo.jpg", "text": "but green"}]
    return search_items(open_collection("runs/photos"), load_encoder("runs/demo/model"), items, 4)


def test_langchain(found):
    pytest.importorskip("langchain_core")
    run = {"__name__": "snippet"}
    exec(BLOCKS[0], run)
    assert [document.id for document in run["retriever"].invoke("a red apple")] == found.ids[0]
    assert [document.id for document in run["documents"]] == found.ids[1]
    best = run["documents"][0]
    assert best.page_content == f"a picture {best.id[-1]}" and best.metadata["image"].endswith(f"p{best.id[-1]}.png")
    assert best.metadata["score"] == pytest.approx(found[1][0].score, abs=1e-6)


def test_llama_index(found):
    pytest.importorskip("llama_index.core")
    run = {"__name__": "snippet"}
    exec(BLOCKS[1], run)
    assert [node.node.node_id for node in run["retriever"].retrieve("a red apple")] == found.ids[0]
    assert [node.node.node_id for node in run["nodes"]] == found.ids[1]
    assert run["nodes"][0].score == pytest.approx(found[1][0].score, abs=1e-6)
