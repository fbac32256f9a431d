"""The benchmark scripts that need no data."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch):
    """Calls `main` of a script with arguments, in this process: another one would import the libraries again."""
    threads = torch.get_num_threads()

    def call(script, *arguments):
        path = SCRIPTS / script
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        importlib.import_module(path.stem).main()

    yield call
    torch.set_num_threads(threads)


def test_every_step_and_encoder_is_timed(tmp_path, run):
    found = tmp_path / "found.json"
    options = ["--size", "tiny", "--rows", 2, "--encode-rows", 2, "--mllm-rows", 2, "--turns", 1, "--threads", 1]
    run("joint_encoder.py", *options, "--mllm", "--peak-tflops", 1, "--json", found)
    content = json.loads(found.read_text())
    assert [row["towers"] for row in content["steps"]] == ["2 + 0", "2 + 0", "2 + 2", "2 + 2", "2 + 2", "6 + 2"]
    assert [row["encode"] for row in content["encoding"]] == ["towers alone", "joint encoder", "Qwen2-VL"]
    assert all(min(row["ratio"], row["mfu"]) > 0 for row in content["steps"] + content["encoding"])


def test_composition_is_timed(tmp_path, run):
    found = tmp_path / "found.json"
    options = ["--products", 300, "--attributes", 6, "--queries", 20, "--width", 4, "--side", 8]
    run("compose_queries.py", *options, "--max-positive-share", 0.3, "--json", found)
    content = json.loads(found.read_text())
    assert content["queries"] == {"train": 20, "test": 2}
    assert content["compose_seconds"] > 0


CLAIM = [
    *("--objects", 12, "--train", 40, "--distractors", 10, "--triplets", 12, "--image-size", 28, "--width", 64),
    *("--stage1-steps", 2, "--stage2-steps", 1, "--batch-size", 8, "--stage2-batch-size", 4, "--mined-per-miner", 2),
    *("--threads", 1, "--no-bf16", "--seeds", 0, "--time-of", "Mixed, own miner only"),
]
STARTS = {"stage 1", "GCL, short"}
ROWS = [
    "towers",
    "GCL",
    "GCL, equal time",
    "Mixed, own miner only",
    "GCL + stage 2, true masks",
    "GCL + stage 2, grouped",
    "GCL, equal time + intersection",
    "GCL, equal time + random parts",
]


def test_shuffled_masks_keep_as_many_of_the_tokens_that_exist(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "claims")
    shuffled = importlib.import_module("solar_training").shuffled
    exists = torch.tensor([[False] + [True] * 20 + [False] * 3, [True] * 24])
    mask = torch.zeros(2, 24)
    mask[:, 3:8] = 1
    found = shuffled(mask, exists, torch.Generator().manual_seed(0))
    assert found.sum(1).tolist() == [5, 5] and not found[~exists].any()
    assert not torch.equal(found, mask)


PARTS = ("+ intersection", "+ random parts")


@pytest.fixture
def claims(monkeypatch):
    """The module, to be called in this process."""
    monkeypatch.syspath_prepend(SCRIPTS / "claims")
    return importlib.import_module("solar")


def test_rows_of_the_solar_claims_are_trained_measured_and_compared(tmp_path, claims, run, capsys):
    run("claims/solar.py", *CLAIM, "--out", tmp_path, "--rows", *ROWS)
    content = json.loads((tmp_path / "results.json").read_text())
    found = {row["row"]: row for row in content["rows"]}
    assert set(found) == {*ROWS} | STARTS
    assert not content["missing"]
    cost = {name: row["cost"] for name, row in found.items()}
    mixed, plain = cost["Mixed, own miner only"], cost["GCL"]
    assert (cost["stage 1"]["samples"], mixed["samples"], plain["samples"]) == (16, 12, 32)
    assert plain["samples"] >= mixed["total_samples"] == 28  # baselines have whole steps
    step, seconds = plain["cpu_seconds"] / plain["steps"], mixed["total_cpu_seconds"] + mixed["mining_cpu_seconds"]
    assert cost["GCL, equal time"]["steps"] * step == pytest.approx(seconds, abs=step)
    assert mixed["mining_seconds"] > 0 == plain["mining_seconds"]
    for name, row in found.items():
        for part in ("known", "unseen"):
            average = (row[part]["precision"]["value"] + row[part]["mean_recall"]["value"]) / 2
            assert row[part]["average"]["value"] == pytest.approx(average)
            assert average == pytest.approx(row[part]["readouts"][row["readouts"][part]]["average"])
            stored = row[part]["outcomes"]["0"][row["readouts"][part]]
            assert stored["wins"].count("1") / 12 == pytest.approx(row[part]["precision"]["value"])
            assert stored["same_union"].count("1") / 12 == pytest.approx(row[part]["other_intersection"]["value"])
            assert 1 - stored["ranks"].count("b") / 12 == pytest.approx(row[part]["recall@10"]["value"])
            assert ("text_to_image" in row[part]) == (name != "towers")
            assert ("masks" in row[part]) == (name != "towers" and not name.endswith(PARTS))
    views, shared, other = (
        found[f"GCL, equal time{name}"]["known"]["readouts"] for name in ("", " + intersection", " + random parts")
    )
    assert shared.pop("score fusion + intersection") and other.pop("score fusion + random parts")
    assert views == shared == other  # the same model

    records = {path: path.stat().st_mtime_ns for path in tmp_path.glob("rows/*/0.json")}

    def call(*arguments):
        capsys.readouterr()
        run("claims/solar.py", *CLAIM, "--out", tmp_path, *arguments)
        return capsys.readouterr().out

    shown = call("--rows", "GCL", "--seeds", 0, 1, "--compare", "GCL", "Mixed, own miner only")
    assert "; seeds 0\n" in shown
    difference = (
        found["GCL"]["known"]["average"]["value"] - found["Mixed, own miner only"]["known"]["average"]["value"]
    )
    assert f"| {100 * difference:.1f} [" in shown
    (line,) = (line for line in call("--brief", "--seeds", 0).splitlines() if line.startswith("| GCL | 1 |"))
    assert f"| {100 * found['GCL']['known']['average']['value']:.1f} |" in line
    assert "Missing" not in call("--rows", *ROWS)
    assert records == {path: path.stat().st_mtime_ns for path in tmp_path.glob("rows/*/0.json")}  # not run again


def test_what_is_missing_or_other_of_the_solar_claims_is_said(tmp_path, claims):
    args = claims.parse([str(word) for word in [*CLAIM, "--out", tmp_path, "--rows", "CL, equal time"]])
    claims.check_settings(args)
    with pytest.raises(claims.WaitingError, match="CL, equal time, seed 0: needs 'Mixed, own miner only' first"):
        claims.run(claims.ROWS["CL, equal time"], 0, None, args)
    assert "* CL, equal time: seeds 0 are missing" in claims.report(args)
    with pytest.raises(ValueError, match=r"have the settings {'objects.: 12}; choose another --out"):
        claims.check_settings(claims.parse(["--objects", "11", "--out", str(tmp_path), *map(str, CLAIM[2:])]))
    with pytest.raises(ValueError, match="no row or group 'GCI'"):
        claims.chosen(["GCI"])
    with pytest.raises(ValueError, match="none in common"):
        claims.compare("GCL", "CL", tmp_path, tmp_path, [0])


def test_the_life_of_a_collection_is_timed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("collection_lifecycle")
    found = {name: step() for name, step in script.steps(300, 16, tmp_path).items() if "ivf" not in name}
    assert found["encode"].changes.added == 300 and found["encode again"].changes.unchanged == 300
    assert found["sync"].changes[:3] == found["sync back"].changes[:3] == (3, 3, 3)
    assert found["filter"] == ["item/7"] and {*map(tuple, found["search 10 where"])} == {("item/7",)}


def test_encoding_is_compared_with_sentence_transformers(tmp_path, run):
    found = tmp_path / "found.json"
    options = ["--size", "tiny", "--rows", 6, "--batch-size", 4, "--turns", 1, "--workers", 0, 1, "--json", found]
    run("encode_throughput.py", *options, "--models", "stock_clip", "mllm_retriever", "--peak-tflops", 1)
    rows = json.loads(found.read_text())["rows"]
    assert [(row["model"], row["items"], row["ours"]) for row in rows] == [
        (model, kind, workers)
        for model in ("stock_clip", "mllm_retriever")
        for kind in ("image", "text")
        for workers in ("0 workers", "1 workers", "array")
    ]
    assert all(min(row["wall"], row["cpu"], row["free_cores"], row["mfu"]) > 0 for row in rows)
    assert all(0 < row["not_model"] < 1 for row in rows)


def test_a_training_step_is_compared_with_sentence_transformers(tmp_path, run):
    found = tmp_path / "found.json"
    chosen = ["sentence-transformers", "ours, tokens"]
    options = ["--size", "tiny", "--rows", 12, "--chunk", 4, "--turns", 1, "--json", found]
    run("training_step.py", *options, "--variants", *chosen)
    rows = json.loads(found.read_text())["rows"]
    assert [row["step"] for row in rows] == chosen
    assert rows[0]["wall"] == rows[0]["cpu"] == rows[0]["memory"] == 1
    assert all(row["seconds"] > 0 for row in rows)


def test_a_training_step_of_a_pruned_mllm_is_timed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("training_step")
    args = SimpleNamespace(mllm="tiny", variants=None, rows=5, chunk=2, device="cpu", bf16=False)
    script.save_model(args, tmp_path)
    losses = {}
    for variant in script.variants(args):
        torch.manual_seed(0)  # of the start of LoRA
        step = script.make_step(variant, tmp_path, args)
        losses[variant] = step()
        assert step() < losses[variant]
    for variant in losses:
        assert losses["ours"] == pytest.approx(losses[variant], rel=1e-5)


def test_search_is_compared_and_its_growth_is_drawn(tmp_path, run):
    found = tmp_path / "found.json"
    run("search.py", "--rows", 1000, "--queries", 2, "--dimension", 16, "--turns", 1, "--json", found)
    content = json.loads(found.read_text())
    states = ["first", "in memory", "updated", "indexed"]
    assert list(content["difference"]) == [f"{state}{part}" for state in states for part in ("", ", filtered")]
    assert max(content["difference"].values()) < 1e-7
    assert min(content["search"][0][name] for name in ("matmul", "faiss", "table", "matmul_cpu", "faiss_cpu")) > 0
    sizes = ["--vectors", 50, 100, "--batches", 1, 2, "--lengths", 4, 8, "--layers", 2, 4, "--turns", 1]
    run("cost_growth.py", "--out", tmp_path, "--size", "tiny", *sizes)
    content = json.loads((tmp_path / "cost_growth.json").read_text())
    assert [point[0] for point in content["vectors"]["exact"]] == [50, 100]
    for name in ("vectors", "batch", "length", "layers"):
        picture = (tmp_path / f"cost_{name}.svg").read_text()
        assert picture.count("<circle") == sum(map(len, content[name].values()))


class EngineOfStock:
    """What `vllm.LLM` does with an export and prompts, done by transformers and sentence-transformers."""

    def __init__(self, folder, **options):
        self.encoder, self.adapter = SentenceTransformer(folder, device="cpu"), None

    def get_tokenizer(self):
        return self.encoder.tokenizer

    def embed(self, prompts, lora_request=None, **options):
        if lora_request is not None and self.adapter is None:
            self.adapter = lora_request
            self.encoder[0].model.load_adapter(lora_request.path)
        return [SimpleNamespace(outputs=SimpleNamespace(embedding=self._embed(prompt))) for prompt in prompts]

    @torch.no_grad()
    def _embed(self, prompt):
        images = prompt.get("multi_modal_data", {}).get("image")
        batch = self.encoder[0].processor(text=[prompt["prompt"]], images=images, return_tensors="pt")
        return self.encoder(dict(batch))["sentence_embedding"][0].tolist()


@pytest.mark.parametrize("name", ["qwen3_vl", "llava", "Qwen2-VL embedder, mean"])
def test_prompts_for_vllm_give_the_vectors_of_the_model(name, tmp_path, monkeypatch, without_video):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=EngineOfStock))
    request = SimpleNamespace(LoRARequest=lambda name, number, path: SimpleNamespace(path=path))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    rows = importlib.import_module("vllm_export").compare(name, ["float32"], tmp_path)
    assert [row["model"] for row in rows] == [name, f"{name}, adapters"][: 1 + ("embedder" in name)]
    assert all(max(row["texts"], row["images"]) <= 1e-5 for row in rows)
