"""The losses as their papers write them: whole matrices and loops over rows, called like those of the package."""

import math

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.losses import Gathered


def cosines(a, b):
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def labels(ids, count):
    return list(range(count)) if ids is None else ids.tolist()


def info_nce(queries, candidates, temperature, *, positive_indices=None, candidate_ids=None, margin=None):
    places, ids = labels(positive_indices, len(queries)), labels(candidate_ids, len(candidates))
    ids = [each if isinstance(each, list) else [each] for each in ids]
    matrix, losses = cosines(queries, candidates), []
    for i, own in enumerate(places):
        scores = [matrix[i, own]]
        for j in range(len(candidates)):
            is_other = all(one != other for one, other in zip(ids[j], ids[own], strict=True))
            if is_other and (margin is None or matrix[i, j] <= matrix[i, own] - margin):
                scores.append(matrix[i, j])
        losses.append((torch.stack(scores) / temperature).logsumexp(0) - matrix[i, own] / temperature)
    return torch.stack(losses).mean()


def soft_labels(queries, candidates, scores, temperature, score_temperature=1.0):
    total = 0
    for query, some, judged in zip(queries, candidates, scores, strict=True):
        found = (cosines(query[None], some)[0] / temperature).softmax(0)
        wanted = [math.exp(score / score_temperature) for score in judged.tolist()]
        wanted = [each / sum(wanted) for each in wanted]
        total = total + sum(share * (math.log(share) - p.log()) for share, p in zip(wanted, found, strict=True))
    return total / len(queries)


def mac(queries, candidates, modality, temperature, hard_temperature, *, positive_indices=None, candidate_ids=None):
    places, ids = labels(positive_indices, len(queries)), labels(candidate_ids, len(candidates))
    matrix, losses = cosines(queries, candidates), []
    for i, own in enumerate(places):
        scores = [
            matrix[i, j] / (hard_temperature if modality[j] == modality[own] else temperature)
            for j in range(len(candidates))
            if j == own or ids[j] != ids[own]
        ]
        losses.append(torch.stack(scores).logsumexp(0) - matrix[i, own] / hard_temperature)
    return torch.stack(losses).mean()


def symmetric_info_nce(a, b, temperature, *, gathered=None):
    ids = gathered and gathered.ids
    return (info_nce(a, b, temperature, candidate_ids=ids) + info_nce(b, a, temperature, candidate_ids=ids)) / 2


def multi_positive(
    anchors, positives, negatives, temperature, positive_mask=None, negative_mask=None, *, gathered=None
):
    ids, losses = labels(gathered and gathered.ids, len(anchors)), []
    for i, anchor in enumerate(anchors):
        pulled = [p for k, p in enumerate(positives[i]) if positive_mask is None or positive_mask[i, k]]
        pushed = [n for k, n in enumerate(negatives[i]) if negative_mask is None or negative_mask[i, k]]
        pushed += [other for j, other in enumerate(anchors) if ids[j] != ids[i]]
        if pulled:
            scores = cosines(anchor[None], torch.stack(pulled + pushed))[0] / temperature
            losses.append(scores.logsumexp(0) - scores[: len(pulled)].logsumexp(0))
    return torch.stack(losses).mean()


def gcl(image, text, fused, temperature, no_self=True, no_same=False, no_third=False, *, gathered=None):
    views = {"image": image, "text": text, "fused": fused}
    return gcl_views(views, temperature, no_self, no_same, no_third, gathered=gathered)


def gcl_views(views, temperature, no_self=True, no_same=False, no_third=False, *, weights=None, gathered=None):
    vectors, losses, shares = list(views.values()), [], []
    number, count, weights = len(vectors), len(vectors[0]), weights or [1] * len(vectors)
    _, ids, present, _ = gathered or Gathered(vectors)
    ids = labels(ids, count)
    present = torch.ones(count, number).bool() if present is None else present
    scores = [[cosines(x, y) / temperature for y in vectors] for x in vectors]
    for a, b, j in [(a, b, j) for a in range(number) for b in range(number) for j in range(count) if a != b]:
        if present[j, a] and present[j, b]:
            denominator = []
            for m, k in [(m, k) for m in range(number) for k in range(count)]:
                left_out = not present[k, m] or (m == a and no_same) or (k != j and ids[k] == ids[j])
                if k == j:
                    left_out = left_out or (m == a and no_self) or (m not in (a, b) and no_third)
                if not left_out:
                    denominator.append(scores[a][m][j, k])
            losses.append(torch.stack(denominator).logsumexp(0) - scores[a][b][j, j])
            shares.append(weights[a] * weights[b])
    return sum(share * loss for share, loss in zip(shares, losses, strict=True)) / sum(shares)


def leaf(*shape, seed=0, dtype=torch.float64):
    """Raw embeddings of unequal norms, with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def scalar(value, dtype=torch.float64):
    """A temperature to learn."""
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def assert_same(found, expected, inputs, tolerance=1e-10):
    """Equal in value and in every gradient, none of which may be zero."""
    assert found.shape == () and math.isfinite(found.item())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    mine, theirs = (torch.autograd.grad(loss, inputs) for loss in (found, expected))
    for grad, reference in zip(mine, theirs, strict=True):
        assert reference.abs().max() > 1e-5
        torch.testing.assert_close(grad, reference, rtol=0, atol=tolerance)


def assert_near(loss, reference, inputs, tolerance):
    """In low precision near the reference in float64, in value and in every gradient, which has its input's dtype."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = loss(*inputs), reference(*exact)
    assert found.dtype == torch.float32 and math.isclose(found.item(), expected.item(), rel_tol=1e-5)
    grads = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, exact)
    for tensor, grad, right in zip(inputs, *grads, strict=True):
        assert grad.dtype == tensor.dtype and right.norm() > 1e-3
        assert (grad - right).norm() < tolerance * right.norm()


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def alignment_scores(globals_, local, mask, global_mask):
    """All single scores of matching and of other pairs."""
    positive, negative = [], []
    for i in range(len(globals_)):
        for j in range(len(local)):
            for k in range(local.shape[1]):
                if mask[j, k] and global_mask[i].any():
                    score = F.cosine_similarity(globals_[i], local[j, k], dim=0)
                    (positive if i == j else negative).append(score)
    return positive, negative


def alignment(text_global, image_local, image_mask, image_global, text_local, text_mask, margin=0.1):
    total = 0
    for globals_, local, mask, global_mask in (
        (text_global, image_local, image_mask, text_mask),
        (image_global, text_local, text_mask, image_mask),
    ):
        positive, negative = alignment_scores(globals_, local, mask, global_mask)
        total = total + (torch.stack(negative).mean() + margin - torch.stack(positive).mean()).clamp(min=0)
    return total


def pearson(a, b):
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def local_distillation(student, teacher, mask):
    samples = []
    for x, y, kept in zip(student, teacher, mask, strict=True):
        x, y = x[kept], y[kept]
        tokens = []
        for k in range(len(x)):
            others = [index for index in range(len(x)) if index != k]
            a, b = cosines(x[k : k + 1], x[others])[0], cosines(y[k : k + 1], y[others])[0]
            if len(x) >= 3 and a.std() > 1e-9 and b.std() > 1e-9:
                tokens.append(pearson(a, b))
        if tokens:
            samples.append(torch.stack(tokens).mean())
    return 1 - torch.stack(samples).mean()


def global_distillation(student, teacher):
    pairs = ~torch.eye(len(student), dtype=torch.bool)
    return 1 - pearson(cosines(student, student)[pairs], cosines(teacher, teacher.detach())[pairs])
