"""Stage 1 of SOLAR: separate the shared content of image and text from the rest, and align the shared part."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import save
from torch import Tensor, nn

from conjoin.losses import AlignmentTerms, ContrastiveLoss, GclLoss, global_distillation, local_distillation
from conjoin.methods.solar.masking import mask_schedule
from conjoin.methods.solar.scores import PairTokens, align, check_scores, mask_tokens, pair_tokens, score_windows
from conjoin.methods.solar.teachers import TeacherTargets, TowerTeacher
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput
from conjoin.storage import atomic_path
from conjoin.training import Objective, RetrievalTrainer, TemperatureConfig

HEADS_FILE = "projection_heads.safetensors"

GCL_VIEWS = ("gcl_image", "gcl_text", "gcl_fused")
"""Names of the embeddings of the GCL loss."""

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
        gcl_weight: Weight of a generalized contrastive loss over the masked image, the masked text and the
            fused embedding of the whole pair, without projection heads. It is not in the paper.
        margin: delta of the alignment (Fig. 10).
        mask: `"evolutionary"` moves from no mask to the estimated mask; `"hard"` uses the estimated mask from the
            start; `"none"` never masks.
        scores: What masks are made of: `"global"`, the cosines of Eq. 1 with the other modality's global token, or
            `"windows"`, the embeddings of windows of tokens (`window_scores`; not in the paper).
        mask_share: Share of the rows of a step that are masked, chosen at random; 1 in the paper. The others keep the
            embeddings of whole items trained.
        mask_schedule: `"linear"` or `"cosine"` decay of rho from 1 to 0.
        mask_warmup_ratio: Share of training after which rho is 0.
        mask_start_ratio: Share of training before which nothing is masked; 0 in the paper. Window scores are not
            computed until then.
        projection_heads: Learn W_V and W_L; otherwise the contrastive loss uses the output of E_VL.
        reduce_scores_across_devices: Fit the thresholds to the scores of all devices, by exchanging their sums; for
            `scores="global"`.

    Raises:
        ValueError: A weight is negative, all are zero, a choice is unknown, or scores of windows are to be reduced.
    """

    itc_weight: float = field(default=1.0)
    gla_weight: float = field(default=1.0)
    gd_weight: float = field(default=1.0)
    ld_weight: float = field(default=1.0)
    gcl_weight: float = field(default=0.0)
    margin: float = field(default=0.1)
    mask: Literal["evolutionary", "hard", "none"] = field(default="evolutionary")
    scores: Literal["global", "windows"] = field(default="global")
    mask_share: float = field(default=1.0)
    mask_schedule: Literal["linear", "cosine"] = field(default="linear")
    mask_warmup_ratio: float = field(default=0.5)
    mask_start_ratio: float = field(default=0.0)
    projection_heads: bool = field(default=True)
    reduce_scores_across_devices: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: getattr(self, f"{name}_weight") for name in ("itc", "gla", "gd", "ld", "gcl")}
        if min(weights.values()) < 0 or not any(weights.values()):
            raise ValueError(f"weights {weights} must not be negative, and not all zero")
        if self.mask not in ("evolutionary", "hard", "none"):
            raise ValueError(f'mask={self.mask!r}; expected "evolutionary", "hard" or "none"')
        check_scores(self.scores, self.reduce_scores_across_devices)
        if not 0 < self.mask_share <= 1:
            raise ValueError(f"mask_share={self.mask_share} must lie in (0, 1]")
        mask_schedule(0.0, self.mask_schedule, self.mask_warmup_ratio, self.mask_start_ratio)


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


