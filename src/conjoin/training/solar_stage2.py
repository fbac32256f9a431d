"""Stage 2 of SOLAR: contrast joint embeddings with samples that the stage-1 model constructs and that were mined."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conjoin.losses import ContrastiveLoss, Temperature, multi_positive
from conjoin.masking import ConstructedSamples, construct_samples, mask_pixels, segment_patches
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput
from conjoin.ops import gather_with_gradient, local_positions

from .contrastive import ContrastiveConfig
from .feature_cache import NewDraws
from .solar_stage1 import HEADS_FILE, PairObjective, ProjectionHeads, align, pair_tokens, threshold_of
from .stage2_rows import Stage2Collator, Stage2Rows
from .trainer import RetrievalTrainer

EVERYTHING_SHARED = -2.0
"""A threshold below every cosine."""


@dataclass
class JointEncoderStage2Config(ContrastiveConfig):
    """Arguments of `JointEncoderStage2Trainer` (SOLAR Sec. 4.2); the switches give every row of Tables 3, 6 and 12.

    Args:
        positive: What the positive of an anchor is: the anchor with its `"intersection"` masked in one modality, with
            a `"random"` part masked (RP), or an `"augmented"` version of it (AP).
        constructed_negatives: Use the three negatives with the difference, or both intersections, masked (CN).
        segments: Mask segments of the image; single patches otherwise.
        mined_per_anchor: Mined negatives drawn per step; 0 for none.
        mask_source: `"frozen"` takes scores and thresholds from the model as it was before this stage, `"online"` from
            the model being trained.
        mask_level: `"feature"` masks tokens where they enter E_VL: cheap, but what is left knows its masked neighbours
            from the towers. `"input"` masks pixels and words before the towers, which run for every sample.
        itc_weight: Of an image-text contrastive loss beside: the Mixed variant of Table 12, which keeps text → image
            search alive.
        trainable_vl_layers: How many of the first layers of E_VL to train whole, besides any LoRA (Mixed: 2).
        reduce_scores_across_devices: Fit the thresholds to the scores of all devices, as in stage 1.

    Raises:
        ValueError: A choice is unknown, a number negative, or a random or augmented positive is to be contrasted with
            constructed negatives, which would then miss less than the positive does.
    """

    positive: Literal["intersection", "random", "augmented"] = field(default="intersection")
    constructed_negatives: bool = field(default=True)
    segments: bool = field(default=True)
    mined_per_anchor: int = field(default=2)
    mask_source: Literal["frozen", "online"] = field(default="frozen")
    mask_level: Literal["feature", "input"] = field(default="feature")
    itc_weight: float = field(default=0.0)
    trainable_vl_layers: int = field(default=0)
    reduce_scores_across_devices: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = {
            "positive": ("intersection", "random", "augmented"),
            "mask_source": ("frozen", "online"),
            "mask_level": ("feature", "input"),
        }
        for name, allowed in choices.items():
            if vars(self)[name] not in allowed:
                raise ValueError(f"{name}={vars(self)[name]!r}; expected one of {allowed}")
        if self.positive != "intersection" and self.constructed_negatives:
            raise ValueError(
                f"positive={self.positive!r} goes with constructed_negatives=False (the paper's RP and AP)"
            )
        for name in ("mined_per_anchor", "itc_weight", "trainable_vl_layers"):
            if vars(self)[name] < 0:
                raise ValueError(f"{name}={vars(self)[name]} must not be negative")


class Stage2Objective(PairObjective):
    """Joint embeddings of anchors, constructed samples and mined negatives, and their loss (Eq. 5), in one forward.

    Args:
        encoder: The model as stage 1 left it; a frozen copy is taken at once if scores are to come from it.
        args: What to contrast.
        heads: Projection heads of stage 1, for the Mixed variant; new ones when None.
    """

    def __init__(
        self, encoder: JointEncoderModel, args: JointEncoderStage2Config, heads: ProjectionHeads | None = None
    ) -> None:
        mixed = args.itc_weight > 0
        loss = ContrastiveLoss(args.temperature, args.learn_temperature) if mixed else nn.Identity()
        super().__init__(encoder, loss, ("image", "text"))
        self.temperature = Temperature(args.temperature, args.learn_temperature)
        self.heads = (heads or ProjectionHeads(encoder.config.hidden_size)) if mixed else None
        self.args = args
        self._scorer = (_frozen_copy(encoder) if args.mask_source == "frozen" else None,)  # neither trained nor saved

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return `{view: (N, d)}`, after the projection heads if there are any."""
        image, text = self.encoder(**_anchors(batch), views=self.views).pooler_output.chunk(2)
        return {"image": image, "text": text} if self.heads is None else self.heads(image, text)

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return anchors `(N, d)`, positives and negatives `(N, K, d)` with their masks, and what is logged."""
        anchors = _anchors(batch)
        views = ("fused", *(self.views if self.heads is not None else ()))
        output = self.encoder(**anchors, views=views, output_tokens=True)
        parts = dict(zip(views, output.pooler_output.chunk(len(views)), strict=True))
        found: dict[str, Tensor] = {"anchors": parts["fused"]}
        if self.heads is not None:
            found |= self.heads(parts["image"], parts["text"])
        metrics: dict[str, Tensor] = {}
        if self.args.positive == "augmented":
            positives = self._embed_rows(batch, "augmented_")
            positive_mask = torch.ones(positives.shape[:2], dtype=torch.bool, device=positives.device)
            negatives, negative_mask = positives[:, :0], positive_mask[:, :0]
        else:
            samples, metrics = self.once("samples", lambda: self._construct(anchors, output))
            embedded = self._embed_samples(anchors, output, samples).transpose(0, 1)
            valid = samples.valid[: embedded.shape[1]].T
            positives, negatives = embedded[:, :1], embedded[:, 1:]
            positive_mask, negative_mask = valid[:, :1], valid[:, 1:]
        if self.args.mined_per_anchor:
            negatives = torch.cat([negatives, self._embed_rows(batch, "mined_")], dim=1)
            negative_mask = torch.cat([negative_mask, batch["mined_rows_mask"].bool()], dim=1)
        found |= {"positives": positives, "positive_mask": positive_mask}
        found |= {"negatives": negatives, "negative_mask": negative_mask}
        rows = len(positives)
        return found | {f"metric_{name}": value.float().expand(rows) for name, value in metrics.items()}

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `solar_loss`, with `itc_loss` in the Mixed variant, and metrics."""
        anchors, positive_mask = embeddings["anchors"], embeddings["positive_mask"]
        temperature = self.temperature()
        loss = multi_positive(
            anchors,
            embeddings["positives"],
            embeddings["negatives"],
            temperature,
            positive_mask,
            embeddings["negative_mask"],
            gathered_anchors=gather_with_gradient(anchors),
            gathered_valid=gather_with_gradient(positive_mask.any(1)),
            gathered_ids=None if ids is None else gather_with_gradient(ids),
            positions=local_positions(len(anchors), anchors.device),
        )
        terms = {"solar_loss": loss, "temperature": temperature.detach()}
        if self.heads is not None:
            found = self.loss(image=embeddings["image"], text=embeddings["text"], ids=ids)
            terms["itc_loss"] = self.args.itc_weight * found["contrastive_loss"]
        metrics = {name: value for name, value in embeddings.items() if name.startswith("metric_")}
        return terms | {name.removeprefix("metric_"): value.mean() for name, value in metrics.items()}

    @torch.no_grad()
    def _construct(
        self, anchors: dict[str, Any], output: JointEncoderOutput
    ) -> tuple[ConstructedSamples, dict[str, Tensor]]:
        """Draw what to mask: anything, or by the scorer's tokens."""
        if self.args.positive == "random":
            tokens = pair_tokens(output)
            image, text = (torch.zeros(mask.shape, device=mask.device) for mask in tokens[2:])
            samples = construct_samples(
                image, tokens.image_mask, EVERYTHING_SHARED, text, tokens.text_mask, EVERYTHING_SHARED
            )
            return samples, {"positive_rate": samples.valid[0].float().mean()}
        tokens = pair_tokens(self._scored(anchors, output))
        scores = align(tokens, reduce_scores_across_devices=self.args.reduce_scores_across_devices)
        image_tau, text_tau = threshold_of(scores.image).threshold, threshold_of(scores.text).threshold
        metrics = {"image_threshold": image_tau, "text_threshold": text_tau}
        segments = None
        if self.args.segments:
            segments = segment_patches(tokens.image[:, 1:])
            metrics["num_segments"] = (segments.amax(1) + 1).float().mean()
        patches, words = (scores.image.scores, tokens.image_mask), (scores.text.scores, tokens.text_mask)
        samples = construct_samples(*patches, image_tau, *words, text_tau, segments)
        return samples, metrics | {"positive_rate": samples.valid[0].float().mean()}

    def _scored(self, anchors: dict[str, Any], output: JointEncoderOutput) -> JointEncoderOutput:
        """The output whose tokens are scored: the scorer's, or what is at hand."""
        (scorer,) = self._scorer
        if scorer is None:
            return output
        nn.Module.to(scorer, self.encoder.device)  # no module of this one, so nothing else moves it
        features = {}
        if scorer.vision_model is self.encoder.vision_model:  # frozen towers, which need not run again
            features = {"image_features": output.image_features, "text_features": output.text_features}
        return scorer(**anchors | features, views=(), output_tokens=True)

    def _embed_samples(
        self, anchors: dict[str, Any], output: JointEncoderOutput, samples: ConstructedSamples
    ) -> Tensor:
        """Embed the constructed samples, `(4, N, d)`, or the positives alone, `(1, N, d)`, if no others are used."""
        roles = len(samples.valid) if self.args.constructed_negatives else 1
        image_weights, text_weights = (weights[:roles].flatten(0, 1) for weights in samples[:2])
        if self.args.mask_level == "feature":
            inputs = {name: value for name, value in anchors.items() if name not in ("pixel_values", "input_ids")}
            inputs |= {"image_features": output.image_features, "text_features": output.text_features}
            inputs = _repeat(inputs, roles) | {"image_weights": image_weights, "text_weights": text_weights}
        elif "pixel_values" not in anchors or "input_ids" not in anchors:
            raise ValueError('mask_level="input" needs pixels and words; cached tower features have neither')
        else:
            inputs = _repeat(anchors, roles)
            patch_size = self.encoder.config.vision_config.patch_size
            inputs["pixel_values"] = mask_pixels(inputs["pixel_values"], image_weights, patch_size)
            inputs["attention_mask"] = inputs["attention_mask"] * text_weights.to(inputs["attention_mask"].dtype)
        return self.encoder(**inputs).pooler_output.unflatten(0, (roles, -1))

    def _embed_rows(self, batch: dict[str, Any], prefix: str) -> Tensor:
        """Embed the other items of each row, `(N, K, d)`."""
        items = {name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)}
        items.pop("rows_mask", None)
        if not items:
            raise ValueError(f"the batch has no {prefix}* items; wrap the data in Stage2Rows")
        rows = len(next(iter(items.values())))
        flat = {name: value.flatten(0, 1) for name, value in items.items()}
        return self.encoder(**flat).pooler_output.unflatten(0, (rows, -1))


