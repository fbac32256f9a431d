"""Shortcuts change nothing but the time, and one that transformers has broken is not used."""

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
def test_equal_to_the_plain_path(name, readout, build, messages, pairs, pictures, recwarn):
    model, processor = build(name, readout=readout)
    text_first = [{"text": pair["text"], "image": pair["image"]} for pair in pairs]  # other states in each view
    several = [(pairs, VIEWS), (text_first, VIEWS)]
    for items, views in [*((each, None) for each in (messages, TEXTS, SHORT, pictures)), *several]:
        for side in ("right", "left"):
            processor.tokenizer.padding_side = side
            assert differ(model, processor(items, instruction=INSTRUCTION), views=views) <= 1e-5
    assert differ(model, processor(["a red box"] * 9)) <= 1e-5  # all but the readout token is shared
    assert not [each for each in recwarn if "shortcut" in str(each.message)]


@every_mllm
def test_what_is_left_out(name, build, pairs):
    model, processor = build(name)
    batch = processor(SHORT, instruction=INSTRUCTION)
    states(model, batch)
    rows, length = batch["input_ids"].shape
    with watched(model) as shapes:
        states(model, batch)
        assert shapes == [(rows, length)] * (KEEP - 1) + [(rows, 1)]
        shapes.clear()
        plain(model, batch)
        assert shapes == [(rows, length)] * KEEP
        shapes.clear()
        batch_of_one = processor(["a red box"])
        states(model, batch_of_one)
        assert shapes == [tuple(batch_of_one["input_ids"].shape)] * KEEP  # there is little to save
        shapes.clear()
        batch = processor(pairs)
        states(model, batch, views=VIEWS)
        shapes.clear()
        states(model, batch, views=VIEWS)
        longest = [int(batch[f"{each}_mask"].sum(1).max()) for each in ("image_view", "text_view", "attention")]
        assert len(shapes) == KEEP and shapes[0][1] < sum(longest)


def test_images_that_enter_the_last_layer(build, pairs):
    """Qwen3-VL adds image features behind its first layers: where one is the last, it runs for all tokens."""
    model, processor = build("qwen3_vl", 2)
    with watched(model) as shapes:
        assert differ(model, processor(pairs)) <= 1e-5
        assert all(tokens > 1 for _, tokens in shapes)
    assert differ(model, processor(TEXTS)) <= 1e-5


@pytest.mark.parametrize("config", [{"sliding_window": 1000}, {"model_type": "new"}], ids=str)
def test_an_unknown_language_model_has_none(config, retriever):
    model, _ = retriever("internvl", KEEP)
    for name, value in config.items():
        object.__setattr__(model.config.get_text_config(), name, value)
    use_shortcuts(model)
    assert model.shortcuts is None


def with_gradients(model, batch, **kwargs):
    """The states of a batch, and what a loss on them gives each parameter."""
    model.zero_grad()
    pooled = model(**batch, **kwargs).pooler_output
    (pooled * torch.linspace(-1, 1, pooled.numel()).view_as(pooled)).sum().backward()
    return pooled.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_mllm
@pytest.mark.parametrize("views", [None, VIEWS], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_has_the_same_gradients(name, views, checkpointed, build, messages):
    model, processor = build(name)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.double().train().requires_grad_(True)
    batch = processor([*messages, TEXTS[3]])  # on a CPU two groups of similar lengths
    fast, found = with_gradients(model, batch, views=views)
    with without_shortcuts(model):
        expected_states, expected = with_gradients(model, batch, views=views)
    assert (fast - expected_states).abs().max() <= 1e-6
    assert found.keys() == expected.keys() and all(gradient.abs().max() > 0 for gradient in expected.values())
    largest = max(gradient.abs().max() for gradient in expected.values())
    for parameter, gradient in expected.items():  # rotary angles are float32
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-6 * float(largest))


def test_training_pads_little(build):
    model, processor = build("qwen2_vl")
    model.train()
    model.norm.eval()
    random_state = torch.get_rng_state()
    long = "a long text " * 20
    batch = processor([long, "a red box", long, "a red bar", long, "blue box"])
    model(**batch)
    assert torch.equal(torch.get_rng_state(), random_state), "the test of a shortcut draws random numbers"
    assert model.training and model.text_model.layers[-1].training and not model.norm.training
    lengths = sorted(batch["attention_mask"].sum(1).tolist())
    with watched(model) as shapes:
        model(**batch)
        model.eval()(**batch)  # but with gradients
    groups = [[(3, length)] * (KEEP - 1) + [(3, 1)] for length in (lengths[2], lengths[5])]
    assert shapes == [*groups[0], *groups[1]] * 2


def turn_further(module, args, kwargs):
    if "readout" in kwargs:
        return args, kwargs | {"position_embeddings": tuple(each.flip(1) for each in kwargs["position_embeddings"])}


def drop_mask(module, args, kwargs):
    return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}


@every_mllm
@pytest.mark.parametrize(
    ("broken", "named"), [(turn_further, "last layer for the readout alone"), (drop_mask, "all views in one pass")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_one_is_off_with_one_warning(name, broken, named, dtype, build, pairs):
    model, processor = build(name, dtype=dtype)
    module = model.text_model if broken is drop_mask else model.text_model.layers[-1]
    module.register_forward_pre_hook(broken, with_kwargs=True)
    batches = [(processor(SHORT, instruction=INSTRUCTION), None), (processor(pairs), VIEWS)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, views in batches * 2:
            expected = plain(model, batch, views=views)
            assert (states(model, batch, views=views) - expected).abs().max() <= (
                1e-5 if dtype == torch.float32 else 0.5
            )
    found = [str(each.message) for each in caught if "shortcut" in str(each.message)]
    assert len(found) == 1 and named in found[0] and transformers.__version__ in found[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_no_break(attention, dtype, build, pairs, recwarn):
    model, processor = build("qwen3_vl", dtype=dtype)
    model.set_attn_implementation(attention)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        assert differ(model, processor(SHORT, instruction=INSTRUCTION)).float() < 0.2
        assert differ(model, processor(pairs), views=VIEWS).float() < 0.2
    assert not [each for each in recwarn if "shortcut" in str(each.message)]


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
    from conjoin.trainers.puma import PumaStage1Config, PumaStage1Trainer

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
