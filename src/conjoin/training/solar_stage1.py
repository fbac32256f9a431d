"""Stage 1 of SOLAR: disentangle what image and text share from what they do not, and align the shared part."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from conjoin.losses import (
    AlignmentTerms,
    ContrastiveLoss,
    LocalScores,
    alignment_terms,
    global_distillation,
    local_distillation,
)
from conjoin.masking import Threshold, evolutionary_mask, mask_schedule, qda_threshold
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput

from .contrastive import ContrastiveConfig
from .distillation_targets import TeacherTargets, TowerTeacher
from .objective import Objective
from .trainer import RetrievalTrainer

HEADS_FILE = "projection_heads.safetensors"

LIVE_INPUTS = {"teacher_pixel_values", "teacher_input_ids"}
"""What teachers that run beside the student read of a batch."""

Teacher = Callable[[dict[str, Any], JointEncoderOutput], TeacherTargets]
"""Maps a batch and the student's output on it to what the student is to imitate."""


@dataclass
class JointEncoderStage1Config(ContrastiveConfig):
    """Arguments of `JointEncoderStage1Trainer`: `L_ITC + l1 L_GLA + l2 L_GD + l3 L_LD` (SOLAR Eq. 4).

    A weight of 0 leaves the term out, which with `mask` and `projection_heads` gives every row of the paper's Table 2.

    Args:
        itc_weight: Of the masked image-text contrastive loss (Eq. 2-3).
        gla_weight: Of the global-to-local alignment (Eq. 1), lambda_1.
        gd_weight: Of the global distillation, lambda_2.
        ld_weight: Of the local distillation, lambda_3.
        margin: delta of the alignment (Fig. 10).
        mask: `"evolutionary"` goes from no mask to the estimated one; `"hard"` uses the latter from the start;
            `"none"` never masks.
        mask_schedule: `"linear"` or `"cosine"` course of rho from 1 to 0.
        mask_warmup_ratio: Share of training after which rho is 0.
        projection_heads: Learn W_V and W_L; without them the contrastive loss sees E_VL itself.
        reduce_scores_across_devices: Fit the thresholds to the scores of all devices, by exchanging their sums.

    Raises:
        ValueError: A weight is negative, all are zero, or a choice is unknown.
    """

    itc_weight: float = field(default=1.0)
    gla_weight: float = field(default=1.0)
    gd_weight: float = field(default=1.0)
    ld_weight: float = field(default=1.0)
    margin: float = field(default=0.1)
    mask: Literal["evolutionary", "hard", "none"] = field(default="evolutionary")
    mask_schedule: Literal["linear", "cosine"] = field(default="linear")
    mask_warmup_ratio: float = field(default=0.5)
    projection_heads: bool = field(default=True)
    reduce_scores_across_devices: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: getattr(self, f"{name}_weight") for name in ("itc", "gla", "gd", "ld")}
        if min(weights.values()) < 0 or not any(weights.values()):
            raise ValueError(f"weights {weights} must not be negative, and not all zero")
        if self.mask not in ("evolutionary", "hard", "none"):
            raise ValueError(f'mask={self.mask!r}; expected "evolutionary", "hard" or "none"')
        mask_schedule(0.0, self.mask_schedule, self.mask_warmup_ratio)


class ProjectionHeads(nn.Module):
    """W_V and W_L of Eq. 2, bias-free and the identity at the start: training only, no part of the encoder."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.image = nn.Linear(hidden_size, hidden_size, bias=False)
        self.text = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.eye_(self.image.weight)
        nn.init.eye_(self.text.weight)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Map `(N, d)` each."""
        return {"image": self.image(image), "text": self.text(text)}


class PairTokens(NamedTuple):
    """Adapter tokens of image-text pairs.

    Args:
        image: `(N, 1 + P, d)` [v_cls; V'].
        text: `(N, 1 + T, d)` [l_cls; L'].
        image_mask: `(N, P)` bool, which of V' exist.
        text_mask: `(N, T)` bool, which of L' exist.
    """

    image: Tensor
    text: Tensor
    image_mask: Tensor
    text_mask: Tensor


