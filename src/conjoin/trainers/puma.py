"""PUMA: trains a layer-pruned MLLM retriever, first by self-distillation, then with the MAC loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from conjoin.data import QueryTable, RetrievalCollator
from conjoin.hub import check_model, load_trainable
from conjoin.hub.build import mllm_model
from conjoin.hub.sentence_model import SentenceModel
from conjoin.losses import mac, mac_hard_temperature, self_distillation
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.shortcuts import use_shortcuts, without_shortcuts
from conjoin.storage import processor_digest, text_digest, weights_digest
from conjoin.trainers.features import precompute
from conjoin.trainers.queries import QueryCandidateConfig, QueryCandidateTrainer, gather_candidates, query_info_nce

TAUGHT = ("queries", "positives")
"""The parts of a batch that a teacher embeds."""


@dataclass
class PumaStage1Config(QueryCandidateConfig):
    """Arguments of `PumaStage1Trainer`: `a1 InfoNCE + a2 distill_scale L_distill` (PUMA Eq. 4).

    Args:
        contrastive_weight: a1 (0.9 in the paper).
        distill_weight: a2 (0.1); 0 needs no teacher.
        schedule: `"fixed"` keeps the weights; `"dynamic"` moves linearly from 0.5 each to the weights (Table 4: best);
            `"reverse"` moves from 0.5 each to the swapped weights.
        kind: Distance between states, see `conjoin.losses.self_distillation`; `"kl"` uses one device's rows only.
        distill_scale: Additional factor of the distillation; 0.05 in the authors' code. Real models have large states:
            with 1, `distillation_loss` can far exceed `contrastive_loss`, and the model learns little except the
            teacher. Choose a factor that keeps it below `contrastive_loss`.
        teacher: `"full"` runs the whole un-pruned model (authors' code), `"shared"` only its deep layers on top of
            the student's (Fig. 2).
        teacher_model_name_or_path: The un-pruned model; None for the `model_name_or_path` of a recipe. It gets the
            readout, positions and dtype of the student.
        teacher_cache: Folder of the teacher's states of the training rows, which must be texts. They are computed
            once; if they exist, the teacher is not loaded. Other weights under the same name need another folder.

    Raises:
        ValueError: A weight is negative, both are zero, or a choice is unknown.
    """

    contrastive_weight: float = field(default=0.9)
    distill_weight: float = field(default=0.1)
    schedule: Literal["fixed", "dynamic", "reverse"] = field(default="fixed")
    kind: Literal["mse", "squared_norm", "cosine", "kl"] = field(default="mse")
    distill_scale: float = field(default=1.0)
    teacher: Literal["full", "shared"] = field(default="full")
    teacher_model_name_or_path: str | None = field(default=None)
    teacher_cache: str | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: vars(self)[name] for name in ("contrastive_weight", "distill_weight", "distill_scale")}
        if min(weights.values()) < 0 or self.contrastive_weight == self.distill_weight == 0:
            raise ValueError(f"{weights}: must not be negative, nor both weights zero")
        if self.teacher_cache and self.teacher == "shared":
            raise ValueError("teacher='shared' changes with the student: expected teacher='full', or no teacher_cache")

    def weights(self, progress: float) -> tuple[float, float]:
        """Return a1 and a2 at a completed share of training (Table 4)."""
        end = (self.contrastive_weight, self.distill_weight)
        if self.schedule == "fixed":
            return end
        first, second = end if self.schedule == "dynamic" else end[::-1]
        return 0.5 + (first - 0.5) * progress, 0.5 + (second - 0.5) * progress


class PumaStage1Trainer(QueryCandidateTrainer):
    """Trains a pruned MLLM retriever by stage 1 of PUMA (Sec. 4.2).

    Args:
        model: The pruned student.
        args: The configuration.
        train_dataset: Queries and candidates, such as sentences: `QueryTable`.
        eval_dataset: As for `QueryCandidateTrainer`.
        processing_class: The model's processor.
        teacher: The un-pruned model, which will be frozen; None loads `args.teacher_model_name_or_path`.
        kwargs: As for `RetrievalTrainer`.

    Raises:
        ValueError: There is no teacher, the model is not a pruned version of it, or the rows cannot be cached.
    """

    config_class = PumaStage1Config
    args: PumaStage1Config

    def __init__(self, *args: Any, teacher: MllmRetrieverModel | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher: Any = None
        self.teacher_name = self.args.teacher_model_name_or_path or self.args.recipe.get("model_name_or_path")
        if self.args.distill_weight and self.args.teacher_cache is None:
            self.teacher = self._freeze(teacher)
        elif self.args.distill_weight:
            self.evaluates_loss = False  # the cache has the states of the training rows alone
            rows: Any = self.train_dataset
            states = self._cached_states(teacher)  # `rows.rows` may be texts after it
            rows.rows = datasets.concatenate_datasets([rows.rows, states], axis=1)

    def _freeze(self, whole: Any) -> nn.Module:
        """Return the frozen teacher: the whole un-pruned model, or the list of layers that the student lacks."""
        student, name = self.encoder, self.teacher_name
        if self.args.teacher == "shared" and not isinstance(student, MllmRetrieverModel):
            raise ValueError("teacher='shared' reads states of tokens of an MLLM retriever; expected teacher='full'")
        if whole is None:
            if name is None:
                raise ValueError(
                    f"distill_weight={self.args.distill_weight} needs a teacher: set teacher_model_name_or_path to "
                    "the un-pruned model"
                )
            check_model(name)
            if isinstance(student, SentenceModel):
                whole = load_trainable(name)[0].to(student.dtype)
            else:
                settings = {each: getattr(student.config, each) for each in ("readout", "position_mode")}
                ret_token = self.processing_class.ret_token or "[RET]"  # type: ignore[union-attr]
                whole = mllm_model(name, ret_token=ret_token, dtype=student.dtype, **settings)
        depths = [each.config.get_text_config().num_hidden_layers for each in (student, whole)]
        widths = [each.config.get_text_config().hidden_size for each in (student, whole)]
        if depths[0] >= depths[1] or widths[0] != widths[1]:
            raise ValueError(
                f"the teacher must be the un-pruned student: it has {depths[1]} layers of width {widths[1]}, "
                f"the student {depths[0]} of width {widths[0]}"
            )
        teacher: Any = whole if self.args.teacher == "full" else whole.text_model.layers[depths[0] :]
        use_shortcuts(teacher)
        return teacher.requires_grad_(False).eval().to(self.args.device)

    def _cached_states(self, whole: MllmRetrieverModel | None) -> datasets.Dataset:
        """Return the teacher's states `{"teacher_queries": (D,), "teacher_positives": (D,)}` of each training row.

        They reach the loss by their names, as every column of numbers.
        """
        data: Any = self.train_dataset
        if isinstance(getattr(data, "rows", None), QueryTable):
            data.rows = data.rows.texts() or data.rows
        rows: Any = getattr(data, "rows", None)
        columns = [name for name in ("query", "positive", "instruction") if name in getattr(rows, "column_names", ())]
        if not columns or any(rows.features[name] != datasets.Value("string") for name in columns):
            raise ValueError(
                "teacher_cache: only the states of texts that are the same in every epoch can be cached, such as "
                f"sentences; {type(rows).__name__} may have images, or draw its candidates: remove teacher_cache"
            )
        processor: Any = self.processing_class
        texts, config, name = rows.select_columns(columns), self.encoder.config, self.teacher_name
        collator, teacher = RetrievalCollator(processor), cache(self._freeze)

        @torch.no_grad()
        def compute(chosen: list[Any]) -> dict[str, Any]:
            batch = collator(chosen)
            batch = send_to_device(batch, self.args.device)
            states = {part: teacher(whole)(**batch[part]).pooler_output for part in TAUGHT}
            return {part: values.float().cpu().numpy() for part, values in states.items()}

        if name is not None and Path(name).is_dir():  # the cache may be shared by runs in other folders
            name = str(Path(name).resolve())
        key = {
            "teacher": name if whole is None else weights_digest(whole),
            "readout": [getattr(config, "readout", None), getattr(config, "position_mode", None)],
            "dtype": str(self.encoder.dtype),
            "processor": getattr(processor, "digest", None) or processor_digest(processor),
            "rows": text_digest(str([texts[column][:] for column in columns])),
        }
        folder, size = str(self.args.teacher_cache), self.args.per_device_eval_batch_size
        states = precompute(texts, compute, folder, key=key, batch_size=size, args=self.args)
        return states.rename_columns({part: f"teacher_{part}" for part in TAUGHT})

    def embed(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings of the given parts, and `teacher_queries` ... by a teacher that runs."""
        taught = {part: inputs[part] for part in TAUGHT if part in inputs and self.teacher is not None}
        states = super().embed(model, {name: part for name, part in inputs.items() if name not in taught})
        for part, items in taught.items():
            if self.args.teacher == "shared":
                states[part], states[f"teacher_{part}"] = self._go_deeper(model, items)
                continue
            states[part] = model(**items).pooler_output
            with torch.no_grad():
                states[f"teacher_{part}"] = self.cached(part, partial(self.teacher, **items)).pooler_output
        return states

    def _go_deeper(self, student: MllmRetrieverModel, items: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the states `(N, D)` of the student, and those after the deep layers on all of its tokens.

        A hook on the language model's norm (an identity) stacks the deep states with the student's states, so the
        retriever's final norm applies to both.
        """
        language_model: Any = student.text_model
        arguments: dict[str, Any] = {}

        def remember(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments.update(kwargs)

        def stack(_module: nn.Module, _args: tuple[Tensor], shallow: Tensor) -> Tensor:
            deep = shallow
            with torch.no_grad():
                for layer in self.teacher:
                    deep = layer(deep, **arguments)
            return torch.stack([shallow, deep], dim=2)

        with (
            without_shortcuts(student),
            language_model.layers[-1].register_forward_pre_hook(remember, with_kwargs=True),
            language_model.norm.register_forward_hook(stack),
        ):
            both = student(**items).pooler_output
        return both[:, 0], both[:, 1].detach()

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the terms of `L = α1 L_cl + α2 L_dist` (Eq. 4, without `distill_scale`), and both weights."""
        first, second = self.args.weights(self.progress)
        terms = self.matryoshka(
            lambda cut: {"contrastive_loss": first * query_info_nce(cut, inputs, self.args.temperature)}, embeddings
        )
        device = embeddings["queries"].device
        terms["contrastive_weight"] = torch.tensor(first, device=device)
        terms["distill_weight"] = torch.tensor(second, device=device)
        if self.args.distill_weight:
            known = inputs | embeddings
            queries, positives = ((known[part], known[f"teacher_{part}"]) for part in TAUGHT)
            distance = self_distillation(*queries, *positives, self.args.kind, temperature=self.args.temperature)
            terms["distillation_loss"] = second * self.args.distill_scale * distance
        return terms


@dataclass
class PumaStage2Config(QueryCandidateConfig):
    """Arguments of `PumaStage2Trainer` (PUMA Eq. 7, Eq. 8, Alg. 1).

    With `decay=0` the loss is InfoNCE from queries to candidates.

    Args:
        temperature: tau_norm and the initial tau_hard; 0.03 in the authors' code, not given in the paper.
        decay: lambda (Table 12).
        round_to: Number of decimals of tau_hard (the authors: 3).
        hold_after: Complete the decay at this share of training, then hold tau_hard (the authors: 0.5).
        reverse: Ablation of Table 5: use tau_hard for candidates of other modalities, and tau_norm for those of the
            target's modality.

    Raises:
        ValueError: `decay` is negative, or another argument is out of range.
    """

    temperature: float = field(default=0.03)
    decay: float = field(default=0.2)
    round_to: int | None = field(default=None)
    hold_after: float | None = field(default=None)
    reverse: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0:
            raise ValueError(f"decay={self.decay} must not be negative")
        self.hard_temperature(1.0)

    def hard_temperature(self, progress: float) -> float:
        """Return tau_hard at a completed share of training."""
        return mac_hard_temperature(self.temperature, self.decay, progress, self.round_to, self.hold_after)


class PumaStage2Trainer(QueryCandidateTrainer):
    """Trains on queries with instructions and their candidates by stage 2 of PUMA (Sec. 4.3).

    Args:
        model: As for `RetrievalTrainer`.
        args: The configuration.
        train_dataset: Queries and candidates that name their modalities, such as those of `MbeirTraining`.
        eval_dataset: As for `QueryCandidateTrainer`.
        processing_class: The model's processor.
        kwargs: As for `RetrievalTrainer`.
    """

    config_class = PumaStage2Config
    args: PumaStage2Config

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `mac_loss`, both temperatures, and the share of candidates with the modality of the query's target.

        Raises:
            ValueError: The rows do not name the modality of their candidates.
        """
        return self.matryoshka(partial(self._mac, inputs=inputs), embeddings)

    def _mac(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        candidates = gather_candidates(embeddings, inputs)
        modality = candidates.modality
        if modality is None:
            raise ValueError(
                "the MAC loss needs rows with 'target_modality' (and 'negative_modalities' if they differ)"
            )
        decayed, constant = self.args.hard_temperature(self.progress), self.args.temperature
        intra, inter = (constant, decayed) if self.args.reverse else (decayed, constant)
        loss = mac(
            embeddings["queries"],
            candidates.embeddings,
            modality,
            inter,
            intra,
            positive_indices=candidates.positions,
            candidate_ids=candidates.ids,
        )
        same = (modality[candidates.positions, None] == modality).float().mean()
        temperatures = {"temperature": inter, "hard_temperature": intra}
        metrics = {name: torch.tensor(value, device=loss.device) for name, value in temperatures.items()}
        return {"mac_loss": loss, **metrics, "same_modality_rate": same}
