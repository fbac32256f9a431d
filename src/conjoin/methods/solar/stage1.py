"""Stage 1 of SOLAR: separate the shared content of image and text from the rest, and align the shared part."""

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
    GclLoss,
    LocalScores,
    alignment_terms,
    global_distillation,
    local_distillation,
)
from conjoin.methods.solar.masking.evolutionary import evolutionary_mask, mask_schedule
from conjoin.methods.solar.masking.threshold import Threshold, qda_threshold
from conjoin.methods.solar.targets import TeacherTargets, TowerTeacher
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput
from conjoin.storage import atomic_path
from conjoin.training import Objective, RetrievalTrainer, TemperatureConfig

HEADS_FILE = "projection_heads.safetensors"

WHOLE = ("whole_image", "whole_text", "whole_fused")
"""Names of the embeddings without masks and projection heads."""

LIVE_INPUTS = {"pixel_values", "input_ids"}
"""The entries of `teacher` that teachers read when they run live."""

Teacher = Callable[[dict[str, Any], JointEncoderOutput], TeacherTargets]
"""Maps the teacher's entries of a batch and the student's output to the distillation targets."""


@dataclass
class SolarStage1Config(TemperatureConfig):
    """Arguments of `SolarStage1Trainer`: `L_ITC + l1 L_GLA + l2 L_GD + l3 L_LD` (SOLAR Eq. 4).

    A weight of 0 removes the term. With `mask` and `projection_heads`, this gives every row of the paper's Table 2.

    Args:
        itc_weight: Weight of the masked image-text contrastive loss (Eq. 2-3).
        gla_weight: Weight lambda_1 of the global-to-local alignment (Eq. 1).
        gd_weight: Weight lambda_2 of the global distillation.
        ld_weight: Weight lambda_3 of the local distillation.
        three_view_weight: Weight of a generalized contrastive loss over the image, text and fused embeddings, without
            masks and projection heads. It is not in the paper.
        margin: delta of the alignment (Fig. 10).
        mask: `"evolutionary"` moves from no mask to the estimated mask; `"hard"` uses the estimated mask from the
            start; `"none"` never masks.
        mask_schedule: `"linear"` or `"cosine"` decay of rho from 1 to 0.
        mask_warmup_ratio: Share of training after which rho is 0.
        projection_heads: Learn W_V and W_L; otherwise the contrastive loss uses the output of E_VL.
        reduce_scores_across_devices: Fit the thresholds to the scores of all devices, by exchanging their sums.

    Raises:
        ValueError: A weight is negative, all are zero, or a choice is unknown.
    """

    itc_weight: float = field(default=1.0)
    gla_weight: float = field(default=1.0)
    gd_weight: float = field(default=1.0)
    ld_weight: float = field(default=1.0)
    three_view_weight: float = field(default=0.0)
    margin: float = field(default=0.1)
    mask: Literal["evolutionary", "hard", "none"] = field(default="evolutionary")
    mask_schedule: Literal["linear", "cosine"] = field(default="linear")
    mask_warmup_ratio: float = field(default=0.5)
    projection_heads: bool = field(default=True)
    reduce_scores_across_devices: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: getattr(self, f"{name}_weight") for name in ("itc", "gla", "gd", "ld", "three_view")}
        if min(weights.values()) < 0 or not any(weights.values()):
            raise ValueError(f"weights {weights} must not be negative, and not all zero")
        if self.mask not in ("evolutionary", "hard", "none"):
            raise ValueError(f'mask={self.mask!r}; expected "evolutionary", "hard" or "none"')
        mask_schedule(0.0, self.mask_schedule, self.mask_warmup_ratio)


class ProjectionHeads(nn.Module):
    """The projections W_V and W_L of Eq. 2: no bias, initialised to the identity, used in training only."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.image = nn.Linear(hidden_size, hidden_size, bias=False)
        self.text = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.eye_(self.image.weight)
        nn.init.eye_(self.text.weight)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Project both views, `(N, d)` each."""
        return {"image": self.image(image), "text": self.text(text)}


