"""Leaving out what an embedding does not need changes nothing but the time."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conjoin.methods.puma.teachers import SharedTeacher
from conjoin.models.mllm_retriever import readout_shortcuts
from conjoin.models.mllm_retriever.readout_shortcuts import shared_prefix_length, similar_lengths
from tiny_mllms import MLLMS

KEEP = 3
every_mllm = pytest.mark.parametrize("name", MLLMS)


@pytest.fixture(autouse=True)
def few_rows_share_too(monkeypatch):
    monkeypatch.setattr(readout_shortcuts, "LEAST_SAVED_TOKENS", 1)


@torch.no_grad()
def states(model, batch, shortcuts=True, **kwargs):
    model.shortcuts = shortcuts
    return model(**batch, **kwargs).pooler_output


def watch(model):
    """The rows and tokens that each layer of a language model gives."""
    found = []
    for layer in model.text_model.layers:
        layer.register_forward_hook(lambda module, args, output: found.append(tuple(output.shape[:2])))
    return found


@every_mllm
@pytest.mark.parametrize("readout", ["token", "before_token", "last"])
def test_equal_to_the_plain_path(name, readout, retriever, messages, pairs, pictures):
    model, processor = retriever(name, KEEP, readout=readout)
    texts = ["a red box", "7", "more words than those"]
    for items, views in ((messages, None), (texts, None), (pictures, None), (pairs, ("image", "text", "fused"))):
        for side in ("right", "left"):
            processor.tokenizer.padding_side = side
            batch = processor(items)
            plain = states(model, batch, False, views=views)
            assert (states(model, batch, views=views) - plain).abs().max() <= 1e-5
    batch = processor(["a red box"] * 3)  # the same prompts: all but the readout token is shared
    assert (states(model, batch) - states(model, batch, False)).abs().max() <= 1e-5


@every_mllm
def test_what_is_left_out(name, retriever):
    model, processor = retriever(name, KEEP)
    shapes = watch(model)
    batch = processor(["a red box", "7 more"], instruction="Find it.")
    states(model, batch)
    length = batch["input_ids"].shape[1]
    shared = int((batch["input_ids"][0] == batch["input_ids"][1]).int().cumprod(0).sum())
    assert 8 * shared >= length
    assert shapes == [(1, shared)] * KEEP + [(2, length - shared)] * (KEEP - 1) + [(2, 1)]
    shapes.clear()
    states(model, batch, shortcuts=False)
    assert shapes == [(2, length)] * KEEP
    shapes.clear()
    batch = processor(["a red box"])
    states(model, batch)
    assert shapes == [tuple(batch["input_ids"].shape)] * (KEEP - 1) + [(1, 1)]  # nothing to share


def test_fewer_operations(retriever):
    model, processor = retriever("qwen2_vl", KEEP)
    batch = processor(["a red box", "7 more", "words"])
    counted = []
    for shortcuts in (False, True):
        with FlopCounterMode(display=False) as counter:
            states(model, batch, shortcuts)
        counted.append(counter.get_total_flops())
    assert counted[1] < 0.7 * counted[0]


def test_images_that_enter_the_last_layer(retriever, pairs):
    """Qwen3-VL adds image features behind its first layers: where one is the last, it runs for all tokens."""
    model, processor = retriever("qwen3_vl", 2)
    shapes = watch(model)
    batch = processor(pairs)
    fast = states(model, batch)
    assert shapes[-1][1] > 1
    assert (fast - states(model, batch, False)).abs().max() <= 1e-5


def test_layers_of_unknown_build_run_for_all_tokens(retriever):
    model, processor = retriever("internvl", KEEP)
    batch = processor(["a red box"])
    expected = states(model, batch)
    model.config.get_text_config().sliding_window = 1000
    shapes = watch(model)
    assert (states(model, batch) - expected).abs().max() <= 1e-5
    assert shapes == [tuple(batch["input_ids"].shape)] * KEEP


def test_a_shared_teacher_still_sees_all_tokens(retriever, messages):
    """Its deep layers go on from every token's state, also where it is evaluated."""
    student, processor = retriever("qwen2_vl", 2)
    full, _ = retriever("qwen2_vl", None)
    batch = dict(processor(messages))
    teacher = SharedTeacher(full, 2)
    with torch.no_grad():
        pooled, deep = teacher(student, batch)
    assert (pooled - states(student, batch)).abs().max() <= 1e-5 and student.shortcuts
    assert (deep - states(full, batch)).abs().max() <= 1e-5


def gradients(model, batch, shortcuts, views=None):
    """The states of a batch, and what a loss on them gives each parameter."""
    model.shortcuts = shortcuts
    model.zero_grad()
    pooled = model(**batch, views=views).pooler_output
    (pooled * torch.linspace(-1, 1, pooled.numel()).view_as(pooled)).sum().backward()
    return pooled.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every_mllm
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_has_the_same_gradients(name, checkpointed, retriever, messages, monkeypatch):
    monkeypatch.setattr(readout_shortcuts, "GROUP_TOKENS", 40)  # several groups
    model, processor = retriever(name, KEEP)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.train().requires_grad_(True)
    batch = processor(messages)
    states, expected = gradients(model, batch, False)
    fast, found = gradients(model, batch, True)
    assert (fast - states).abs().max() <= 1e-5
    assert found.keys() == expected.keys() and all(gradient.abs().max() > 0 for gradient in expected.values())
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, p=parameter: p + m)


