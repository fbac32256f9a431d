"""Tiny random MLLMs of real architectures with real tokenizers and image processors, by name."""

import torch
from tokenizers import pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

DEPTH = 4
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_SPECIALS = [*CHAT, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
LLAVA_SPECIALS = ["<s>", "</s>", "<image>"]
INTERN_SPECIALS = [*CHAT, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
INTERN_NAMES = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
INTERN_NAMES |= {"video_token": "<video>"}


def tokenizer(specials):
    """One token per byte, then the special tokens."""
    vocabulary = {byte: index for index, byte in enumerate(BYTES)}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=None, eos_token=specials[0], pad_token=specials[0])
    made.add_tokens(specials, special_tokens=True)
    if specials is INTERN_SPECIALS:  # its processor asks for these tokens by name
        made._set_model_specific_special_tokens(INTERN_NAMES)
    return made


def _id(specials, token):
    return len(BYTES) + specials.index(token)


def _qwen_ids():
    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    names |= {"vision_end_token_id": "<|vision_end|>"}
    return {key: _id(QWEN_SPECIALS, token) for key, token in names.items()} | {"video_token_id": 290}


def _qwen_text(vocab_size):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return TEXT | {"vocab_size": vocab_size, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}


def qwen2_vl(vocab_size=300, depth=DEPTH):
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = _qwen_text(vocab_size) | {"num_hidden_layers": depth}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **_qwen_ids())
    return Qwen2VLForConditionalGeneration(config), QWEN_SPECIALS, _qwen_images(4)


def qwen2_5_vl(vocab_size=300):
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=_qwen_text(vocab_size), vision_config=vision, **_qwen_ids())
    return Qwen2_5_VLForConditionalGeneration(config), QWEN_SPECIALS, _qwen_images(4)


def qwen3_vl(vocab_size=300):
    vision = {"depth": 3, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = _qwen_text(vocab_size) | {"head_dim": 8}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids())
    return Qwen3VLForConditionalGeneration(config), QWEN_SPECIALS, _qwen_images(4)


def llava(vocab_size=300):
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 16}
    text = TEXT | {"model_type": "llama", "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None}
    image_token_id = _id(LLAVA_SPECIALS, "<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image_token_id, image_seq_length=4)
    pixels = {"height": 16, "width": 16}
    return LlavaForConditionalGeneration(config), LLAVA_SPECIALS, CLIPImageProcessorPil(size=pixels, crop_size=pixels)


def internvl(vocab_size=300):
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": [16, 16], "patch_size": [4, 4]}
    text = TEXT | {"model_type": "qwen2", "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None}
    image_token_id = _id(INTERN_SPECIALS, "<IMG_CONTEXT>")
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=image_token_id, image_seq_length=4)
    pixels = {"height": 16, "width": 16}
    return InternVLForConditionalGeneration(config), INTERN_SPECIALS, GotOcr2ImageProcessorPil(size=pixels)


def _qwen_images(patch_size):
    return Qwen2VLImageProcessorPil(patch_size=patch_size, min_pixels=8 * 8, max_pixels=24 * 24)


MLLMS = {build.__name__: build for build in (qwen2_vl, qwen2_5_vl, qwen3_vl, llava, internvl)}


def save_mllm(name, folder, **build):
    """Write the checkpoint of a tiny MLLM as its publisher would: sharded, with head, tokenizer, image processor."""
    torch.manual_seed(0)
    model, specials, image_processor = MLLMS[name](**build)
    with torch.no_grad():  # library initialisations are so small that all embeddings would be alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer(specials).save_pretrained(folder)
    image_processor.save_pretrained(folder)
    return model.eval()
