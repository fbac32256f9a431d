"""What loads as an encoder, and what it is read at: tiny random models of the real classes against their own vectors.

docs/models.md prints the same table.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from conjoin.hub import load_model
from conjoin.retrieval import load_encoder
from tiny_checkpoints import (
    CHECKPOINTS,
    EYE_LAYERS,
    PIXELS,
    SIZES,
    bert_tokenizer,
    clip_tokenizer,
    siglip_tokenizer,
    xlm_roberta_tokenizer,
)

TEXTS = ["a red apple", "no", "two green chairs"]
CLIP_TEXT = {"vocab_size": 74, "bos_token_id": 72, "eos_token_id": 73, "max_position_embeddings": 40, **SIZES}
SIGLIP_TEXT = {"vocab_size": 39, "bos_token_id": None, "eos_token_id": 0, "max_position_embeddings": 16, **SIZES}
BERT_TOKENS = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
T5 = {"vocab_size": 39, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def model(name, kind="Model", **config):
    return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**config))


def eye():
    return transformers.ViTImageProcessorPil(size=PIXELS)


def changed(tokenizer, **values):
    for name, value in values.items():
        setattr(tokenizer, name, value)
    return tokenizer


def naflex():
    config = {"text_config": SIGLIP_TEXT, "vision_config": {"patch_size": 8, "num_patches": 16, **SIZES}}
    processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    return model("Siglip2", **config), siglip_tokenizer(), processor


LOADS = {
    "openai/clip-vit-base-patch32": ("", CHECKPOINTS["clip"]),
    "google/siglip-base-patch16-224": ("", CHECKPOINTS["siglip"]),
    "google/siglip2-base-patch16-224": (
        "",
        lambda: (CHECKPOINTS["siglip"]()[0], changed(siglip_tokenizer(), model_max_length=int(1e30)), eye()),
    ),
    "google/siglip2-base-patch16-naflex": ("", naflex),
    "the text tower of CLIP": ("mean, last", lambda: (model("CLIPText", **CLIP_TEXT), clip_tokenizer())),
    "the image tower of CLIP": ("mean, cls", lambda: (model("CLIPVision", **EYE_LAYERS), eye())),
    "the image tower of SigLIP": ("mean", lambda: (model("SiglipVision", **EYE_LAYERS), eye())),
    "facebook/dinov2-base": ("mean, cls", CHECKPOINTS["dinov2"]),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": ("mean, cls", lambda: (model("DINOv3ViT", **EYE_LAYERS), eye())),
    "google/vit-base-patch16-224": (
        "mean, cls",
        lambda: (model("ViT", "ForImageClassification", **EYE_LAYERS), eye()),
    ),
    "google-bert/bert-base-uncased": ("mean, cls, last", CHECKPOINTS["bert"]),
    "FacebookAI/xlm-roberta-base": ("mean, cls, last", CHECKPOINTS["xlm_roberta"]),
    "answerdotai/ModernBERT-base": (
        "mean, cls, last",
        lambda: (model("ModernBert", vocab_size=77, **BERT_TOKENS, **SIZES), bert_tokenizer()),
    ),
    "google/mt5-base (its encoder)": (
        "mean, last",
        lambda: (model("T5", **T5, decoder_start_token_id=0), siglip_tokenizer()),
    ),
    "Qwen/Qwen3-0.6B": (
        "mean, last",
        lambda: (
            model("Qwen3", "ForCausalLM", vocab_size=39, head_dim=12, num_key_value_heads=2, **SIZES),
            siglip_tokenizer(),
        ),
    ),
}
"""By example: which `pooling` it is tried with ("" for two towers, read by their projections), and a tiny copy."""
CASES = [(name, pooling) for name, (poolings, _) in LOADS.items()
         for pooling in re.findall(r"\w+", poolings) or [None]]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            tiny, *processors = LOADS[name][1]()
            with torch.no_grad():  # else all vectors are alike
                for parameter in tiny.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            made[name] = str(tmp_path_factory.mktemp("load"))
            for part in (tiny, *processors):
                part.save_pretrained(made[name])
        return made[name]

    return get


@torch.no_grad()
def by_projections(folder, texts, pictures):
    own = AutoModel.from_pretrained(folder)
    longest = own.config.get_text_config().max_position_embeddings
    is_siglip = own.config.model_type.startswith("siglip")
    padding = {"padding": "max_length", "max_length": longest} if is_siglip else {"padding": True}
    words = AutoTokenizer.from_pretrained(folder)(texts, truncation=True, return_tensors="pt", **padding)
    seen = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    return torch.cat([own.get_text_features(**words).pooler_output, own.get_image_features(**seen).pooler_output])


def by_sentence_transformers(folder, pooling, items):
    """The vectors of sentence-transformers with the same pooling."""
    pool = Pooling(1, {"last": "lasttoken"}.get(pooling, pooling))
    return torch.as_tensor(SentenceTransformer(modules=[Transformer(folder), pool], device="cpu").encode(items))


@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_vectors_are_those_of_the_library(name, pooling, folders, pictures):
    encoder = load_encoder(folders(name), device="cpu", pooling=pooling, batch_size=2)
    kinds = {"text": TEXTS, "image": pictures[:3]}
    items = [item for kind in kinds if kind in encoder.processor.takes for item in kinds[kind]]
    found = encoder.encode(items)
    if pooling is None:
        wanted = by_projections(folders(name), *kinds.values())
    else:
        wanted = by_sentence_transformers(folders(name), pooling, items)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(wanted, dim=1), atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-4  # the vectors say something of the items
    again = load_encoder(folders(name), device="cpu", pooling=pooling)
    assert again.fingerprint == encoder.fingerprint  # else a collection is never its model's again


@pytest.mark.parametrize(("name", "pooling", "problem"), [
    ("facebook/dinov2-base", None, r"does not say how .*pass pooling= \(--pooling\), one of mean, cls, last"),
    ("google-bert/bert-base-uncased", None, r"pass pooling= \(--pooling\)"),
    ("google-bert/bert-base-uncased", "max", "pooling='max'.* one of mean, cls, last"),
    ("openai/clip-vit-base-patch32", "mean", "expected none, it has projections"),
])  # fmt: skip
def test_a_pooling_is_never_guessed(name, pooling, problem, folders):
    with pytest.raises(ValueError, match=problem):
        load_encoder(folders(name), device="cpu", pooling=pooling)


def test_the_table_of_the_docs():
    page = Path(__file__).parents[2] / "docs/models.md"
    rows = [f"| {name} | {poolings or 'its projections'} |" for name, (poolings, _) in LOADS.items()]
    listed = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [line for line in rows if line not in listed] == []


def colpali():
    text = {"vocab_size": 39, **SIZES, "num_key_value_heads": 2, "model_type": "qwen2_vl_text"}
    vlm = transformers.Qwen2VLConfig(text_config=text, vision_config={"depth": 1, "embed_dim": 8, "num_heads": 2})
    return transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=8)


def blip2():
    text = {**SIZES, "model_type": "opt", "vocab_size": 39, "ffn_dim": 24, "word_embed_proj_dim": 16}
    config = transformers.Blip2Config(
        vision_config=EYE_LAYERS, qformer_config={**SIZES, "vocab_size": 39}, text_config=text
    )
    return transformers.Blip2ForImageTextRetrieval(config)


REFUSED = {
    "BLIP-2": (lambda: [blip2()], "'blip-2' does not say"),
    "only a processor": (lambda: [eye()], "it is no folder with a file config.json or"),
    "late interaction": (lambda: [colpali()], "a late-interaction model .* has a vector for each token"),
    "masked at random": (lambda: [model("ViTMAE", **EYE_LAYERS), eye()], "another vector for the same item"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_encoder_is_refused_in_one_line_when_it_is_loaded(kind, tmp_path):
    build, problem = REFUSED[kind]
    for part in build():
        part.save_pretrained(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=problem) as raised:
        load_encoder(tmp_path, device="cpu", pooling="mean" if kind == "masked at random" else None)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def late(folder):
    for part in CHECKPOINTS["bert"]():
        part.save_pretrained(folder / "bert")
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    tokens = Dense(24, 16, bias=False, activation_function=torch.nn.Identity(), **names)
    SentenceTransformer(modules=[Transformer(str(folder / "bert")), tokens], device="cpu").save(str(folder))


def splade(folder):
    words = bert_tokenizer()
    for part in (model("Bert", "ForMaskedLM", vocab_size=77, **SIZES), words):
        part.save_pretrained(folder / "bert")
    SparseEncoder(modules=[MLMTransformer(str(folder / "bert")), SpladePooling("max")], device="cpu").save(str(folder))
    (folder / "config_sentence_transformers.json").unlink()  # as before it named the class


def reranker(folder):
    for part in (model("Bert", "ForSequenceClassification", vocab_size=77, num_labels=1, **SIZES), bert_tokenizer()):
        part.save_pretrained(folder)


def new_reranker(folder):
    reranker(folder / "bert")
    CrossEncoder(str(folder / "bert"), device="cpu").save_pretrained(str(folder))


@pytest.mark.parametrize(("save", "problem"), [
    (late, "a late-interaction model .* has a vector for each token"),
    (splade, "it is a sparse model"),
    (reranker, "it is a reranker, .*pass it as reranker"),
    (new_reranker, "it is a reranker"),
])  # fmt: skip
def test_models_of_sentence_transformers_without_one_vector_are_named(save, problem, tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match=problem) as raised:
        load_encoder(tmp_path, device="cpu")
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


ROBERTA = {"max_position_embeddings": 42, "pad_token_id": 1, "vocab_size": 42}
LONG = {
    "RoBERTa": (lambda: model("Roberta", **ROBERTA, **SIZES), xlm_roberta_tokenizer, 40),  # behind the padding token
    "XLM-RoBERTa": (lambda: CHECKPOINTS["xlm_roberta"]()[0], xlm_roberta_tokenizer, 40),
    "BERT": (lambda: CHECKPOINTS["bert"]()[0], bert_tokenizer, 40),
    "CLIP": (lambda: model("CLIPText", **CLIP_TEXT), clip_tokenizer, 40),
}


@pytest.mark.parametrize("name", LONG)
def test_texts_are_cut_to_the_positions_of_a_model_whose_tokenizer_has_no_limit(name, tmp_path):
    build, words, limit = LONG[name]
    for part in (build(), changed(words(), model_max_length=int(1e30))):
        part.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, device="cpu", pooling="mean")
    longer, longest = encoder.encode(["a " * 80, "a " * 99])
    np.testing.assert_allclose(longer, longest, atol=1e-6)
    assert encoder.model.model.max_seq_length == limit


def test_adapters_alone_are_merged_into_the_model_that_they_name(tiny_checkpoints, own_export, tmp_path):
    for name, base in (("tower", Path(tiny_checkpoints["bert"])), ("own", own_export[0])):
        how = {"pooling": "mean"} if name == "tower" else {}
        tiny = AutoModel.from_pretrained(base) if how else load_model(base)[0]
        targets = r".*attention\.self\.(query|value)|.*text_model.*\.(query|value|q_proj)"
        adapted = get_peft_model(tiny, LoraConfig(target_modules=targets, r=2, init_lora_weights=False))
        adapted.save_pretrained(tmp_path / name)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
        found = load_encoder(tmp_path / name, device="cpu", **how)
        merged, plain = adapted.merge_and_unload(), load_encoder(base, device="cpu", **how)
        inner = found.model.body if how else found.model
        for weight, wanted in zip(inner.parameters(), merged.parameters(), strict=True):
            torch.testing.assert_close(weight, wanted)
        assert np.abs(found.encode(TEXTS) - plain.encode(TEXTS)).max() > 1e-4
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
        with pytest.raises(ValueError, match="names no base_model_name_or_path"):
            load_encoder(tmp_path / name, device="cpu", **how)


def test_an_adapter_beside_the_weights_is_applied(tiny_checkpoints, tmp_path):
    words = AutoTokenizer.from_pretrained(tiny_checkpoints["bert"])
    base = AutoModel.from_pretrained(tiny_checkpoints["bert"])
    for part in (base, words):
        part.save_pretrained(tmp_path)
    plain = load_encoder(tmp_path, device="cpu", pooling="mean").encode(TEXTS)
    adapted = get_peft_model(base, LoraConfig(target_modules=["query", "value"], r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    found = load_encoder(tmp_path, device="cpu", pooling="mean").encode(TEXTS)
    wanted = by_sentence_transformers(str(tmp_path), "mean", TEXTS)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(wanted, dim=1), atol=1e-5)
    assert np.abs(found - plain).max() > 1e-2
