"""What is pushed is what is loaded: models, datasets, collections and metrics, through a hub on this machine."""

import json
import os
import re
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from test_push import metadata

from conjoin.cli.main import main
from conjoin.data import load_triplets
from conjoin.hub import export
from conjoin.hub.build import image_text_processor, score_fusion_model
from conjoin.push import collection_upload, dataset_upload, metric_upload, model_upload, push
from conjoin.retrieval import ItemEncoder, encode_collection, open_collection
from loopback_hub import ENVIRONMENT
from tiny_encoder import tiny_encoder
from tiny_merit import QUERIES, product_rows, write_products, write_queries

TEXTS = ["a red apple", "two"]
PROGRAM = """
import json, sys
from pathlib import Path
import lancedb
import numpy as np
from conjoin.cli.main import main

folder, texts, found = Path(sys.argv[1]), json.loads(sys.argv[2]), {}

def run(*words):
    if main([*map(str, words)]) != 0:
        sys.exit(1)

run("push", folder / "pinned", "me/model")
run("push", folder / "triplets.jsonl", "me/triplets", "--type", "dataset")
run("push", folder / "photos", "me/photos", "--model", "me/model", "--keep-pictures", 20)
run("push", "mrr_at_k", "me/mrr_at_k", "--type", "metric")

from huggingface_hub import HfApi, snapshot_download

sha = HfApi().model_info("me/model").sha
run("push", folder / "new", "me/model", "--replace")

from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoProcessor
from conjoin import load_encoder, load_model, open_collection
from conjoin.retrieval import Collection
from conjoin.trainers.base import hub_revisions

for name, revision in (("new", None), ("pinned", sha)):
    found[f"conjoin {name}"] = load_encoder("me/model", revision=revision).encode(texts)
    sentence = SentenceTransformer("me/model", trust_remote_code=True, revision=revision)
    found[f"sentence {name}"] = sentence.encode(texts)
(folder / "rows.csv").write_text("\\n".join(["text", *texts]))
words = ("--only", "text", "--revision", sha, "--no-bf16", "--out", folder / "rows")
run("encode", "me/model", folder / "rows.csv", *words)
run("export", "me/model", "--out", folder / "exported")
found["command pinned"] = Collection(folder / "rows").vectors()
options = {"trust_remote_code": True, "revision": sha, "code_revision": sha}
model, processor = (c.from_pretrained("me/model", **options) for c in (AutoModel, AutoProcessor))
found["transformers pinned"] = model.eval()(**processor(texts)).embeddings.detach().numpy()

vectors = np.load(folder / "vectors.npy")
table = lancedb.connect("hf://datasets/me/photos/data").open_table("train")
found["plain"] = [row["id"] for row in table.search(vectors[0]).distance_type("dot").limit(3).to_list()]
for place, memory in (("table", 0), ("memory", 10**9)):
    collection = open_collection("hf://datasets/me/photos", memory=memory)
    result = collection.rank(vectors, 3, where="price < 8")
    rows = collection.rows(result.ids[0], pictures=True)
    found |= {f"ids {place}": result.ids, f"scores {place}": result.scores, f"model {place}": collection.model.name}
    found[f"words {place}"] = collection.rank(vectors, 1, words=["thing 5"] * len(vectors)).ids
    found[f"images {place}"] = [row["image"] for row in rows if row["picture"]]

from datasets import load_dataset
import evaluate

rows = load_dataset("me/triplets", split="test")
found["commits"] = [hub_revisions(rows)["me/triplets"], HfApi().dataset_info("me/triplets").sha]
found["picture"] = np.asarray(rows[0]["query_image"].convert("RGB"))
try:
    load_model("me/model", revision="absent")
except FileNotFoundError as error:
    found["error"] = str(error)
sys.modules["conjoin"] = None  # a metric of a Space does not need this package
metric = evaluate.load("me/mrr_at_k")
found["mrr"] = metric.compute(predictions=[["a", "b"]], references=[["b"]], k=2)["mrr_at_k"]
np.savez(folder / "found.npz", **found)
snapshot_download("me/triplets", repo_type="dataset", local_dir=folder / "repository")
"""


@pytest.fixture
def photos(tmp_path, pictures, monkeypatch):
    """A collection of pictures, texts and prices, with indexes."""
    monkeypatch.setenv("CONJOIN_ROOTS", str(tmp_path))
    rows = []
    for number in range(12):
        pictures[number % 4].save(tmp_path / f"{number}.png")
        kept = {"text": f"thing {number}", "price": number}
        rows.append({"id": f"row {number}", "image": str(tmp_path / f"{number}.png"), "metadata": kept})
    encode_collection(rows, tiny_encoder(), tmp_path / "photos").index(None)
    return tmp_path / "photos"


