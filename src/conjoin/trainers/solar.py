"""SOLAR / SUMMR: a joint encoder from image-text pairs without labels, in two self-supervised stages."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from conjoin.constants import SOLAR_HEADS
from conjoin.data import EpochRows, augment_image
from conjoin.data.row_images import map_images
from conjoin.data.training_rows import has_order
from conjoin.losses import (
    AlignmentTerms,
    ContrastiveLoss,
    GclLoss,
    Temperature,
    gather_rows,
    global_distillation,
    local_distillation,
    multi_positive,
)
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput
from conjoin.processing import load_image
from conjoin.retrieval import load_mined
from conjoin.storage import reading
from conjoin.trainers.base import RetrievalTrainer, TemperatureConfig
from conjoin.trainers.features import CachedFeatures
from conjoin.trainers.solar_masks import (
    ConstructedSamples,
    PairTokens,
    align,
    construct_samples,
    fit_threshold,
    mask_pixels,
    mask_schedule,
    mask_tokens,
    pair_tokens,
    segment_patches,
    separation,
    window_scores,
)
from conjoin.trainers.solar_teachers import TeacherCollator, Teachers, tower_targets

logger = logging.getLogger(__name__)

GCL_VIEWS = ("gcl_image", "gcl_text", "gcl_fused")
"""Names of the embeddings of the GCL loss."""
EVERYTHING_SHARED = -2.0
"""A threshold below every cosine: all tokens count as shared."""


@dataclass
class SolarConfig(TemperatureConfig):
    """Arguments of both stages of SOLAR.

    Args:
        gcl_weight: Weight of a generalized contrastive loss over the image, the text (masked in stage 1) and the fused
            embedding of the whole pair, without projection heads. It is not in the paper.
        scores: What masks are made of: `"global"`, the cosines of Eq. 1 with the other modality's global token, or
            `"windows"`, the embeddings of windows of tokens (`window_scores`; not in the paper).
        reduce_scores_across_devices: Fit the thresholds to the scores of all devices, by exchanging their sums (App.
            G.1); for `scores="global"`.

    Raises:
        ValueError: A choice is unknown, a weight is negative, or scores of windows are to be reduced.
    """

    gcl_weight: float = field(default=0.0)
    scores: Literal["global", "windows"] = field(default="global")
    reduce_scores_across_devices: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores == "windows" and self.reduce_scores_across_devices:
            raise ValueError('reduce_scores_across_devices=True needs scores="global", got scores="windows"')


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


class SolarTrainer(RetrievalTrainer):
    """What both stages share: frozen towers without dropout, projection heads, the two contrastive losses of pairs.

    The output of a frozen tower serves as target or score, so it must not be random.
    """

    model_class = JointEncoderModel
    supports_token_chunks: ClassVar[bool] = False
    args: Any

    def make_loss(self, model: Any, args: Any) -> nn.ModuleDict:
        """Return the loss of pairs with its projection heads and the GCL loss, where they have a weight.

        Raises:
            ValueError: The model has no E_VL, or drops tokens at random. Masks and constructed samples choose which
                tokens to drop.
        """
        got = {name: getattr(model.config, name) for name in ("num_vl_layers", "token_dropout")}
        if not got["num_vl_layers"] or got["token_dropout"]:
            raise ValueError(f"SOLAR needs a joint_encoder with num_vl_layers and without token_dropout, got {got}")
        loss = nn.ModuleDict()
        if args.itc_weight:
            loss["contrastive"] = ContrastiveLoss(args.temperature, args.learn_temperature)
        if args.itc_weight and getattr(args, "projection_heads", True):
            loss["heads"] = ProjectionHeads(model.config.hidden_size)
        if args.gcl_weight:
            loss["gcl"] = GclLoss(args.temperature, args.learn_temperature)
        return loss

    def freeze_dropout(self, model: Any) -> None:
        """Put frozen towers into evaluation mode."""
        for tower in filter(is_frozen, (model.vision_model, model.text_model)):
            tower.eval()

    def project(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Return both views `(N, d)` after the projection heads, if there are any."""
        return self.loss["heads"](image, text) if "heads" in self.loss else {"image": image, "text": text}

    def pair_views(self, views: Sequence[Tensor], fused: Tensor | None) -> dict[str, Tensor]:
        """Return what `loss_terms` reads of the embeddings `(N, d)` of both views and of the whole pair."""
        embeddings: dict[str, Any] = self.project(*views) if self.args.itc_weight else {}
        return embeddings | (dict(zip(GCL_VIEWS, (*views, fused), strict=True)) if self.args.gcl_weight else {})

    def embed_for_evaluation(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the unmasked embeddings `{view: (N, d)}`, after the projection heads if there are any."""
        pairs, _ = split_teacher(inputs["pairs"])
        return self.project(*model(**pairs, views=self.views).pooler_output.chunk(2))

    def pair_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `itc_loss` (Eq. 2-3) with its metrics, and `gcl_loss`: weighted, and those that have a weight."""
        terms: dict[str, Tensor] = {}
        ids, views = inputs.get("ids"), (*self.views, "fused")
        if self.args.itc_weight:
            terms = self.loss["contrastive"](**{view: embeddings[view] for view in self.views}, ids=ids)
            terms["itc_loss"] = self.args.itc_weight * terms.pop("contrastive_loss")
        if self.args.gcl_weight:
            parts = {view: embeddings[name] for view, name in zip(views, GCL_VIEWS, strict=True)}
            terms["gcl_loss"] = self.args.gcl_weight * self.loss["gcl"](**parts, ids=ids)["gcl_loss"]
        return terms


@dataclass
class SolarStage1Config(SolarConfig):
    """Arguments of `SolarStage1Trainer`: `L_ITC + l1 L_GLA + l2 L_GD + l3 L_LD` (SOLAR Eq. 4).

    A weight of 0 removes the term. With `mask` and `projection_heads`, this gives every row of the paper's Table 2.

    Args:
        itc_weight: Weight of the masked image-text contrastive loss (Eq. 2-3).
        gla_weight: Weight lambda_1 of the global-to-local alignment (Eq. 1).
        gd_weight: Weight lambda_2 of the global distillation.
        ld_weight: Weight lambda_3 of the local distillation.
        margin: delta of the alignment (Fig. 10).
        mask: `"evolutionary"` moves from no mask to the estimated mask; `"hard"` uses the estimated mask from the
            start; `"none"` never masks.
        mask_share: Share of the rows of a step that are masked, chosen at random; 1 in the paper. The others keep the
            embeddings of whole items trained.
        mask_schedule: `"linear"` or `"cosine"` decay of rho from 1 to 0.
        mask_warmup_ratio: Share of training after which rho is 0.
        mask_start_ratio: Share of training before which nothing is masked; 0 in the paper. Window scores are not
            computed until then.
        projection_heads: Learn W_V and W_L; otherwise the contrastive loss uses the output of E_VL.
        vision_teacher: Name or folder of a vision model (DINOv2 in the paper). Without teachers, the student's own
            frozen towers are the teachers.
        text_teacher: Of a text model, for token states (BGE-m3-retromae).
        text_global_teacher: Of a text model with the same tokens, for states of whole texts (BGE-m3); None for
            `text_teacher`.
        teacher_max_text_length: Maximum text length of the text teacher in tokens; None for its tokenizer's limit.

    Raises:
        ValueError: As `SolarConfig`, or one of two teachers is missing.
    """

    itc_weight: float = field(default=1.0)
    gla_weight: float = field(default=1.0)
    gd_weight: float = field(default=1.0)
    ld_weight: float = field(default=1.0)
    margin: float = field(default=0.1)
    mask: Literal["evolutionary", "hard", "none"] = field(default="evolutionary")
    mask_share: float = field(default=1.0)
    mask_schedule: Literal["linear", "cosine"] = field(default="linear")
    mask_warmup_ratio: float = field(default=0.5)
    mask_start_ratio: float = field(default=0.0)
    projection_heads: bool = field(default=True)
    vision_teacher: str | None = field(default=None)
    text_teacher: str | None = field(default=None)
    text_global_teacher: str | None = field(default=None)
    teacher_max_text_length: int | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_share <= 1:
            raise ValueError(f"mask_share={self.mask_share} must lie in (0, 1]")
        if (self.vision_teacher is None) != (self.text_teacher is None):
            raise ValueError("set both of vision_teacher and text_teacher, or neither")
        if not 0 <= self.mask_start_ratio <= self.mask_warmup_ratio <= 1:
            ratios = f"mask_start_ratio={self.mask_start_ratio}, mask_warmup_ratio={self.mask_warmup_ratio}"
            raise ValueError(f"{ratios}: expected 0 <= start <= warmup <= 1")


class SolarStage1Trainer(SolarTrainer):
    """Trains a joint encoder by stage 1 of SOLAR (Sec. 4.1).

    The towers run once. Their tokens give the local scores, the scores give the thresholds, and these give the masks
    for a second pass of the vision-language encoder. Score statistics and distillation terms are computed over the
    rows embedded together: the device's batch, or a chunk of the gradient cache. With the gradient cache,
    teachers run once and their states of all rows stay on the device, about 1 MB a row at the paper's size.

    The log contains every term, rho, the thresholds, the share of tokens above them, the share of rows without any,
    the mean and standard deviation of both score populations, and how well these separate (0.5 is chance).
    `save_model` also writes `SOLAR_HEADS`, for stage 2; `from_pretrained` does not read it.

    Args:
        model: The student, a joint encoder.
        args: The configuration.
        train_dataset: Rows `{"image", "text", "id"?, "group"?}`.
        eval_dataset: Rows of the same form, for R@k.
        processing_class: The model's processor.
        teacher: `Teachers`, or what maps the entry `teacher` of a batch and the student's output to `TeacherTargets`.
            None loads those of the configuration; if it names none, the student's frozen towers are the teachers.
        kwargs: As for `RetrievalTrainer`: `peft_config`, `columns`, `data_collator` ...

    Raises:
        ValueError: There is no teacher and a tower is trained.
    """

    config_class = SolarStage1Config
    loss_file = SOLAR_HEADS

    def __init__(self, *args: Any, teacher: Any = None, **kwargs: Any) -> None:
        self.teacher: Any = teacher
        super().__init__(*args, **kwargs)

    def make_collator(self, processor: Any, model: PreTrainedModel, args: Any) -> Callable[..., Any]:
        """Return what maps rows to a batch, with the inputs of the teachers; load them, if there are none yet."""
        if self.teacher is None and (args.gd_weight or args.ld_weight) and args.vision_teacher is not None:
            names = (args.vision_teacher, args.text_teacher, args.text_global_teacher)
            self.teacher = Teachers.from_pretrained(*names, max_text_length=args.teacher_max_text_length)
        if not isinstance(self.teacher, Teachers):
            return super().make_collator(processor, model, args)
        return TeacherCollator(processor, model.config.vision_config.patch_size, self.teacher)

    def make_loss(self, model: Any, args: Any) -> nn.ModuleDict:
        """Return the parts of `SolarTrainer`; without teachers, the towers must be frozen."""
        loss = super().make_loss(model, args)
        needs_teacher = self.teacher is None and (args.gd_weight or args.ld_weight)
        if needs_teacher and not (is_frozen(model.vision_model) and is_frozen(model.text_model)):
            raise ValueError("a tower that is trained cannot be a teacher: freeze the towers, or set vision_teacher")
        return loss

    def embed(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the masked embeddings `(N, d)`; what `chunk_terms` reads stays in `inputs["states"]`."""
        self.freeze_dropout(model)
        pairs, teacher_inputs = split_teacher(inputs["pairs"])
        has_gcl = self.args.gcl_weight > 0
        views = (*(self.views if self.args.gd_weight else ()), *(("fused",) if has_gcl else ()))
        output = model(**pairs, views=views, output_tokens=True)
        unmasked = dict(zip(views, () if not views else output.pooler_output.chunk(len(views)), strict=True))
        tokens, alignment = pair_tokens(output), None
        self.shares.states = [tokens.image, tokens.text]
        if self.args.gla_weight or self.args.scores == "global":
            alignment = align(tokens, self.args.margin, self.args.reduce_scores_across_devices)
        embeddings: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if self.args.itc_weight or has_gcl:
            image, text, metrics = self.cached(
                "masks", lambda: self._weights(model, alignment, tokens, teacher_inputs)
            )
            parts = model(
                **pairs | {"image_features": output.image_features, "text_features": output.text_features},
                image_tokens=output.image_tokens,
                text_tokens=output.text_tokens,
                image_weights=image,
                text_weights=text,
                views=self.views,
            ).pooler_output.chunk(2)
            embeddings = self.pair_views(parts, unmasked.get("fused"))
        inputs["states"] = output, tokens, alignment, unmasked, metrics
        return embeddings

    def chunk_terms(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `gla` (Eq. 1), `ld` and `gd` of the rows embedded together, without weights, and metrics of masks."""
        output, tokens, alignment, unmasked, metrics = inputs["states"]
        terms = {"gla": alignment.loss} if self.args.gla_weight else {}
        if self.args.gd_weight or self.args.ld_weight:
            with torch.no_grad():
                if self.teacher is None:
                    targets = tower_targets(output)
                else:  # a teacher runs once for each row, which the gradient cache keeps
                    _, teacher_inputs = split_teacher(inputs["pairs"])
                    targets = self.cached("targets", lambda: self.teacher(teacher_inputs, output))
        if self.args.ld_weight:
            image = local_distillation(tokens.image[:, 1:], targets.image_tokens, tokens.image_mask)
            known = tokens.text_mask & targets.text_mask
            terms["ld"] = image + local_distillation(tokens.text[:, 1:], targets.text_tokens, known)
        if self.args.gd_weight:
            image = global_distillation(unmasked["image"], targets.image_global)
            terms["gd"] = image + global_distillation(unmasked["text"], targets.text_global)
        return terms | metrics

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the terms of `L = L_ITC + λ1 L_GLA + λ2 L_GD + λ3 L_LD` (Eq. 4), a GCL term, and metrics."""
        terms = self.matryoshka(partial(self.pair_terms, inputs=inputs), embeddings)
        chunk = dict(inputs.get("chunk_terms", {}))
        weights = {"gla": self.args.gla_weight, "ld": self.args.ld_weight, "gd": self.args.gd_weight}
        terms |= {f"{name}_loss": weight * chunk.pop(name) for name, weight in weights.items() if weight}
        return terms | chunk

    def rho(self) -> float:
        """Return rho of the evolutionary mask at this step: 1 masks nothing, 0 masks fully."""
        args = self.args
        if args.mask == "evolutionary":
            return mask_schedule(self.progress, args.mask_schedule, args.mask_warmup_ratio, args.mask_start_ratio)
        return 1.0 if args.mask == "none" else 0.0

    def masks(
        self, model: Any, alignment: AlignmentTerms | None, tokens: PairTokens, teacher_inputs: Any, rows: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the masks of patches `(R, P)` and words `(R, T)` of the rows to mask `(R,)`, and metrics.

        `teacher_inputs` is the entry `teacher` of the part, which a subclass may use.
        """
        rho = self.rho()
        tokens = PairTokens(*(part[rows] for part in tokens))
        if alignment is None or self.args.scores == "windows":
            patches, words = window_scores(model.vl_encoder, tokens)
        else:
            patches, words = (part._replace(scores=part.scores[rows]) for part in alignment[1:])
        image, image_metrics = mask_tokens(patches, tokens.image_mask, rho, "image")
        text, text_metrics = mask_tokens(words, tokens.text_mask, rho, "text")
        return image, text, image_metrics | text_metrics | {"rho": torch.tensor(rho, device=image.device)}

    def _weights(
        self, model: Any, alignment: AlignmentTerms | None, tokens: PairTokens, teacher_inputs: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the weights of patches and words of all rows, and metrics."""
        count, device = len(tokens.image), tokens.image.device
        if self.args.scores == "windows" and self.rho() == 1:  # no mask yet, and the scores would cost time
            return tokens.image_mask.float(), tokens.text_mask.float(), {}
        rows = torch.arange(count, device=device)
        if self.args.mask_share < 1:
            rows = torch.randperm(count, device=device)[: max(2, round(self.args.mask_share * count))]
        *masks, metrics = self.masks(model, alignment, tokens, teacher_inputs, rows)
        image, text = (
            mask.new_ones(exists.shape).index_copy(0, rows, mask)
            for mask, exists in zip(masks, tokens[2:], strict=True)
        )
        return image, text, metrics


@dataclass
class SolarStage2Config(SolarConfig):
    """Arguments of `SolarStage2Trainer` (SOLAR Sec. 4.2); they cover every row of Tables 3, 6 and 12.

    Args:
        positive: The positive of an anchor: the anchor with the `"intersection"` masked in one modality, the anchor
            with a `"random"` part masked (RP), or an `"augmented"` version (AP).
        constructed_negatives: Use three negatives (CN): image difference, text difference, or intersections masked.
        segments: Mask image segments instead of single patches.
        mined: Output folder of `conjoin mine` for the training rows.
        mined_per_anchor: Mined negatives sampled per anchor and step; 0 for none.
        mask_source: `"frozen"` takes scores and thresholds from the model at the start of this stage, `"online"` from
            the model being trained.
        mask_level: `"feature"` masks the input tokens of E_VL: cheap, but in the towers the other tokens have seen the
            masked ones. `"input"` masks pixels and words before the towers, which then run for every sample; not for
            a text tower that attends to padding (SigLIP).
        itc_weight: Weight of an additional image-text contrastive loss: the Mixed variant of Table 12, which preserves
            text → image search. It goes on with the projection heads of stage 1.
        trainable_vl_layers: Number of first layers of E_VL to train fully, besides any LoRA (Mixed: 2).
        min_separation: Stop at the first step if the scores of a modality separate matching from non-matching pairs
            with a probability below this (`image_separation`, `text_separation` in the log of stage 1; 0.5 is chance).
            From such scores the constructed samples are random. 0 never stops.

    Raises:
        ValueError: As `SolarConfig`, or constructed negatives are combined with a random or augmented positive, which
            may miss more of the anchor than they do.
    """

    positive: Literal["intersection", "random", "augmented"] = field(default="intersection")
    constructed_negatives: bool = field(default=True)
    segments: bool = field(default=True)
    mined: str | None = field(default=None)
    mined_per_anchor: int = field(default=2)
    mask_source: Literal["frozen", "online"] = field(default="frozen")
    mask_level: Literal["feature", "input"] = field(default="feature")
    itc_weight: float = field(default=0.0)
    trainable_vl_layers: int = field(default=0)
    min_separation: float = field(default=0.55)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive != "intersection" and self.constructed_negatives:
            raise ValueError(
                f"positive={self.positive!r} goes with constructed_negatives=False (the paper's RP and AP)"
            )


class SolarStage2Rows(EpochRows):
    """Rows `{"anchor", "mined", "exists", "augmented"}` of pairs; every epoch resamples the negatives.

    Args:
        rows: Pairs, or their `CachedFeatures`.
        mined: From the id of each row to those of its negatives; None for no negatives.
        per_anchor: Negatives sampled per anchor; missing negatives are filled with the anchor and marked as absent.
        augment: Makes the image of the augmented version, from an image and a random generator; `CachedFeatures` take
            another stored copy. None for rows without one.
        seed: Seed of the sampling.

    Raises:
        ValueError: A row has no mined negatives. On reading a row: one of its negatives is not in the rows.
    """

    def __init__(
        self,
        rows: Any,
        mined: Mapping[str, Sequence[str]] | None = None,
        per_anchor: int = 2,
        augment: Callable[[Image.Image, np.random.Generator], Image.Image] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(rows, seed)
        self.mined, self.per_anchor, self.augment = mined, per_anchor, augment
        plain = rows.rows if isinstance(rows, CachedFeatures) else rows
        self.ids = [] if mined is None else [str(name) for name in plain["id"]]
        self._indices = {name: index for index, name in enumerate(self.ids)}
        without = next((name for name in self.ids if name not in (mined or ())), None)
        if without is not None:
            raise ValueError(f"nothing was mined for the row {without!r}: the mined negatives are of other rows")

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator, anchor = self.torch_random(index), self.rows[index]
        row: dict[str, Any] = {"anchor": anchor, "mined": [], "exists": []}
        if self.mined is not None:
            names = self.mined[self.ids[index]]
            drawn = [names[place] for place in torch.randperm(len(names), generator=generator)[: self.per_anchor]]
            if unknown := [name for name in drawn if name not in self._indices]:
                raise ValueError(
                    f"row {index} ({self.ids[index]!r}): its mined negative {unknown[0]!r} is not in the training "
                    "rows; mine in these"
                )
            missing = self.per_anchor - len(drawn)
            row["mined"] = [self.rows[self._indices[name]] for name in drawn] + [anchor] * missing
            row["exists"] = [True] * len(drawn) + [False] * missing
        if self.augment is not None and isinstance(self.rows, CachedFeatures):
            row["augmented"] = [self.rows.choose(index, 1 + int(torch.randint(2**31, (), generator=generator)))]
        elif self.augment is not None:
            augment, random = self.augment, self.numpy_random(index)
            name = f"row {index} ({anchor.get('id', index)!r})"
            image = map_images(lambda single: augment(load_image(single, name), random), anchor["image"])
            text = anchor.get("alternative_text") or anchor["text"]
            row["augmented"] = [{**anchor, "image": image, "text": text}]
        return row


class SolarStage2Collator:
    """Collates `SolarStage2Rows` into the parts `pairs` (the anchors, N rows), `mined` (N·K rows) and `augmented`.

    `mined_mask` `(N, K)` is True for mined items that exist. Plain rows of pairs are collated as usual.

    Args:
        collator: Collator of rows of pairs.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if "anchor" not in rows[0]:
            return self.collator(list(rows))
        batch = self.collator([row["anchor"] for row in rows])
        for role in ("mined", "augmented"):
            others = [other for row in rows for other in row.get(role, [])]
            if others:
                batch[role] = self.collator(others)["pairs"]
        if rows[0]["mined"]:
            batch["mined_mask"] = torch.tensor([row["exists"] for row in rows])
        return batch


class SolarStage2Trainer(SolarTrainer):
    """Trains a joint encoder by stage 2 of SOLAR: contrasts joint embeddings with constructed samples and mined ones.

    From the folder of the model of stage 1, it also takes the projection heads, if `itc_weight` asks for them, and the
    temperatures, if they are learned.

    Args:
        model: The model of stage 1.
        args: The configuration.
        train_dataset: Rows `{"image", "text", "id", "group"?}`, or `SolarStage2Rows` of them, for mined negatives that
            are not in the folder `args.mined`.
        eval_dataset: Rows of pairs, for R@k.
        processing_class: The model's processor.
        kwargs: As for `RetrievalTrainer`: `peft_config`, `columns` ...

    Raises:
        ValueError: There are no mined negatives and `args` needs some; the rows are a stream; or `mask_level="input"`,
            but the text tower attends to padding, so it would see the masked words.
    """

    config_class = SolarStage2Config
    evaluates_loss = False  # rows of evaluation have no constructed or mined samples

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data_collator = SolarStage2Collator(self.data_collator)

    def prepare_rows(self, rows: Any, args: Any) -> Any:
        """Return the rows with mined negatives and augmented versions, if they are used."""
        augment = augment_image if args.positive == "augmented" else None
        if rows is None or isinstance(rows, SolarStage2Rows) or not (args.mined_per_anchor or augment):
            return rows
        if not has_order(rows):
            raise ValueError(
                "mined negatives and augmented positives need rows in order: set dataset_streaming to false"
            )
        mined = None
        if args.mined_per_anchor:
            if args.mined is None:
                raise ValueError(
                    f"mined_per_anchor={args.mined_per_anchor} needs mined, the output of `conjoin mine`; set "
                    "mined_per_anchor to 0 to train without mined negatives"
                )
            mined = load_mined(args.mined)
        return SolarStage2Rows(rows, mined, args.mined_per_anchor, augment, args.seed)

    def make_loss(self, model: Any, args: Any) -> nn.ModuleDict:
        """Return the parts of `SolarTrainer` and the temperature of Eq. 5; those of stage 1 where there are some."""
        loss = super().make_loss(model, args)
        if args.mask_level == "input" and model.config.text_attends_padding:
            raise ValueError(
                'mask_level="input" masks words before a text tower that leaves masked tokens out; this one '
                f'({model.config.text_config.model_type}) attends to all: set mask_level to "feature"'
            )
        loss["temperature"] = Temperature(args.temperature, args.learn_temperature)
        file = Path(model.name_or_path or "") / SOLAR_HEADS
        with reading(file):
            state = load_file(str(file)) if file.is_file() else {}
        if "contrastive.temperature.log_value" in state:
            state["temperature.log_value"] = state["contrastive.temperature.log_value"]
        state = {name: value for name, value in state.items() if args.learn_temperature or "temperature" not in name}
        if args.itc_weight and "heads.image.weight" not in state:
            logger.warning("no projection heads in %r: the Mixed variant starts with new ones", str(file))
        loss.load_state_dict(state, strict=False)
        needs_scores = args.positive == "intersection" and args.mask_source == "frozen"
        towers = (model.vision_model, model.text_model)
        shared = {id(tower): tower for tower in towers} if all(map(is_frozen, towers)) else {}
        self.scorer = copy.deepcopy(model, shared).requires_grad_(False).eval() if needs_scores else None
        model.vl_encoder.layers[: args.trainable_vl_layers].requires_grad_(True)
        return loss

    def embed(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the embeddings of the given parts.

        `pairs` gives `anchors` `(N, d)`, `constructed` samples `(N, K, d)` and their mask `valid` `(N, K)`;
        `augmented` and `mined` give the embeddings of their items.
        """
        self.freeze_dropout(model)
        embeddings: dict[str, Tensor] = {}
        if "pairs" in inputs:
            anchors, teacher_inputs = split_teacher(inputs["pairs"])
            views = ("fused", *(self.views if self.args.itc_weight or self.args.gcl_weight else ()))
            output = model(**anchors, views=views, output_tokens=True)
            fused, *parts = output.pooler_output.chunk(len(views))
            embeddings = {"anchors": fused} | (self.pair_views(parts, fused) if parts else {})
            if self.args.positive != "augmented":
                samples, inputs["states"] = self.cached(
                    "samples", lambda: self.construct(model, anchors, output, teacher_inputs)
                )
                constructed = self._embed_samples(model, anchors, output, samples).transpose(0, 1)
                embeddings |= {"constructed": constructed, "valid": samples.valid[: constructed.shape[1]].T}
        for name in ("augmented", "mined"):
            if name in inputs:
                embeddings[name] = model(**inputs[name], views=("fused",)).pooler_output
        return embeddings

    def chunk_terms(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the metrics of the constructed samples."""
        return inputs.get("states", {})

    def samples_of(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the samples of each anchor `(N, K, d)`, positive first, and the mask `(N, K)` of existing samples."""
        parts = [(embeddings["constructed"], embeddings["valid"])] if "constructed" in embeddings else []
        for name in ("augmented", "mined"):
            if name in embeddings:
                samples = embeddings[name].unflatten(0, (len(embeddings["anchors"]), -1))
                everything = torch.ones(samples.shape[:2], dtype=torch.bool, device=samples.device)
                parts.append((samples, inputs["mined_mask"].bool() if name == "mined" else everything))
        samples, mask = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        return samples, mask

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return `solar_loss` (Eq. 5) and metrics, and the further losses that have a weight."""
        return self.matryoshka(partial(self._terms, inputs=inputs), embeddings) | inputs.get("chunk_terms", {})

    def _terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        anchors, ids, temperature = embeddings["anchors"], inputs.get("ids"), self.loss["temperature"]()
        samples, mask = self.samples_of(embeddings, inputs)
        gathered = gather_rows(anchors, ids=ids, present=mask[:, :1].any(1))
        positives, negatives = (samples[:, :1], samples[:, 1:]), (mask[:, :1], mask[:, 1:])
        loss = multi_positive(anchors, *positives, temperature, *negatives, gathered=gathered)
        return {"solar_loss": loss} | self.pair_terms(embeddings, inputs) | {"temperature": temperature.detach()}

    @torch.no_grad()
    def construct(
        self, model: Any, anchors: dict[str, Any], output: JointEncoderOutput, teacher_inputs: Any
    ) -> tuple[ConstructedSamples, dict[str, Tensor]]:
        """Sample the tokens to mask, any tokens or tokens selected by the scores, and return metrics.

        `teacher_inputs` is the entry `teacher` of the part, which a subclass may use.
        """
        if self.args.positive == "random":
            *_, image_mask, text_mask = pair_tokens(output)
            patches, words = (torch.zeros_like(mask, dtype=torch.float) for mask in (image_mask, text_mask))
            samples = construct_samples(patches, image_mask, EVERYTHING_SHARED, words, text_mask, EVERYTHING_SHARED)
            return samples, {"positive_rate": samples.valid[0].float().mean()}
        scorer = model
        if self.scorer is not None:
            scorer = nn.Module.to(self.scorer, model.device)  # not a submodule, so nothing else moves it
            features = {}
            if scorer.vision_model is model.vision_model:  # shared frozen towers: reuse their output
                features = {"image_features": output.image_features, "text_features": output.text_features}
            output = scorer(**anchors | features, views=(), output_tokens=True)
        tokens, segments = pair_tokens(output), None
        if self.args.scores == "windows":
            scores: Sequence[Any] = window_scores(scorer.vl_encoder, tokens)
        else:
            scores = align(tokens, reduce_scores_across_devices=self.args.reduce_scores_across_devices)[1:]
        taus = [fit_threshold(part).threshold for part in scores]
        metrics = {f"{name}_threshold": tau for name, tau in zip(self.views, taus, strict=True)}
        separations = {f"{name}_separation": separation(part) for name, part in zip(self.views, scores, strict=True)}
        poor = {name: round(float(p), 3) for name, p in separations.items() if p < self.args.min_separation}
        if poor and self.progress == 0:
            raise ValueError(
                f"{poor}, but min_separation={self.args.min_separation}: the scores of stage 1 hardly separate "
                "matching from other tokens; train stage 1 for more steps, or set min_separation to 0"
            )
        if self.args.segments:
            segments = segment_patches(tokens.image[:, 1:])
            metrics["num_segments"] = (segments.amax(1) + 1).float().mean()
        parts = [(part.scores, mask, tau) for part, mask, tau in zip(scores, tokens[2:], taus, strict=True)]
        samples = construct_samples(*parts[0], *parts[1], segments)
        return samples, metrics | separations | {"positive_rate": samples.valid[0].float().mean()}

    def _embed_samples(
        self, model: Any, anchors: dict[str, Any], output: JointEncoderOutput, samples: ConstructedSamples
    ) -> Tensor:
        """Embed the constructed samples `(4, N, d)`, or only the positives `(1, N, d)` without negatives."""
        roles = len(samples.valid) if self.args.constructed_negatives else 1
        image_weights, text_weights = (weights[:roles].flatten(0, 1) for weights in samples[:2])
        inputs = dict(anchors)
        if self.args.mask_level == "feature":
            inputs = {name: value for name, value in anchors.items() if name not in ("pixel_values", "input_ids")}
            inputs |= {"image_features": output.image_features, "text_features": output.text_features}
        elif "pixel_values" not in anchors or "input_ids" not in anchors:
            raise ValueError('mask_level="input" needs pixels and words; cached tower features contain neither')
        inputs = {name: value.repeat(roles, *(1,) * (value.ndim - 1)) for name, value in inputs.items()}
        if self.args.mask_level == "feature":
            inputs |= {"image_weights": image_weights, "text_weights": text_weights}
        else:
            patch_size = model.config.vision_config.patch_size
            inputs["pixel_values"] = mask_pixels(inputs["pixel_values"], image_weights, patch_size)
            inputs["attention_mask"] = inputs["attention_mask"] * text_weights.to(inputs["attention_mask"].dtype)
        return model(**inputs, views=("fused",)).pooler_output.unflatten(0, (roles, -1))


def split_teacher(pairs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the part `pairs` into the model inputs and the teacher's entries."""
    inputs = dict(pairs)
    return inputs, inputs.pop("teacher", {})


def is_frozen(module: nn.Module) -> bool:
    """Whether nothing in a module is trained."""
    return not any(parameter.requires_grad for parameter in module.parameters())