class PairObjective(Objective):
    """An objective of SOLAR. Frozen towers teach or score, so they run without dropout, as if they were cached."""

    encoder: JointEncoderModel

    def train(self, mode: bool = True) -> Self:
        """Set the mode of everything but the frozen towers, which stay in evaluation mode."""
        super().train(mode)
        for tower in (self.encoder.vision_model, self.encoder.text_model):
            if not any(parameter.requires_grad for parameter in tower.parameters()):
                tower.eval()
        return self


class Stage1Objective(PairObjective):
    """The four terms of stage 1 in one forward.

    The towers run once. Their tokens give the local scores, these the thresholds and masks; the masks then enter a
    second pass of the vision-language encoder. The statistics of scores, and the distillation terms, are those of the
    rows embedded together: of the device's batch, or of a chunk of the gradient cache. There, live teachers run once,
    and what they say of all rows stays on the device: at the paper's size about 1 MB a row.

    Args:
        encoder: The student.
        args: Weights and mask settings.
        teacher: Gives the targets of both distillations; None if neither is asked for.
    """

    def __init__(
        self, encoder: JointEncoderModel, args: JointEncoderStage1Config, teacher: Teacher | None = None
    ) -> None:
        super().__init__(encoder, ContrastiveLoss(args.temperature, args.learn_temperature), ("image", "text"))
        self.heads = ProjectionHeads(encoder.config.hidden_size) if args.projection_heads and args.itc_weight else None
        self.args = args
        self._teacher = (teacher,)  # a tuple, so that it is neither trained nor saved with the rest
        if teacher is None and (args.gd_weight or args.ld_weight):
            raise ValueError("gd_weight and ld_weight need a teacher")

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return un-masked `{view: (N, d)}` embeddings after the projection heads."""
        return self._project(*self.encoder(**_model_inputs(batch), views=self.views).pooler_output.chunk(2))

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the masked embeddings and, repeated for every row, the other terms and the metrics."""
        inputs = _model_inputs(batch)
        output = self.encoder(**inputs, views=self.views if self.args.gd_weight else (), output_tokens=True)
        tokens = pair_tokens(output)
        alignment = align(tokens, self.args.margin, self.args.reduce_scores_across_devices)
        terms = {"gla_loss": self.args.gla_weight * alignment.loss} if self.args.gla_weight else {}
        terms |= self._distil(batch, output, tokens)
        embeddings: dict[str, Tensor] = {}
        if self.args.itc_weight:
            rho = self._rho()
            image, image_metrics = _mask(alignment.image, tokens.image_mask, rho, "image")
            text, text_metrics = _mask(alignment.text, tokens.text_mask, rho, "text")
            terms |= image_metrics | text_metrics | {"rho": torch.tensor(rho, device=image.device)}
            features = {"image_features": output.image_features, "text_features": output.text_features}
            masked = self.encoder(**inputs | features, image_weights=image, text_weights=text, views=self.views)
            embeddings = self._project(*masked.pooler_output.chunk(2))
        rows = len(tokens.image)
        return embeddings | {name: term.float().expand(rows) for name, term in terms.items()}

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `itc_loss` over all rows, and the means of the others over them."""
        terms = {name: value.mean() for name, value in embeddings.items() if name not in self.views}
        if not self.args.itc_weight:
            return terms
        found = self.loss(**{view: embeddings[view] for view in self.views}, ids=ids)
        return {"itc_loss": self.args.itc_weight * found.pop("contrastive_loss")} | found | terms

    def _project(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {"image": image, "text": text} if self.heads is None else self.heads(image, text)

    def _rho(self) -> float:
        if self.args.mask == "evolutionary":
            return mask_schedule(self.progress, self.args.mask_schedule, self.args.mask_warmup_ratio)
        return 1.0 if self.args.mask == "none" else 0.0

    def _distil(self, batch: dict[str, Any], output: JointEncoderOutput, tokens: PairTokens) -> dict[str, Tensor]:
        (teacher,) = self._teacher
        if teacher is None:
            return {}
        with torch.no_grad():
            if LIVE_INPUTS.isdisjoint(batch):
                targets = teacher(batch, output)
            else:
                targets = self.once("targets", lambda: teacher(batch, output))
        terms: dict[str, Tensor] = {}
        if self.args.ld_weight:
            known = tokens.text_mask & targets.text_mask
            image = local_distillation(tokens.image[:, 1:], targets.image_tokens, tokens.image_mask)
            text = local_distillation(tokens.text[:, 1:], targets.text_tokens, known)
            terms["ld_loss"] = self.args.ld_weight * (image + text)
        if self.args.gd_weight and output.pooler_output is not None:
            image, text = output.pooler_output.chunk(2)
            terms["gd_loss"] = self.args.gd_weight * (
                global_distillation(image, targets.image_global) + global_distillation(text, targets.text_global)
            )
        return terms


class JointEncoderStage1Trainer(RetrievalTrainer):
    """Trains a joint encoder by stage 1 of SOLAR (Sec. 4.1).

    Every term is logged, and beside them rho, the thresholds, how much they let through, and mean and deviation of
    both score populations. `save_model` also writes the projection heads, which the Mixed variant of stage 2 goes on
    with; `from_pretrained` does not read them.

    Args:
        model: The student.
        args: The configuration.
        teacher: The towers as they are now when None, which is right only if they stay frozen.
        kwargs: As for `RetrievalTrainer`.

    Raises:
        ValueError: Without a teacher, a tower is being trained.
    """

    objective: Stage1Objective

    def __init__(
        self,
        model: JointEncoderModel,
        args: JointEncoderStage1Config,
        teacher: Teacher | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if teacher is None and (args.gd_weight or args.ld_weight):
            teacher = TowerTeacher(model)
        super().__init__(Stage1Objective(model, args, teacher), args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the encoder, and the projection heads beside it."""
        super().save_model(output_dir, _internal_call=_internal_call)
        if not _internal_call and self.args.should_save and self.objective.heads is not None:
            heads = {name: value.contiguous() for name, value in self.objective.heads.state_dict().items()}
            save_file(heads, str(Path(str(output_dir or self.args.output_dir)) / HEADS_FILE))


