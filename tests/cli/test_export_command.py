"""`conjoin export`: the folder that training saves, and stock checkpoints."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModel, AutoProcessor

from conjoin import JointEncoderModel
from conjoin.cli.main import main
from conjoin.hub import export, load_model
from conjoin.hub.build import image_text_processor, mllm_model, mllm_processor, towers_model
from conjoin.retrieval import load_encoder


@pytest.fixture(scope="module")
def saved(mllm_checkpoints, tmp_path_factory):
    source, _ = mllm_checkpoints("qwen2_vl")
    processor = mllm_processor(source, prompts={"query": "Find it.", "document": "Read it."})
    return str(export(mllm_model(source, 2), processor, tmp_path_factory.mktemp("saved")))


def prompts(folder):
    return json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]


def test_a_stock_checkpoint(saved, tmp_path, capsys):
    out = tmp_path / "stock"
    assert main(["export", saved, "--format", "stock", "--out", str(out), "--query-prompt", "Find a picture."]) == 0
    assert f'SentenceTransformer("{out}")' in capsys.readouterr().out
    assert type(AutoModel.from_pretrained(out)).__name__ == "Qwen2VLModel"
    assert prompts(out) == {"query": "Find a picture.", "document": "Read it."}


def test_a_folder_with_its_code(saved, tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["export", saved, "--out", str(out), "--document-prompt", ""]) == 0
    assert f'SentenceTransformer("{out}", trust_remote_code=True)' in capsys.readouterr().out
    assert prompts(out) == {"query": "Find it.", "document": ""} == load_model(out)[1].prompts
    assert (out / "modeling_mllm_retriever.py").is_file()


def test_prompts_of_an_export_stay(saved, tmp_path):
    model, processor = load_model(saved)
    written = export(model, processor, tmp_path / "written", prompts={"query": "find "})
    assert processor.prompts["query"] == "Find it.", "the processor that was given does not change"
    for form in ("code", "stock"):
        out = tmp_path / form
        assert main(["export", str(written), "--format", form, "--out", str(out)]) == 0
        assert prompts(out) == {"query": "find ", "document": ""}


def test_a_second_export_into_one_folder_is_refused(saved, tmp_path, capsys):
    command = ["export", saved, "--out", str(tmp_path / "out")]
    assert (main(command), main([*command, "--query-prompt", "Other."])) == (0, 2)
    assert "exists; choose another folder" in capsys.readouterr().err
    assert load_model(tmp_path / "out")[1].prompts == {"query": "Find it.", "document": "Read it."}


def test_the_readout_of_a_joint_encoder(tiny_checkpoints, tmp_path):
    clip = tiny_checkpoints["clip"]
    model = towers_model(JointEncoderModel, clip, clip, hidden_size=24, num_attention_heads=2, vl_init="normal")
    fused = export(model, image_text_processor(clip, clip), tmp_path / "fused")
    item = {"image": Image.effect_noise((16, 16), 60).convert("RGB"), "text": "a bus"}
    vectors = {}
    for readout in ("fused", "sum"):
        assert main(["export", str(fused), "--out", str(tmp_path / f"to {readout}"), "--readout", readout]) == 0
        encoder = load_encoder(tmp_path / f"to {readout}")
        assert encoder.model.config.readout == readout
        vectors[readout] = encoder.encode([item, "a bus"])
    assert (vectors["fused"] == load_encoder(fused).encode([item, "a bus"])).all()
    change = abs(vectors["sum"] - vectors["fused"]).max(axis=1)
    assert change[0] > 1e-3 > change[1]


@torch.no_grad()
def embed(model, folder):
    return model(**AutoProcessor.from_pretrained(folder, trust_remote_code=True)(["a man", "b"])).embeddings


def test_adapters_of_peft_are_merged_into_the_model_that_they_name(saved, mllm_checkpoints, tmp_path, capsys):
    torch.manual_seed(0)
    plain, targets = AutoModel.from_pretrained(saved, trust_remote_code=True).eval(), r".*language_model.*\.q_proj"
    before = embed(plain, saved)
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapters")
    expected = embed(adapted, saved)
    words = ["export", str(tmp_path / "adapters"), "--out", str(tmp_path / "merged")]
    config = tmp_path / "adapters/adapter_config.json"
    for base, problem in (
        (None, "names no base_model_name_or_path"),
        (mllm_checkpoints("qwen2_vl")[0], "is a qwen2_vl"),
    ):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
        assert main(words) == 2 and problem in capsys.readouterr().err
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": saved}))
    assert main(words) == 0
    merged = AutoModel.from_pretrained(tmp_path / "merged", trust_remote_code=True).eval()
    torch.testing.assert_close(embed(merged, tmp_path / "merged"), expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-2
