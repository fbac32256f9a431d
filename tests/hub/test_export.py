"""A saved model works where the package is not installed, through transformers and sentence-transformers."""

import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from checks import embed, far
from PIL import Image

from conjoin.hub import export, load_model
from conjoin.models.shortcuts import use_shortcuts
from tiny_kinds import KINDS
from tiny_training import make_encoder

BATCHES = """
shown, words = {"type": "image", "image": image}, {"type": "text", "text": "a b"}
batches = {
    "mixed": ["a b", image, {"image": image, "text": "a b"}],
    "message": [[{"role": "user", "content": [shown, words]}]],
    "texts": ["a b", "c"],
}
if "mllm" in name:
    batches["several"] = [[{"role": "user", "content": [shown, words, shown]}]]
"""
READ = f"""
import sys
import numpy as np, torch
from PIL import Image
from transformers import AutoModel, AutoProcessor
from sentence_transformers import SentenceTransformer

torch.set_grad_enabled(False)
root, names = ARGUMENTS
image = Image.open(root + "/picture.png")
for name in names:
    exec({BATCHES!r})
    folder = root + "/" + name
    model, processor = (c.from_pretrained(folder, trust_remote_code=True) for c in (AutoModel, AutoProcessor))
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    assert "mllm" not in name or model.shortcuts is None
    model.save_pretrained(folder + "/again")
    again = AutoModel.from_pretrained(folder + "/again", trust_remote_code=True)
    encoder = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    found = {{"dimension": encoder.get_embedding_dimension()}}
    found["prompted"] = encoder.encode("a b", prompt_name="query")
    found["alone"] = np.concatenate([encoder.encode([item]) for item in batches["mixed"]])
    for kind, batch in batches.items():
        found[kind + " sentence"] = encoder.encode(batch)
        for way, each in (("auto", model), ("again", again)):
            found[kind + " " + way] = each.eval()(**processor(batch)).embeddings.numpy()
    np.savez(folder + "/vectors.npz", **found)
print("conjoin" in sys.modules)
"""


@pytest.mark.slow
def test_the_same_vectors_without_the_package(
    tiny_checkpoints, mllm_checkpoints, tmp_path, pictures, run_without_conjoin, monkeypatch
):
    """Also without the MLLM that a retriever was cut from, and without its shortcuts."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    picture = pictures[1].convert("RGBA")
    picture.putalpha(90)  # transparency must come out the same on every road
    picture.save(tmp_path / "picture.png")

    def source(name):
        return shutil.copytree(mllm_checkpoints(name)[0], tmp_path / "source" / name), None

    expected, prompted = {}, {}
    for name in ("joint_encoder", "score_fusion", "token_fusion", "mllm_retriever", "mllm_retriever, llava"):
        model, processor = KINDS[name](tiny_checkpoints, source)
        use_shortcuts(model)
        export(model.eval(), processor, tmp_path / name, prompts={"query": "find "})
        names = {"name": name, "image": Image.open(tmp_path / "picture.png")}
        exec(BATCHES, names)
        expected[name] = {kind: embed(model, processor, batch) for kind, batch in names["batches"].items()}
        told = {"instruction": "find "} if "mllm" in name else {}
        prompted[name] = embed(model, processor, ["a b" if told else "find a b"], **told)[0]
    shutil.rmtree(tmp_path / "source")
    arguments = repr((str(tmp_path), list(expected)))
    assert run_without_conjoin(READ.replace("ARGUMENTS", arguments)).splitlines()[-1] == "False"
    for name, batches in expected.items():
        found, limit = np.load(tmp_path / name / "vectors.npz"), 1e-5 if "mllm" in name else 1e-6
        text, image, pair = batches["mixed"]
        assert far(text, image) > 1e-3 and far(prompted[name], text) > 1e-3
        assert found["dimension"] == len(text) and far(batches["message"], pair) <= limit
        assert far(found["prompted"], prompted[name]) <= limit and far(found["alone"], batches["mixed"]) <= limit
        for kind, vectors in batches.items():
            for way in ("sentence", "auto", "again"):
                assert far(found[f"{kind} {way}"], vectors) <= limit, (name, kind, way)
        code = "".join(path.read_text() for path in (tmp_path / name).glob("*.py"))
        assert not re.search("past_key_values|DynamicCache", code)


def equal(model, folder):
    """Whether a folder holds the weights of a model."""
    loaded, _ = load_model(folder)
    return all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_folder_names_no_local_path(own_export, tmp_path_factory):
    folder = own_export[0]
    for file in folder.glob("*.json"):
        text = file.read_text()
        assert "_name_or_path" not in text and str(tmp_path_factory.getbasetemp()) not in text, file.name
    assert not [file.name for file in folder.iterdir() if file.is_dir()]


def test_another_model_replaces_all_weights_and_keeps_other_files(tiny_checkpoints, tmp_path, monkeypatch):
    """In one file, then in shards, then in one file. What comes between is in `test_power_loss.py`."""
    others = {"recipe.json", "model-v1.safetensors", "model_ema.safetensors"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "checkpoint-1").mkdir()
    for hidden_size, size in ((24, "50GB"), (16, "50KB"), (24, "50GB")):
        model, processor = make_encoder(tiny_checkpoints, hidden_size=hidden_size)
        monkeypatch.setattr(model, "save_pretrained", partial(model.save_pretrained, max_shard_size=size))
        assert equal(model, export(model, processor, tmp_path))
        weights = {file.name for file in tmp_path.glob("*.safetensors")} - others
        assert len(weights) > 1 if size == "50KB" else weights == {"model.safetensors"}
        assert (tmp_path / "model.safetensors.index.json").exists() == (size == "50KB")
    assert others | {"checkpoint-1"} < {file.name for file in tmp_path.iterdir()}


def test_a_failure_leaves_the_earlier_model(own_export, tmp_path, monkeypatch):
    _, model, processor = own_export
    folder = export(model, processor, tmp_path / "model", {"query": "find "})
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(processor, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        export(model, processor, folder, weights={name: value + 1 for name, value in model.state_dict().items()})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
