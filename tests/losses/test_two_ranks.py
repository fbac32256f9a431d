"""Two gloo ranks against one process with the full batch, in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from naive_losses import leaf, scalar

from conjoin import losses
from conjoin.losses import ContrastiveLoss, GclLoss, gather_rows, gcl

pytestmark = pytest.mark.slow

ROWS = 6
MODALITY = torch.tensor([0, 1, 2, 0, 1, 1])
IDS = torch.tensor([0, 1, 2, 0, 4, 1])
POSITIVE_MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [0, 0], [0, 1]], dtype=torch.bool)
PRESENT = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=torch.bool)
LACKING = torch.tensor([[1, 1, 1]] * 4 + [[0, 1, 0]] * 2, dtype=torch.bool)  # rank 0 lacks nothing


def inputs():
    """Queries, candidates, a third view, positives and the temperature of the full batch."""
    return [*(leaf(ROWS, 5, seed=seed) for seed in range(3)), leaf(ROWS, 2, 5, seed=3), scalar(0.2)]


def some(*views, rows, ids=False, present=None):
    return gather_rows(*views, ids=IDS[rows] if ids else None, present=None if present is None else present[rows])


def to_candidates(name, q, c, rows, *temperatures):
    """InfoNCE, or MAC, to the candidates of all ranks."""
    (columns, modality), ids, _, places = gather_rows(c, MODALITY[rows], ids=IDS[rows])
    given = (modality,) if name == "mac" else ()
    return getattr(losses, name)(q, columns, *given, *temperatures, positive_indices=places, candidate_ids=ids)


def module(kind, *views, rows):
    """A module; rank 0, whose rows lack nothing, does not say so."""
    given = {} if kind is ContrastiveLoss or LACKING[rows].all() else {"present": LACKING[rows]}
    return next(iter(kind(0.2).double()(*views, IDS[rows], **given).values()))


LOSSES = {
    "info_nce": lambda q, c, f, p, t, rows: to_candidates("info_nce", q, c, rows, t),
    "mac": lambda q, c, f, p, t, rows: to_candidates("mac", q, c, rows, t, t / 2),
    "symmetric": lambda q, c, f, p, t, rows: losses.symmetric_info_nce(q, c, t, gathered=some(q, c, rows=rows, ids=1)),
    "multi_positive": lambda q, c, f, p, t, rows: losses.multi_positive(
        q, p, p[:, :0], t, POSITIVE_MASK[rows], gathered=some(q, rows=rows, ids=True, present=POSITIVE_MASK.any(1))
    ),
    "gcl": lambda q, c, f, p, t, rows: gcl(q, c, f, t, gathered=some(q, c, f, rows=rows)),
    "flags": lambda q, c, f, p, t, rows: gcl(q, c, f, t, False, True, True, gathered=some(q, c, f, rows=rows, ids=1)),
    "present": lambda q, c, f, p, t, rows: gcl(q, c, f, t, gathered=some(q, c, f, rows=rows, present=PRESENT)),
    "ContrastiveLoss": lambda q, c, f, p, t, rows: module(ContrastiveLoss, q, c, rows=rows),
    "GclLoss": lambda q, c, f, p, t, rows: module(GclLoss, q, c, f, rows=rows),
    "mean_over_devices": lambda q, c, f, p, t, rows: losses.mean_over_devices(q.sum(1) / t, PRESENT[rows, 0]),
}
"""Every loss on the given rows, with the candidates of all ranks."""


def differentiate(loss, rows=slice(None)):
    """The loss, and its gradients with respect to everything (None as zero), which lies in memory column by column."""
    leaves = [x.detach()[rows].mT.contiguous().mT if x.ndim else x.detach() for x in inputs()]
    leaves = [x.clone().requires_grad_() for x in leaves]
    value = loss(*leaves, rows)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def statistics(reduced, rows=slice(None)):
    """Number, mean and scatter of both populations of scores of both modalities."""
    q, c, _, p, _ = (x.detach()[rows] if x.ndim else x for x in inputs())
    tokens = (q, p, POSITIVE_MASK[rows] | True, c, p + 1, POSITIVE_MASK[rows])
    terms = losses.alignment_terms(*tokens, reduce_scores_across_devices=reduced)
    return torch.stack([torch.stack([*part.positive, *part.negative]) for part in terms[1:]])


def run_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    results = {name: differentiate(loss, rows) for name, loss in LOSSES.items()}
    results["masked"] = ContrastiveLoss()(torch.eye(3), torch.eye(3), IDS[rows])["masked_negatives"]
    results["statistics"] = statistics(False, rows), statistics(True, rows)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two ranks computed."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    torch.multiprocessing.spawn(run_rank, args=(folder,), nprocs=2)
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_over_ranks_is_the_full_batch(ranks, name):
    """Value, gradient of every embedding (averaged as DDP averages parameters) and of the temperature."""
    value, gradients = differentiate(LOSSES[name])
    values, parts = zip(*(rank[name] for rank in ranks), strict=True)
    assert values[0] != values[1] and (sum(values) / 2 - value).abs() <= 1e-10
    assert gradients[0].abs().max() > 1e-3 and (gradients[-1].abs() > 1e-3 or "Loss" in name)
    for full, first, second in zip(gradients, *parts, strict=True):
        together = torch.cat([first, second]) if full.ndim else first + second
        assert (together / 2 - full).abs().max() <= 1e-10


def test_masked_negatives_are_those_of_all_ranks(ranks):
    whole = ContrastiveLoss()(torch.eye(6), torch.eye(6), IDS)["masked_negatives"]
    assert [rank["masked"] for rank in ranks] == [whole, whole] and whole == pytest.approx(4 / 6)


def test_statistics_of_scores_are_joined_without_the_scores(ranks):
    own, joined = zip(*(rank["statistics"] for rank in ranks), strict=True)
    (n, mean, scatter), (m, other, more) = (each.unflatten(1, (2, 3)).unbind(2) for each in own)
    assert (mean - other).abs().max() > 0.01
    middle = (n * mean + m * other) / (n + m)
    spread = scatter + more + n * (mean - middle).square() + m * (other - middle).square()
    for found in joined:
        torch.testing.assert_close(found.unflatten(1, (2, 3)), torch.stack([n + m, middle, spread], dim=2))
    assert torch.equal(statistics(False), statistics(True))  # one process
