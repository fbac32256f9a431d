"""The retrievers of docs/interop.md find what `search_items` finds."""

import json
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


def test_one_query_by_every_door(found, capsys):
    """A query whose words and vector both matter: the same ids and scores."""
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from conjoin.serving.endpoint import make_endpoint
    from conjoin.serving.searcher import Searcher

    text, model = "pictrue 3", "runs/demo/model"
    collection, encoder = open_collection("runs/photos"), load_encoder(model)
    hits = [(hit.id, pytest.approx(hit.score, abs=1e-5)) for hit in search_items(collection, encoder, [text], 4)[0]]
    assert hits[0][0] == "row3" and hits[0][1] != hits[1][1]
    main(["search", "runs/photos", "--model", model, "--text", text, "-k", "4", "--json"])
    doors = {"command line": json.loads(capsys.readouterr().out)["results"]}
    searcher = Searcher.load("runs/photos", model)
    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1")
    doors["endpoint and page"] = client.post("/search", json={"items": [text], "k": 4}).json()["results"][0]
    for number, name in enumerate(("LangChain", "LlamaIndex")):
        run = {"__name__": "snippet"}
        exec(BLOCKS[number], run)
        if number == 0:
            doors[name] = [vars(each) | each.metadata for each in run["retriever"].invoke(text)]
        else:
            doors[name] = [{"id": each.node.node_id, "score": each.score} for each in run["retriever"].retrieve(text)]
    assert {name: [(hit["id"], hit["score"]) for hit in each] for name, each in doors.items()} == dict.fromkeys(
        doors, hits
    )


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