@pytest.mark.slow
def test_push_then_load(hub, tiny_checkpoints, pictures, photos, tmp_path):
    expected, clip = {}, tiny_checkpoints["clip"]
    for seed, name in enumerate(("pinned", "new")):
        model, processor = score_fusion_model(clip), image_text_processor(clip, clip)
        torch.manual_seed(seed)
        with torch.no_grad():
            model.backbone.text_projection.weight.add_(torch.randn(20, 16))
        export(model, processor, tmp_path / name)
        expected[name] = ItemEncoder(model, processor).encode(TEXTS)
    assert not np.allclose(expected["new"], expected["pinned"], atol=1e-2)
    first = {"id": "a", "kind": "edit", "query_image": "0.png", "query_text": None, "positive_image": "1.png"}
    first |= {"positive_text": "one", "negative_image": None, "negative_text": "two"}
    triplets = tmp_path / "triplets.jsonl"
    triplets.write_text(json.dumps(first) + "\n" + json.dumps(first | {"id": "b"}) + "\n")
    collection = open_collection(photos)
    vectors = collection.vectors()[:2]
    np.save(tmp_path / "vectors.npy", vectors)
    environment = os.environ | ENVIRONMENT | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(repository.private for repository in hub.repositories.values())
    files = hub.files("me/photos", "dataset")
    assert not [name for name, raw in files.items() if str(tmp_path).encode() in raw or name.startswith(".v")]
    with np.load(tmp_path / "found.npz") as found:
        for name in ("conjoin new", "sentence new"):
            np.testing.assert_allclose(found[name], expected["new"], atol=1e-6, err_msg=name)
        for name in ("conjoin pinned", "sentence pinned", "transformers pinned", "command pinned"):
            np.testing.assert_allclose(found[name], expected["pinned"], atol=1e-6, err_msg=name)
        assert found["commits"][0] == found["commits"][1]
        assert np.array_equal(found["picture"], np.asarray(pictures[0])) and found["mrr"] == 0.5
        assert re.match("cannot load the model 'me/model': .*absent", str(found["error"]))
        result = collection.rank(vectors, 3, where="price < 8")
        assert found["plain"].tolist() == collection.rank(vectors[:1], 3).ids[0]
        for place in ("table", "memory"):
            assert found[f"ids {place}"].tolist() == result.ids and found[f"model {place}"] == "me/model"
            np.testing.assert_allclose(found[f"scores {place}"], result.scores, atol=1e-6)
            assert (
                found[f"words {place}"].tolist() == collection.rank(vectors, 1, words=["thing 5"] * len(vectors)).ids
            )
            assert found[f"images {place}"].tolist() == [f"{id_.split()[1]}.png" for id_ in result.ids[0]]
    assert metadata(model_upload(tmp_path / "exported", "me/copy").card)["base_model"] == ["me/model"]
    local, pushed = load_triplets(triplets), load_triplets(tmp_path / "repository/triplets/test.parquet")
    assert pushed["query_text"] == local["query_text"] and pushed["kind"] == local["kind"]
    assert pushed[0]["query_image"]["bytes"] == (tmp_path / "0.png").read_bytes()


def write(upload, folder):
    """The files of an upload as one gets them by a download."""
    for name, file in upload.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file if isinstance(file, bytes) else file.read_bytes())
    return folder


def test_merit_is_pushed_as_it_is_and_with_queries_as_parquet(tmp_path):
    made = tmp_path / "mini"
    for split, rows, queries in (("train", product_rows()[:3], QUERIES[:1]), ("test", product_rows(), QUERIES)):
        write_products(made, rows, split)
        write_queries(made, queries, split)
    for name in ("ood.json", "mini_merit.json", "notes.txt"):
        (made / name).write_text("{}")
    upload = dataset_upload(made, "me/mini", tmp_path / "work")
    assert metadata(upload.card)["license"] == "cc-by-sa-4.0" and "miniature of MERIT" in upload.card
    assert upload.left_out == ("notes.txt",) and {"queries-test.json", "ood.json"} <= set(upload.files)
    folder, cache = str(write(upload, tmp_path / "repository")), str(tmp_path / "cache")
    products, queries = (datasets.load_dataset(folder, name, cache_dir=cache) for name in ("products", "queries"))
    assert {split: len(rows) for split, rows in products.items()} == {"train": 3, "test": 7}
    lines = [json.loads(line) for line in (made / "queries-test.json").read_text().splitlines()]
    assert [json.loads(text) for text in queries["test"]["query"]] == [line["query"] for line in lines]
    answers = [[str(each) for each in line["pos_candidate"]] for line in lines]
    assert list(queries["test"]["pos_candidate"]) == answers and len(queries["train"]) == 1


