"""What is pushed is what is loaded: models, datasets and metrics, through a hub on this machine."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_push import metadata

from conjoin.data import load_triplets
from conjoin.evaluation.hf_metrics.space import metric_upload
from conjoin.hub import export
from conjoin.hub.dataset_upload import dataset_upload
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor
from conjoin.retrieval import ItemEncoder
from loopback_hub import ENVIRONMENT
from tiny_merit import QUERIES, product_rows, write_products, write_queries

TEXTS = ["a red apple", "two"]
PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from conjoin.cli.main import main

folder, first, second, triplets = map(Path, sys.argv[1:5])
texts = json.loads(sys.argv[5])
found = {}

def push(*words):
    if main(["push", *map(str, words)]) != 0:
        sys.exit(1)

push(first, "me/model")
push(triplets, "me/triplets", "--type", "dataset")
push("mrr_at_k", "me/mrr_at_k", "--type", "metric")

from huggingface_hub import HfApi, snapshot_download

sha = HfApi().model_info("me/model").sha
push(second, "me/model", "--replace")

from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoProcessor
from conjoin import load_encoder, load_model
from conjoin.retrieval import Collection

for name, revision in (("new", None), ("pinned", sha)):
    found[f"conjoin {name}"] = load_encoder("me/model", revision=revision).encode(texts)
    sentence = SentenceTransformer("me/model", trust_remote_code=True, revision=revision)
    found[f"sentence {name}"] = sentence.encode(texts)
(folder / "rows.csv").write_text("\\n".join(["text", *texts]))
words = ("encode", "me/model", folder / "rows.csv", "--only", "text", "--revision", sha, "--no-bf16")
words += ("--out", folder / "rows")
if main([*map(str, words)]) != 0:
    sys.exit(1)
found["command pinned"] = Collection.open(folder / "rows").vectors()
options = {"trust_remote_code": True, "revision": sha, "code_revision": sha}
model, processor = (c.from_pretrained("me/model", **options) for c in (AutoModel, AutoProcessor))
found["transformers pinned"] = model.eval()(**processor(texts)).embeddings.detach().numpy()

from datasets import load_dataset
import evaluate

rows = load_dataset("me/triplets", split="test")
found["picture"] = np.asarray(rows[0]["query_image"].convert("RGB"))
try:
    load_model("me/model", revision="absent")
except FileNotFoundError as error:
    (folder / "error.txt").write_text(str(error))
sys.modules["conjoin"] = None  # a metric of a Space does not need this package
metric = evaluate.load("me/mrr_at_k")
found["mrr"] = metric.compute(predictions=[["a", "b"]], references=[["b"]], k=2)["mrr_at_k"]
np.savez(folder / "found.npz", **found)
snapshot_download("me/triplets", repo_type="dataset", local_dir=folder / "triplets")
"""


@pytest.mark.slow
def test_push_then_load(hub, tiny_checkpoints, pictures, tmp_path):
    expected, clip = {}, tiny_checkpoints["clip"]
    for seed, name in enumerate(("pinned", "new")):
        model, processor = ScoreFusionModel.from_clip(clip), ImageTextProcessor.from_backbones(clip, clip)
        torch.manual_seed(seed)
        with torch.no_grad():
            model.backbone.text_projection.weight.add_(torch.randn(20, 16))
        export(model, processor, tmp_path / name)
        expected[name] = ItemEncoder(model, processor).encode(TEXTS)
    triplets = write_triplets(tmp_path, pictures)
    environment = os.environ | ENVIRONMENT | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    arguments = [tmp_path, tmp_path / "pinned", tmp_path / "new", triplets, json.dumps(TEXTS)]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "found.npz") as found:
        names = ("conjoin new", "conjoin pinned", "sentence new", "sentence pinned", "transformers pinned")
        for name in (*names, "command pinned"):
            np.testing.assert_allclose(found[name], expected[name.split()[1]], atol=1e-6, err_msg=name)
        assert np.array_equal(found["picture"], np.asarray(pictures[0])) and found["mrr"] == 0.5
    assert not np.allclose(expected["new"], expected["pinned"], atol=1e-2)
    assert re.match("cannot load the model 'me/model': .*absent", (tmp_path / "error.txt").read_text())
    assert all(repository.private for repository in hub.repositories.values())
    local, pushed = load_triplets(triplets), load_triplets(tmp_path / "triplets/triplets/test.parquet")
    assert pushed["query_text"] == local["query_text"] and pushed["kind"] == local["kind"]
    assert pushed[0]["query_image"]["bytes"] == (tmp_path / "p0.png").read_bytes()


