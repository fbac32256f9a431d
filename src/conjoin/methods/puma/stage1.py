"""Stage 1 of PUMA: train a pruned model on text pairs and by distillation from the un-pruned model."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from conjoin.data import RowsWithTeacher
from conjoin.losses import DISTILLATION_KINDS, info_nce, self_distillation
from conjoin.methods.puma.teacher_states import TEACHER_PARTS, TeacherStates, TeacherStatesCollator
from conjoin.methods.puma.teachers import DeepTeacher, FullTeacher, SharedTeacher, make_teacher
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.training.query_candidates import (
    PARTS,
    QueryCandidateConfig,
    QueryCandidateObjective,
    QueryCandidateTrainer,
    gather_candidates,
)


@dataclass
class PumaStage1Config(QueryCandidateConfig):
    """Arguments of `PumaStage1Trainer`: `a1 InfoNCE + a2 distill_scale L_distill` (PUMA Eq. 4).

    Args:
        contrastive_weight: a1 (0.9 in the paper).
        distill_weight: a2 (0.1).
        schedule: `"fixed"` keeps the weights; `"dynamic"` moves linearly from 0.5 each to the weights (Table 4: best);
            `"reverse"` moves from 0.5 each to the swapped weights.
        kind: Distance between states, see `conjoin.losses.self_distillation`; `"kl"` uses one device's rows only.
        distill_scale: Additional factor of the distillation; 0.05 in the authors' code. Real models have large states:
            with 1, `distillation_loss` can far exceed `contrastive_loss`, and the model learns little except the
            teacher. Choose a factor that keeps it below `contrastive_loss`.
        teacher: `"full"` runs the whole un-pruned model (authors' code), `"shared"` only its deep layers on top of
            the student's (Fig. 2).

    Raises:
        ValueError: A weight is negative, both are zero, or a choice is unknown.
    """

    contrastive_weight: float = field(default=0.9)
    distill_weight: float = field(default=0.1)
    schedule: Literal["fixed", "dynamic", "reverse"] = field(default="fixed")
    kind: str = field(default="mse")
    distill_scale: float = field(default=1.0)
    teacher: Literal["full", "shared"] = field(default="full")

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: vars(self)[name] for name in ("contrastive_weight", "distill_weight", "distill_scale")}
        if min(weights.values()) < 0 or self.contrastive_weight == self.distill_weight == 0:
            raise ValueError(f"{weights}: must not be negative, nor both weights zero")
        choices = {"schedule": ("fixed", "dynamic", "reverse"), "kind": DISTILLATION_KINDS}
        for name, allowed in (choices | {"teacher": ("full", "shared")}).items():
            if vars(self)[name] not in allowed:
                raise ValueError(f"{name}={vars(self)[name]!r}; expected one of {allowed}")

    def weights(self, progress: float) -> tuple[float, float]:
        """Return a1 and a2 at a completed share of training (Table 4)."""
        end = (self.contrastive_weight, self.distill_weight)
        if self.schedule == "fixed":
            return end
        first, second = end if self.schedule == "dynamic" else end[::-1]
        return 0.5 + (first - 0.5) * progress, 0.5 + (second - 0.5) * progress


class PumaStage1Objective(QueryCandidateObjective):
    """InfoNCE over the candidates of all devices, and distillation of queries and positives, in one forward.

    Args:
        encoder: The pruned student.
        args: Weights and kinds.
        teacher: Computes the target states; None if batches contain them (`teacher` of `queries` and `positives`).
    """

    encoder: MllmRetrieverModel

    def __init__(
        self, encoder: MllmRetrieverModel, args: PumaStage1Config, teacher: DeepTeacher | None = None
    ) -> None:
        super().__init__(encoder)
        self.args = args
        self._teacher = (teacher,)  # a tuple hides it from the module: not trained, not saved

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the states of the given parts, and the teacher's states of queries and positives."""
        (teacher,) = self._teacher
        inputs = {part: dict(batch[part]) for part in PARTS if part in batch}
        cached = {part: inputs[part].pop("teacher")["states"] for part in inputs if "teacher" in inputs[part]}
        states = {f"teacher_{part}": value for part, value in cached.items()}
        if teacher is None or not self.args.distill_weight:
            return states | super().embed(**inputs)
        teacher_states = {part: inputs.pop(part) for part in TEACHER_PARTS if part in inputs}
        states |= super().embed(**inputs)
        for part, values in teacher_states.items():
            states[part], states[f"teacher_{part}"] = teacher(self.encoder, values)
        return states

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weighted `contrastive_loss`."""
        candidates = gather_candidates(embeddings, ids, None)
        contrastive = info_nce(
            embeddings["queries"],
            candidates.embeddings,
            self.args.temperature,
            positive_indices=candidates.positions,
            candidate_ids=candidates.ids,
        )
        return {"contrastive_loss": self.args.weights(self.progress)[0] * contrastive}

    def terms(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss` and `distillation_loss` (of states of full width), both weighted, and the weights.

        Raises:
            ValueError: Distillation is on and there are no teacher states.
        """
        queries, positives = (embeddings[part] for part in TEACHER_PARTS)
        contrastive_weight, distill_weight = self.args.weights(self.progress)
        terms = super().terms(embeddings, ids, batch)
        if self.args.distill_weight:
            teacher_states = [embeddings.get(f"teacher_{part}") for part in TEACHER_PARTS]
            if teacher_states[0] is None or teacher_states[1] is None:
                raise ValueError("distillation needs a teacher, or rows with its states (RowsWithTeacher)")
            distance = self_distillation(
                queries,
                teacher_states[0],
                positives,
                teacher_states[1],
                self.args.kind,
                temperature=self.args.temperature,
            )
            terms["distillation_loss"] = distill_weight * self.args.distill_scale * distance
        weights = {"contrastive_weight": contrastive_weight, "distill_weight": distill_weight}
        return terms | {name: queries.new_tensor(value, dtype=torch.float32) for name, value in weights.items()}


class PumaStage1Trainer(QueryCandidateTrainer):
    """Trains a pruned MLLM retriever by stage 1 of PUMA (Sec. 4.2).

    Args:
        model: The pruned student.
        args: The configuration.
        teacher: The un-pruned model, which will be frozen, or its `TeacherStates` for the training rows. None only
            without distillation.
        train_dataset: Rows of `load_nli`, or any other queries and candidates.
        kwargs: Arguments of `QueryCandidateTrainer`.

    Raises:
        ValueError: `distill_weight` is positive and there is no teacher, the model is not a pruned version of the
            teacher, or the cached states are for other rows or another readout.
    """

    def __init__(
        self,
        model: MllmRetrieverModel,
        args: PumaStage1Config,
        teacher: MllmRetrieverModel | TeacherStates | None = None,
        train_dataset: Any = None,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        live: FullTeacher | SharedTeacher | None = None
        if isinstance(teacher, TeacherStates):
            teacher.check_student(model)
            train_dataset = RowsWithTeacher(train_dataset, teacher)
        elif teacher is not None:
            live = make_teacher(args.teacher, teacher, model).to(args.device)
        elif args.distill_weight:
            raise ValueError(f"distill_weight={args.distill_weight} needs a teacher")
        objective = PumaStage1Objective(model, args, live)
        super().__init__(objective, args, train_dataset=train_dataset, **kwargs)
        if isinstance(teacher, TeacherStates):
            self.data_collator = TeacherStatesCollator(self.data_collator)