class ThreeViewLoss(nn.Module):
    """A weighted generalized contrastive loss over the image, text and fused embeddings of each pair.

    Args:
        args: Its `temperature`.
        weight: Of the loss.
    """

    def __init__(self, args: TemperatureConfig, weight: float) -> None:
        super().__init__()
        self.loss, self.weight = GclLoss(args.temperature, args.learn_temperature), weight

    def forward(self, embeddings: dict[str, Tensor], ids: Tensor | None) -> dict[str, Tensor]:
        """Return the loss by its name; `embeddings` has the entries `WHOLE` `(N, d)`."""
        image, text, fused = (embeddings[name] for name in WHOLE)
        found = self.loss(image=image, text=text, fused=fused, ids=ids)
        return {name: self.weight * value for name, value in found.items() if name.endswith("_loss")}


class PairTokens(NamedTuple):
    """Adapter tokens of image-text pairs.

    Args:
        image: `(N, 1 + P, d)` [v_cls; V'].
        text: `(N, 1 + T, d)` [l_cls; L'].
        image_mask: `(N, P)` bool, True for the tokens of V' that exist.
        text_mask: `(N, T)` bool, True for the tokens of L' that exist.
    """

    image: Tensor
    text: Tensor
    image_mask: Tensor
    text_mask: Tensor


