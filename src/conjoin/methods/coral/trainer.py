"""Coral: contrastive learning, and masked reconstruction of the target from the query's and the target's state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conjoin.data.training_rows import QueryRows
from conjoin.losses import embedding_reconstruction, info_nce, mean_over_devices, mean_over_rows, token_reconstruction
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.training.query_candidates import (
    QueryCandidateConfig,
    QueryCandidateObjective,
    QueryCandidateTrainer,
    gather_candidates,
)

from .decoders import ReconstructionDecoder
from .targets import PADDING, PromptFrame, choose_masked, draw_noise, pack_targets, recorded_embeddings, unpack_targets

SEED = "mask_seed"
MODALITIES = ("vision", "language")
STATES = {"reg": "queries", "rec": "positives"}
"""The state that each term reconstructs the target from: the query's, or the target's own."""


class SeededRows(QueryRows):
    """Adds `mask_seed` to each row: another one in every epoch, the same on any number of processes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {SEED: int(self.numpy_random(index, 1).integers(2**62))}


class SeedCollator:
    """Adds `mask_seeds` `(N,)` to a batch of rows that have seeds.

    Args:
        collator: Collates the rest.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = self.collator(list(rows))
        if rows and SEED in rows[0]:
            batch["mask_seeds"] = torch.tensor([row[SEED] for row in rows])
        return batch


@dataclass
class CoralConfig(QueryCandidateConfig):
    """Arguments of `CoralTrainer`: `L_cl + λ1 L_reg + λ2 L_rec` (Coral Eq. 7); defaults are the paper's (App. E.3).

    Args:
        temperature: Of the contrastive loss.
        reconstruct: What to reconstruct, of `vision` and `language` (Table 3); empty for the contrastive loss alone.
        reg_weight: λ1, of the target's reconstruction from the query's state; 0 for none.
        rec_weight: λ2, of its reconstruction from its own state; 0 for none.
        mask_ratio: Masked share of the tokens of one modality.
        masked_only: Predict the masked tokens only, in place of all tokens of the modality.
        normalize_targets: Standardise each image embedding over its dimensions before the vision decoder predicts it
            (as the pixels of a patch in He et al., "Masked Autoencoders", arXiv 2111.06377, Sec. 3), for a model whose
            image embeddings are small; not in the paper.
        decoder_positions: Largest number of tokens of a target, images and texts.
        decoder_dropout: Dropout rate of the decoders.
        decoded_rows: Targets decoded at once; the activations of their decoders are in memory.

    Raises:
        ValueError: An argument is out of range.
    """

    temperature: float = field(default=0.02)
    reconstruct: tuple[str, ...] = field(default=MODALITIES)
    reg_weight: float = field(default=0.1)
    rec_weight: float = field(default=0.1)
    mask_ratio: float = field(default=0.5)
    masked_only: bool = field(default=False)
    normalize_targets: bool = field(default=False)
    decoder_positions: int = field(default=1024)
    decoder_dropout: float = field(default=0.1)
    decoded_rows: int = field(default=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.reconstruct, str):
            raise ValueError(f"reconstruct={self.reconstruct!r}; expected a list of some of {MODALITIES}")
        self.reconstruct = tuple(self.reconstruct)
        unknown = [name for name in self.reconstruct if name not in MODALITIES]
        if unknown or len(set(self.reconstruct)) < len(self.reconstruct):
            raise ValueError(f"reconstruct={self.reconstruct}; expected some of {MODALITIES}, each once")
        if min(self.reg_weight, self.rec_weight) < 0:
            raise ValueError(f"reg_weight={self.reg_weight}, rec_weight={self.rec_weight}: must not be negative")
        if not 0 < self.mask_ratio <= 1:
            raise ValueError(f"mask_ratio={self.mask_ratio} must lie in (0, 1]")
        if min(self.decoded_rows, self.decoder_positions) < 1 or not 0 <= self.decoder_dropout < 1:
            given = {name: vars(self)[name] for name in ("decoded_rows", "decoder_positions", "decoder_dropout")}
            raise ValueError(f"{given}: expected positive numbers and a rate below 1")

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the terms that are not zero, by the names of `STATES`."""
        weights = {"reg": self.reg_weight, "rec": self.rec_weight}
        return {name: weight for name, weight in weights.items() if weight}