def threshold_of(scores: LocalScores) -> Threshold:
    """tau: where the Gaussians fitted to both populations are equally dense (App. C.1)."""
    positive, negative = scores.positive, scores.negative
    return qda_threshold(positive.mean, positive.std, negative.mean, negative.std)


def _mask(scores: LocalScores, exists: Tensor, rho: float, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The evolutionary mask `(N, T)` of one modality and what is logged of it."""
    tau, fallback = threshold_of(scores)
    shared = ((scores.scores > tau) & exists).sum() / exists.sum().clamp(min=1)
    metrics = {f"{name}_threshold": tau, f"{name}_threshold_fallback": fallback, f"{name}_shared_rate": shared}
    for sign, population in (("positive", scores.positive), ("negative", scores.negative)):
        metrics |= {f"{name}_{sign}_mean": population.mean, f"{name}_{sign}_std": population.std}
    return evolutionary_mask(scores.scores, tau, rho), metrics


def _model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if not name.startswith("teacher_")}


def pair_tokens(output: JointEncoderOutput) -> PairTokens:
    """The tokens of a batch of pairs.

    Raises:
        ValueError: A row has no local token of image or of text.
    """
    for name, mask in (("image", output.image_token_mask), ("text", output.text_token_mask)):
        if mask is None or not mask.any(1).all():
            lacking = "all" if mask is None else (~mask.any(1)).nonzero().flatten().tolist()[:5]
            raise ValueError(f"SOLAR trains on image-text pairs; rows without {name} tokens: {lacking}")
    tokens = (output.image_tokens, output.text_tokens, output.image_token_mask, output.text_token_mask)
    return PairTokens(*cast("tuple[Tensor, Tensor, Tensor, Tensor]", tokens))


def align(tokens: PairTokens, margin: float = 0.1, reduce_scores_across_devices: bool = False) -> AlignmentTerms:
    """Scores between the global tokens of each modality and the local ones of the other, and their loss (Eq. 1)."""
    image, text, image_mask, text_mask = tokens
    return alignment_terms(
        text[:, 0], image[:, 1:], image_mask, image[:, 0], text[:, 1:], text_mask, margin,
        reduce_scores_across_devices=reduce_scores_across_devices,
    )  # fmt: skip
