"""A saved model works where the package is not installed, through transformers and sentence-transformers."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from conjoin.hub import export, load_model
from conjoin.models.shortcuts import use_shortcuts
from tiny_kinds import KINDS
from tiny_training import make_encoder

READ = """
import json, sys
import numpy as np, torch
from PIL import Image
from transformers import AutoModel, AutoProcessor
from sentence_transformers import SentenceTransformer

root, names = {arguments!r}
image = Image.open(root + "/picture.png")
pair = {{"image": image, "text": "a b"}}
items = ["a b", image, pair]
shown, words = {{"type": "image", "image": image}}, {{"type": "text", "text": "a b"}}
message = [{{"role": "user", "content": [shown, words]}}]
several = [{{"role": "user", "content": [shown, words, shown]}}]
for name in names:
    folder = f"{{root}}/{{name}}"
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    with torch.no_grad():
        vectors = model(**processor(items)).embeddings.numpy()
        assert "mllm" not in name or model.shortcuts is None
        parts = {{"several": model(**processor([several])).embeddings.numpy()}} if "mllm" in name else {{}}
    model.save_pretrained(folder + "/again")
    again = AutoModel.from_pretrained(folder + "/again", trust_remote_code=True).eval()
    with torch.no_grad():
        assert np.array_equal(again(**processor(items)).embeddings.numpy(), vectors) or "mllm" in name
    encoder = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    np.savez(
        folder + "/vectors.npz",
        auto=vectors,
        mixed=encoder.encode(items),
        alone=np.concatenate([encoder.encode([item]) for item in items]),
        message=encoder.encode([message]),
        text=encoder.encode("a b"),
        texts=encoder.encode(["a b", "c"]),
        pair=encoder.encode(pair),
        prompted=encoder.encode("a b", prompt_name="query"),
        dimension=encoder.get_embedding_dimension(),
        **parts,
    )
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
    several = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "a b"}]}]
    several[0]["content"].append(several[0]["content"][0])

    def source(name):
        return shutil.copytree(mllm_checkpoints(name)[0], tmp_path / "source" / name), None

    expected, others = {}, {}
    for name in ("joint_encoder", "score_fusion", "token_fusion", "mllm_retriever", "mllm_retriever, llava"):
        model, processor = KINDS[name](tiny_checkpoints, source)
        use_shortcuts(model)
        export(model.eval(), processor, tmp_path / name, prompts={"query": "find "})
        told = {"instruction": ["find ", None]} if "mllm" in name else {}
        with torch.no_grad():
            expected[name] = model(**processor(["a b", picture, {"image": picture, "text": "a b"}])).embeddings.numpy()
            words = ["a b", "c"] if told else ["find a b", "c"]
            others[name] = model(**processor(words, **told)).embeddings.numpy()
            if told:
                others[f"{name}, several"] = model(**processor([several])).embeddings.numpy()
    shutil.rmtree(tmp_path / "source")
    printed = run_without_conjoin(READ.format(arguments=(str(tmp_path), list(expected))))
    assert printed.splitlines()[-1] == "False"
    for name, (text, image, pair) in expected.items():
        found = np.load(tmp_path / name / "vectors.npz")
        assert np.abs(text - image).max() > 1e-3 and np.abs(others[name][0] - text).max() > 1e-3
        assert found["dimension"] == len(text)
        for key, wanted in (
            ("auto", expected[name]),
            ("mixed", expected[name]),
            ("alone", expected[name]),
            ("message", pair[None]),
            ("text", text),
            ("texts", np.stack([text, others[name][1]])),
            ("pair", pair),
            ("prompted", others[name][0]),
            ("several", others.get(f"{name}, several")),
        ):
            if wanted is not None:
                assert np.abs(found[key] - wanted).max() <= (1e-5 if "mllm" in name else 1e-6), (name, key)
        code = "".join(path.read_text() for path in (tmp_path / name).glob("*.py"))
        assert not re.search("past_key_values|DynamicCache", code)


