"""`load_encoder` takes every kind of model there is behind one interface, and runs no code that was not trusted."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from conjoin import JointEncoderModel
from conjoin.retrieval import ItemEncoder, encode_collection, load_encoder
from conjoin.retrieval.search import load_query_encoder

TEXTS = ["a red apple", "two green chairs by the sea", "no", "photo.png 12"]
EVIL = "from pathlib import Path\nPath({mark!r}).touch()\n"


@pytest.fixture(scope="module")
def folders(own_export, exports, sentence_folders, tiny_checkpoints):
    """`{kind: folder}` of a model of every kind."""
    stock = {name: tiny_checkpoints[name] for name in ("clip", "siglip", "bert", "dinov2", "vit")}
    stock["mllm"] = exports("mllm_retriever")[0]
    return {"own": own_export[0], "st-bert": sentence_folders["bert"], "st-clip": sentence_folders["clip"], **stock}


KINDS = ("own", "mllm", "st-bert", "st-clip", "clip", "siglip", "bert", "dinov2", "vit")
SETTINGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
BLIND, MUTE = {"st-bert", "bert"}, {"dinov2", "vit"}


def items_for(kind, pictures):
    texts, images = ([] if kind in MUTE else TEXTS), ([] if kind in BLIND else pictures[:3])
    mixed = zip(images, TEXTS, strict=False) if kind in {"own", "mllm", "clip", "siglip"} else ()
    return [*texts, *images, *({"image": image, "text": text} for image, text in mixed)]


def load(kind, folder, **options):
    return load_encoder(folder, device="cpu", pooling="cls" if kind in ("bert", "dinov2", "vit") else None, **options)


def sentence_transformer(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_has_one_interface(self, kind, folders, pictures):
        encoder = load(kind, folders[kind], batch_size=2)
        items = items_for(kind, pictures)
        vectors = encoder.encode(items, ids=[f"id{n}" for n in range(len(items))])
        assert vectors.shape == (len(items), encoder.dimension) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(vectors, np.concatenate([encoder.encode([item]) for item in items]), atol=1e-5)
        distances = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
        assert distances[~np.eye(len(items), dtype=bool)].min() > 1e-4
        assert (encoder.name, encoder.batch_size, encoder.dtype) == (str(folders[kind]), 2, None)
        assert encoder.device == torch.device("cpu") and encoder.identity[:2] == (encoder.name, encoder.fingerprint)

    def test_its_processing_is_stable_and_tells_settings_apart(self, kind, folders, pictures, tmp_path):
        encoder = load(kind, folders[kind])
        before = encoder.processing
        encoder.encode(items_for(kind, pictures))
        moved = shutil.copytree(folders[kind], tmp_path / "moved", ignore=shutil.ignore_patterns("SHA256SUMS"))
        (path,) = [moved / name for name in SETTINGS if (moved / name).is_file()][:1]
        for value in (None, 7):
            settings = json.loads(path.read_text())
            if value is not None and "model_max_length" in settings:
                settings["model_max_length"] = value
            elif value is not None:
                settings.get("image_processor", settings)["image_mean"] = [value] * 3
            path.write_text(json.dumps(settings))
            again = load(kind, moved).processing
            assert again is not None and (again == before) == (value is None)
        assert encoder.processing == before

    def test_fingerprint_is_stable_and_tells_weights_apart(self, kind, folders, tmp_path):
        first = load(kind, folders[kind]).fingerprint
        moved = shutil.copytree(folders[kind], tmp_path / "moved")
        assert load(kind, moved, batch_size=3).fingerprint == first
        changed = load(kind, moved)
        weight = next(parameter for parameter in changed.model.parameters() if parameter.ndim > 1)
        with torch.no_grad():
            weight[0, 0] += 1e-3
        assert changed.fingerprint != first

    def test_threads_and_bf16(self, kind, folders, pictures):
        items = items_for(kind, pictures)
        exact = load(kind, folders[kind], batch_size=3).encode(items)
        state = torch.get_rng_state()
        for threads in (1, 4):
            found = load(kind, folders[kind], batch_size=3, threads=threads).encode(items)
            np.testing.assert_array_equal(found, exact)
        assert torch.equal(state, torch.get_rng_state())
        rough = load(kind, folders[kind], batch_size=3, dtype=torch.bfloat16).encode(items)
        assert rough.dtype == np.float32 and 1e-6 < np.abs(rough - exact).max() < 0.1

    def test_bad_items_are_named(self, kind, folders, pictures):
        encoder = load(kind, folders[kind])
        good = items_for(kind, pictures)[0]
        with pytest.raises(ValueError, match=r"^item 'bad': text is empty"):
            encoder.encode([good, {"text": " "}], ids=["good", "bad"])
        if kind in BLIND | MUTE:
            foreign = "a text" if kind in MUTE else pictures[0]
            with pytest.raises(ValueError, match=r"^item 'bad': .*this model cannot take '(text|image)'"):
                encoder.encode([good, foreign], ids=["good", "bad"])

    def test_a_prompt_stands_before_every_item_of_a_model_that_reads(self, kind, folders, pictures):
        encoder = load(kind, folders[kind], batch_size=3)
        if kind not in MUTE:
            plain, told = encoder.encode(TEXTS), encoder.encode(TEXTS, prompt="find it: ")
            assert np.linalg.norm(plain - told, axis=1).min() > 1e-4
            some = encoder.encode(TEXTS, prompt=["find it: ", None, None, "seek"])
            np.testing.assert_allclose(some[:3], [told[0], *plain[1:3]], atol=1e-5)
            assert np.linalg.norm(some[3] - told[3]) > 1e-4
            with pytest.raises(ValueError, match="1 instructions for 4 items"):
                encoder.encode(TEXTS, prompt=["find"])
        if kind not in BLIND:
            plain, told = encoder.encode(pictures), encoder.encode(pictures, prompt="find it: ")
            assert (np.linalg.norm(plain - told, axis=1) > 1e-4).all() == (kind not in MUTE)


class TestOurOwn:
    def test_our_own_export(self, own_export, pictures):
        folder, model, processor = own_export
        items = [*TEXTS, *pictures, {"image": pictures[0], "text": TEXTS[0]}]
        encoder = load_encoder(folder, batch_size=4, device="cpu")
        found = encoder.encode(items)
        with torch.no_grad():
            np.testing.assert_allclose(found, model(**processor(items)).embeddings, atol=1e-5)
        np.testing.assert_allclose(found, sentence_transformer(folder).encode(items), atol=1e-5)
        assert type(encoder.model) is JointEncoderModel
        assert encoder.fingerprint == ItemEncoder(model, processor).fingerprint


class TestCodeInTheFolder:
    """Python files beside the weights run with `trust_remote_code=True` only; those of our models never."""

    def poison(self, source, folder, mark, **config):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))
        for file in [*folder.glob("*.py"), folder / "evil.py"]:
            file.write_text(EVIL.format(mark=str(mark)))
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))

    @pytest.mark.parametrize("trusted", [False, True])
    def test_of_our_models_never_runs(self, own_export, tmp_path, trusted, pictures):
        folder, mark = tmp_path / "folder", tmp_path / "mark"
        self.poison(own_export[0], folder, mark)
        for name in ("tokenizer_config.json", "processor_config.json"):
            path = folder / name
            code = {"auto_map": {"AutoTokenizer": ["evil.A", "evil.A"], "AutoProcessor": "evil.B"}}
            path.write_text(json.dumps(json.loads(path.read_text()) | code))
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["auto_map"] = {"AutoConfig": "evil.A", "AutoModel": "evil.B"}
        (folder / "config.json").write_text(json.dumps(config))
        processor = json.loads((folder / "processor_config.json").read_text())
        processor["image_processor"]["auto_map"] = {"AutoImageProcessor": "evil.C"}
        (folder / "processor_config.json").write_text(json.dumps(processor))
        items = [*TEXTS, *pictures]
        found = load_encoder(folder, device="cpu", trust_remote_code=trusted).encode(items)
        np.testing.assert_array_equal(found, load_encoder(own_export[0], device="cpu").encode(items))
        assert not mark.exists()

    def test_of_a_type_that_transformers_knows_is_not_run(self, tiny_checkpoints, tmp_path):
        folder, mark = tmp_path / "folder", tmp_path / "mark"
        code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
        self.poison(tiny_checkpoints["bert"], folder, mark, **code)
        found = load("bert", folder).encode(TEXTS)
        np.testing.assert_array_equal(found, load("bert", tiny_checkpoints["bert"]).encode(TEXTS))
        assert not mark.exists()

    @pytest.mark.parametrize("kind", ["stock", "sentence-transformers", "module"])
    def test_of_others_needs_trust(self, kind, sentence_folders, tiny_checkpoints, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "stdin", None)  # nothing may ask
        folder, mark = tmp_path / "folder", tmp_path / "mark"
        source = tiny_checkpoints["bert"] if kind == "stock" else sentence_folders["bert"]
        code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "model_type": "evil"}
        self.poison(source, folder, mark, **({} if kind == "module" else code))
        if kind == "module":
            modules = json.loads((folder / "modules.json").read_text())
            modules[1]["type"] = "evil.Pooling"
            (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ValueError, match=r"needs Python code from its own folder; to run it, pass trust"):
            load_encoder(folder, device="cpu")
        assert not mark.exists()

    def test_of_others_runs_when_trusted(self, tiny_checkpoints, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        folder = shutil.copytree(tiny_checkpoints["bert"], tmp_path / "trusted_model")
        (folder / "mine.py").write_text(
            "from transformers import BertConfig, BertModel\n"
            "class MineConfig(BertConfig):\n    model_type = 'mine'\n"
            "class MineModel(BertModel):\n    config_class = MineConfig\n"
        )
        path = folder / "config.json"
        code = {"auto_map": {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.MineModel"}, "model_type": "mine"}
        path.write_text(json.dumps(json.loads(path.read_text()) | code))
        found = load("bert", folder, trust_remote_code=True).encode(TEXTS)
        wanted = load("bert", tiny_checkpoints["bert"]).encode(TEXTS)
        np.testing.assert_allclose(found, wanted, atol=1e-6)


class TestErrors:
    def test_no_such_model(self, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(FileNotFoundError, match=r"cannot load the model 'absent/model': there is no such folder"):
            load_encoder("absent/model", device="cpu")
        with pytest.raises(FileNotFoundError, match="cannot load the model"):
            load_encoder(tmp_path, device="cpu")

    @pytest.mark.parametrize("kind", ["own", "st-bert", "bert"])
    def test_damaged_weights(self, kind, folders, tmp_path):
        folder = shutil.copytree(folders[kind], tmp_path / "damaged")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        said = f"'{weights}' is missing, truncated" if kind == "own" else f"'{folder}': it cannot be read"
        with pytest.raises(ValueError, match=said):
            load(kind, folder)

    def test_a_language_model_needs_a_pooling(self, mllm_checkpoints, pictures):
        folder, _ = mllm_checkpoints("qwen2_vl")
        with pytest.raises(ValueError, match=r"'qwen2_vl' does not say .*pass pooling="):
            load_encoder(folder, device="cpu")
        encoder = load_encoder(folder, device="cpu", pooling="last")
        assert encoder.encode([pictures[0], "a", {"image": pictures[0], "text": "a"}]).shape == (3, encoder.dimension)


def test_queries_are_encoded_in_the_precision_of_the_collection(folders, tmp_path):
    kind = KINDS[0]
    for dtype, precision in (("bfloat16", "bfloat16"), (None, "full")):
        encoder = load(kind, folders[kind], dtype=dtype)
        collection = encode_collection([{"id": "a", "text": "words"}], encoder, tmp_path / precision)
        assert collection.model == encoder.identity and collection.model.precision == precision
        assert load_query_encoder(collection).dtype == encoder.dtype


@pytest.mark.parametrize("fails", [False, True])
def test_layers_are_compiled_or_a_warning_says_why_not(fails, folders, monkeypatch, caplog):
    def compile_layer(layer, **options):
        compiled = torch.compile(layer._call_impl, backend="eager", **options)
        layer._compiled_call_impl = explode if fails else compiled
        seen.append(options)

    def explode(*_, **__):
        raise RuntimeError("no compiler")

    seen = []
    plain = load(KINDS[0], folders[KINDS[0]]).encode(["some words"])
    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    encoder = load(KINDS[0], folders[KINDS[0]], compile=True)
    np.testing.assert_allclose(encoder.encode(["some words"]), plain, atol=1e-6)
    assert seen and all(options == {"dynamic": True} for options in seen)
    assert ("runs without compiled layers: RuntimeError: no compiler" in caplog.text) == fails
