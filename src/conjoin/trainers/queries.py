"""What the trainers on queries and candidates share: their rows, one forward over both, negatives from all devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import datasets
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.data import RetrievalBatchSampler, RetrievalCollator
from conjoin.data.cells import is_missing
from conjoin.data.columns import query_items, require_columns
from conjoin.data.training_rows import QueryRows, has_order, positives_of, repeats_of, sources_of
from conjoin.evaluation.metrics import ranks_of_pairs
from conjoin.losses import info_nce
from conjoin.losses.gather import gather_with_gradient, is_distributed
from conjoin.storage import stable_id
from conjoin.trainers.base import RetrievalConfig, RetrievalTrainer

PARTS = ("queries", "positives", "negatives")
"""The parts of a batch; each part is the processor's output for some items."""


@dataclass
class QueryCandidateConfig(RetrievalConfig):
    """Arguments of `QueryCandidateTrainer`.

    With `mask_false_negatives`, no two rows of a batch share a positive, counted over all devices.

    Args:
        temperature: Softmax temperature.
        one_dataset_per_batch: Build every batch from one dataset, so that the dataset does not identify a negative.
        shared_columns: Columns of the rows, such as brand and colour: a positive that has the value of a query's own
            positive in one of them is not its negative. `negatives` of rows always are.
    """

    temperature: float = field(default=0.05)
    one_dataset_per_batch: bool = field(default=False)
    shared_columns: list[str] = field(default_factory=list)


class Candidates(NamedTuple):
    """The candidates of all devices, in device order: positives, then negatives.

    Args:
        embeddings: `(M, D)` embeddings of the candidates.
        positions: `(N,)` index of each local query's positive in `embeddings`.
        ids: `(M, 1 + A)` equal for equal candidates, and for those that share a value of the A `shared_columns`; None
            without either.
        modality: `(M,)` values of `conjoin.data.MODALITY_IDS`; None if the rows do not name modalities.
    """

    embeddings: Tensor
    positions: Tensor
    ids: Tensor | None
    modality: Tensor | None


