"""Global-to-local alignment: the formula, its statistics, padding and batches that lack something."""

import naive_losses as naive
import pytest
import torch
from naive_losses import assert_near, assert_same, leaf

from conjoin.losses import alignment as module, alignment_terms, global_to_local_alignment

IMAGE_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
TEXT_MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]]).bool()


def batch(count=4, width=6, dtype=torch.float64):
    """text_global, image_local, image_global, text_local."""
    shapes = [(count, width), (count, 5, width), (count, width), (count, 3, width)]
    return [leaf(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def align(*tensors, image_mask=IMAGE_MASK, text_mask=TEXT_MASK, margin=0.5, function=global_to_local_alignment):
    text_global, image_local, image_global, text_local = tensors
    return function(text_global, image_local, image_mask, image_global, text_local, text_mask, margin=margin)


@pytest.mark.parametrize("width", [6, 3])
@pytest.mark.parametrize("block", [1, 7, 2**22])
def test_loss_and_statistics_are_those_of_all_single_scores(width, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ENTRIES", block)
    tensors = batch(width=width)
    assert_same(align(*tensors), align(*tensors, function=naive.alignment), tensors)
    terms = align(*tensors, function=alignment_terms)
    text_global, image_local, image_global, text_local = tensors
    for found, mask, populations in (
        (terms.image, IMAGE_MASK, naive.alignment_scores(text_global, image_local, IMAGE_MASK, TEXT_MASK)),
        (terms.text, TEXT_MASK, naive.alignment_scores(image_global, text_local, TEXT_MASK, IMAGE_MASK)),
    ):
        for statistics, scores in zip((found.positive, found.negative), populations, strict=True):
            scores = torch.stack(scores).detach()
            assert statistics.n == len(scores) and not any(value.requires_grad for value in statistics)
            torch.testing.assert_close(statistics.mean, scores.mean())
            torch.testing.assert_close(statistics.std, scores.std(correction=0))
        torch.testing.assert_close(found.scores[mask], torch.stack(populations[0]).detach())
        assert not found.scores[~mask].any() and not found.scores.requires_grad


@pytest.mark.parametrize("count", [2, 60])
@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5])
def test_deviations_far_below_the_mean_are_exact_in_single_precision(count, spread):
    """E[x^2] - E[x]^2 knows no deviation below 1e-4; the threshold would be noise."""
    pooled = torch.ones(count, 40, dtype=torch.float64) + spread * leaf(count, 40).detach() / 3
    local = pooled[:1, None].repeat(count, 4, 1) + spread * leaf(count, 4, 40, seed=1).detach() / 3
    local[..., 20:] *= -1  # cosines near 0
    everywhere = torch.ones(count, 4).bool()
    scores = naive.alignment_scores(pooled, local, everywhere, everywhere)
    tensors = (pooled.float(), local.float(), everywhere) * 2
    for found, population in zip(alignment_terms(*tensors).image[1:], scores, strict=True):
        assert found.std.item() == pytest.approx(torch.stack(population).std(correction=0).item(), rel=0.02)


def test_closed_forms():
    same, apart, everywhere = torch.ones(3, 2, 4), torch.eye(3)[:, None].expand(3, 2, 3), torch.ones(3, 2).bool()
    for pooled, local, other, loss in (
        (same, same, same, 0.2),  # all pairs alike: the margin, twice
        (apart, apart, apart, 0.0),  # mean(S-) = 0, mean(S+) = 1
        (apart, apart, -apart, 1.1),
    ):
        found = global_to_local_alignment(pooled[:, 0], local, everywhere, other[:, 0], local, everywhere)
        assert found.item() == pytest.approx(loss, abs=1e-6)


def test_padding_may_hold_anything():
    expected = align(*batch(), function=alignment_terms)
    text_global, image_local, image_global, text_local = (tensor.detach().clone() for tensor in batch())
    image_local[~IMAGE_MASK], text_local[~TEXT_MASK] = float("nan"), 0.0
    image_local = torch.nn.functional.pad(image_local, (0, 0, 0, 2), value=float("inf")).requires_grad_()
    mask = torch.nn.functional.pad(IMAGE_MASK, (0, 2))
    found = align(text_global, image_local, image_global, text_local, image_mask=mask, function=alignment_terms)
    torch.testing.assert_close((found.loss, found.image.negative), (expected.loss, expected.image.negative))
    (gradient,) = torch.autograd.grad(found.loss, [image_local])
    assert gradient.isfinite().all() and not gradient[~mask].any() and gradient.abs().max() > 1e-3


def test_a_sample_without_an_image_takes_no_part():
    tensors, image_mask = batch(), IMAGE_MASK.clone()
    image_mask[2], tensors[2].data[2] = False, 0.0
    found = align(*tensors, image_mask=image_mask, function=alignment_terms)
    assert_same(found.loss, align(*tensors, image_mask=image_mask, function=naive.alignment), tensors)
    own, others = naive.alignment_scores(tensors[2], tensors[3], TEXT_MASK, image_mask)
    for statistics, scores in ((found.text.positive, own), (found.text.negative, others)):
        assert statistics.n == len(scores)
        torch.testing.assert_close(statistics.std, torch.stack(scores).std(correction=0))
    assert not found.text.scores[2].any()


@pytest.mark.parametrize(("count", "images", "texts"), [(1, True, True), (4, False, True), (4, True, False)])
def test_without_a_population_the_loss_is_zero(count, images, texts):
    tensors = batch(count)
    masks = {"image_mask": IMAGE_MASK[:count] & images, "text_mask": TEXT_MASK[:count] & texts}
    terms = align(*tensors, **masks, function=alignment_terms)
    assert terms.loss.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(terms.loss, tensors))
    for part in (terms.image, terms.text):
        assert part.negative.n == 0 and part.negative.mean == 0 and part.negative.std == 0
        assert part.positive.mean.isfinite() and part.positive.std.isfinite()


def test_low_precision_and_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in batch()]
        assert_near(align, lambda *exact: align(*exact, function=naive.alignment), tensors, 1e-2)


def test_errors_name_what_is_wrong():
    a, b, c, d = batch()
    b.data[1, 2] = 0.0
    for tensors, mask, message in (
        ((a, b, c, d), TEXT_MASK, r"mask of image_local has shape \(4, 3\), expected \(4, 5\)"),
        ((a, b, c, d[:3]), IMAGE_MASK, r"text_local has shape \(3, 3, 6\), expected \(4, \*, 6\)"),
        ((a, b, c[:3], d), IMAGE_MASK, r"image_global has shape \(3, 6\), expected \(4, 6\)"),
        ((a, b, c, d), IMAGE_MASK | True, r"image_local\[\(1, 2\)\] has norm 0"),
    ):
        with pytest.raises(ValueError, match=message):
            align(*tensors, image_mask=mask)