class WeightedGcl(nn.Module):
    """A weighted generalized contrastive loss over the image, text and fused embeddings of each pair.

    Args:
        args: Its `temperature`.
        weight: Of the loss.
    """

    def __init__(self, args: TemperatureConfig, weight: float) -> None:
        super().__init__()
        self.loss, self.weight = GclLoss(args.temperature, args.learn_temperature), weight

    def forward(self, embeddings: dict[str, Tensor], ids: Tensor | None) -> dict[str, Tensor]:
        """Return the loss by its name; `embeddings` has the entries `GCL_VIEWS` `(N, d)`."""
        image, text, fused = (embeddings[name] for name in GCL_VIEWS)
        terms = self.loss(image=image, text=text, fused=fused, ids=ids)
        return {name: self.weight * value for name, value in terms.items() if name.endswith("_loss")}


class PairObjective(Objective):
    """An objective of SOLAR. Frozen towers run without dropout, because their output serves as target or score.

    Raises:
        ValueError: There is no E_VL, or the encoder drops tokens at random. Masks and constructed samples choose which
            tokens to drop.
    """

    encoder: JointEncoderModel
    sorts_rows: ClassVar[bool] = False

    def __init__(self, encoder: JointEncoderModel, loss: nn.Module) -> None:
        super().__init__(encoder, loss, ("image", "text"))
        if not encoder.config.num_vl_layers:
            raise ValueError("SOLAR needs a vision-language encoder, and num_vl_layers is 0")
        if encoder.config.token_dropout:
            raise ValueError(
                f"token_dropout={encoder.config.token_dropout}: SOLAR needs 0, because random drops blur what its "
                "masks and constructed samples drop; set token_dropout in the model's config"
            )

    @property
    def embedding_names(self) -> Collection[str]:
        """Which outputs of `embed` are embeddings."""
        return (*self.views, *GCL_VIEWS, "anchors", "constructed", "augmented", "mined")

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
        self.gcl = WeightedGcl(args, args.gcl_weight) if args.gcl_weight else None
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
        inputs, teacher_inputs = split_teacher(batch["pairs"])
        views = (*(self.views if self.args.gd_weight else ()), *(("fused",) if self.gcl is not None else ()))
        output = self.encoder(**inputs, views=views, output_tokens=True)
        unmasked = dict(zip(views, () if not views else output.pooler_output.chunk(len(views)), strict=True))
        tokens = pair_tokens(output)
        terms: dict[str, Tensor] = {}
        alignment = None
        if self.args.gla_weight or self.args.scores == "global":
            alignment = align(tokens, self.args.margin, self.args.reduce_scores_across_devices)
            terms |= {"gla_loss": self.args.gla_weight * alignment.loss} if self.args.gla_weight else {}
        terms |= self._distil(teacher_inputs, output, tokens, unmasked)
        embeddings: dict[str, Tensor] = {}
        if self.args.itc_weight or self.gcl is not None:
            image, text, metrics = self.once("masks", lambda: self._weights(alignment, tokens, teacher_inputs))
            terms |= metrics
            masked = self.encoder(
                **inputs | {"image_features": output.image_features, "text_features": output.text_features},
                image_tokens=output.image_tokens,
                text_tokens=output.text_tokens,
                image_weights=image,
                text_weights=text,
                views=self.views,
            )
            parts = masked.pooler_output.chunk(2)
            if self.args.itc_weight:
                embeddings |= self._project(*parts)
            if self.gcl is not None:
                embeddings |= dict(zip(GCL_VIEWS, (*parts, unmasked["fused"]), strict=True))
        rows = len(tokens.image)
        return embeddings | {name: term.float().expand(rows) for name, term in terms.items()}

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `itc_loss` and the GCL loss over all rows, and the means of the other terms."""
        terms = {name: value.mean() for name, value in embeddings.items() if name not in (*self.views, *GCL_VIEWS)}
        if self.gcl is not None:
            terms |= self.gcl(embeddings, ids)
        if not self.args.itc_weight:
            return terms
        contrastive = self.loss(**{view: embeddings[view] for view in self.views}, ids=ids)
        return {"itc_loss": self.args.itc_weight * contrastive.pop("contrastive_loss")} | contrastive | terms

    def masks(
        self, alignment: AlignmentTerms | None, tokens: PairTokens, teacher_inputs: dict[str, Any], rows: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the masks of patches `(R, P)` and words `(R, T)` of the rows to mask `(R,)`, and metrics.

        `teacher_inputs` is the entry `teacher` of the part, which a subclass may use.
        """
        rho = self._rho()
        tokens = PairTokens(*(part[rows] for part in tokens))
        if alignment is None or self.args.scores == "windows":
            image_scores, text_scores = score_windows(self.encoder, tokens)
        else:
            image_scores, text_scores = (
                part._replace(scores=part.scores[rows]) for part in (alignment.image, alignment.text)
            )
        image, image_metrics = mask_tokens(image_scores, tokens.image_mask, rho, "image")
        text, text_metrics = mask_tokens(text_scores, tokens.text_mask, rho, "text")
        return image, text, image_metrics | text_metrics | {"rho": torch.tensor(rho, device=image.device)}

    def _weights(
        self, alignment: AlignmentTerms | None, tokens: PairTokens, teacher_inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the weights of patches and words of all rows, and metrics."""
        count, device = len(tokens.image), tokens.image.device
        if self.args.scores == "windows" and self._rho() == 1:  # no mask yet, and the scores would cost time
            return tokens.image_mask.float(), tokens.text_mask.float(), {}
        rows = torch.arange(count, device=device)
        if self.args.mask_share < 1:
            rows = torch.randperm(count, device=device)[: max(2, round(self.args.mask_share * count))]
        image, text, metrics = self.masks(alignment, tokens, teacher_inputs, rows)
        weights = [
            mask.new_ones(exists.shape).index_copy(0, rows, mask)
            for mask, exists in ((image, tokens.image_mask), (text, tokens.text_mask))
        ]
        return weights[0], weights[1], metrics

    def _project(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {"image": image, "text": text} if self.heads is None else self.heads(image, text)

    def _rho(self) -> float:
        if self.args.mask == "evolutionary":
            schedule, start = self.args.mask_schedule, self.args.mask_start_ratio
            return mask_schedule(self.progress, schedule, self.args.mask_warmup_ratio, start)
        return 1.0 if self.args.mask == "none" else 0.0

    def _distil(
        self,
        teacher_inputs: dict[str, Any],
        output: JointEncoderOutput,
        tokens: PairTokens,
        unmasked: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        (teacher,) = self._teacher
        if teacher is None:
            return {}
        with torch.no_grad():
            if LIVE_INPUTS.isdisjoint(teacher_inputs):
                targets = teacher(teacher_inputs, output)
            else:
                targets = self.once("targets", lambda: teacher(teacher_inputs, output))
        terms: dict[str, Tensor] = {}
        if self.args.ld_weight:
            known = tokens.text_mask & targets.text_mask
            image = local_distillation(tokens.image[:, 1:], targets.image_tokens, tokens.image_mask)
            text = local_distillation(tokens.text[:, 1:], targets.text_tokens, known)
            terms["ld_loss"] = self.args.ld_weight * (image + text)
        if self.args.gd_weight:
            image = global_distillation(unmasked["image"], targets.image_global)
            text = global_distillation(unmasked["text"], targets.text_global)
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
        is_checkpoint = _internal_call and output_dir is not None
        if not is_checkpoint and self.objective.heads is not None:
            state = self.objective_weights()  # of all processes
            if self.args.should_save:
                prefix = "heads."
                heads = {name: value.contiguous() for name, value in state.items() if name.startswith(prefix)}
                folder = Path(str(output_dir or self.args.output_dir))
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_path(folder / HEADS_FILE) as path:
                    path.write_bytes(save({name.removeprefix(prefix): value for name, value in heads.items()}))
        super().save_model(output_dir, _internal_call=_internal_call)


def split_teacher(pairs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the part `pairs` into the model inputs and the teacher's entries."""
    inputs = dict(pairs)
    return inputs, inputs.pop("teacher", {})
