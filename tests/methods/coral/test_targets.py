"""What Coral reconstructs: a target's own tokens, the masks of each modality, what a masked token can change."""

import json

import pytest
import torch
from tiny_coral import Products, make_model, picture
from tokenizers import Tokenizer

from conjoin.methods.coral import ReconstructionDecoder
from conjoin.methods.coral.targets import (
    IMAGE,
    PADDING,
    PromptFrame,
    choose_masked,
    draw_noise,
    pack_targets,
    recorded_embeddings,
    unpack_targets,
)
from conjoin.methods.coral.trainer import SeedCollator, SeededRows
from tiny_mllms import MLLMS

ITEMS = [
    {"image": picture(1), "text": "a red shoe"},
    {"text": "only words"},
    {"image": picture(2, 20)},
    [{"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "image", "image": picture(3)},
                                  {"type": "text", "text": "then"}]}],
]  # fmt: skip


def targets_of(model, processor, items):
    batch = processor(items)
    with torch.no_grad(), recorded_embeddings(model) as seen:
        model(**batch)
    image_token = model.config.backbone_config.image_token_id
    packed = pack_targets(batch, seen[0], PromptFrame.of(processor), image_token)
    return unpack_targets(packed, slice(0, len(items)))


@pytest.mark.parametrize("readout", ["token", "last"])
@pytest.mark.parametrize("name", sorted(MLLMS))
@pytest.mark.parametrize("chosen", [slice(None), slice(0, 1), slice(1, 2), slice(2, 3)], ids=str)
def test_targets_are_the_tokens_of_the_item_alone(name, readout, chosen, mllm_checkpoints):
    model, processor = make_model(mllm_checkpoints(name)[0], lora=False, readout=readout)
    items = ITEMS[chosen]
    found = targets_of(model.eval(), processor, items)
    table = model.get_input_embeddings().weight
    texts = ["a red shoe", "only words", "", "firstthen"][chosen]
    images = [1, 0, 1, 1][chosen]
    for row, (text, count) in enumerate(zip(texts, images, strict=True)):
        own = found.ids[row][found.ids[row] >= 0]
        assert processor.tokenizer.decode(own) == text
        assert torch.equal(found.embeddings[row][found.ids[row] >= 0], table[own])
        assert ((found.ids[row] == IMAGE).sum() > 0) == (count > 0)
        assert not found.embeddings[row][found.ids[row] == PADDING].any()
    with torch.no_grad():  # image tokens are those that the vision tower gives
        pixels = processor([item for item, count in zip(items, images, strict=True) if count]) if any(images) else {}
        if pixels:
            rows = pixels["pixel_values"].flatten(0, 1)
            kept = pixels.get("pixel_attention_mask")
            rows = rows if kept is None else pixels["pixel_values"][kept.bool()]
            grid = pixels.get("image_grids")
            expected = model.run_vision_tower(rows, None if grid is None else grid[grid.prod(-1) > 0]).tokens
            torch.testing.assert_close(found.embeddings[found.ids == IMAGE], expected, rtol=0, atol=1e-6)


def test_a_llava_processor_whose_start_ends_in_a_space_keeps_the_first_word(mllm_checkpoints):
    model, processor = make_model(mllm_checkpoints("llava")[0], lora=False)
    (ids,) = targets_of(model.eval(), processor, ["words"]).ids
    assert processor.tokenizer.decode(ids) == "words"


MERGES = [("Ġ", "w"), ("Ġ", "("), (")", "Ċ"), (".", "Ċ"), ("Ċ", "Ċ")]


def with_merges(processor):
    """Let the tokenizer join a space with the next letter, and punctuation with a line break, as real ones do."""
    state = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {"".join(pair): 1000 + number for number, pair in enumerate(MERGES)}
    state["model"]["merges"] = [" ".join(pair) for pair in MERGES]
    processor.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_tokens_that_join_characters(name, mllm_checkpoints):
    """A word keeps its space; a separator that is in one token with punctuation of the text stays with it."""
    _, processor = make_model(mllm_checkpoints(name)[0], lora=False)
    with_merges(processor)
    frame = PromptFrame.of(processor)
    image_token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)

    def own(item):
        batch = processor([item])
        ids, length = batch["input_ids"], batch["attention_mask"].sum(1)
        ids = ids[batch["attention_mask"].bool()][None]
        is_image = ids == image_token
        return processor.tokenizer.decode(ids[frame.own_texts(batch, ids, length, is_image)])

    def spoken(*texts):
        parts = [{"type": "text", "text": text} for text in texts]
        return [{"role": "user", "content": [*parts, {"type": "image", "image": picture(1)}]}]

    space = " " if name == "llava" else ""  # of the template, in one token with the word
    assert own("words with words") == f"{space}words with words"
    assert own({"image": picture(1), "text": "a shoe"}) == "a shoe"
    assert own({"image": picture(1), "text": "a shoe (XL)"}) == "a shoe (XL)\n"
    assert own("a title.") == "a title.\n"
    assert own(spoken("first", "then")) == "firstthen"
    assert own(spoken("first.", "then")) == "first.\nthen"
    assert own("two\nlines") == "twolines"  # a line break is never a target by itself


