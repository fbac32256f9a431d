"""Global-to-local alignment: the formula, its statistics, padding and batches that lack something."""

import naive_losses as naive
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from naive_losses import assert_same, leaf

from conjoin.losses import ScoreStatistics, alignment as module, alignment_terms, global_to_local_alignment

IMAGE_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
TEXT_MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]]).bool()


def batch(count=4, width=6, dtype=torch.float64):
    """text_global, image_local, image_global, text_local."""
    shapes = [(count, width), (count, 5, width), (count, width), (count, 3, width)]
    return [leaf(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def align(tensors, image_mask=IMAGE_MASK, text_mask=TEXT_MASK, margin=0.5, function=global_to_local_alignment):
    text_global, image_local, image_global, text_local = tensors
    return function(text_global, image_local, image_mask, image_global, text_local, text_mask, margin)


@pytest.mark.parametrize("width", [6, 3])
def test_equals_the_loop_over_single_scores(width):
    tensors = batch(width=width)
    assert_same(align(tensors), align(tensors, function=naive.alignment), tensors)


@pytest.mark.parametrize("width", [6, 3])
@pytest.mark.parametrize("block", [1, 7, 2**22])
def test_statistics_are_those_of_all_single_scores(width, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ENTRIES", block)
    tensors = batch(width=width)
    terms = align(tensors, function=alignment_terms)
    text_global, image_local, image_global, text_local = tensors
    directions = {
        "image": (terms.image, naive.alignment_scores(text_global, image_local, IMAGE_MASK, TEXT_MASK)),
        "text": (terms.text, naive.alignment_scores(image_global, text_local, TEXT_MASK, IMAGE_MASK)),
    }
    for found, populations in directions.values():
        for statistics, scores in zip((found.positive, found.negative), populations, strict=True):
            scores = torch.stack(scores).detach()
            assert statistics.n == len(scores)
            torch.testing.assert_close(statistics.mean, scores.mean())
            torch.testing.assert_close(statistics.scatter, (scores - scores.mean()).square().sum())
            torch.testing.assert_close(statistics.std, scores.std(correction=0))
            assert not any(value.requires_grad for value in statistics)
    torch.testing.assert_close(terms.image.scores[IMAGE_MASK], torch.stack(directions["image"][1][0]).detach())
    torch.testing.assert_close(terms.text.scores[TEXT_MASK], torch.stack(directions["text"][1][0]).detach())
    assert terms.image.scores[~IMAGE_MASK].abs().max() == 0
    assert not terms.image.scores.requires_grad


@pytest.mark.parametrize(("count", "width"), [(2, 40), (6, 40), (60, 40)])
@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5])
def test_deviations_far_below_the_mean_are_exact_in_single_precision(count, width, spread):
    """E[x^2] - E[x]^2 knows no deviation below 1e-4; the threshold would be noise."""
    generator = torch.Generator().manual_seed(0)
    pooled = torch.nn.functional.pad(torch.ones(count, 1), (0, width - 1))
    pooled[:, 1:] = 0.1 * torch.randn(count, width - 1, generator=generator)
    pooled[1:] = pooled[0] + spread * torch.randn(count - 1, width, generator=generator)
    local = pooled[:1, None] + 5 * torch.nn.functional.pad(torch.ones(count, 4, 1), (width - 1, 0))
    local = local + spread * torch.randn(local.shape, generator=generator)
    everywhere = torch.ones(count, 4).bool()
    found = alignment_terms(pooled, local, everywhere, pooled, local, everywhere).image
    exact = alignment_terms(*(x.double() if x.is_floating_point() else x for x in (
        pooled, local, everywhere, pooled, local, everywhere
    ))).image  # fmt: skip
    scores = naive.alignment_scores(pooled.double(), local.double(), everywhere, everywhere)
    for single, double, population in zip(found[1:], exact[1:], scores, strict=True):
        std = torch.stack(population).std(correction=0)
        assert double.std.item() == pytest.approx(std.item(), rel=1e-9) and 0.01 * spread < std < spread
        assert single.std.item() == pytest.approx(std.item(), rel=0.02)  # single scores are rounded to 3e-8 themselves


def test_closed_forms():
    same = torch.ones(3, 2, 4)
    everywhere = torch.ones(3, 2).bool()
    loss = global_to_local_alignment(same[:, 0], same, everywhere, same[:, 0], same, everywhere, 0.1)
    assert loss.item() == pytest.approx(0.2, abs=1e-6)  # all pairs alike: the margin, twice
    apart = torch.eye(3)[:, None].expand(3, 2, 3)
    loss = global_to_local_alignment(apart[:, 0], apart, everywhere, apart[:, 0], apart, everywhere, 0.1)
    assert loss.item() == 0  # mean(S-) = 0, mean(S+) = 1
    loss = global_to_local_alignment(apart[:, 0], apart, everywhere, -apart[:, 0], apart, everywhere, 0.1)
    assert loss.item() == pytest.approx(1.1)


def test_padding_may_hold_anything():
    tensors = batch()
    expected = align(tensors, function=alignment_terms)
    text_global, image_local, image_global, text_local = (tensor.detach().clone() for tensor in tensors)
    image_local[~IMAGE_MASK], text_local[~TEXT_MASK] = float("nan"), 0.0
    image_local = torch.nn.functional.pad(image_local, (0, 0, 0, 2), value=float("inf")).requires_grad_()
    masks = torch.nn.functional.pad(IMAGE_MASK, (0, 2)), TEXT_MASK
    found = align([text_global, image_local, image_global, text_local], *masks, function=alignment_terms)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.image.negative, expected.image.negative)
    (gradient,) = torch.autograd.grad(found.loss, [image_local])
    assert gradient.isfinite().all() and gradient[~masks[0]].abs().max() == 0 and gradient.abs().max() > 1e-3