class CoralObjective(QueryCandidateObjective):
    """InfoNCE over the candidates of all devices, and the reconstruction of each query's positive.

    The decoders are trained beside the encoder. They are part of checkpoints, not of the saved model.

    Args:
        encoder: The retriever.
        args: Weights and sizes.
        frame: Of the model's processor: what of a prompt is not the item.
        language_head: `(V, D)` output embeddings of the MLLM, frozen; None for the input embeddings.

    Raises:
        ValueError: The head does not fit the model.
    """

    encoder: MllmRetrieverModel
    sorts_rows: ClassVar[bool] = False

    def __init__(
        self, encoder: MllmRetrieverModel, args: CoralConfig, frame: PromptFrame, language_head: Tensor | None = None
    ) -> None:
        super().__init__(encoder)
        self.args, self.frame = args, frame
        width = encoder.config.get_text_config().hidden_size
        if language_head is not None and language_head.shape[1] != width:
            raise ValueError(f"the language head has shape {tuple(language_head.shape)}, the model the width {width}")
        self._head = (language_head,)  # a tuple hides it from the module: not trained, not saved
        self.decoders = nn.ModuleDict()
        for name in args.reconstruct if args.weights else ():
            self.decoders[name] = ReconstructionDecoder(width, args.decoder_positions, args.decoder_dropout)

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the raw embeddings of the given parts, and the own tokens of the positives."""
        if not self.decoders or "positives" not in batch:
            return super().embed(**batch)
        inputs = batch.pop("positives")
        outputs = super().embed(**batch)
        with recorded_embeddings(self.encoder) as seen:
            outputs["positives"] = self.encoder(**inputs).pooler_output
        return outputs | pack_targets(inputs, seen[0], self.frame, self.encoder.config.backbone_config.image_token_id)

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss`."""
        candidates = gather_candidates(embeddings, ids, None)
        loss = info_nce(
            embeddings["queries"],
            candidates.embeddings,
            self.args.temperature,
            positive_indices=candidates.positions,
            candidate_ids=candidates.ids,
        )
        return {"contrastive_loss": loss}

    def terms(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss` and the weighted `{reg,rec}_{vision,language}_loss`, of states of full width."""
        terms = super().terms(embeddings, ids, batch)
        return terms | self._reconstruct(embeddings, batch.get("mask_seeds")) if self.decoders else terms

    def _reconstruct(self, embeddings: dict[str, Tensor], seeds: Tensor | None) -> dict[str, Tensor]:
        """Return the weighted reconstruction terms; blocks of rows are decoded again in the backward pass."""
        count = len(embeddings["positives"])
        seeds = torch.randint(2**62, (count,)) if seeds is None else seeds
        rows = [slice(start, start + self.args.decoded_rows) for start in range(0, count, self.args.decoded_rows)]
        terms = {}
        for name in self.decoders:
            for term, weight in self.args.weights.items():
                blocks = [
                    checkpoint(self._decode, name, STATES[term], embeddings, seeds, block, use_reentrant=False)
                    for block in rows
                ]
                values, ids, valid = zip(*blocks, strict=True)
                if name == "language":
                    values = self._token_errors(values, ids)
                means = map(mean_over_rows, values, valid)
                losses, present = (torch.cat(parts) for parts in zip(*means, strict=True))
                terms[f"{term}_{name}_loss"] = weight * mean_over_devices(losses, present)
        return terms

    def _decode(
        self, name: str, source: str, embeddings: dict[str, Tensor], seeds: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode the targets of some rows.

        Args:
            name: What to reconstruct, one of `MODALITIES`.
            source: The part of the batch whose states are decoded.
            embeddings: What `embed` returned.
            seeds: Of the mask of each row of the batch.
            rows: The rows.

        Returns:
            The errors `(P,)` of image tokens, or the states `(P, D)` that predict text tokens; the ids `(P,)` of these
            tokens; and `(N, Q)` where they are among the positions of each row.
        """
        decoder: Any = self.decoders[name]
        target = unpack_targets(embeddings, rows)
        noise = draw_noise(seeds[rows].tolist(), target.ids.shape[1]).to(target.ids.device)
        kind = target.kinds[name]
        masked = choose_masked(kind, noise, self.args.mask_ratio)
        positions, valid = _positions(masked if self.args.masked_only else kind)
        dtype = decoder.output_norm.weight.dtype
        state, tokens = embeddings[source][rows].to(dtype), target.embeddings.to(dtype)
        predicted = decoder(state, tokens, (target.ids != PADDING) & ~masked, positions)[valid]
        at = torch.arange(len(positions), device=positions.device)[:, None], positions
        if name == "vision":
            targets = target.embeddings[at][valid]
            targets = F.layer_norm(targets, targets.shape[-1:]) if self.args.normalize_targets else targets
            predicted = embedding_reconstruction(predicted, targets)
        return predicted, target.ids[at][valid], valid

    def _token_errors(self, states: tuple[Tensor, ...], ids: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the errors `(P,)` of each block's text tokens; one pass over the language head for all blocks."""
        (head,) = self._head
        embedding: Any = self.encoder.get_input_embeddings()
        table = embedding.weight if head is None else head
        return token_reconstruction(torch.cat(states), table, torch.cat(ids)).split([len(block) for block in ids])

    def to_device(self, device: torch.device) -> None:
        """Move the frozen language head."""
        (head,) = self._head
        self._head = (None if head is None else head.to(device),)


class CoralTrainer(QueryCandidateTrainer):
    """Trains an MLLM retriever on queries and candidates by Coral (Sec. 4.1).

    Args:
        model: The retriever: all layers or the first ones, with any readout.
        args: The configuration.
        language_head: Output embeddings `(V, D)` of the MLLM, see `load_language_head`; None for the input embeddings,
            for a model whose head is tied or pruned.
        processing_class: The model's processor.
        kwargs: Arguments of `QueryCandidateTrainer`.

    Raises:
        ValueError: The model is no MLLM retriever, the processor is not its own, or there is something to reconstruct
            and it writes prompts by the chat template of a published embedder, in which own tokens are not known.
    """

    rows_class = SeededRows

    def __init__(
        self,
        model: MllmRetrieverModel,
        args: CoralConfig,
        language_head: Tensor | None = None,
        processing_class: MllmRetrieverProcessor | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if not isinstance(model, MllmRetrieverModel) or not isinstance(processing_class, MllmRetrieverProcessor):
            raise ValueError(
                "Coral reconstructs the input of an MLLM retriever; expected such a model and its processor "
                f"(processing_class), got {type(model).__name__} and {type(processing_class).__name__}"
            )
        if args.reconstruct and processing_class.sentence_files is not None:
            raise ValueError(
                f"reconstruct={list(args.reconstruct)}, but the prompts of this published embedder come from its chat "
                "template, in which the item's own tokens are not known; expected reconstruct=[] or an MLLM"
            )
        objective = CoralObjective(model, args, PromptFrame.of(processing_class), language_head)
        objective.to_device(args.device)
        super().__init__(objective, args, processing_class=processing_class, **kwargs)
        self.data_collator = SeedCollator(self.data_collator)


def _positions(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions `(N, Q)` of the entries of each row of `(N, T)`, and which of them exist."""
    counts = wanted.sum(1)
    longest = int(counts.max())
    positions = (~wanted).int().argsort(dim=1, stable=True)[:, :longest]
    return positions, torch.arange(longest, device=wanted.device) < counts[:, None]
