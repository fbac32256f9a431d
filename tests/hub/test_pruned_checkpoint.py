"""Reading a checkpoint: only what is kept is opened, read, downloaded or allocated."""

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from conjoin.hub import pruned_checkpoint
from conjoin.hub.build import mllm_model
from tiny_mllms import DEPTH, MLLMS

INDEX = "model.safetensors.index.json"


@pytest.fixture
def reads(monkeypatch):
    """What is read: `{file name: [tensor names]}`, also of files opened and not read."""
    found = {}
    original = modeling_utils.safe_open

    class Slice:
        def __init__(self, part, name, names):
            self.part, self.name, self.names = part, name, names

        def __getattr__(self, name):
            return getattr(self.part, name)

        def __getitem__(self, key):
            self.names.append(self.name)
            return self.part[key]

    class File:
        def __init__(self, path, **options):
            self.file, self.names = original(path, **options), found.setdefault(Path(path).resolve().name, [])

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_slice(self, name):
            return Slice(self.file.get_slice(name), name, self.names)

    monkeypatch.setattr(modeling_utils, "safe_open", File)
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
    model = mllm_model(folder, keep)
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
    again = mllm_model(str(partial), keep)
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
    model = mllm_model(mllm_checkpoints("qwen2_vl")[0], 2)
    assert sum(made) <= model.num_parameters()


def test_a_single_file_is_read_in_part(mllm_checkpoints, reads, tmp_path):
    folder, _ = mllm_checkpoints("qwen2_vl")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shards = sorted(tmp_path.glob("*.safetensors"))
    save_file({k: v for shard in shards for k, v in load_file(shard).items()}, tmp_path / "model.safetensors")
    for file in (*shards, tmp_path / INDEX):
        file.unlink()
    mllm_model(tmp_path, 1)
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
        model = mllm_model(str(path), 2)
        expected = mllm_model(folder, 2).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
        assert not [tensor for tensor in reads["model.safetensors"] if is_dropped(tensor, 2)]


def test_from_the_hub_downloads_only_what_it_keeps(mllm_checkpoints, monkeypatch, tmp_path):
    """The download is replaced by one from a folder, which keeps count."""
    folder, _ = mllm_checkpoints("qwen2_vl")
    calls = []

    def download(repo, revision, allow_patterns):
        calls.append((repo, revision, allow_patterns))
        for file in Path(folder).iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(pruned_checkpoint, "snapshot_download", download)
    model = mllm_model("someone/tiny-qwen2-vl", 2, revision="v1")
    weight_map = json.load(open(f"{folder}/{INDEX}"))["weight_map"]
    needed = {shard for tensor, shard in weight_map.items() if not is_dropped(tensor, 2)}
    assert {file.name for file in tmp_path.glob("*.safetensors")} == needed < set(weight_map.values())
    assert all(call[:2] == ("someone/tiny-qwen2-vl", "v1") for call in calls)
    assert not [pattern for pattern in calls[0][2] if fnmatch("model-00001-of-00002.safetensors", pattern)]
    assert model.config.keep_layers == 2


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))


def test_the_type_of_the_weights(mllm_checkpoints, tmp_path):
    folder = shutil.copytree(mllm_checkpoints("qwen2_vl")[0], tmp_path / "half")
    assert mllm_model(folder, 2).dtype == torch.float32
    half = mllm_model(folder, 2, dtype=torch.bfloat16)
    change_config(folder, dtype="bfloat16")
    for model in (half, mllm_model(folder, 2)):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def remove(folder, pattern):
    for path in folder.glob(pattern):
        path.unlink()


def shard_of_a_kept_layer(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / next(shard for tensor, shard in weight_map.items() if "layers.0." in tensor)


def damage(folder):
    shard = shard_of_a_kept_layer(folder)
    shard.write_bytes(shard.read_bytes()[:-100])


def swap_weights(folder, other):
    remove(folder, "*safetensors*")
    for path in Path(other).glob("*safetensors*"):
        shutil.copy(path, folder)


def test_a_folder_that_is_no_such_checkpoint(mllm_checkpoints, tmp_path):
    llava, sizes = mllm_checkpoints("llava")[0], {"intermediate_size": 64}
    for number, (change, error, message) in enumerate(
        (
            (
                lambda f: shard_of_a_kept_layer(f).unlink(),
                FileNotFoundError,
                r"model-\S+, which holds required weights",
            ),
            (damage, ValueError, r"model-\S+' cannot be read: "),
            (lambda f: remove(f, "*safetensors*"), FileNotFoundError, r"lacks model\.safetensors"),
            (lambda f: remove(f, "config.json"), ValueError, r"key in its config\.json"),
            (
                lambda f: swap_weights(f, llava),
                ValueError,
                r"the config\.json of '.*' does not fit its weights: \d+ weights",
            ),
            (lambda f: change_config(f, model_type="bert"), ValueError, "backbone_config='bert'; expected one of"),
            (lambda f: change_config(f, text_config=sizes), ValueError, r"6 weights are missing or .*mlp\.down_proj"),
        )
    ):
        folder = shutil.copytree(mllm_checkpoints("qwen2_vl")[0], tmp_path / str(number))
        change(folder)
        with pytest.raises(error, match=message):
            mllm_model(str(folder), 2)


def test_a_checkpoint_that_is_nowhere(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise OSError("no route")

    with pytest.raises(FileNotFoundError, match="there is no folder 'absent/folder/x', and the Hub download"):
        mllm_model("absent/folder/x", 2)
    monkeypatch.setattr(pruned_checkpoint, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"there is no folder 'runs/small', and the Hub .*: no route"):
        mllm_model("runs/small", 2)
