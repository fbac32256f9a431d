"""All views of an item in one pass of the language model equal one pass for each view."""

import pytest
import torch

from conjoin.data import PairCollator
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.mllm_retriever.prompt_rows import pack_views
from conjoin.processing import MllmRetrieverProcessor
from tiny_mllms import MLLMS

VIEWS = ("image", "text", "fused")


@pytest.fixture
def pairs(pictures):
    texts = ["a red apple", "green", "two words of text", "b"]
    return [{"image": picture, "text": text} for picture, text in zip(pictures, texts, strict=True)]


def load(folder, **config):
    model = MllmRetrieverModel.from_mllm(folder, 3, **config).double().train()
    ret_token = None if config.get("readout") == "last" else "[RET]"
    return model, MllmRetrieverProcessor.from_mllm(folder, ret_token=ret_token)


def passes(model):
    """A list that grows by the shape of the input of each pass of the language model."""
    seen = []
    model.text_model.register_forward_pre_hook(lambda m, a, k: seen.append(k["inputs_embeds"].shape), with_kwargs=True)
    return seen


def with_gradients(model, forward):
    model.zero_grad()
    states = forward()
    (states * torch.linspace(-1, 1, states.numel()).view_as(states).double()).sum().backward()
    return states.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, {"readout": "last"}, {"position_mode": "1d"}], ids=str)
@pytest.mark.parametrize("name", sorted(MLLMS))
def test_one_pass_equals_three(name, settings, mllm_checkpoints, pairs):
    model, processor = load(mllm_checkpoints(name)[0], **settings)
    items = [*pairs, {"text": "only a text"}, {"image": pairs[1]["image"]}]
    parts = [[{"image": p["image"]} if "image" in p else p for p in items],
             [{"text": p["text"]} if "text" in p else p for p in items], items]  # fmt: skip
    expected, gradients = with_gradients(
        model, lambda: torch.cat([model(**processor(part)).pooler_output for part in parts])
    )
    for side in ("right", "left"):
        processor.tokenizer.padding_side = side
        batch, seen = processor(items), passes(model)
        found, own = with_gradients(model, lambda batch=batch: model(**batch, views=VIEWS).pooler_output)
        assert len(seen) == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert own.keys() == gradients.keys()
        largest = max(gradient.abs().max() for gradient in gradients.values())
        for parameter, gradient in gradients.items():  # rotary angles are float32
            torch.testing.assert_close(own[parameter], gradient, rtol=0, atol=1e-6 * float(largest))
    tokens = seen[0][1]
    longest = {view: int(batch[mask].sum(1).max()) for view, mask in zip(
        VIEWS, ("image_view_mask", "text_view_mask", "attention_mask"), strict=True)}  # fmt: skip
    assert tokens < sum(longest.values())


def test_eager_attention_takes_one_pass(mllm_checkpoints, pairs):
    model, processor = load(mllm_checkpoints("qwen2_vl")[0])
    batch = processor(pairs)
    with torch.no_grad():
        expected = model(**batch, views=VIEWS).pooler_output
        model.text_model.set_attn_implementation("eager")
        seen = passes(model)
        torch.testing.assert_close(model(**batch, views=VIEWS).pooler_output, expected, rtol=0, atol=1e-5)
        assert len(seen) == 1


def test_what_follows_a_text_runs_once_for_each_view(mllm_checkpoints, pairs):
    model, processor = load(mllm_checkpoints("qwen2_vl")[0])
    text_first = [{"text": pair["text"], "image": pair["image"]} for pair in pairs]
    seen = passes(model)
    with torch.no_grad():
        found = model(**processor(text_first), views=VIEWS).pooler_output
        assert len(seen) == 3
        expected = [model(**processor([p[key] if key else p for p in text_first])).pooler_output
                    for key in ("image", "text", None)]  # fmt: skip
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-9)


def test_training_pairs_take_one_pass(mllm_checkpoints, pairs):
    model, processor = load(mllm_checkpoints("qwen2_vl")[0])
    seen = passes(model)
    model(**PairCollator(processor)([{"id": str(i), **pair} for i, pair in enumerate(pairs)])["pairs"], views=VIEWS)
    assert len(seen) == 1


def test_which_tokens_see_which():
    ids, rows = torch.arange(1, 7)[None], torch.zeros(1, 6, dtype=torch.long)
    first = torch.tensor([[1, 1, 1, 0, 0, 0]])
    second = torch.tensor([[1, 1, 0, 1, 1, 0]])
    packed = pack_views(ids, rows, [first, second])
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5]]  # the last is of no view
    assert packed.visible.int().tolist() == [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0],
                                              [1, 1, 0, 1, 1]]]  # fmt: skip
    assert packed.join([torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2, 3]])]).tolist() == [[0, 1, 2, 2, 3]]
    assert pack_views(ids, rows, [first, torch.tensor([[0, 1, 0, 1, 0, 0]])]) is None
