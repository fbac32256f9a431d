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

SCRIPTS = Path(__file__).parent


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


def test_the_life_of_a_collection_is_timed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("collection_lifecycle")
    found = {name: step() for name, step in script.steps(300, 16, tmp_path).items() if "ivf" not in name}
    assert found["encode"].changes.added == 300 and found["encode again"].changes.unchanged == 300
    assert found["sync"].changes[:3] == found["sync back"].changes[:3] == (3, 3, 3)
    assert found["filter"] == ["item/7"] and {*map(tuple, found["search 10 where"])} == {("item/7",)}


def test_encoding_is_compared_with_sentence_transformers(tmp_path, run):
    found = tmp_path / "found.json"
    options = ["--size", "tiny", "--rows", 6, "--batch-size", 4, "--turns", 1, "--read-threads", 1, "--json", found]
    run("encode_throughput.py", *options, "--models", "stock_clip", "mllm_retriever")
    rows = json.loads(found.read_text())["rows"]
    assert [(row["model"], row["items"], row["ours"]) for row in rows] == [
        (model, kind, threads)
        for model in ("stock_clip", "mllm_retriever")
        for kind in ("image", "text")
        for threads in ("1 threads", "array")
    ]
    assert all(min(row["wall"], row["cpu"], row["first"]) > 0 for row in rows)
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
    args = SimpleNamespace(mllm="tiny", variants=None, rows=5, chunk=2, bf16=False)
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


def test_every_section_of_the_gpu_benchmark_runs_at_toy_size(tmp_path, run, capsys):
    found = tmp_path / "found.json"
    run("gpu.py", "--toy", "--sections", "kernel", "--json", found)
    content = json.loads(found.read_text())
    assert content["setup"].keys() >= {"device", "date", "torch", "transformers", "sentence-transformers"}
    assert content["kernel"]["problem"] is None and "## kernel\n" in capsys.readouterr().out
    losses = [(row["pairs"], row["way"], row["loss"]) for row in content["kernel"]["rows"]]
    assert [loss[:2] for loss in losses] == [(16, "kernel"), (16, "naive"), (64, "kernel"), (64, "naive")]
    assert [loss[2] for loss in losses[::2]] == pytest.approx([loss[2] for loss in losses[1::2]], rel=1e-5)
    script = importlib.import_module("gpu")
    rows = {name: list(section(script.Toy, "cpu")) for name, (section, _) in script.SECTIONS.items()}
    assert [(row["layers"], row["items"]) for row in rows["forward"]] == [
        *((4, "text"), (4, "image"), (2, "text"), (2, "image"))
    ]
    assert [row["threads"] for row in rows["encode"]] == ["sentence-transformers", 1, 2]
    assert {row["way"] for row in rows["search"]} == {"exact_search", "exact_search, held", "torch"}
    assert min(row["ms"] for part in rows.values() for row in part) > 0
    assert min(row[name] for row in rows["forward"] + rows["train"] for name in ("per_second", "tflops")) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sections run where there is a GPU")
def test_a_section_of_the_gpu_benchmark_that_fails_or_has_no_time_is_recorded(tmp_path, run, capsys):
    found = tmp_path / "found.json"
    run("gpu.py", "--sections", "kernel,forward,encode", "--minutes", 1.99, "--json", found)
    problems = {name: part["problem"] for name, part in json.loads(found.read_text()).items() if name != "setup"}
    no_gpu = "RuntimeError: torch sees no GPU: only --toy runs on a CPU"
    skipped = "skipped: 120 seconds could pass --minutes 1.99"
    assert problems == {"kernel": no_gpu, "forward": no_gpu, "encode": skipped}
    assert no_gpu in capsys.readouterr().out


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
