"""What Coral reconstructs: a target's own tokens, the masks of each modality; its decoders and the language head."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from conjoin import CoralConfig
from conjoin.trainers.coral import IMAGE, ReconstructionDecoder, choose_masked, find_language_head
from tiny_coral import Products, make_model, make_trainer, picture
from tiny_mllms import MLLMS

ITEMS = [
    {"image": picture(1), "text": "a red shoe"},
    {"text": "only words"},
    {"image": picture(2, 20)},
    [{"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "image", "image": picture(3)},
                                  {"type": "text", "text": "then"}]}],
]  # fmt: skip


def targets_of(model, processor, items, folder):
    """The ids and the embeddings of the own tokens of each item."""
    trainer = make_trainer(model.eval(), processor, folder, None)
    with torch.no_grad():
        found = trainer.embed(model, {"positives": processor(items)})
    lengths = found["target_lengths"].tolist()
    return [found[name].split(lengths) for name in ("target_ids", "target_tokens")]


@pytest.mark.parametrize("readout", ["token", "last"])
@pytest.mark.parametrize("name", sorted(MLLMS))
@pytest.mark.parametrize("chosen", [slice(None), slice(0, 1), slice(1, 2), slice(2, 3)], ids=str)
def test_targets_are_the_tokens_of_the_item_alone(name, readout, chosen, mllm_checkpoints, tmp_path):
    model, processor = make_model(mllm_checkpoints(name)[0], lora=False, readout=readout)
    items, table = ITEMS[chosen], model.get_input_embeddings().weight
    rows, tokens = targets_of(model, processor, items, tmp_path)
    texts, images = ["a red shoe", "only words", "", "firstthen"][chosen], [1, 0, 1, 1][chosen]
    for ids, embeddings, text, count in zip(rows, tokens, texts, images, strict=True):
        assert processor.tokenizer.decode(ids[ids >= 0]) == text
        assert torch.equal(embeddings[ids >= 0], table[ids[ids >= 0]])
        assert (IMAGE in ids) == (count > 0)
    if any(images):  # image tokens are those that the vision tower gives
        batch = processor([item for item, count in zip(items, images, strict=True) if count])
        kept, grids = batch.get("pixel_attention_mask"), batch.get("image_grids")
        pixels = batch["pixel_values"].flatten(0, 1) if kept is None else batch["pixel_values"][kept.bool()]
        with torch.no_grad():
            expected = model.run_vision_tower(pixels, None if grids is None else grids[grids.prod(-1) > 0]).tokens
        found = torch.cat(tokens)[torch.cat(rows) == IMAGE]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


MERGES = [("Ġ", "w"), ("Ġ", "("), (")", "Ċ"), (".", "Ċ"), ("Ċ", "Ċ")]
UNUSED = "ĀāĂăĄ"
"""Bytes of no text."""


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_tokens_that_join_characters(name, mllm_checkpoints, tmp_path):
    """A word keeps its space; a separator that is in one token with punctuation of the text stays with it."""
    model, processor = make_model(mllm_checkpoints(name)[0], lora=False)
    state = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {"".join(pair): vocabulary.pop(byte) for pair, byte in zip(MERGES, UNUSED, strict=True)}
    state["model"]["merges"] = [" ".join(pair) for pair in MERGES]
    processor.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))

    def spoken(*texts):
        parts = [{"type": "text", "text": text} for text in texts]
        return [{"role": "user", "content": [*parts, {"type": "image", "image": picture(1)}]}]

    space = " " if name == "llava" else ""  # of the template, in one token with the word
    cases = [
        ("words with words", f"{space}words with words"),
        ({"image": picture(1), "text": "a shoe"}, "a shoe"),
        ({"image": picture(1), "text": "a shoe (XL)"}, "a shoe (XL)\n"),
        ("a title.", "a title.\n"),
        (spoken("first", "then"), "firstthen"),
        (spoken("first.", "then"), "first.\nthen"),
        ("two\nlines", "twolines"),  # a line break is never a target by itself
    ]
    rows, _ = targets_of(model, processor, [item for item, _ in cases], tmp_path)
    assert [processor.tokenizer.decode(ids[ids >= 0]) for ids in rows] == [expected for _, expected in cases]


def test_a_fixed_share_of_each_row_is_masked():
    kind = torch.zeros(5, 12, dtype=torch.bool)
    for row, count in enumerate([12, 7, 2, 1, 0]):
        kind[row, torch.randperm(12, generator=torch.Generator().manual_seed(row))[:count]] = True
    masked = choose_masked(kind, range(5), 0.5)
    assert masked.sum(1).tolist() == [6, 4, 1, 1, 0]
    assert not (masked & ~kind).any()
    assert choose_masked(kind, range(5), 0.1).sum(1).tolist() == [1, 1, 1, 1, 0]
    assert choose_masked(kind, range(5), 1.0).equal(kind)
    assert not choose_masked(kind, range(5, 10), 0.5).equal(masked)
    padded = torch.nn.functional.pad(kind, (0, 18))
    assert choose_masked(padded, range(5), 0.5)[:, :12].equal(masked)
    shares = torch.stack([choose_masked(kind[:1], [seed], 0.5)[0] for seed in range(400)])
    assert (shares.float().mean(0) - 0.5).abs().max() < 0.1


def test_masks_follow_the_epoch_and_the_row(mllm_checkpoints, tmp_path):
    trainer = make_trainer(*make_model(mllm_checkpoints("qwen2_vl")[0]), tmp_path, Products(4), seed=3)
    rows = trainer.train_dataset

    def seeds():
        return trainer.data_collator([rows[i] for i in range(4)])["mask_seed"].tolist()

    first = seeds()
    assert first == seeds() and len(set(first)) == 4
    rows.epoch = 1
    assert not set(first) & set(seeds())
    assert "mask_seed" not in trainer.data_collator([Products(1)[0]])  # a stream


@pytest.mark.parametrize("attended", [[0, 2], [1], []])
def test_a_decoder_is_attention_and_feed_forward_with_a_norm_behind_each_and_a_linear_layer(attended):
    torch.manual_seed(0)
    decoder = ReconstructionDecoder(128, positions=5, dropout=0.0).double()
    state, tokens, where = torch.randn(128).double(), torch.randn(3, 128).double(), decoder.positions.weight
    keys = torch.cat([(tokens + where[:3])[attended], state[None]])  # not those that are masked
    query = state + where[1]
    weight, bias = decoder.attention.in_proj_weight.chunk(3), decoder.attention.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, keys, keys), weight, bias, strict=True))
    heads = [(q[part] @ k[:, part].T / 8).softmax(0) @ v[:, part] for part in (slice(0, 64), slice(64, 128))]
    found = decoder.attention_norm(query + decoder.attention.out_proj(torch.cat(heads)))
    expected = decoder.output(decoder.output_norm(found + decoder.feed_forward(found)))
    mask, places = torch.tensor([[place in attended for place in range(3)]]), torch.tensor([[1]])
    torch.testing.assert_close(decoder(state[None], tokens[None], mask, places)[0, 0], expected)
    with pytest.raises(ValueError, match="a target has 6 tokens, but decoder_positions=5"):
        decoder(state[None], torch.zeros(1, 6, 128).double(), torch.ones(1, 6).bool(), places)


@pytest.mark.parametrize("shards", [True, False])
def test_the_language_head_is_that_in_the_files(shards, mllm_checkpoints, tmp_path):
    folder, mllm = mllm_checkpoints("qwen2_vl")
    model, _ = make_model(folder)
    weights = {name: value.clone() for name, value in mllm.state_dict().items()}
    config = CoralConfig("unused", use_cpu=True, language_head=str(tmp_path))

    def read(tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        if shards:
            index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return find_language_head(model, config)

    assert torch.equal(read(weights), weights["lm_head.weight"])
    del weights["lm_head.weight"]  # tied to the input embeddings
    assert read(weights) is None
