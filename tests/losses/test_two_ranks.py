"""Two gloo ranks against one process with the full batch, in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from conjoin.ops import gather_rows, gather_with_gradient as gather, local_positions
from naive_losses import leaf, scalar
from torch.nn.parallel import DistributedDataParallel

from conjoin.losses import ContrastiveLoss, GclLoss, gcl, info_nce, mac, multi_positive, symmetric_info_nce
from conjoin.losses.gcl_loss import GclOptions, GclRows, gcl_of_rows

pytestmark = pytest.mark.slow

ROWS = 6
MODALITY = torch.tensor([0, 1, 2, 0, 1, 1])
IDS = torch.tensor([0, 1, 2, 0, 4, 1])
POSITIVE_MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [0, 0], [0, 1]], dtype=torch.bool)
PRESENT = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=torch.bool)

OPTIONS = GclOptions(exclude_self=False, exclude_same_modality=True, exclude_other_positive=True)


def inputs():
    """Queries, candidates, a third view, positives, negatives and the temperature of the full batch."""
    shapes = [(ROWS, 5)] * 3 + [(ROWS, 2, 5)] * 2
    return [leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)] + [scalar(0.2)]


FULL = {
    "info_nce": lambda q, c, f, p, n, t, s: info_nce(q, c, t),
    "info_nce_ids": lambda q, c, f, p, n, t, s: info_nce(q, c, t, candidate_ids=IDS),
    "symmetric": lambda q, c, f, p, n, t, s: symmetric_info_nce(q, c, t),
    "mac": lambda q, c, f, p, n, t, s: mac(q, c, MODALITY, t, t / 2),
    "multi_positive": lambda q, c, f, p, n, t, s: multi_positive(q, p, n, t, POSITIVE_MASK),
    "gcl": lambda q, c, f, p, n, t, s: gcl(q, c, f, t),
    "gcl_flags": lambda q, c, f, p, n, t, s: gcl_of_rows(GclRows((q, c, f), IDS), t, OPTIONS),
    "gcl_present": lambda q, c, f, p, n, t, s: gcl_of_rows(GclRows((q, c, f), None, PRESENT), t, GclOptions()),
}
"""Every loss on one process; the last argument is the slice of rows a rank holds."""


def positions():
    return local_positions(ROWS // 2, torch.device("cpu"))


LOCAL = {
    "info_nce": lambda q, c, f, p, n, t, s: info_nce(q, gather(c), t, positive_indices=positions()),
    "info_nce_ids": lambda q, c, f, p, n, t, s: info_nce(
        q, gather(c), t, positive_indices=positions(), candidate_ids=gather(IDS[s])
    ),
    "symmetric": lambda q, c, f, p, n, t, s: symmetric_info_nce(
        q, c, t, gathered_a=gather(q), gathered_b=gather(c), positive_indices=positions()
    ),
    "mac": lambda q, c, f, p, n, t, s: mac(q, gather(c), gather(MODALITY[s]), t, t / 2, positive_indices=positions()),
    "multi_positive": lambda q, c, f, p, n, t, s: multi_positive(
        q, p, n, t, POSITIVE_MASK[s], gathered=gather_rows(q, present=POSITIVE_MASK[s].any(1))
    ),
    "gcl": lambda q, c, f, p, n, t, s: gcl_of_rows(GclRows((q, c, f)), t, GclOptions(), gather_rows(q, c, f)),
    "gcl_flags": lambda q, c, f, p, n, t, s: gcl_of_rows(
        GclRows((q, c, f), IDS[s]), t, OPTIONS, gather_rows(q, c, f, ids=IDS[s])
    ),
    "gcl_present": lambda q, c, f, p, n, t, s: gcl_of_rows(
        GclRows((q, c, f), None, PRESENT[s]), t, GclOptions(), gather_rows(q, c, f, present=PRESENT[s])
    ),
}
MODULES = {
    "contrastive": lambda: ContrastiveLoss(0.2),
    "gcl": lambda: GclLoss(0.2),
    "gcl_lacking": lambda: GclLoss(0.2),
}


class Trained(torch.nn.Module):
    """An encoder and a loss behind one forward, as the trainers have it."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(5, 4)
        self.loss = loss

    def forward(self, ids, options, **views):
        embedded = self.encoder(torch.cat(list(views.values()))).chunk(len(views))
        return self.loss(**dict(zip(views, embedded, strict=True)), ids=ids, **options)


def train_step(name, rows=None):
    """Loss terms and parameter gradients of one module on some rows of the full batch."""
    model = Trained(MODULES[name]()).double()
    parameters = list(model.parameters())
    if rows is None:
        rows = slice(None)
    else:
        model = DistributedDataParallel(model)
    roles = ("image", "text", "fused") if name.startswith("gcl") else ("image", "text")
    present = torch.tensor([[1, 1, 1]] * 4 + [[0, 1, 0]] * 2, dtype=torch.bool)[rows]  # rank 0 lacks nothing
    options = {"present": present} if name == "gcl_lacking" and not present.all() else {}
    views = {role: view.detach()[rows] for role, view in zip(roles, inputs(), strict=False)}
    terms = model(IDS[rows], options, **views)
    sum(value for key, value in terms.items() if key.endswith("_loss")).backward()
    return {key: value.detach() for key, value in terms.items()}, [p.grad for p in parameters]


def differentiate(loss, tensors, rows):
    """The loss, and its gradients with respect to everything (None as zero), which lies in memory column by column."""
    leaves = [tensor.detach()[rows].mT.contiguous().mT if tensor.ndim else tensor.detach() for tensor in tensors]
    leaves = [tensor.clone().requires_grad_() for tensor in leaves]
    value = loss(*leaves, rows)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def run_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    results = {"world_size": dist.get_world_size()}
    for name, loss in LOCAL.items():
        results["loss", name] = differentiate(loss, inputs(), rows)
    for name in MODULES:
        results["module", name] = train_step(name, rows)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two ranks computed."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    torch.multiprocessing.spawn(run_rank, args=(folder,), nprocs=2)
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", LOCAL)
def test_the_mean_over_ranks_is_the_full_batch(ranks, name):
    """Value, gradient of every embedding (averaged as DDP averages parameters) and of the temperature."""
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    value, gradients = differentiate(FULL[name], inputs(), slice(0, ROWS))
    values, parts = zip(*(rank["loss", name] for rank in ranks), strict=True)
    assert values[0] != values[1]
    assert (sum(values) / 2 - value).abs() <= 1e-10
    assert gradients[0].abs().max() > 1e-3 and gradients[-1].abs() > 1e-3
    for full, first, second in zip(gradients, *parts, strict=True):
        together = torch.cat([first, second]) if full.ndim else first + second
        assert (together / 2 - full).abs().max() <= 1e-10


@pytest.mark.parametrize("name", MODULES)
def test_modules_under_ddp_equal_one_process(ranks, name):
    terms, gradients = train_step(name)
    assert min(gradient.abs().max() for gradient in gradients) > 1e-4
    for rank in ranks:
        found, averaged = rank["module", name]
        for one, other in zip(averaged, gradients, strict=True):
            assert (one - other).abs().max() <= 1e-10
    assert set(found) == set(terms)
    for key, value in terms.items():
        mean = sum(rank["module", name][0][key].double() for rank in ranks) / 2
        assert mean.item() == pytest.approx(value.item(), abs=1e-6 if key == "masked_negatives" else 1e-10)