class PairObjective(Objective):
    """An objective of SOLAR. Frozen towers run without dropout, because their output serves as target or score.

    Raises:
        ValueError: The encoder drops tokens at random. Masks and constructed samples choose which tokens to drop.
    """

    encoder: JointEncoderModel

    def __init__(self, encoder: JointEncoderModel, loss: nn.Module) -> None:
        super().__init__(encoder, loss, ("image", "text"))
        if encoder.config.token_dropout:
            raise ValueError(
                f"token_dropout={encoder.config.token_dropout}: SOLAR needs 0, because random drops blur what its "
                "masks and constructed samples drop; set token_dropout in the model's config"
            )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules except frozen towers, which stay in evaluation mode."""
        super().train(mode)
        for tower in (self.encoder.vision_model, self.encoder.text_model):
            if not any(parameter.requires_grad for parameter in tower.parameters()):
                tower.eval()
        return self


class SolarStage1Objective(PairObjective):
    """The terms of stage 1 in one forward.

    The towers run once. Their tokens give the local scores, the scores give the thresholds, and these give the masks
    for a second pass of the vision-language encoder. Score statistics and distillation terms are computed over the
    rows embedded together: the device's batch, or a chunk of the gradient cache. With the gradient cache, live
    teachers run once and their states of all rows stay on the device, about 1 MB a row at the paper's size.

    Args:
        encoder: The student.
        args: Weights and mask settings.
        teacher: Computes the targets of both distillations; None if neither is used.
    """

    def __init__(self, encoder: JointEncoderModel, args: SolarStage1Config, teacher: Teacher | None = None) -> None:
        super().__init__(encoder, ContrastiveLoss(args.temperature, args.learn_temperature))
        self.heads = ProjectionHeads(encoder.config.hidden_size) if args.projection_heads and args.itc_weight else None
        self.three_view = ThreeViewLoss(args, args.three_view_weight) if args.three_view_weight else None
        self.args = args
        self._teacher = (teacher,)  # a tuple hides it from the module: not trained, not saved
        if teacher is None and (args.gd_weight or args.ld_weight):
            raise ValueError("gd_weight and ld_weight need a teacher")

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the unmasked embeddings `{view: (N, d)}` after the projection heads."""
        inputs, _ = split_teacher(batch["pairs"])
        return self._project(*self.encoder(**inputs, views=self.views).pooler_output.chunk(2))

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the masked embeddings, and the other terms and the metrics repeated for every row."""
        inputs, taught = split_teacher(batch["pairs"])
        views = (*self.views, "fused") if self.three_view is not None else self.views if self.args.gd_weight else ()
        output = self.encoder(**inputs, views=views, output_tokens=True)
        whole = {} if output.pooler_output is None else _by_view(output.pooler_output, len(views))
        tokens = pair_tokens(output)
        alignment = align(tokens, self.args.margin, self.args.reduce_scores_across_devices)
        terms = {"gla_loss": self.args.gla_weight * alignment.loss} if self.args.gla_weight else {}
        terms |= self._distil(taught, output, tokens, whole)
        embeddings = {} if self.three_view is None else whole
        if self.args.itc_weight:
            image, text, metrics = self.masks(alignment, tokens, taught)
            terms |= metrics
            features = {"image_features": output.image_features, "text_features": output.text_features}
            masked = self.encoder(**inputs | features, image_weights=image, text_weights=text, views=self.views)
            embeddings |= self._project(*masked.pooler_output.chunk(2))
        rows = len(tokens.image)
        return embeddings | {name: term.float().expand(rows) for name, term in terms.items()}

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `itc_loss` and the three-view loss over all rows, and the means of the other terms."""
        terms = {name: value.mean() for name, value in embeddings.items() if name not in (*self.views, *WHOLE)}
        if self.three_view is not None:
            terms |= self.three_view(embeddings, ids)
        if not self.args.itc_weight:
            return terms
        found = self.loss(**{view: embeddings[view] for view in self.views}, ids=ids)
        return {"itc_loss": self.args.itc_weight * found.pop("contrastive_loss")} | found | terms

    def masks(
        self, alignment: AlignmentTerms, tokens: PairTokens, taught: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the masks of the patches `(N, P)` and of the words `(N, T)`, and metrics.

        `taught` is the entry `teacher` of the part, which a subclass may use.
        """
        rho = self._rho()
        image, image_metrics = _mask(alignment.image, tokens.image_mask, rho, "image")
        text, text_metrics = _mask(alignment.text, tokens.text_mask, rho, "text")
        return image, text, image_metrics | text_metrics | {"rho": torch.tensor(rho, device=image.device)}

    def _project(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {"image": image, "text": text} if self.heads is None else self.heads(image, text)

    def _rho(self) -> float:
        if self.args.mask == "evolutionary":
            return mask_schedule(self.progress, self.args.mask_schedule, self.args.mask_warmup_ratio)
        return 1.0 if self.args.mask == "none" else 0.0

    def _distil(
        self, taught: dict[str, Any], output: JointEncoderOutput, tokens: PairTokens, whole: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        (teacher,) = self._teacher
        if teacher is None:
            return {}
        with torch.no_grad():
            if LIVE_INPUTS.isdisjoint(taught):
                targets = teacher(taught, output)
            else:
                targets = self.once("targets", lambda: teacher(taught, output))
        terms: dict[str, Tensor] = {}
        if self.args.ld_weight:
            known = tokens.text_mask & targets.text_mask
            image = local_distillation(tokens.image[:, 1:], targets.image_tokens, tokens.image_mask)
            text = local_distillation(tokens.text[:, 1:], targets.text_tokens, known)
            terms["ld_loss"] = self.args.ld_weight * (image + text)
        if self.args.gd_weight:
            image = global_distillation(whole["whole_image"], targets.image_global)
            text = global_distillation(whole["whole_text"], targets.text_global)
            terms["gd_loss"] = self.args.gd_weight * (image + text)
        return terms


class SolarStage1Trainer(RetrievalTrainer):
    """Trains a joint encoder by stage 1 of SOLAR (Sec. 4.1).

    The log contains every term, rho, the thresholds, the share of tokens above them, the share of rows without any,
    the mean and standard deviation of both score populations, and how well these separate (0.5 is chance).
    `save_model` also writes the projection heads, for the Mixed variant of stage 2; `from_pretrained` does not read
    them.

    Args:
        model: The student.
        args: The configuration.
        teacher: The teacher; None uses the student's towers, which must be frozen.
        kwargs: Arguments of `RetrievalTrainer`.

    Raises:
        ValueError: There is no teacher and a tower is trainable.
    """

    objective: SolarStage1Objective

    def __init__(
        self,
        model: JointEncoderModel,
        args: SolarStage1Config,
        teacher: Teacher | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if teacher is None and (args.gd_weight or args.ld_weight):
            teacher = TowerTeacher(model)
        super().__init__(SolarStage1Objective(model, args, teacher), args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the encoder and the projection heads to one folder, the encoder's weights last."""
        if not _internal_call and self.args.should_save and self.objective.heads is not None:
            heads = {name: value.contiguous() for name, value in self.objective.heads.state_dict().items()}
            folder = Path(str(output_dir or self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(folder / HEADS_FILE) as path:
                save_file(heads, str(path))
        super().save_model(output_dir, _internal_call=_internal_call)


def _by_view(embeddings: Tensor, count: int) -> dict[str, Tensor]:
    """Name the first `count` views of stacked embeddings `(count * N, d)` as in `WHOLE`."""
    return dict(zip(WHOLE[:count], embeddings.chunk(count), strict=True))


def threshold_of(scores: LocalScores) -> Threshold:
    """Return tau, where the Gaussians fitted to both populations have equal density (App. C.1)."""
    positive, negative = scores.positive, scores.negative
    return qda_threshold(positive.mean, positive.std, negative.mean, negative.std)


def separation(scores: LocalScores) -> Tensor:
    """P(s+ > s-) for scores drawn from the Gaussians fitted to both populations: 0.5 is chance."""
    positive, negative = scores.positive, scores.negative
    deviation = (positive.std.square() + negative.std.square()).sqrt().clamp(min=1e-12)
    return torch.special.ndtr((positive.mean - negative.mean) / deviation)


def _mask(scores: LocalScores, exists: Tensor, rho: float, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the evolutionary mask `(N, T)` of one modality and its metrics."""
    tau, fallback = threshold_of(scores)
    above = (scores.scores > tau) & exists
    metrics = {
        f"{name}_threshold": tau,
        f"{name}_threshold_fallback": fallback,
        f"{name}_shared_rate": above.sum() / exists.sum().clamp(min=1),
        f"{name}_empty_rate": (~above.any(1)).float().mean(),
        f"{name}_separation": separation(scores),
    }
    for sign, population in (("positive", scores.positive), ("negative", scores.negative)):
        metrics |= {f"{name}_{sign}_mean": population.mean, f"{name}_{sign}_std": population.std}
    return evolutionary_mask(scores.scores, exists, tau, rho), metrics


def split_teacher(pairs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the part `pairs` into the model inputs and the teacher's entries."""
    inputs = dict(pairs)
    return inputs, inputs.pop("teacher", {})


def pair_tokens(output: JointEncoderOutput) -> PairTokens:
    """Return the tokens of a batch of pairs.

    Raises:
        ValueError: A row has no local image token or no local text token.
    """
    for name, mask in (("image", output.image_token_mask), ("text", output.text_token_mask)):
        if mask is None or not mask.any(1).all():
            lacking = "all" if mask is None else (~mask.any(1)).nonzero().flatten().tolist()[:5]
            raise ValueError(f"SOLAR trains on image-text pairs; rows without {name} tokens: {lacking}")
    tokens = (output.image_tokens, output.text_tokens, output.image_token_mask, output.text_token_mask)
    return PairTokens(*cast("tuple[Tensor, Tensor, Tensor, Tensor]", tokens))


def align(tokens: PairTokens, margin: float = 0.1, reduce_scores_across_devices: bool = False) -> AlignmentTerms:
    """Score local tokens against the other modality's global token, and compute the alignment loss (Eq. 1)."""
    image, text, image_mask, text_mask = tokens
    return alignment_terms(
        text[:, 0], image[:, 1:], image_mask, image[:, 0], text[:, 1:], text_mask, margin,
        reduce_scores_across_devices=reduce_scores_across_devices,
    )  # fmt: skip