@pytest.mark.parametrize("mode", ["training", "gradients"])
def test_training_shares_no_prefix_and_pads_little(mode, retriever, monkeypatch):
    model, processor = retriever("qwen2_vl", KEEP)
    texts = ["a red box", "7 more " * 20, "a red bar", "7 more " * 20]
    batch = processor(texts, instruction="Find it.")
    lengths = batch["attention_mask"].sum(1).tolist()
    shapes = watch(model)
    with torch.set_grad_enabled(mode == "gradients"):
        model.train(mode == "training")(**batch)
        short, long = lengths[:2]
        assert shapes == [(4, long)] * (KEEP - 1) + [(4, 1)]  # few tokens: one group
        shapes.clear()
        monkeypatch.setattr(readout_shortcuts, "GROUP_TOKENS", 2 * short)
        model(**batch)
    assert shapes == [(2, short)] * (KEEP - 1) + [(2, 1)] + ([(1, long)] * (KEEP - 1) + [(1, 1)]) * 2


def test_dropout_of_attention_weights_runs_the_whole_last_layer(retriever):
    model, processor = retriever("llava", KEEP)
    model.config.get_text_config().attention_dropout = 0.5
    batch = processor(["a red box"])
    shapes = watch(model)
    model.train()(**batch)
    assert shapes == [tuple(batch["input_ids"].shape)] * KEEP
    shapes.clear()
    model.eval()(**batch)
    assert shapes[-1] == (1, 1)


def test_groups_of_similar_lengths(monkeypatch):
    monkeypatch.setattr(readout_shortcuts, "GROUP_TOKENS", 10)
    groups = similar_lengths(torch.tensor([9, 2, 8, 3, 4, 30]))
    assert [(rows.tolist(), longest) for rows, longest in groups] == [([1, 3, 4, 2], 8), ([0], 9), ([5], 30)]
    assert len(similar_lengths(torch.tensor([1, 1]))) == 1


def test_attention_by_every_implementation_and_type(retriever, messages):
    model, processor = retriever("qwen3_vl", KEEP)
    batch = processor(messages)
    expected = states(model, batch)
    model.set_attn_implementation("eager")
    assert (states(model, batch) - expected).abs().max() <= 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert (states(model, batch).float() - expected).abs().max() < 0.1
    model.to(torch.bfloat16)
    assert (states(model, batch).float() - states(model, batch, False).float()).abs().max() < 0.1


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_copies_are_their_own(name, retriever, messages):
    model, processor = retriever(name, KEEP)
    batch = processor(messages)
    expected = states(model, batch)
    copied = copy.deepcopy(model)
    assert torch.equal(states(copied, batch), expected)
    with torch.no_grad():
        copied.text_model.layers[-1].mlp.down_proj.weight.zero_()
    assert (states(copied, batch) - expected).abs().max() > 1e-2
    assert (states(copied, batch) - states(copied, batch, False)).abs().max() <= 1e-5
    assert torch.equal(states(model, batch), expected)


@pytest.mark.slow
def test_compiled(retriever):
    model, processor = retriever("llava", 1)
    batch = dict(processor(["a red box", "7 more"], instruction="Find it."))
    expected = states(model, batch)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert (compiled(**batch).pooler_output - expected).abs().max() <= 1e-5


def test_prefix_length(monkeypatch):
    ids = torch.tensor([[1, 2, 3, 9, 5], [1, 2, 3, 4, 5]])
    images = torch.zeros_like(ids, dtype=torch.bool)
    assert shared_prefix_length(ids, images, torch.tensor([4, 4])) == 3
    assert shared_prefix_length(ids, images, torch.tensor([4, 2])) == 2  # what is read is not shared
    assert shared_prefix_length(ids[:1], images[:1], torch.tensor([4])) == 0
    images[0, 1] = True
    assert shared_prefix_length(ids, images, torch.tensor([4, 4])) == 1
    long = torch.cat([ids[:, :1], torch.arange(40).view(2, 20)], 1)
    assert shared_prefix_length(long, torch.zeros_like(long, dtype=torch.bool), torch.tensor([20, 20])) == 0
    monkeypatch.setattr(readout_shortcuts, "LEAST_SAVED_TOKENS", 6)
    same = torch.ones(3, 4, dtype=torch.long)
    at, images = torch.tensor([3, 3, 3]), torch.zeros_like(same, dtype=torch.bool)
    assert shared_prefix_length(same, images, at) == 3
    assert shared_prefix_length(same[:2], images[:2], at[:2]) == 0
