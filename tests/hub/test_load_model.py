"""Saved models of this package load with the installed classes."""

import json
import shutil
import time

import pytest
import torch

from conjoin.hub import check_model, load_model, load_processor, model_type
from conjoin.retrieval import load_encoder
from conjoin.trainers import ModelArguments

UNREADABLE = "cannot load the model '.*': .* cannot be read: "
UNCHECKED = shutil.ignore_patterns("SHA256SUMS")
UNREACHABLE = "http://127.0.0.1:9"


@pytest.mark.parametrize("kind", ["joint_encoder", "mllm_retriever", "score_fusion", "token_fusion"])
def test_every_kind_loads_as_it_was_saved(kind, exports):
    folder, model, processor = exports(kind)
    loaded, read = load_model(folder)
    assert type(loaded) is type(model) and type(read) is type(processor) and not loaded.training
    assert model_type(folder) == kind
    batch, again = processor(["a b", "c"]), read(["a b", "c"])
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    with torch.no_grad():
        assert torch.equal(loaded(**again).embeddings, model(**batch).embeddings)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 32}, "cannot load .*: the config.json of .* does not fit its weights: .*text_adapter.0.bias"),
        (
            {"num_vl_layers": 9},
            r"cannot load .*: the config.json of .* does not fit its weights: .*vl_encoder.layers.\d",
        ),
        *((size, f"{UNREADABLE}.*expected whole files, weights as safetensors") for size in (0, 100, 2000)),
        *((text, UNREADABLE) for text in ("[" * 100_000, "[]")),
        ('{"model_type": "bert", "hidden_size": "x"}', UNREADABLE),
    ],
)
def test_a_damaged_model_is_one_error_that_names_it(change, problem, tmp_path, own_export):
    """Of its configuration or its weights; what flips and cuts do to each file is in `test_damaged_files.py`."""
    shutil.copytree(own_export[0], tmp_path, dirs_exist_ok=True, ignore=UNCHECKED)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    if isinstance(change, int):
        weights.write_bytes(weights.read_bytes()[:change])
    else:
        config.write_text(change if isinstance(change, str) else json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ValueError, match=problem) as raised:
        load_encoder(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_another_kind_is_refused(tiny_checkpoints):
    for load in (load_model, load_processor):
        with pytest.raises(ValueError, match=r"is a bert; expected a model of this package, one of \['joint_encoder'"):
            load(tiny_checkpoints["bert"])


def test_prompts_and_code_may_be_changed(own_export, tmp_path):
    folder = shutil.copytree(own_export[0], tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Another: "}}')
    (folder / "configuration_joint_encoder.py").write_text("")
    load_model(folder)


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """Use the hub at an address, and an empty cache."""

    def use(address):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)

    return use


def test_without_a_network_the_message_names_the_model(endpoint):
    endpoint(UNREACHABLE)
    towers = {"model_type": "joint_encoder", "vision_model_name_or_path": "sample"}
    train = ModelArguments(**towers, text_model_name_or_path="o/m").load
    started = time.monotonic()
    for load in (lambda: check_model("o/m"), lambda: load_model("o/m"), lambda: load_encoder("o/m"), train):
        with pytest.raises(FileNotFoundError, match=r"^cannot load the model 'o/m': .*, and not on the hub: \S"):
            load()
    assert time.monotonic() - started < 4


def test_a_name_that_the_hub_does_not_know(endpoint, hub):
    endpoint(hub.url)
    with pytest.raises(FileNotFoundError, match=r"no such folder, and not on the hub: .*Repository Not Found"):
        check_model("o/m")


def test_what_cannot_be_a_repository_needs_no_request(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `runs/demo/model` may be below the current folder
    endpoint("no address at all")
    for name in ("runs/demo/model", "/absent", "../x", "~/x", "a b"):
        with pytest.raises(FileNotFoundError, match=f"'{name}': there is no such folder, and not on the hub: Repo id"):
            check_model(name)
    (tmp_path / "weights.bin").write_text("x")
    for path in (tmp_path / "weights.bin", tmp_path):
        with pytest.raises(FileNotFoundError, match="it is no folder with a file config"):
            check_model(path)


def test_a_folder_and_a_cached_model_pass(endpoint, tmp_path, tiny_checkpoints):
    endpoint(UNREACHABLE)
    check_model(tiny_checkpoints["clip"])
    cached, commit = tmp_path / "cache/models--o--m", "a" * 40
    for name, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/main", commit)):
        (cached / name).parent.mkdir(parents=True)
        (cached / name).write_text(text)
    check_model("o/m")