def test_a_sample_without_an_image_takes_no_part():
    tensors = batch()
    image_mask = IMAGE_MASK.clone()
    image_mask[2] = False
    tensors[2].data[2] = 0.0
    found = align(tensors, image_mask, function=alignment_terms)
    assert_same(found.loss, align(tensors, image_mask, function=naive.alignment), tensors)
    assert found.text.scores[2].abs().max() == 0
    assert found.text.positive.n == TEXT_MASK.sum() - TEXT_MASK[2].sum()


@pytest.mark.parametrize("case", ["one sample", "no image", "no text", "nothing"])
def test_without_a_population_the_loss_is_zero(case):
    tensors = batch(count=1 if case == "one sample" else 4)
    image_mask, text_mask = IMAGE_MASK[: len(tensors[0])].clone(), TEXT_MASK[: len(tensors[0])].clone()
    if case in ("no image", "nothing"):
        image_mask[:] = False
    if case in ("no text", "nothing"):
        text_mask[:] = False
    terms = align(tensors, image_mask, text_mask, function=alignment_terms)
    assert terms.loss.item() == 0
    assert all(gradient.abs().max() == 0 for gradient in torch.autograd.grad(terms.loss, tensors))
    for part in (terms.image, terms.text):
        assert part.negative.n == 0 and part.negative.mean == 0 and part.negative.std == 0
        assert part.positive.mean.isfinite() and part.positive.std.isfinite()


def test_identical_pairs_have_finite_deviations():
    same = torch.full((4, 3, 7), 0.3, requires_grad=True)
    everywhere = torch.ones(4, 3).bool()
    terms = alignment_terms(same[:, 0], same, everywhere, same[:, 1], same, everywhere)
    assert terms.loss.item() == pytest.approx(0.2, abs=1e-5)
    assert 0 <= terms.image.positive.std < 1e-6 and 0 <= terms.text.negative.std < 1e-6
    assert torch.autograd.grad(terms.loss, same)[0].isfinite().all()


def test_low_precision_and_autocast():
    exact = batch()
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    reference = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        found = align(tensors, function=alignment_terms)
    expected = align(reference, function=naive.alignment)
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, right in zip(
        torch.autograd.grad(found.loss, tensors), torch.autograd.grad(expected, reference), strict=True
    ):
        assert right.norm() > 1e-3 and (mine - right).norm() < 1e-2 * right.norm()


def test_errors_name_what_is_wrong():
    tensors = batch()
    with pytest.raises(ValueError, match=r"mask of image_local has shape \(4, 3\), expected \(4, 5\)"):
        align(tensors, TEXT_MASK)
    with pytest.raises(ValueError, match=r"text_local has shape \(3, 3, 6\), expected \(4, \*, 6\)"):
        align([*tensors[:3], tensors[3][:3]])
    with pytest.raises(ValueError, match=r"image_global has shape \(3, 6\), expected \(4, 6\)"):
        align([*tensors[:2], tensors[2][:3], tensors[3]])
    tensors[1].data[1, 2] = 0.0
    with pytest.raises(ValueError, match=r"image_local\[\(1, 2\)\] has norm 0"):
        align(tensors)


def _run_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    rows = slice(2 * rank, 2 * rank + 2)
    text_global, image_local, image_global, text_local = (tensor.detach()[rows] for tensor in batch())
    given = (text_global, image_local, IMAGE_MASK[rows], image_global, text_local, TEXT_MASK[rows], 0.5)
    results = [alignment_terms(*given, reduce_scores_across_devices=reduced) for reduced in (False, True)]
    torch.save([_plain(terms) for terms in results], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _plain(terms):
    return {
        "loss": terms.loss,
        "scores": terms.image.scores,
        "statistics": torch.stack([torch.stack([*part.positive, *part.negative]) for part in terms[1:]]),
    }


@pytest.mark.slow
def test_statistics_of_two_ranks_are_those_of_all_their_scores(tmp_path):
    torch.multiprocessing.spawn(_run_rank, args=(str(tmp_path),), nprocs=2)
    (own0, both0), (own1, both1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (own0["statistics"] - own1["statistics"]).abs().max() > 0.1
    expected = []
    tensors = [tensor.detach() for tensor in batch()]
    for globals_, local, mask, other in (
        (tensors[0], tensors[1], IMAGE_MASK, TEXT_MASK),
        (tensors[2], tensors[3], TEXT_MASK, IMAGE_MASK),
    ):
        ranks = [
            naive.alignment_scores(*(part[rows] for part in (globals_, local, mask, other)))
            for rows in (slice(0, 2), slice(2, 4))
        ]
        for populations in zip(*ranks, strict=True):
            scores = torch.stack([score for population in populations for score in population])
            expected += [scores.new_tensor(len(scores)), scores.mean(), scores.var(correction=0) * len(scores)]
    for both, own in ((both0, own0), (both1, own1)):
        torch.testing.assert_close(both["statistics"].flatten(), torch.stack(expected))
        assert torch.equal(both["loss"], own["loss"]) and torch.equal(both["scores"], own["scores"])


def test_reducing_on_one_process_changes_nothing():
    text_global, image_local, image_global, text_local = batch()
    given = (text_global, image_local, IMAGE_MASK, image_global, text_local, TEXT_MASK)
    assert isinstance(alignment_terms(*given).image.positive, ScoreStatistics)
    plain, reduced = (_plain(alignment_terms(*given, reduce_scores_across_devices=flag)) for flag in (False, True))
    assert all(torch.equal(plain[key], reduced[key]) for key in plain)
