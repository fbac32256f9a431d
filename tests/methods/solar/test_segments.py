"""Segments against Algorithm 1 with a clustering for every cut."""

import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from conjoin.methods.solar import masking
from conjoin.methods.solar.masking import segment_patches


def images(count=24, patches=30, width=16):
    """A few regions each, with noise from none to much."""
    generator = torch.Generator().manual_seed(0)
    regions = torch.randn(count, 10, width, generator=generator, dtype=torch.float64)
    numbers = 1 + torch.arange(count)[:, None] % 10
    owners = (torch.rand(count, patches, generator=generator) * numbers).long()
    noise = torch.randn(count, patches, width, generator=generator, dtype=torch.float64)
    return (
        regions.gather(1, owners[..., None].expand(-1, -1, width)) + torch.linspace(0, 2, count)[:, None, None] * noise
    )


def algorithm_1(image, threshold=0.45, step=0.05, max_rounds=5, max_share=0.87, max_segments=5):
    """Its labels, and which ways the cut moved."""
    moves = []
    for _ in range(max_rounds):
        labels = fcluster(linkage(image.numpy(), "average", metric="cosine"), threshold, "distance")
        sizes = torch.bincount(torch.from_numpy(labels))[1:]
        if sizes.max() / len(image) > max_share:
            threshold -= step
            moves.append("down")
        elif len(sizes) > max_segments:
            threshold += step
            moves.append("up")
        else:
            break
    return torch.from_numpy(labels).long(), moves


def assert_same_partition(found, expected):
    assert torch.equal(found[:, None] == found, expected[:, None] == expected)
    assert found.unique().tolist() == list(range(int(found.max()) + 1))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_equals_clustering_anew_for_every_cut(block, monkeypatch):
    monkeypatch.setattr(masking, "IMAGES_PER_BLOCK", block)
    features, seen = images(), []
    for found, image in zip(segment_patches(features), features, strict=True):
        expected, moves = algorithm_1(image)
        assert_same_partition(found, expected)
        seen.append(tuple(moves))
    assert () in seen and ("up",) * 5 in seen and any("down" in moves for moves in seen)
    assert any(0 < len(moves) < 5 for moves in seen)


@pytest.mark.parametrize("settings", [(0.2, 0.1, 1, 0.5, 3), (0.6, 0.03, 9, 0.3, 2), (0.0, 0.3, 3, 1.0, 1)])
def test_every_setting_is_algorithm_1s(settings):
    features = images()
    for found, image in zip(segment_patches(features, *settings), features, strict=True):
        assert_same_partition(found, algorithm_1(image, *settings)[0])


def test_regions_are_found_whatever_their_norms():
    regions = torch.eye(4)[torch.tensor([[0, 1, 2, 3, 0, 1], [2, 2, 1, 1, 2, 0]])]
    labels = segment_patches((regions * torch.rand(2, 6, 1) * 9).bfloat16())
    assert labels.dtype == torch.long
    for found, region in zip(labels, regions.argmax(2), strict=True):
        assert_same_partition(found, region)


def test_degenerate_images():
    blank = segment_patches(torch.ones(2, 9, 4))
    assert blank.tolist() == [[0] * 9] * 2  # one segment at any cut
    zero = segment_patches(torch.zeros(1, 3, 4))
    assert sorted(zero[0].tolist()) == [0, 1, 2]
    assert segment_patches(torch.rand(3, 1, 4)).tolist() == [[0]] * 3
    assert segment_patches(torch.rand(0, 5, 4)).shape == (0, 5)
    assert_same_partition(segment_patches(torch.tensor([[[1.0, 0], [1, 0]]]))[0], torch.zeros(2))


def test_no_gradient_and_no_effect_of_autocast():
    features = images().float().requires_grad_()
    plain = segment_patches(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(segment_patches(features), plain)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"features has shape \(4, 3\), expected \(N, P, D\)"):
        segment_patches(torch.ones(4, 3))
    with pytest.raises(ValueError, match="max_rounds=0"):
        segment_patches(torch.ones(1, 4, 3), max_rounds=0)
    with pytest.raises(ValueError, match="must be finite"):
        segment_patches(torch.full((1, 4, 3), float("nan")))
