"""Patches through a vision tower: by a product, and few images at once, change nothing but the time."""

import copy

import pytest
import torch
from torch import nn

from conjoin.models.mllm_retriever import modeling_mllm_retriever
from conjoin.models.mllm_retriever.modeling_mllm_retriever import images_at_once, project_by_product

QWENS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@pytest.mark.parametrize("bias", [True, False])
def test_product_is_the_convolution(bias):
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=bias)
    module = nn.Sequential(copy.deepcopy(plain))
    project_by_product(module)
    patches = torch.randn(5, 3, 2, 4, 4)
    gradients = []
    for layer in (plain, module):
        output = layer(patches)
        assert output.shape == (5, 8, 1, 1, 1)
        output.square().sum().backward()
        gradients.append((output, *(parameter.grad for parameter in layer.parameters())))
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(*gradients, strict=True))
    assert module.state_dict().keys() == {f"0.{name}" for name in plain.state_dict()}


@pytest.mark.parametrize("name", QWENS)
@pytest.mark.parametrize("limit", [1, 2048])
def test_few_images_at_once_are_all_at_once(name, limit, retriever, messages, monkeypatch):
    monkeypatch.setattr(modeling_mllm_retriever, "PATCHES_AT_ONCE", limit)
    model, processor = retriever(name, 2)
    batch = processor(messages)
    pixels, grid = batch["pixel_values"][batch["pixel_attention_mask"].bool()], batch["image_grids"].flatten(0, 1)
    grid = grid[grid.prod(1) > 0]
    assert len(grid) > 1
    calls = []
    model.vision_model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    with torch.no_grad():
        found = model.run_vision_tower(pixels, grid)
        assert calls == (grid.prod(1).tolist() if limit == 1 else [len(pixels)])
        expected = model._image_tokens(pixels, grid)
    assert calls[-1] == len(pixels)
    pairs = zip([found.tokens, *found.deepstack], [expected.tokens, *expected.deepstack], strict=True)
    assert all((ours - theirs).abs().max() <= 1e-5 for ours, theirs in pairs)
    assert bool(found.deepstack) == (name == "qwen3_vl")


def test_groups_of_images():
    assert images_at_once([100, 1948, 1, 3000, 1, 2047, 2]) == [2, 1, 1, 2, 1]
