"""InfoNCE: from queries to candidates, in both directions, and as a module with its temperature."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_local, check_matrix, exclude_own, inverse, loss_metrics, own_columns, unit
from .gather import Gathered, gather_rows
from .kernel import logsumexp, pair_logsumexp
from .temperature import Temperature


def info_nce(
    queries: Tensor,
    candidates: Tensor,
    temperature: Tensor | float,
    *,
    positive_indices: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    margin: float | None = None,
) -> Tensor:
    """InfoNCE from queries to candidates: `-mean_i log softmax_j(cos(q_i, c_j) / t)` at the positive.

    A batch of one query and one candidate has no negatives: the loss is 0 and so are its gradients.

    Args:
        queries: `(N, D)`, raw.
        candidates: `(M, D)`; by default the positive of query i is candidate i, and M >= N.
        temperature: Positive float, or 0-d tensor to learn.
        positive_indices: `(N,)` index of each query's positive among the candidates, which may be those of all
            devices.
        candidate_ids: `(M,)` integers naming what each candidate shows; candidates with the id of a query's positive
            are not its negatives. Of several ids `(M, A)`, such as those of attributes, one that is equal suffices.
        margin: Candidates whose cosine with the query is more than that of its positive minus this are not its
            negatives (as the absolute margin of GISTEmbed, arXiv 2402.16829, here by the scores of the model itself).
            A negative margin leaves out only those that are so much nearer than the positive. None for all.

    Raises:
        ValueError: Shapes do not fit, a vector is zero or not finite, or the temperature is not positive.
    """
    check_matrix(queries, "queries")
    check_matrix(candidates, "candidates", queries)
    scale = inverse(temperature)
    q, c = unit(queries, "queries"), unit(candidates, "candidates")
    exclusion = exclude_own(c, len(q), positive_indices, candidate_ids, "queries")
    own = (q * own_columns(c, len(q), positive_indices)).sum(-1)
    if margin is not None:
        exclusion = exclusion._replace(limits=own.detach() - margin)
    return mean_cross_entropy(logsumexp(q, c, scale, exclusion), own * scale)


def soft_labels(
    queries: Tensor, candidates: Tensor, scores: Tensor, temperature: Tensor | float, score_temperature: float = 1.0
) -> Tensor:
    """`mean_i KL(softmax(scores_i / score_temperature) || softmax_k(cos(q_i, c_ik) / temperature))`.

    Args:
        queries: `(N, D)`, raw.
        candidates: `(N, K, D)`, raw, those of each query.
        scores: `(N, K)` what a judge, such as a reranker, says of them.
        temperature: Positive float, or 0-d tensor to learn.
        score_temperature: Of the judge's softmax.

    Raises:
        ValueError: Shapes do not fit, a vector is zero or not finite, or a temperature is not positive.
    """
    check_matrix(queries, "queries")
    check_local(candidates, "candidates", queries)
    if scores.shape != candidates.shape[:2]:
        raise ValueError(f"scores have shape {tuple(scores.shape)}, expected {tuple(candidates.shape[:2])}")
    cosines = (unit(queries, "queries")[:, None] * unit(candidates, "candidates")).sum(-1)
    wanted = (scores.to(cosines.dtype) * inverse(score_temperature, "score_temperature")).softmax(1)
    return F.kl_div((cosines * inverse(temperature)).log_softmax(1), wanted, reduction="batchmean")


def mean_cross_entropy(negatives: Tensor, positive: Tensor) -> Tensor:
    """The mean of `log(e^positive + sum e^negatives) - positive`.

    Args:
        negatives: `(N,)` log-sum-exp of each row's negatives, minus infinity without any.
        positive: `(N,)` scaled similarity of each row to its positive.
    """
    return (torch.logaddexp(negatives, positive) - positive).mean()


def symmetric_info_nce(
    a: Tensor, b: Tensor, temperature: Tensor | float, *, gathered: Gathered | None = None
) -> Tensor:
    """The mean of `info_nce` in both directions (CLIP; SOLAR Eq. 3), which share one matrix of similarities.

    Args:
        a: `(N, D)`, raw.
        b: `(N, D)`; row i belongs to row i of `a`.
        temperature: Positive float, or 0-d tensor to learn.
        gathered: Result of `gather_rows(a, b, ids=...)`: candidates of all devices, and what each pair shows.

    Raises:
        ValueError: As `info_nce`, or `a` and `b` differ in shape.
    """
    check_matrix(a, "a")
    check_matrix(b, "b", a, same_rows=True)
    (all_a, all_b), ids, _, positions = gathered or Gathered((a, b))
    if positions is not None:
        own: dict[str, Any] = {"positive_indices": positions, "candidate_ids": ids}
        return (info_nce(a, all_b, temperature, **own) + info_nce(b, all_a, temperature, **own)) / 2
    scale = inverse(temperature)
    x, y = unit(a, "a"), unit(b, "b")
    forth, back = pair_logsumexp(x, y, scale, exclude_own(y, len(x), None, ids, "pairs"))
    positive = (x * y).sum(-1) * scale
    return (mean_cross_entropy(forth, positive) + mean_cross_entropy(back, positive)) / 2


class ContrastiveLoss(nn.Module):
    """Symmetric InfoNCE between image and text embeddings, negatives from all devices.

    Args:
        temperature: Softmax temperature, or its start.
        learn_temperature: Train it.
    """

    def __init__(self, temperature: float = 0.07, learn_temperature: bool = True) -> None:
        super().__init__()
        self.temperature = Temperature(temperature, learn_temperature)

    def forward(
        self, image: Tensor, text: Tensor, ids: Tensor | None = None, present: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `contrastive_loss` and the metrics `temperature` and, with `ids`, `masked_negatives`.

        The latter is how many candidates a row does not count as negatives for their id, on average.

        Args:
            image: `(N, D)`, raw.
            text: `(N, D)`.
            ids: `(N,)` integers naming what each pair shows; pairs of one id are not each other's negatives.
            present: `(N, 3)` bool, whether each row has image, text and both.

        Raises:
            ValueError: A row lacks an image or a text.
        """
        if present is not None and not present.all():
            lacking = (~present.all(dim=1)).nonzero().flatten().tolist()
            raise ValueError(f"symmetric InfoNCE needs image and text in every row; rows {lacking[:5]} lack one")
        temperature = self.temperature()
        loss = symmetric_info_nce(image, text, temperature, gathered=gather_rows(image, text, ids=ids))
        return {"contrastive_loss": loss} | loss_metrics(temperature, ids)