def write_triplets(folder, pictures):
    for number, picture in enumerate(pictures):
        picture.save(folder / f"p{number}.png")
    first = {"id": "a", "kind": "edit", "query_image": "p0.png", "query_text": None}
    first |= {"positive_image": "p1.png", "positive_text": "one", "negative_image": None, "negative_text": "two"}
    (folder / "triplets.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(first | {"id": "b"}) + "\n")
    return folder / "triplets.jsonl"


def test_merit_is_pushed_as_it_is_and_with_queries_as_parquet(tmp_path):
    made = tmp_path / "mini"
    write_products(made, product_rows())
    (made / "queries-test.json").write_text("".join(json.dumps(each) + "\n" for each in QUERIES))
    for name in ("ood.json", "mini_merit.json", "notes.txt"):
        (made / name).write_text("{}")
    upload = dataset_upload(made, "me/mini", tmp_path / "work")
    assert metadata(upload.card)["license"] == "cc-by-sa-4.0" and "miniature of MERIT" in upload.card
    assert upload.left_out == ("notes.txt",)
    assert {"queries-test.json", "ood.json", "queries/test.parquet"} <= set(upload.files)
    configs = {each["config_name"]: each["data_files"] for each in metadata(upload.card)["configs"]}
    assert {"split": "test", "path": "data/test-00000-of-00001.parquet"} in configs["products"]
    assert "| queries | test | 3 |" in upload.card

    from datasets import Dataset

    rows = Dataset.from_parquet(str(upload.files["queries/test.parquet"]), cache_dir=str(tmp_path / "cache"))
    lines = [json.loads(line) for line in (made / "queries-test.json").read_text().splitlines()]
    assert [json.loads(row["query"]) for row in rows] == [line["query"] for line in lines]
    assert [row["pos_candidate"] for row in rows] == [[str(each) for each in line["pos_candidate"]] for line in lines]


def test_shards_of_a_split_are_one_split(tmp_path):
    made = tmp_path / "merit"
    for shard, rows in enumerate((product_rows()[:3], product_rows()[3:])):
        write_products(made, rows, f"train-{shard}")
    write_queries(made, QUERIES)
    upload = dataset_upload(made, "me/merit", tmp_path / "work")
    (products,) = (each for each in metadata(upload.card)["configs"] if each["config_name"] == "products")
    paths = [f"data/train-{shard}-00000-of-00001.parquet" for shard in (0, 1)]
    assert products["data_files"] == [{"split": "train", "path": paths}]
    assert f"| products | train | {len(product_rows())} |" in upload.card


@pytest.mark.parametrize("source", ["absent", "."])
def test_a_source_of_no_known_layout_is_named(tmp_path, source):
    with pytest.raises(ValueError, match=r"has no queries-\*.json \(MERIT\); expected this layout"):
        dataset_upload(tmp_path / source, "me/data", tmp_path / "work")


def test_a_metric_has_a_space_of_its_own_name():
    with pytest.raises(FileNotFoundError, match=r"ndcg\.py"):
        metric_upload("ndcg", "me/ndcg")
    with pytest.raises(ValueError, match=r"must be named OWNER/mrr_at_k, got 'me/metric'"):
        metric_upload("mrr_at_k", "me/metric")