class QueryCandidateTrainer(RetrievalTrainer):
    """Trains on rows `{"query", "positive", "instruction"?, "negatives"?, ...}`; a subclass defines `loss_terms`.

    A batch has the `PARTS` with N, N and M rows; `ids` and `candidate_modality` are `(N + M,)`. The random choices of
    a row depend only on the seed, the epoch and the row.

    Args:
        model: As for `RetrievalTrainer`.
        args: The configuration.
        train_dataset: Rows for `RetrievalCollator`; the columns of sentence-transformers (`anchor`, `positive`,
            `negative_1` ...) are known. A stream keeps its own order, so rows of a batch may share a positive.
        eval_dataset: Like `train_dataset`, with a length; each query is ranked against the positives of all rows.
        processing_class: The model's processor.
        kwargs: As for `RetrievalTrainer`.
    """

    config_class = QueryCandidateConfig
    needed_columns: ClassVar[tuple[str, ...]] = ("query", "positive")
    same_layers: ClassVar[bool] = False
    rows_class: ClassVar[type[QueryRows]] = QueryRows
    args: QueryCandidateConfig

    def embed(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings of the given parts, by name."""
        return {part: model(**inputs[part]).pooler_output for part in PARTS if part in inputs}

    def embed_for_evaluation(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings `{"query": (N, D), "candidate": (N, D)}`."""
        roles = {"query": "queries", "candidate": "positives"}
        return {role: model(**inputs[part]).pooler_output for role, part in roles.items()}

    def make_collator(self, processor: ProcessorMixin, model: PreTrainedModel, args: Any) -> Any:
        """Return what maps rows to a batch with the ids of the candidates."""
        collator = RetrievalCollator(processor)
        return AttributeCollator(collator, args.shared_columns) if args.shared_columns else collator

    def rename_columns(self, rows: Any) -> Any:
        """Return rows with the names of columns that this trainer reads."""
        if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
            names = rows.column_names or []
            items = query_items(names, {role: name for role, name in self._columns.items() if name in names})
            for role in {*items} & {*self.needed_columns} - {*names, *self._columns}:
                rows = rows.rename_columns({item["whole"]: role for item in items[role][:1] if "whole" in item})
            several = [item["whole"] for item in items["negative"] if "whole" in item]
            if several and not {"negatives", "negative"} & {*self._columns} and several != ["negatives"]:
                rows = rows.map(
                    lambda row: {"negatives": [row[name] for name in several if row[name] is not None]},
                    remove_columns=several,
                )
        return super().rename_columns(rows)

    def prepare_rows(self, rows: Any, args: RetrievalConfig) -> Any:
        """Return the rows with their random choices seeded."""
        return self.rows_class(rows, args.seed) if has_order(rows) else rows

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Build batches; with `mask_false_negatives`, of rows with different positives, if the rows have an order."""
        rows = self.train_dataset
        if not isinstance(rows, QueryRows) or self.args.train_sampling_strategy == "sequential":
            return super().get_train_dataloader()
        sampler = RetrievalBatchSampler(
            positives_of(rows) if self.args.mask_false_negatives else range(len(rows)),
            self.args.train_batch_size,
            sources_of(rows) if self.args.one_dataset_per_batch else None,
            processes=self.args.world_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            repeats=repeats_of(rows),
        )
        self.epochs.followers = [rows, sampler]  # accelerate does not set the epoch of a sampler after a resume
        return self.make_loader(rows, batch_sampler=sampler)

    def prepare_evaluation_rows(self, rows: Any) -> Any:
        """Return the rows with their random choices seeded, without negatives."""
        return QueryRows(rows, self.args.seed, negatives=False)

    def _rank(self, embeddings: Mapping[str, Tensor], ids: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """Rank all candidates for every query; duplicates count once, and all positives of a row are right."""
        labels = ids.tolist()
        first = {label: row for row, label in reversed(list(enumerate(labels)))}
        candidates = {label: index for index, label in enumerate(first)}
        known = getattr(self.evaluated_rows, "positives", [()] * len(labels))
        pairs = [
            (row, candidates[label])
            for row, (drawn, names) in enumerate(zip(labels, known, strict=True))
            for label in {drawn, *(stable_id(str(name)) for name in names)} & candidates.keys()
        ]
        chosen = torch.tensor(list(first.values()), device=ids.device)
        right = torch.tensor(pairs, device=ids.device)
        return {"query_to_candidate": ranks_of_pairs(embeddings["query"], embeddings["candidate"][chosen], right)}


class AttributeCollator:
    """Adds `attributes` `(N + M, A)` to a batch: integers, equal for positives with one value in a column.

    Args:
        collator: Of rows of queries.
        columns: A columns of the rows.
    """

    def __init__(self, collator: RetrievalCollator, columns: Sequence[str]) -> None:
        self.collator, self.columns = collator, columns

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate rows.

        Raises:
            ValueError: No row has one of the columns, or as the collator.
        """
        require_columns(self.columns, [*dict.fromkeys(name for row in rows for name in row)])
        batch, others = self.collator(rows), sum(len(row.get("negatives") or ()) for row in rows)
        values = [[row.get(name) for name in self.columns] for row in rows] + [[None] * len(self.columns)] * others
        batch["attributes"] = torch.tensor(
            [[stable_id(uuid4().hex if is_missing(each) else str(each)) for each in row] for row in values]
        )
        return batch


def gather_candidates(embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> Candidates:
    """Gather the candidates of all devices, with gradient; devices may have different numbers of negatives."""
    positives = embeddings["positives"]
    local = torch.cat([positives, embeddings.get("negatives", positives[:0])])
    rank, counts = 0, [len(local)]
    if is_distributed():
        rank = dist.get_rank()
        counts = gather_with_gradient(torch.tensor(counts, device=local.device)).tolist()
    names = [inputs[name].view(len(local), -1) for name in ("ids", "attributes") if name in inputs]
    named = (torch.cat(names, dim=1) if names else None, inputs.get("candidate_modality"))
    ids, modality = (None if values is None else _gather(values, counts) for values in named)
    positions = torch.arange(len(positives), device=local.device) + sum(counts[:rank])
    return Candidates(_gather(local, counts), positions, ids, modality)


def query_info_nce(
    embeddings: dict[str, Tensor], inputs: dict[str, Any], temperature: float | Tensor, margin: float | None = None
) -> Tensor:
    """Return InfoNCE from the queries of this device to the candidates of all; `margin` as for `info_nce`."""
    candidates = gather_candidates(embeddings, inputs)
    return info_nce(
        embeddings["queries"],
        candidates.embeddings,
        temperature,
        positive_indices=candidates.positions,
        candidate_ids=candidates.ids,
        margin=margin,
    )


def _gather(values: Tensor, counts: list[int]) -> Tensor:
    """Concatenate the rows `(counts[rank], ...)` of all ranks, in rank order, with gradient."""
    longest = max(counts)
    padded = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
    parts = gather_with_gradient(padded).split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
