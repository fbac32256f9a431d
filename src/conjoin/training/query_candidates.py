"""Shared code of methods on queries and candidates: one forward over both, negatives from all devices."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import RetrievalBatchSampler, RetrievalCollator
from conjoin.data.training_rows import (
    KnownPositives,
    NamedCandidates,
    QueryRows,
    has_order,
    positives_of,
    repeats_of,
    sources_of,
)
from conjoin.evaluation.metrics import ranks_of_pairs
from conjoin.losses.gather import gather_with_gradient, is_distributed
from conjoin.storage import stable_id
from conjoin.training.config import RetrievalConfig
from conjoin.training.objective import Objective
from conjoin.training.trainer import RetrievalTrainer

PARTS = ("queries", "positives", "negatives")
"""The parts of a batch; each part is the processor's output for some items."""


@dataclass
class QueryCandidateConfig(RetrievalConfig):
    """Arguments of `QueryCandidateTrainer`.

    No two rows of a batch share a positive, counted over all devices.

    Args:
        temperature: Softmax temperature.
        one_dataset_per_batch: Build every batch from one dataset, so that the dataset does not identify a negative.

    Raises:
        ValueError: The temperature is not positive.
    """

    temperature: float = field(default=0.05)
    one_dataset_per_batch: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


class Candidates(NamedTuple):
    """The candidates of all devices, in device order: positives, then negatives.

    Args:
        embeddings: `(M, D)` embeddings of the candidates.
        positions: `(N,)` index of each local query's positive in `embeddings`.
        ids: `(M,)` equal for equal candidates; None without ids.
        modality: `(M,)` values of `conjoin.data.MODALITY_IDS`; None if the rows do not name modalities.
    """

    embeddings: Tensor
    positions: Tensor
    ids: Tensor | None
    modality: Tensor | None


class QueryCandidateObjective(Objective):
    """Embeds the queries and candidates of a batch; a method implements `contrast`.

    A batch has the `PARTS` with N, N and M rows; `ids` and `candidate_modality` are `(N + M,)`.

    Args:
        encoder: Any model of this package.
    """

    same_layers: ClassVar[bool] = False

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__(encoder, nn.Identity(), ("query", "candidate"))

    @property
    def embedding_names(self) -> Collection[str]:
        """Which outputs of `embed` are embeddings."""
        return PARTS

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the raw embeddings of the given parts, by name."""
        return {part: self.encoder(**batch[part]).pooler_output for part in PARTS if part in batch}

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the raw embeddings `{"query": (N, D), "candidate": (N, D)}` for evaluation."""
        roles = zip(self.views, PARTS, strict=False)
        return {role: self.encoder(**batch[part]).pooler_output for role, part in roles}


class QueryCandidateTrainer(RetrievalTrainer):
    """Trains on rows `{"query", "positive", "instruction"?, "negatives"?, ...}` of `conjoin.data`.

    The random choices of a row depend only on the seed, the epoch and the row.

    Args:
        objective: The objective to minimise.
        args: The configuration.
        train_dataset: Any rows for `RetrievalCollator`. A stream keeps its own order, so rows of a batch may share a
            positive.
        eval_dataset: Like `train_dataset`, with a length; each query is ranked against the positives of all rows.
        processing_class: The model's processor.
        data_collator: A `RetrievalCollator` with the processor by default.
        kwargs: As for `RetrievalTrainer`.
    """

    rows_class: ClassVar[type[QueryRows]] = QueryRows
    args: QueryCandidateConfig

    def __init__(
        self,
        objective: QueryCandidateObjective,
        args: QueryCandidateConfig,
        train_dataset: Any = None,  # noqa: ANN401
        processing_class: ProcessorMixin | None = None,
        data_collator: Any = None,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if data_collator is None and processing_class is not None:
            data_collator = RetrievalCollator(processing_class)
        rows = self.rows_class(train_dataset, args.seed) if has_order(train_dataset) else train_dataset
        super().__init__(
            objective,
            args,
            train_dataset=rows,
            processing_class=processing_class,
            data_collator=data_collator and NamedCandidates(data_collator),
            **kwargs,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Build batches whose rows have different positives, if the rows have an order."""
        rows = self.train_dataset
        if not isinstance(rows, QueryRows):
            return super().get_train_dataloader()
        sampler = RetrievalBatchSampler(
            positives_of(rows),
            self._train_batch_size,
            sources_of(rows) if self.args.one_dataset_per_batch else None,
            processes=self.args.world_size,
            seed=self.args.seed,
            repeats=repeats_of(rows),
        )
        self.epochs.followers = [rows, sampler]  # accelerate does not set the epoch of a sampler after a resume
        loader = DataLoader(
            rows,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def _embed_dataset(self, dataset: Any) -> tuple[dict[str, Tensor], Tensor]:  # noqa: ANN401
        return super()._embed_dataset(QueryRows(dataset, self.args.seed, negatives=False))

    def _rank(self, embeddings: dict[str, Tensor], labels: Tensor, dataset: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Rank all candidates for every query; duplicates count once, and all positives of a row are right."""
        row_labels = labels.tolist()
        first = {label: row for row, label in reversed(list(enumerate(row_labels)))}
        candidates = {label: index for index, label in enumerate(first)}
        known = dataset.positives if isinstance(dataset, KnownPositives) else [()] * len(row_labels)
        pairs = [
            (row, candidates[label])
            for row, (drawn, names) in enumerate(zip(row_labels, known, strict=True))
            for label in {drawn, *(stable_id(str(name)) for name in names)} & candidates.keys()
        ]
        rows = torch.tensor(list(first.values()), device=labels.device)
        right = torch.tensor(pairs, device=labels.device)
        return {"query_to_candidate": ranks_of_pairs(embeddings["query"], embeddings["candidate"][rows], right)}


def gather_candidates(embeddings: dict[str, Tensor], ids: Tensor | None, modality: Tensor | None) -> Candidates:
    """Gather the candidates of all devices, with gradient; devices may have different numbers of negatives."""
    positives = embeddings["positives"]
    local = torch.cat([positives, embeddings.get("negatives", positives[:0])])
    rank, counts = 0, [len(local)]
    if is_distributed():
        rank = dist.get_rank()
        counts = gather_with_gradient(torch.tensor(counts, device=local.device)).tolist()
    ids, modality = (None if values is None else _gather(values, counts) for values in (ids, modality))
    positions = torch.arange(len(positives), device=local.device) + sum(counts[:rank])
    return Candidates(_gather(local, counts), positions, ids, modality)


def _gather(values: Tensor, counts: list[int]) -> Tensor:
    """Concatenate the rows `(counts[rank], ...)` of all ranks, in rank order, with gradient."""
    longest = max(counts)
    padded = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
    parts = gather_with_gradient(padded).split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
