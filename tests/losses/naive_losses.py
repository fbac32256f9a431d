"""The losses as their papers write them: whole matrices and loops over rows. What the package's are tested against."""

import math

import torch
import torch.nn.functional as F

MODALITIES = ("image", "text", "fused")


def cosines(a, b):
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def info_nce(queries, candidates, temperature, places=None, ids=None, hard_temperature=None, modality=None):
    places = range(len(queries)) if places is None else places.tolist()
    ids = list(range(len(candidates))) if ids is None else ids.tolist()
    matrix, losses = cosines(queries, candidates), []
    for i, own in enumerate(places):
        scores = []
        for j in range(len(candidates)):
            same_id = ids[j] == ids[own]
            if j != own and same_id:
                continue
            hard = modality is not None and modality[j] == modality[own]
            scores.append(matrix[i, j] / (hard_temperature if hard else temperature))
        hard = modality is not None
        losses.append(torch.stack(scores).logsumexp(0) - matrix[i, own] / (hard_temperature if hard else temperature))
    return torch.stack(losses).mean()


def mac(queries, candidates, modality, temperature, hard_temperature, places=None, ids=None):
    return info_nce(queries, candidates, temperature, places, ids, hard_temperature, modality)


def multi_positive(anchors, positives, negatives, temperature, positive_mask=None, negative_mask=None, ids=None):
    ids = list(range(len(anchors))) if ids is None else ids.tolist()
    losses = []
    for i, anchor in enumerate(anchors):
        pulled = [p for k, p in enumerate(positives[i]) if positive_mask is None or positive_mask[i, k]]
        pushed = [n for k, n in enumerate(negatives[i]) if negative_mask is None or negative_mask[i, k]]
        pushed += [other for j, other in enumerate(anchors) if ids[j] != ids[i]]
        if pulled:
            scores = cosines(anchor[None], torch.stack(pulled + pushed))[0] / temperature
            losses.append(scores.logsumexp(0) - scores[: len(pulled)].logsumexp(0))
    return torch.stack(losses).mean()


def gcl(
    image,
    text,
    fused,
    temperature,
    exclude_self=True,
    exclude_same_modality=False,
    exclude_other_positive=False,
    pairs=None,
    present=None,
    ids=None,
):
    if pairs is None:
        pairs = [(a, b) for a in MODALITIES for b in MODALITIES if a != b]
    count = len(image)
    ids = list(range(count)) if ids is None else ids.tolist()
    present = torch.ones(count, 3, dtype=torch.bool) if present is None else present
    vectors = [image, text, fused]
    scores = [[cosines(x, y) / temperature for y in vectors] for x in vectors]
    losses = []
    for first, second in pairs:
        a, b = MODALITIES.index(first), MODALITIES.index(second)
        for j in range(count):
            if not (present[j, a] and present[j, b]):
                continue
            denominator = []
            for m in range(3):
                for k in range(count):
                    left_out = not present[k, m] or (m == a and exclude_same_modality) or (k != j and ids[k] == ids[j])
                    if k == j:
                        left_out = left_out or (m == a and exclude_self)
                        left_out = left_out or (m not in (a, b) and exclude_other_positive)
                    if not left_out:
                        denominator.append(scores[a][m][j, k])
            losses.append(torch.stack(denominator).logsumexp(0) - scores[a][b][j, j])
    return torch.stack(losses).mean()


def leaf(*shape, seed=0, dtype=torch.float64):
    """Raw embeddings of unequal norms, with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def triple(count=4, width=6, dtype=torch.float64):
    """An embedding of each modality."""
    return [leaf(count, width, seed=seed, dtype=dtype) for seed in range(3)]


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


def alignment(text_global, image_local, image_mask, image_global, text_local, text_mask, margin):
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
    pairs = [(i, j) for i in range(len(student)) for j in range(len(student)) if i != j]
    rows = [
        torch.stack([F.cosine_similarity(x[i], x[j], dim=0) for i, j in pairs]) for x in (student, teacher.detach())
    ]
    return 1 - pearson(*rows)
