"""One pass for all views changes nothing but the time, and where transformers has broken it, it is not used."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers

from conjoin.hub.build import prune
from conjoin.models.shortcuts import use_shortcuts, without_shortcuts
from tiny_mllms import MLLMS

KEEP = 3
VIEWS = ("image", "text", "fused")
INSTRUCTION = "Find the picture that shows what the text says."
SHORT = ["a red box", "7 more"] * 4
TEXTS = ["a red box", "7", "more words than those", "a long text " * 30, "blue"]
every_mllm = pytest.mark.parametrize("name", MLLMS)


@pytest.fixture
def build(retriever):
    """`build(name, keep_layers, ...)` is a tiny MLLM with its shortcuts, and its processor."""

    def get(name, keep_layers=KEEP, **config):
        model, processor = retriever(name, keep_layers, **config)
        use_shortcuts(model)
        return model, processor

    return get


@pytest.fixture
def pairs(pictures):
    """Pairs whose image comes first."""
    return [{"image": picture, "text": text} for picture, text in zip(pictures, TEXTS, strict=False)]


@torch.no_grad()
def states(model, batch, **kwargs):
    return model(**batch, **kwargs).pooler_output


def plain(model, batch, **kwargs):
    with without_shortcuts(model):
        return states(model, batch, **kwargs)


def differ(model, batch, **kwargs):
    return (states(model, batch, **kwargs) - plain(model, batch, **kwargs)).abs().max()


@contextmanager
def watched(model):
    """The rows and tokens that each layer of a language model gives, once its shortcuts are tested."""
    found = []
    hook = [layer.register_forward_hook(lambda m, a, output: found.append(tuple(output.shape[:2])))
            for layer in model.text_model.layers]  # fmt: skip
    yield found
    for each in hook:
        each.remove()


@every_mllm
@pytest.mark.parametrize("readout", ["token", "before_token", "last"])
def test_equal_to_the_plain_path(name, readout, build, pairs, recwarn):
    model, processor = build(name, readout=readout)
    text_first = [{"text": pair["text"], "image": pair["image"]} for pair in pairs]  # other states in each view
    for items in (pairs, text_first):
        for side in ("right", "left"):
            processor.tokenizer.padding_side = side
            assert differ(model, processor(items, instruction=INSTRUCTION), views=VIEWS) <= 1e-5
    assert not [each for each in recwarn if "read alone" in str(each.message)]


@every_mllm
def test_what_is_left_out(name, build, pairs):
    model, processor = build(name)
    batch = processor(pairs)
    states(model, batch, views=VIEWS)
    with watched(model) as shapes:
        states(model, batch, views=VIEWS)
        longest = [int(batch[f"{each}_mask"].sum(1).max()) for each in ("image_view", "text_view", "attention")]
        assert len(shapes) == KEEP and shapes[0][1] < sum(longest)


def test_a_language_model_with_a_window_has_none(retriever):
    model, _ = retriever("internvl", KEEP)
    object.__setattr__(model.config.get_text_config(), "sliding_window", 1000)
    use_shortcuts(model)
    assert model.shortcuts is None


def with_gradients(model, batch, **kwargs):
    """The states of a batch, and what a loss on them gives each parameter."""
    model.zero_grad()
    pooled = model(**batch, **kwargs).pooler_output
    (pooled * torch.linspace(-1, 1, pooled.numel()).view_as(pooled)).sum().backward()
    return pooled.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_mllm
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_has_the_same_gradients(name, checkpointed, build, pairs):
    model, processor = build(name)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.double().train().requires_grad_(True)
    batch = processor(pairs)
    fast, found = with_gradients(model, batch, views=VIEWS)
    with without_shortcuts(model):
        expected_states, expected = with_gradients(model, batch, views=VIEWS)
    assert (fast - expected_states).abs().max() <= 1e-6
    assert found.keys() == expected.keys() and all(gradient.abs().max() > 0 for gradient in expected.values())
    largest = max(gradient.abs().max() for gradient in expected.values())
    for parameter, gradient in expected.items():  # rotary angles are float32
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-6 * float(largest))


def drop_mask(module, args, kwargs):
    return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}


@every_mllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_one_is_off_with_one_warning(name, dtype, build, pairs):
    model, processor = build(name, dtype=dtype)
    model.text_model.register_forward_pre_hook(drop_mask, with_kwargs=True)
    batch = processor(pairs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            expected = plain(model, batch, views=VIEWS)
            far = (states(model, batch, views=VIEWS) - expected).abs().max()
            assert far <= (1e-5 if dtype == torch.float32 else 0.5)
    found = [str(each.message) for each in caught if "read alone" in str(each.message)]
    assert len(found) == 1 and transformers.__version__ in found[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_no_break(attention, dtype, build, pairs, recwarn):
    model, processor = build("qwen3_vl", dtype=dtype)
    model.set_attn_implementation(attention)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        assert differ(model, processor(pairs), views=VIEWS).float() < 0.2
    assert not [each for each in recwarn if "read alone" in str(each.message)]


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_copies_are_their_own(name, build, messages):
    model, processor = build(name)
    batch = processor(messages)
    expected = states(model, batch)
    copied = copy.deepcopy(model)
    assert torch.equal(states(copied, batch), expected)
    with torch.no_grad():
        copied.text_model.layers[-1].mlp.down_proj.weight.zero_()
    assert (states(copied, batch) - expected).abs().max() > 1e-2 and differ(copied, batch) <= 1e-5
    assert torch.equal(states(model, batch), expected)
    pruned = prune(model, 2)
    use_shortcuts(pruned)
    assert pruned.text_model.config is pruned.config.get_text_config() and differ(pruned, batch) <= 1e-5


def test_a_shared_teacher_still_sees_all_tokens(build, messages, tmp_path):
    """Its deep layers go on from every token's state, also where it is evaluated."""
    from conjoin import PumaStage1Config, PumaStage1Trainer

    student, processor = build("qwen2_vl", 2)
    full, _ = build("qwen2_vl", None)
    batch = dict(processor(messages))
    config = PumaStage1Config(str(tmp_path), use_cpu=True, teacher="shared")
    trainer = PumaStage1Trainer(student, config, processing_class=processor, teacher=full)
    with torch.no_grad():
        found = trainer.embed(student, {"queries": batch})
    pooled, deep = found["queries"], found["teacher_queries"]
    assert (pooled - states(student, batch)).abs().max() <= 1e-5 and student.shortcuts is not None
    assert (deep - states(full, batch)).abs().max() <= 1e-5


@pytest.mark.slow
def test_compiled(build):
    model, processor = build("llava", 1)
    batch = dict(processor(SHORT, instruction=INSTRUCTION))
    expected = plain(model, batch)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert (compiled(**batch).pooler_output - expected).abs().max() <= 1e-5
