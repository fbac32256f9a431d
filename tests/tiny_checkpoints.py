"""Tiny random checkpoints of real architectures, with their tokenizers and image processors."""

import string

from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    XLMRobertaConfig,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)

LETTERS = string.ascii_lowercase + string.digits
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PIXELS = {"height": 16, "width": 16}
EYE_LAYERS = {"image_size": 16, "patch_size": 8, **SIZES, "num_hidden_layers": 3}


def bert_tokenizer():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, model_max_length=40)


def clip_tokenizer():
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], model_max_length=40)


def xlm_roberta_tokenizer():
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS, "<mask>"]
    return XLMRobertaTokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], model_max_length=40)


def siglip_tokenizer():
    """T5-like: no BOS, padded with its EOS."""
    pieces = ["</s>", "▁", "<unk>", *LETTERS]
    backend = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2))
    backend.pre_tokenizer = Metaspace()
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    special = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=16, **special)


def _clip():
    text = {"vocab_size": 74, "bos_token_id": 72, "eos_token_id": 73, "max_position_embeddings": 40, **SIZES}
    text["hidden_size"] = 16  # as in TinyCLIP, the towers differ in width
    return CLIPModel(CLIPConfig(text_config=text, vision_config=EYE_LAYERS, projection_dim=20))


def _siglip():
    text = {"vocab_size": 39, "bos_token_id": None, "eos_token_id": 0, "max_position_embeddings": 16, **SIZES}
    return SiglipModel(SiglipConfig(text_config=text, vision_config=EYE_LAYERS))


CHECKPOINTS = {
    "clip": lambda: (_clip(), clip_tokenizer(), CLIPImageProcessorPil(size=PIXELS, crop_size=PIXELS)),
    "siglip": lambda: (_siglip(), siglip_tokenizer(), SiglipImageProcessorPil(size=PIXELS)),
    "dinov2": lambda: (Dinov2Model(Dinov2Config(**EYE_LAYERS)), ViTImageProcessorPil(size=PIXELS)),
    "vit": lambda: (ViTModel(ViTConfig(**EYE_LAYERS)), ViTImageProcessorPil(size=PIXELS)),
    "bert": lambda: (BertModel(BertConfig(vocab_size=77, max_position_embeddings=40, **SIZES)), bert_tokenizer()),
    "xlm_roberta": lambda: (
        XLMRobertaModel(XLMRobertaConfig(vocab_size=42, max_position_embeddings=42, pad_token_id=1, **SIZES)),
        xlm_roberta_tokenizer(),
    ),
}
"""By name: the model, and what turns items into its inputs."""