def test_a_fixed_share_of_each_row_is_masked():
    kind = torch.zeros(5, 12, dtype=torch.bool)
    for row, count in enumerate([12, 7, 2, 1, 0]):
        kind[row, torch.randperm(12, generator=torch.Generator().manual_seed(row))[:count]] = True
    noise = draw_noise(range(5), 12)
    masked = choose_masked(kind, noise, 0.5)
    assert masked.sum(1).tolist() == [6, 4, 1, 1, 0]
    assert not (masked & ~kind).any()
    assert choose_masked(kind, noise, 0.1).sum(1).tolist() == [1, 1, 1, 1, 0]
    assert choose_masked(kind, noise, 1.0).equal(kind)
    assert not choose_masked(kind, draw_noise(range(5, 10), 12), 0.5).equal(masked)
    torch.testing.assert_close(draw_noise(range(5), 30)[:, :12], noise)  # padding does not change the mask
    shares = torch.stack([choose_masked(kind[:1], draw_noise([seed], 12), 0.5)[0] for seed in range(400)])
    assert (shares.float().mean(0) - 0.5).abs().max() < 0.1


def test_seeds_follow_the_epoch_and_the_row():
    rows = SeededRows(Products(4), seed=3)
    first = [rows[i]["mask_seed"] for i in range(4)]
    assert first == [rows[i]["mask_seed"] for i in range(4)]
    assert len(set(first)) == 4
    rows.epoch = 1
    assert not set(first) & {rows[i]["mask_seed"] for i in range(4)}
    collate = SeedCollator(lambda found: {"count": len(found)})
    assert collate([rows[0], rows[1]])["mask_seeds"].shape == (2,)
    assert "mask_seeds" not in collate([Products(1)[0]])  # a stream


def test_a_masked_token_changes_no_prediction_and_any_other_does_and_so_does_their_order():
    torch.manual_seed(0)
    decoder = ReconstructionDecoder(16, positions=8, dropout=0.1).double().eval()
    state, tokens = torch.randn(3, 16).double(), torch.randn(3, 6, 16).double()
    attended = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    places = torch.tensor([[0, 2, 4], [1, 3, 5], [0, 1, 2]])
    expected = decoder(state, tokens, attended, places)
    assert expected.shape == (3, 3, 16)
    for row in range(3):
        for place in range(6):
            changed = tokens.clone()
            changed[row, place] += 1e-3
            moved = (decoder(state, changed, attended, places) != expected).any(2)
            wanted = torch.zeros_like(moved)
            wanted[row] = attended[row, place]
            assert moved.equal(wanted)
    assert (decoder(state + torch.eye(3, 16), tokens, attended, places) != expected).any(2).all()
    order = [3, 1, 2, 0, 4, 5]  # of visible tokens of the first row
    moved = (decoder(state, tokens[:, order], attended[:, order], places) - expected).abs().amax((1, 2))
    assert moved[0] > 1e-9 and moved[2] == 0
    with pytest.raises(ValueError, match="a target has 9 tokens, but decoder_positions=8"):
        decoder(state, torch.randn(3, 9, 16).double(), torch.ones(3, 9).bool(), places)


def test_a_decoder_is_attention_and_feed_forward_with_a_norm_behind_each():
    torch.manual_seed(0)
    decoder = ReconstructionDecoder(128, positions=5, dropout=0.0).double()
    state, tokens = torch.randn(128).double(), torch.randn(3, 128).double()
    where = decoder.positions.weight
    keys = torch.stack([tokens[0] + where[0], tokens[2] + where[2], state])  # the second is masked
    query = state + decoder.positions.weight[1]
    weight, bias = decoder.attention.in_proj_weight.chunk(3), decoder.attention.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, keys, keys), weight, bias, strict=True))
    heads = []
    for part in (slice(0, 64), slice(64, 128)):
        heads.append((q[part] @ k[:, part].T / 8).softmax(0) @ v[:, part])
    found = decoder.attention_norm(query + decoder.attention.out_proj(torch.cat(heads)))
    expected = decoder.output_norm(found + decoder.feed_forward(found))
    attended, places = torch.tensor([[True, False, True]]), torch.tensor([[1]])
    torch.testing.assert_close(decoder(state[None], tokens[None], attended, places)[0, 0], expected)
