"""Reading a checkpoint: only what is kept is opened, read, downloaded or allocated."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig

from conjoin.models.mllm_retriever import MllmRetrieverModel, pruned_checkpoint
from tiny_mllms import DEPTH, MLLMS

INDEX = "model.safetensors.index.json"


@pytest.fixture
def reads(monkeypatch):
    """What is read: `{file name: [tensor names]}`, also of files opened and not read."""
    found = {}
    original = pruned_checkpoint.safe_open

    class Recorded:
        def __init__(self, path, **kwargs):
            self.name, self.context = path.rsplit("/", 1)[1], original(path, **kwargs)
            found[self.name] = []

        def __enter__(self):
            self.file = self.context.__enter__()
            return self

        def __exit__(self, *details):
            return self.context.__exit__(*details)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            found[self.name].append(name)
            return self.file.get_slice(name)

    monkeypatch.setattr(pruned_checkpoint, "safe_open", Recorded)
    return found


def is_dropped(name, keep):
    """By the full name in the checkpoint: the head, and the language model's layers from `keep` on."""
    layer = re.search(r"^(?!.*vis).*layers\.(\d+)\.", name)
    return "lm_head" in name or (layer is not None and int(layer[1]) >= keep)


@pytest.mark.parametrize("name", MLLMS)
@pytest.mark.parametrize("keep", [2, DEPTH])
def test_reads_only_what_it_keeps(name, keep, mllm_checkpoints, reads, tmp_path):
    folder, full = mllm_checkpoints(name)
    weight_map = json.load(open(f"{folder}/{INDEX}"))["weight_map"]
    kept = {tensor: shard for tensor, shard in weight_map.items() if not is_dropped(tensor, keep)}
    model = MllmRetrieverModel.from_mllm(folder, keep)
    assert sorted(tensor for tensors in reads.values() for tensor in tensors) == sorted(kept)
    assert set(reads) == set(kept.values())
    if keep < DEPTH:
        assert set(kept.values()) < set(weight_map.values())  # so that some files were not opened
        assert {int(n) for n in re.findall(r"language_model\.layers\.(\d+)", " ".join(model.state_dict()))} == {0, 1}
    state = full.model.state_dict()
    own = dict(model.state_dict())
    assert torch.equal(own.pop("norm.weight"), state["language_model.norm.weight"])
    own.pop("ret_embedding")
    assert all(torch.equal(value, state[key.removeprefix("backbone.")]) for key, value in own.items())

    partial = tmp_path / "partial"  # files of nothing that is kept need not exist
    shutil.copytree(folder, partial)
    for shard in set(weight_map.values()) - set(kept.values()):
        (partial / shard).unlink()
    again = MllmRetrieverModel.from_mllm(str(partial), keep)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_no_deep_parameter_is_ever_allocated(mllm_checkpoints, monkeypatch):
    """Counted where parameters are made: on a real device, only those that are kept, and once."""
    made = []
    original = torch.nn.Module.register_parameter

    def register(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            made.append(parameter.numel())
        original(module, name, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", register)
    model = MllmRetrieverModel.from_mllm(mllm_checkpoints("qwen2_vl")[0], 2)
    assert sum(made) <= model.num_parameters()


def test_a_single_file_is_read_in_part(mllm_checkpoints, reads, tmp_path):
    folder, _ = mllm_checkpoints("qwen2_vl")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shards = sorted(tmp_path.glob("*.safetensors"))
    save_file({k: v for shard in shards for k, v in load_file(shard).items()}, tmp_path / "model.safetensors")
    for file in (*shards, tmp_path / INDEX):
        file.unlink()
    MllmRetrieverModel.from_mllm(tmp_path, 1)
    assert list(reads) == ["model.safetensors"]
    assert not [tensor for tensor in reads["model.safetensors"] if is_dropped(tensor, 1)]


def test_old_names_on_disk(mllm_checkpoints, reads, tmp_path):
    """As the published checkpoints of LLaVA-1.5 and Qwen2-VL name them."""
    for name, new, old in (
        ("llava", "language_model.", "language_model.model."),
        ("qwen2_vl", "language_model.", "model."),
    ):
        folder, full = mllm_checkpoints(name)
        path = tmp_path / name
        shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
        tensors = {key.replace(new, old): value.clone() for key, value in full.model.state_dict().items()}
        head = "language_model.lm_head.weight" if name == "llava" else "lm_head.weight"
        save_file(tensors | {head: full.lm_head.weight.detach().clone()}, path / "model.safetensors")
        reads.clear()
        model = MllmRetrieverModel.from_mllm(str(path), 2)
        expected = MllmRetrieverModel.from_mllm(folder, 2).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
        assert not [tensor for tensor in reads["model.safetensors"] if is_dropped(tensor, 2)]


def test_from_the_hub_downloads_only_what_it_keeps(mllm_checkpoints, monkeypatch, tmp_path):
    """The download is replaced by one from a folder, which keeps count."""
    folder, _ = mllm_checkpoints("qwen2_vl")
    calls = []

    def download(repo, revision, allow_patterns):
        calls.append((repo, revision, allow_patterns))
        shutil.copytree(
            folder,
            tmp_path,
            dirs_exist_ok=True,
            ignore=lambda _, names: [n for n in names if not any(re.fullmatch(glob(p), n) for p in allow_patterns)],
        )
        return str(tmp_path)

    def glob(pattern):
        return pattern.replace(".", r"\.").replace("*", ".*")

    monkeypatch.setattr(pruned_checkpoint, "snapshot_download", download)
    model = MllmRetrieverModel.from_mllm("someone/tiny-qwen2-vl", 2, revision="v1")
    weight_map = json.load(open(f"{folder}/{INDEX}"))["weight_map"]
    needed = {shard for tensor, shard in weight_map.items() if not is_dropped(tensor, 2)}
    assert {file.name for file in tmp_path.glob("*.safetensors")} == needed < set(weight_map.values())
    assert all(call[:2] == ("someone/tiny-qwen2-vl", "v1") for call in calls)
    assert not [pattern for pattern in calls[0][2] if "safetensors" in pattern]
    assert model.config.keep_layers == 2


def test_the_type_of_the_weights(mllm_checkpoints, tmp_path):
    folder, _ = mllm_checkpoints("qwen2_vl")
    assert MllmRetrieverModel.from_mllm(folder, 2).dtype == torch.float32
    half = MllmRetrieverModel.from_mllm(folder, 2, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert {p.dtype for p in MllmRetrieverModel.from_mllm(str(tmp_path), 2).parameters()} == {torch.bfloat16}


def shard_of_a_kept_layer(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / next(shard for tensor, shard in weight_map.items() if "layers.0." in tensor)


def without_weights(folder, llava):
    for path in folder.glob("*safetensors*"):
        path.unlink()


def without_a_shard(folder, llava):
    shard_of_a_kept_layer(folder).unlink()


def with_a_damaged_shard(folder, llava):
    shard = shard_of_a_kept_layer(folder)
    shard.write_bytes(shard.read_bytes()[:-100])


def without_a_config(folder, llava):
    (folder / "config.json").unlink()


def with_weights_of_llava(folder, llava):
    without_weights(folder, llava)
    for path in llava.glob("*safetensors*"):
        shutil.copy(path, folder)


def with_a_config_of_bert(folder, llava):
    BertConfig().save_pretrained(folder)


def with_another_size(folder, llava):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without_a_shard, FileNotFoundError, r"lacks model-\S+, which holds required weights"),
        (with_a_damaged_shard, ValueError, r"model-\S+ is truncated or damaged"),
        (without_weights, FileNotFoundError, r"lacks model\.safetensors"),
        (without_a_config, FileNotFoundError, r"has no config\.json"),
        (with_weights_of_llava, ValueError, r"is not a checkpoint of 'qwen2_vl' with these sizes: \d+ weights are"),
        (with_a_config_of_bert, ValueError, "'bert' is not a supported MLLM"),
        (with_another_size, ValueError, r"6 weights are missing or of another shape, .*mlp\.down_proj"),
    ],
)
def test_a_folder_that_is_no_such_checkpoint(change, error, message, mllm_checkpoints, tmp_path):
    shutil.copytree(mllm_checkpoints("qwen2_vl")[0], tmp_path, dirs_exist_ok=True)
    change(tmp_path, Path(mllm_checkpoints("llava")[0]))
    with pytest.raises(error, match=message):
        MllmRetrieverModel.from_mllm(str(tmp_path), 2)


def test_a_checkpoint_that_is_nowhere(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise OSError("no route")

    with pytest.raises(FileNotFoundError, match="there is no folder 'absent/folder/x', and the Hub download"):
        MllmRetrieverModel.from_mllm("absent/folder/x", 2)
    monkeypatch.setattr(pruned_checkpoint, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"there is no folder 'runs/small', and the Hub .*: no route"):
        MllmRetrieverModel.from_mllm("runs/small", 2)


def test_unknown_fields_are_refused(mllm_checkpoints):
    folder, _ = mllm_checkpoints("qwen2_vl")
    with pytest.raises(ValueError, match="unknown field 'keep_layer' of the MLLM retriever; expected some of"):
        MllmRetrieverModel.from_mllm(folder, keep_layer=2)
