"""A collection on the Hub: pushed without paths of this machine, searched there, and replaced only when told."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml
from PIL import Image

from conjoin.cli.main import main
from conjoin.hub import push
from conjoin.retrieval import encode_collection, open_collection
from conjoin.retrieval.collection_copy import collection_upload
from loopback_hub import ENVIRONMENT
from tiny_encoder import tiny_encoder

PROGRAM = """
import json, sys
import lancedb
import numpy as np
from conjoin import open_collection

vectors = np.load(sys.argv[1])
table = lancedb.connect("hf://datasets/me/photos/data").open_table("train")
plain = table.search(vectors[0]).distance_type("dot").limit(3).to_list()
for memory in (0, 10**9):
    collection = open_collection("hf://datasets/me/photos", memory=memory)
    result = collection.search(vectors, 3, where="price < 8")
    words = collection.search(vectors, 1, text="thing 5").ids
    rows = collection.rows(result.ids[0], pictures=True)
    found = {"ids": result.ids, "scores": result.scores.tolist(), "words": words, "model": collection.model.name}
    found |= {"plain": [row["id"] for row in plain], "images": [row["image"] for row in rows]}
    found |= {"pictures": [len(row["picture"]) for row in rows], "rows": len(collection)}
    print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(tmp_path))
    rows = []
    for number in range(12):
        Image.new("RGB", (60, 30), (number * 20, 9, 200)).save(tmp_path / f"{number}.png")
        kept = {"text": f"thing {number}", "price": number}
        rows.append({"id": f"row {number}", "image": str(tmp_path / f"{number}.png"), "metadata": kept})
    encode_collection(rows, tiny_encoder(), tmp_path / "photos").index(None)
    return tmp_path / "photos"


@pytest.mark.slow
def test_it_is_searched_from_the_hub_in_the_table_and_in_memory(hub, api, folder, tmp_path):
    push(collection_upload(folder, "me/photos", tmp_path / "work", model="me/model", side=20), api=api)
    files = hub.files("me/photos", "dataset")
    assert {"README.md", "SHA256SUMS"} < set(files) and not [name for name in files if name.startswith(".v")]
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    collection = open_collection(folder)
    np.save(tmp_path / "vectors.npy", collection.vectors()[:2])
    environment = os.environ | ENVIRONMENT | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "vectors.npy")]
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert printed.returncode == 0, printed.stderr
    vectors = collection.vectors()[:2]
    expected = collection.search(vectors, 3, where="price < 8")
    answers = [json.loads(line) for line in printed.stdout.splitlines()]
    assert len(answers) == 2
    for found in answers:
        assert found["ids"] == expected.ids and found["rows"] == 12
        np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-6)
        assert found["plain"] == collection.search(vectors[:1], 3).ids[0]
        assert found["words"] == collection.search(vectors, 1, text="thing 5").ids
        assert found["model"] == "me/model" and all(found["pictures"])
        assert found["images"] == [f"{id_.split()[1]}.png" for id_ in found["ids"][0]]


def test_a_download_is_a_collection(hub, api, folder, tmp_path):
    upload = collection_upload(folder, "me/photos", tmp_path / "work")
    push(upload, api=api)
    for name, content in hub.files("me/photos", "dataset").items():
        (tmp_path / "download" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "download" / name).write_bytes(content)
    copy = open_collection(tmp_path / "download")
    copy.verify()
    assert copy.rows(["row 3"]) == [{"id": "row 3", "text": "thing 3", "image": "3.png", "price": 3}]


def test_another_is_replaced_only_when_told_and_whole(hub, api, folder, tmp_path):
    push(collection_upload(folder, "me/photos", tmp_path / "one"), api=api)
    open_collection(folder).remove(["row 1"])
    upload = collection_upload(folder, "me/photos", tmp_path / "other")
    with pytest.raises(ValueError, match="'me/photos' holds another dataset"):
        push(upload, api=api)
    push(upload, replace=True, api=api)
    assert set(hub.files("me/photos", "dataset")) == {*upload.files, ".gitattributes"}


def test_the_command_knows_a_collection_and_prints_its_card(folder, capsys):
    words = ["--dry-run", "--model", "me/model", "--license", "mit", "--language", "en"]
    assert main(["push", str(folder), "me/photos", *words]) == 0
    printed = capsys.readouterr()
    assert "to the dataset repository me/photos" in printed.err and "data/train.lance/" in printed.err
    told = yaml.safe_load(printed.out.split("---")[1])
    assert (told["license"], told["language"]) == ("mit", ["en"]) and "conjoin" in told["tags"]
    assert "12 rows with vectors of 8 dimensions (float32" in printed.out and "| price | int64 |" in printed.out
    assert 'conjoin search hf://datasets/me/photos --model me/model --text "a red apple"' in printed.out
    assert str(folder.parent) not in printed.out + printed.err


def test_options_of_a_collection_are_for_collections(folder, tmp_path, capsys):
    for words, problem in (
        (["push", str(folder), "me/x", "--type", "space", "--model", "m"], "'m' lacks config.json"),
        (["push", str(folder), "me/x", "--keep-pictures", "0"], "--keep-pictures must be at least 1"),
        (["push", str(folder), "me/x", "--results", "r.json"], "--results is for a model"),
        (["push", str(folder), "me/x", "--type", "space", "--keep-pictures", "9"], "--keep-pictures is for a dataset"),
        (["copy", str(tmp_path / "none"), str(tmp_path / "copy")], "there is no collection"),
        (["copy", str(folder), str(folder)], "holds a collection"),
        (["copy", str(folder), "hf://datasets/me/x"], "can only be read"),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().err


def test_copy_to_a_folder_and_to_milvus(folder, tmp_path, capsys):
    assert main(["copy", str(folder), str(tmp_path / "copy"), "--keep-pictures", "9"]) == 0
    assert "copied 12 rows" in capsys.readouterr().out
    assert "picture" in open_collection(tmp_path / "copy").rows(["row 1"], pictures=True)[0]
    assert main(["copy", str(folder), str(tmp_path / "copy")]) == 2
    assert main(["copy", str(folder), str(tmp_path / "copy"), "--replace"]) == 0
    pytest.importorskip("milvus_lite")
    assert main(["copy", str(folder), f"{tmp_path}/m.db/photos"]) == 0
    vectors = open_collection(folder).vectors()[:2]
    assert (
        open_collection(f"{tmp_path}/m.db/photos").search(vectors, 3).ids
        == open_collection(folder).search(vectors, 3).ids
    )
