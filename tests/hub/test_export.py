"""A saved model works where the package is not installed, through transformers and sentence-transformers."""

import json
import os

import numpy as np
import pytest
import torch

from conjoin.hub import export, load_model
from conjoin.hub.save import staged
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor
from conjoin.storage import TEMPORARY

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
message = [{{"role": "user", "content": [{{"type": "image", "image": image}}, {{"type": "text", "text": "a b"}}]}}]
for name in names:
    folder = f"{{root}}/{{name}}"
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        vectors = model(**processor(items)).embeddings.numpy()
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
    )
print("conjoin" in sys.modules)
"""
MODELS = {
    "joint_encoder": lambda c: JointEncoderModel.from_backbones(
        c["dinov2"], c["bert"], hidden_size=16, num_attention_heads=2
    ),
    "score_fusion": lambda c: ScoreFusionModel.from_clip(c["clip"]),
    "token_fusion": lambda c: TokenFusionModel.from_backbones(c["dinov2"], c["bert"]),
}


@pytest.mark.slow
def test_the_same_vectors_without_the_package(tiny_checkpoints, tmp_path, pictures, run_without_conjoin, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    picture = pictures[1].convert("RGBA")
    picture.putalpha(90)  # transparency must come out the same on every road
    picture.save(tmp_path / "picture.png")
    expected, others = {}, {}
    for name, build in MODELS.items():
        model = build(tiny_checkpoints).eval()
        towers = ("clip", "clip") if name == "score_fusion" else ("dinov2", "bert")
        processor = ImageTextProcessor.from_backbones(*(tiny_checkpoints[tower] for tower in towers))
        export(model, processor, tmp_path / name, prompts={"query": "find "})
        with torch.no_grad():
            expected[name] = model(**processor(["a b", picture, {"image": picture, "text": "a b"}])).embeddings.numpy()
            others[name] = model(**processor(["c", "find a b"])).embeddings.numpy()
    printed = run_without_conjoin(READ.format(arguments=(str(tmp_path), list(MODELS))))
    assert printed.splitlines()[-1] == "False"
    for name, (text, image, pair) in expected.items():
        found = np.load(tmp_path / name / "vectors.npz")
        assert np.abs(text - image).max() > 1e-3
        assert found["dimension"] == len(text)
        assert np.array_equal(found["auto"], expected[name]), name
        for key, wanted in (
            ("mixed", expected[name]),
            ("alone", expected[name]),
            ("message", pair[None]),
            ("text", text),
            ("texts", np.stack([text, others[name][0]])),
            ("pair", pair),
            ("prompted", others[name][1]),
        ):
            assert np.abs(found[key] - wanted).max() <= 1e-6, (name, key)


def test_what_a_killed_export_left_is_removed_a_day_later(tmp_path):
    old, new = (tmp_path / f"export.{name}{TEMPORARY}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    os.utime(old, (0, 0))
    with staged(tmp_path) as staging:
        assert set(tmp_path.iterdir()) == {new, staging}


def test_a_class_that_is_not_registered_is_refused(tiny_checkpoints, tmp_path):
    class Unregistered(JointEncoderModel):
        _auto_class = None

    model = MODELS["joint_encoder"](tiny_checkpoints)
    processor = ImageTextProcessor.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    with pytest.raises(ValueError, match="Unregistered is not registered"):
        export(Unregistered(model.config), processor, tmp_path)


class TestFolder:
    """`export` writes one folder, whole or not at all."""

    def parts(self, tiny_checkpoints, hidden_size=16, seed=0):
        torch.manual_seed(seed)
        model = JointEncoderModel.from_backbones(
            tiny_checkpoints["dinov2"], tiny_checkpoints["bert"], hidden_size=hidden_size, num_attention_heads=2
        )
        return model, ImageTextProcessor.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])

    def test_names_no_local_path(self, tiny_checkpoints, tmp_path):
        folder = export(*self.parts(tiny_checkpoints), tmp_path / "model")
        for file in folder.glob("*.json"):
            text = file.read_text()
            assert "_name_or_path" not in text and str(tmp_path.parent) not in text, file.name
        assert {file.name for file in folder.iterdir()} >= {
            "config.json", "model.safetensors", "modeling_joint_encoder.py", "configuration_joint_encoder.py",
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

    def test_without_a_processor(self, tiny_checkpoints, tmp_path):
        model, _ = self.parts(tiny_checkpoints)
        folder = export(model, None, tmp_path / "model")
        assert (folder / "model.safetensors").exists() and not (folder / "processor_config.json").exists()