class TestFolder:
    """`export` writes one folder, whole or not at all."""

    def parts(self, tiny_checkpoints, hidden_size=16, seed=0):
        model, processor = make_encoder(tiny_checkpoints, hidden_size=hidden_size)
        with torch.no_grad():
            next(model.parameters()).add_(seed)
        return model, processor

    def test_names_no_local_path(self, tiny_checkpoints, tmp_path):
        folder = export(*self.parts(tiny_checkpoints), tmp_path / "model")
        for file in folder.glob("*.json"):
            text = file.read_text()
            assert "_name_or_path" not in text and str(tmp_path.parent) not in text, file.name
        assert {file.name for file in folder.iterdir()} >= {
            "config.json", "model.safetensors", "modeling_joint_encoder.py", "configuration_joint_encoder.py",
            "modeling_towers.py", "configuration_towers.py",
            "processing_image_text.py", "item_inputs.py", "item_images.py",
            "processor_config.json", "tokenizer.json", "modules.json",
            "sentence_bert_config.json", "config_sentence_transformers.json",
        }  # fmt: skip
        assert not [file.name for file in folder.iterdir() if file.is_dir()]

    def test_replaces_a_model_and_keeps_other_files(self, tiny_checkpoints, tmp_path):
        folder = export(*self.parts(tiny_checkpoints, hidden_size=24), tmp_path / "model")
        (folder / "recipe.json").write_text("{}")
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"a shard of an earlier model")
        others = ["model-v1.safetensors", "model_ema.safetensors"]
        for name in others:
            (folder / name).touch()
        (folder / "checkpoint-1").mkdir()
        model, processor = self.parts(tiny_checkpoints)
        export(model, processor, folder)
        loaded, _ = load_model(folder)
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
        assert (folder / "recipe.json").exists() and (folder / "checkpoint-1").exists()
        assert sorted(file.name for file in folder.glob("*.safetensors")) == [
            *others[:1],
            "model.safetensors",
            others[1],
        ]

    def test_a_failure_leaves_the_earlier_model(self, tiny_checkpoints, tmp_path, monkeypatch):
        folder = export(*self.parts(tiny_checkpoints), tmp_path / "model", {"query": "find "})
        before = {file.name: file.read_bytes() for file in folder.iterdir()}

        def fail(*args, **kwargs):
            raise OSError("No space left on device")

        model, processor = self.parts(tiny_checkpoints, seed=1)
        monkeypatch.setattr(processor, "save_pretrained", fail)
        with pytest.raises(OSError, match="No space left"):
            export(model, processor, folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    def test_an_interruption_never_mixes_two_models(self, tiny_checkpoints, tmp_path, monkeypatch):
        """While files are moved, the folder has the old weights with the old files, no weights, or all new files."""
        folder = export(*self.parts(tiny_checkpoints, hidden_size=24), tmp_path / "model")
        replace, states = os.replace, []

        def watched(source, target):
            if Path(target).parent == folder:  # else a file that is not finished
                size = json.loads((folder / "config.json").read_text())["hidden_size"]
                states.append((size, len(list(folder.glob("*.safetensors")))))
            replace(source, target)

        monkeypatch.setattr(os, "replace", watched)
        export(*self.parts(tiny_checkpoints), folder)
        assert set(states) == {(24, 0), (16, 0)} and load_model(folder)[0].config.hidden_size == 16

    def test_a_model_in_shards_loads(self, tiny_checkpoints, tmp_path, monkeypatch):
        model, processor = self.parts(tiny_checkpoints)
        export(model, processor, tmp_path / "model")
        save = model.save_pretrained
        monkeypatch.setattr(model, "save_pretrained", lambda folder: save(folder, max_shard_size="50KB"))
        folder = export(model, processor, tmp_path / "model")
        assert len(list(folder.glob("*.safetensors"))) > 1 and not (folder / "model.safetensors").exists()
        loaded, _ = load_model(folder)
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