class JointEncoderStage2Trainer(RetrievalTrainer):
    """Trains the joint embedding by stage 2 of SOLAR; with `itc_weight`, the Mixed variant.

    Args:
        model: As stage 1 left it.
        args: The configuration.
        train_dataset: `Stage2Rows`; any rows of pairs if nothing mined or augmented is used.
        data_collator: Of single rows; `Stage2Collator` is put around it.
        heads: Folder of a stage-1 model, whose projection heads Mixed goes on with.
        kwargs: As for `RetrievalTrainer`.

    Raises:
        ValueError: `args` asks for mined or augmented rows and `train_dataset` has none.
        FileNotFoundError: `heads` holds no projection heads.
    """

    def __init__(
        self,
        model: JointEncoderModel,
        args: JointEncoderStage2Config,
        train_dataset: Any = None,  # noqa: ANN401
        data_collator: Any = None,  # noqa: ANN401
        heads: str | Path | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        needs_rows = args.mined_per_anchor or args.positive == "augmented"
        if needs_rows and train_dataset is not None and not isinstance(train_dataset, Stage2Rows):
            raise ValueError(
                f"mined_per_anchor={args.mined_per_anchor} and positive={args.positive!r} need a Stage2Rows dataset, "
                f"got {type(train_dataset).__name__}; set mined_per_anchor to 0 to train without mined negatives"
            )
        objective = Stage2Objective(model, args, None if heads is None else load_heads(heads))
        model.vl_encoder.layers[: args.trainable_vl_layers].requires_grad_(True)
        super().__init__(objective, args, train_dataset=train_dataset, data_collator=data_collator, **kwargs)
        self.data_collator = Stage2Collator(self.data_collator)
        if isinstance(train_dataset, Stage2Rows):
            self.add_callback(NewDraws(train_dataset))


def load_heads(folder: str | Path) -> ProjectionHeads:
    """Read the projection heads that stage 1 wrote beside its model.

    Raises:
        FileNotFoundError: There are none.
    """
    path = Path(folder) / HEADS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r}: no projection heads; stage 1 writes them unless they are switched off"
        )
    state = load_file(str(path))
    heads = ProjectionHeads(len(state["image.weight"]))
    heads.load_state_dict(state)
    return heads


def _frozen_copy(encoder: JointEncoderModel) -> JointEncoderModel:
    """A copy that training does not touch; towers that are frozen anyway are shared."""
    towers = [encoder.vision_model, encoder.text_model]
    frozen = not any(parameter.requires_grad for tower in towers for parameter in tower.parameters())
    shared = {id(tower): tower for tower in towers} if frozen else {}
    return copy.deepcopy(encoder, shared).requires_grad_(False).eval()


def _anchors(batch: dict[str, Any]) -> dict[str, Any]:
    prefixes = ("mined_", "augmented_", "teacher_")
    return {name: value for name, value in batch.items() if not name.startswith(prefixes)}


def _repeat(tensors: dict[str, Any], times: int) -> dict[str, Any]:
    return {name: value.repeat(times, *(1,) * (value.ndim - 1)) for name, value in tensors.items()}
