"""What loads of the papers' baselines, on tiny random copies in the form of their files: a table of benchmarks.md."""

import json
import shutil

import numpy as np
import pytest
from transformers import (
    AutoTokenizer,
    Blip2Config,
    Blip2ForImageTextRetrieval,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)

from conjoin.hub import load_embedder
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.retrieval import ItemEncoder, load_encoder
from tiny_embedders import write
from tiny_mllms import LLAVA_SPECIALS, TEXT, save_mllm, tokenizer

pytestmark = pytest.mark.usefixtures("without_video")
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}


def save_blip2(folder):
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    question = layers | {"intermediate_size": 24, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
    text = layers | {"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
    config = Blip2Config(vision_config=VISION, qformer_config=question, text_config=text, num_query_tokens=4)
    Blip2ForImageTextRetrieval(config).save_pretrained(folder)
    tokenizer(LLAVA_SPECIALS).save_pretrained(folder)


def save_llava_next(folder):
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
    text = TEXT | {"model_type": "llama", "vocab_size": 300}
    LlavaNextForConditionalGeneration(LlavaNextConfig(vision_config=vision, text_config=text)).save_pretrained(folder)
    tokenizer(LLAVA_SPECIALS).save_pretrained(folder)


def save_gme(folder):
    save_mllm("qwen2_vl", folder)
    kinds = ["custom_st.MultiModalTransformer", "sentence_transformers.models.Normalize"]
    write(folder / "modules.json", [{"idx": n, "name": str(n), "path": "", "type": kinds[n]} for n in range(2)])
    change(folder, auto_map={"AutoModel": "gme_inference.GmeQwen2VL"})


def save_vlm2vec_adapter(folder):
    write(folder / "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct"})


def save_vlm2vec_full(folder):
    parts = {"AutoConfig": "configuration_phi3_v.Phi3VConfig"}
    parts["AutoModelForCausalLM"] = "modeling_phi3_v.Phi3VForCausalLM"
    write(folder / "config.json", {"model_type": "phi3_v", "auto_map": parts})


def save_uniir(folder):
    (folder / "clip_sf_large.pth").write_bytes(b"a pickled state dict")


def change(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | values)


REFUSED = {
    "BLIP-2": (save_blip2, "'blip-2' gives no embedding"),
    "CLIP-SF": (save_uniir, "it has neither a config.json nor a modules.json"),
    "E5-V, BGE-VL-MLLM": (save_llava_next, "'llava_next' gives no embedding"),
    "LamRA": (lambda folder: save_mllm("qwen2_vl", folder), "'qwen2_vl' gives no embedding"),
    "GME": (save_gme, "needs Python code from its own folder"),
    "VLM2Vec-Full": (save_vlm2vec_full, "needs Python code from its own folder"),
    "VLM2Vec-LoRA": (save_vlm2vec_adapter, "it has neither a config.json nor a modules.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_load_is_refused_by_name(name, tmp_path):
    save, problem = REFUSED[name]
    save(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=problem) as raised:
        load_encoder(tmp_path, device="cpu")
    assert str(tmp_path) in str(raised.value)


def test_bge_vl_loads_as_clip_and_its_code_does_not_run(tiny_checkpoints, pictures, tmp_path):
    folder = shutil.copytree(tiny_checkpoints["clip"], tmp_path / "bge-vl")
    change(folder, auto_map={"AutoModel": "modeling_MMRet_CLIP.CLIPModel"}, architectures=["CLIPModel"])
    (folder / "modeling_MMRet_CLIP.py").write_text("raise RuntimeError('run')\n")
    items = ["a cat", pictures[0], {"image": pictures[0], "text": "a cat"}]
    found = load_encoder(folder, device="cpu").encode(items)
    np.testing.assert_array_equal(found, load_encoder(tiny_checkpoints["clip"], device="cpu").encode(items))


@pytest.mark.parametrize("preset", ["gme_qwen2_vl", "vlm2vec"])
def test_gme_and_merged_vlm2vec_load_by_their_preset_without_code(preset, pictures, tmp_path):
    save_gme(tmp_path)
    model, processor = load_embedder(tmp_path, preset=preset, processor={"min_pixels": 64, "max_pixels": 576})
    found = ItemEncoder(model, processor, device="cpu").encode(["a cat", pictures[0]])
    assert found.shape == (2, 32) and np.linalg.norm(found[0] - found[1]) > 0.01


def test_lamra_is_read_before_its_own_token(pictures, tmp_path):
    save_mllm("qwen2_vl", tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    words.add_tokens(["<emb>"], special_tokens=True)
    words.save_pretrained(tmp_path)
    model = MllmRetrieverModel.from_mllm(tmp_path, ret_token="<emb>", readout="before_token")
    processor = MllmRetrieverProcessor.from_mllm(tmp_path, ret_token="<emb>")
    before = ItemEncoder(model, processor, device="cpu").encode(["a cat", pictures[0]])
    with_other = model.get_input_embeddings().weight.data
    with_other[model.config.ret_token_id] += 1
    after = ItemEncoder(model, processor, device="cpu").encode(["a cat", pictures[0]])
    np.testing.assert_allclose(before, after, atol=1e-6)  # [RET] itself is not read