@pytest.mark.parametrize("source", ["absent", "."])
def test_a_source_of_no_known_layout_is_named(tmp_path, source):
    with pytest.raises(ValueError, match=r"has no queries-\*.json \(MERIT\); expected this layout"):
        dataset_upload(tmp_path / source, "me/data", tmp_path / "work")


def test_a_metric_has_a_space_of_its_own_name():
    with pytest.raises(ValueError, match="no metric 'ndcg'; expected one of hit_rate_at_k, "):
        metric_upload("ndcg", "me/ndcg")
    with pytest.raises(ValueError, match=r"must be named OWNER/mrr_at_k, got 'me/metric'"):
        metric_upload("mrr_at_k", "me/metric")


def test_a_download_is_a_collection(photos, tmp_path):
    copy = open_collection(write(collection_upload(photos, "me/photos", tmp_path / "work"), tmp_path / "download"))
    copy.verify()
    assert copy.rows(["row 3"]) == [{"id": "row 3", "text": "thing 3", "image": "3.png", "price": 3}]


def test_another_collection_is_replaced_only_when_told_and_whole(hub, api, photos, tmp_path):
    push(collection_upload(photos, "me/photos", tmp_path / "one"), api=api)
    open_collection(photos).remove(["row 1"])
    upload = collection_upload(photos, "me/photos", tmp_path / "other")
    with pytest.raises(ValueError, match="'me/photos' holds another dataset"):
        push(upload, api=api)
    push(upload, replace=True, api=api)
    assert set(hub.files("me/photos", "dataset")) == {*upload.files, ".gitattributes"}


def test_the_command_knows_a_collection_and_prints_its_card(photos, capsys):
    words = ["--dry-run", "--model", "me/model", "--license", "mit", "--language", "en"]
    assert main(["push", str(photos), "me/photos", *words]) == 0
    printed = capsys.readouterr()
    assert "to the dataset repository me/photos" in printed.err and "data/train.lance/" in printed.err
    told = metadata(printed.out)
    assert (told["license"], told["language"]) == ("mit", ["en"]) and "conjoin" in told["tags"]
    assert "12 rows with vectors of 8 dimensions (float32" in printed.out and "| price | int64 |" in printed.out
    assert 'conjoin search hf://datasets/me/photos --model me/model --text "a red apple"' in printed.out
    assert str(photos.parent) not in printed.out + printed.err


def test_collections_that_cannot_be_pushed_or_copied_are_named(photos, tmp_path, capsys):
    for words, problem in (
        (["push", str(photos), "me/x", "--type", "space", "--model", "m"], "'m' lacks config.json"),
        (["push", str(photos), "me/x", "--keep-pictures", "0"], "--keep-pictures must be at least 1"),
        (["push", str(photos), "me/x", "--results", "r.json"], "--results is for a model"),
        (["copy", str(tmp_path / "none"), str(tmp_path / "copy")], "there is no collection"),
        (["copy", str(photos), str(photos)], "holds a collection"),
        (["copy", str(photos), "hf://datasets/me/x"], "can only be read"),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().err


def test_copy_to_a_folder_and_to_milvus(photos, tmp_path, capsys):
    assert main(["copy", str(photos), str(tmp_path / "copy"), "--keep-pictures", "9"]) == 0
    assert "copied 12 rows" in capsys.readouterr().out
    assert "picture" in open_collection(tmp_path / "copy").rows(["row 1"], pictures=True)[0]
    assert main(["copy", str(photos), str(tmp_path / "copy")]) == 2
    assert main(["copy", str(photos), str(tmp_path / "copy"), "--replace"]) == 0
    pytest.importorskip("milvus_lite")
    assert main(["copy", str(photos), f"{tmp_path}/m.db/photos"]) == 0
    vectors = open_collection(photos).vectors()[:2]
    expected = open_collection(photos).rank(vectors, 3).ids
    assert open_collection(f"{tmp_path}/m.db/photos").rank(vectors, 3).ids == expected
