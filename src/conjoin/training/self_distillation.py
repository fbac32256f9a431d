"""Stage 1 of PUMA: a pruned model learns from text pairs and from the model it was cut out of."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from conjoin.losses import DISTILLATION_KINDS, info_nce, self_distillation
from conjoin.models.mllm_retriever import MllmRetrieverModel

from .deep_teachers import DeepTeacher, FullTeacher, SharedTeacher, make_teacher
from .query_candidates import QueryCandidateConfig, QueryCandidateObjective, QueryCandidateTrainer, gather_candidates
from .state_shards import TaughtRows
from .teacher_states import TAUGHT, TeacherStates, TeacherStatesCollator


@dataclass
class SelfDistillationConfig(QueryCandidateConfig):
    """Arguments of `SelfDistillationTrainer`: `a1 InfoNCE + a2 distill_scale L_distill` (PUMA Eq. 4).

    Args:
        contrastive_weight: a1 (0.9 in the paper).
        distill_weight: a2 (0.1).
        schedule: `"fixed"` keeps the weights; `"dynamic"` goes linearly to them from 0.5 each (Table 4: best);
            `"reverse"` goes from there to the same two, exchanged.
        kind: How states are compared, see `conjoin.losses.self_distillation`; `"kl"` sees the rows of a device only.
        distill_scale: Another factor of the distillation; 0.05 in the authors' code. States of real models are large:
            with 1, where `distillation_loss` is logged far above `contrastive_loss`, hardly anything but the teacher
            is learned; choose a factor that keeps it the smaller of the two.
        teacher: `"full"` is the un-pruned model beside the student (authors' code), `"shared"` its deep layers on top
            of the student's (Fig. 2).

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
        """a1 and a2 at a share of training done (Table 4)."""
        end = (self.contrastive_weight, self.distill_weight)
        if self.schedule == "fixed":
            return end
        first, second = end if self.schedule == "dynamic" else end[::-1]
        return 0.5 + (first - 0.5) * progress, 0.5 + (second - 0.5) * progress


class SelfDistillationObjective(QueryCandidateObjective):
    """InfoNCE over the candidates of all devices, and distillation of queries and positives, in one forward.

    Args:
        encoder: The pruned student.
        args: Weights and kinds.
        teacher: Of the states to imitate; None if batches carry them (`teacher_queries`, `teacher_positives`).
    """

    encoder: MllmRetrieverModel

    def __init__(
        self, encoder: MllmRetrieverModel, args: SelfDistillationConfig, teacher: DeepTeacher | None = None
    ) -> None:
        super().__init__(encoder)
        self.args = args
        self._teacher = (teacher,)  # a tuple, so that it is neither trained nor saved with the rest

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the states of the parts that are there and, of queries and positives, the teacher's."""
        (teacher,) = self._teacher
        if teacher is None or not self.args.distill_weight:
            return super().embed(**batch)
        states = super().embed(**{part: inputs for part, inputs in batch.items() if part not in TAUGHT})
        for part in TAUGHT:
            if part in batch:
                states[part], states[f"teacher_{part}"] = teacher(self.encoder, batch[part])
        return states

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `contrastive_loss` and `distillation_loss`, weighted, with the weights.

        Raises:
            ValueError: There are states of no teacher.
        """
        queries, positives = (embeddings[part] for part in TAUGHT)
        candidates = gather_candidates(embeddings, ids, None)
        contrastive = info_nce(
            queries,
            candidates.embeddings,
            self.args.temperature,
            positive_indices=candidates.positions,
            candidate_ids=candidates.ids,
        )
        contrastive_weight, distill_weight = self.args.weights(self.progress)
        terms = {"contrastive_loss": contrastive_weight * contrastive}
        if self.args.distill_weight:
            known = batch | embeddings
            taught = [known.get(f"teacher_{part}") for part in TAUGHT]
            if taught[0] is None or taught[1] is None:
                raise ValueError("distillation needs a teacher, or rows with its states (TaughtRows)")
            distance = self_distillation(
                queries, taught[0], positives, taught[1], self.args.kind, temperature=self.args.temperature
            )
            terms["distillation_loss"] = distill_weight * self.args.distill_scale * distance
        weights = {"contrastive_weight": contrastive_weight, "distill_weight": distill_weight}
        return terms | {name: queries.new_tensor(value, dtype=torch.float32) for name, value in weights.items()}


class SelfDistillationTrainer(QueryCandidateTrainer):
    """Trains a pruned MLLM retriever by stage 1 of PUMA (Sec. 4.2).

    Args:
        model: The pruned student.
        args: The configuration.
        teacher: The un-pruned model, which is frozen; or its `TeacherStates` on disk, for the training rows. None
            only without distillation.
        train_dataset: Rows of `load_nli`, or any other queries and candidates.
        kwargs: As for `QueryCandidateTrainer`.

    Raises:
        ValueError: There is no teacher but `distill_weight` is positive, the model is not the student of the teacher,
            or the states on disk are of other rows or of another readout.
    """

    def __init__(
        self,
        model: MllmRetrieverModel,
        args: SelfDistillationConfig,
        teacher: MllmRetrieverModel | TeacherStates | None = None,
        train_dataset: Any = None,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        live: FullTeacher | SharedTeacher | None = None
        if isinstance(teacher, TeacherStates):
            teacher.check_student(model)
            train_dataset = TaughtRows(train_dataset, teacher)
        elif teacher is not None:
            live = make_teacher(args.teacher, teacher, model).to(args.device)
        elif args.distill_weight:
            raise ValueError(f"distill_weight={args.distill_weight} needs a teacher")
        objective = SelfDistillationObjective(model, args, live)
        super().__init__(objective, args, train_dataset=train_dataset, **kwargs)
        if isinstance(teacher, TeacherStates):
            self.data_collator = TeacherStatesCollator(self.data_collator)
