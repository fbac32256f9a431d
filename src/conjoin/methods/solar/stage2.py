"""Stage 2 of SOLAR: contrast joint embeddings with constructed samples and mined negatives."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conjoin.losses import ContrastiveLoss, LocalScores, Temperature, gather_rows, multi_positive
from conjoin.methods.solar.masking import ConstructedSamples, construct_samples, mask_pixels, segment_patches
from conjoin.methods.solar.rows import SolarStage2Collator, SolarStage2Rows
from conjoin.methods.solar.scores import align, check_scores, pair_tokens, score_windows, separation, threshold_of
from conjoin.methods.solar.stage1 import (
    GCL_VIEWS,
    HEADS_FILE,
    PairObjective,
    ProjectionHeads,
    WeightedGcl,
    split_teacher,
)
from conjoin.models.joint_encoder import JointEncoderModel, JointEncoderOutput
from conjoin.training import RetrievalTrainer, TemperatureConfig

EVERYTHING_SHARED = -2.0
"""A threshold below every cosine: all tokens count as shared."""


@dataclass
class SolarStage2Config(TemperatureConfig):
    """Arguments of `SolarStage2Trainer` (SOLAR Sec. 4.2); they cover every row of Tables 3, 6 and 12.

    Args:
        positive: The positive of an anchor: the anchor with the `"intersection"` masked in one modality, the anchor
            with a `"random"` part masked (RP), or an `"augmented"` version (AP).
        constructed_negatives: Use three negatives (CN): image difference, text difference, or intersections masked.
        segments: Mask image segments instead of single patches.
        mined_per_anchor: Mined negatives sampled per anchor and step; 0 for none.
        scores: As in stage 1: `"global"` (the paper's) or `"windows"`.
        mask_source: `"frozen"` takes scores and thresholds from the model at the start of this stage, `"online"` from
            the model being trained.
        mask_level: `"feature"` masks the input tokens of E_VL: cheap, but in the towers the other tokens have seen the
            masked ones. `"input"` masks pixels and words before the towers, which then run for every sample; not for
            a text tower that attends to padding (SigLIP).
        itc_weight: Weight of an additional image-text contrastive loss: the Mixed variant of Table 12, which preserves
            text → image search.
        gcl_weight: Weight of an additional generalized contrastive loss over the image, text and fused
            embeddings of the anchors, without projection heads. It is not in the paper.
        trainable_vl_layers: Number of first layers of E_VL to train fully, besides any LoRA (Mixed: 2).
        reduce_scores_across_devices: Fit the thresholds to the scores of all devices, as in stage 1.
        min_separation: Stop at the first step if the scores of a modality separate matching from non-matching pairs
            with a probability below this (`image_separation`, `text_separation` in the log of stage 1; 0.5 is chance).
            From such scores the constructed samples are random. 0 never stops.

    Raises:
        ValueError: A choice is unknown, a number is negative, scores of windows are to be reduced, or constructed
            negatives are combined with a random or augmented positive, which may miss more of the anchor than they do.
    """

    positive: Literal["intersection", "random", "augmented"] = field(default="intersection")
    constructed_negatives: bool = field(default=True)
    segments: bool = field(default=True)
    mined_per_anchor: int = field(default=2)
    scores: Literal["global", "windows"] = field(default="global")
    mask_source: Literal["frozen", "online"] = field(default="frozen")
    mask_level: Literal["feature", "input"] = field(default="feature")
    itc_weight: float = field(default=0.0)
    gcl_weight: float = field(default=0.0)
    trainable_vl_layers: int = field(default=0)
    reduce_scores_across_devices: bool = field(default=False)
    min_separation: float = field(default=0.55)

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
        check_scores(self.scores, self.reduce_scores_across_devices)
        if self.positive != "intersection" and self.constructed_negatives:
            raise ValueError(
                f"positive={self.positive!r} goes with constructed_negatives=False (the paper's RP and AP)"
            )
        for name in ("mined_per_anchor", "itc_weight", "gcl_weight", "trainable_vl_layers", "min_separation"):
            if vars(self)[name] < 0:
                raise ValueError(f"{name}={vars(self)[name]} must not be negative")


class SolarStage2Objective(PairObjective):
    """The loss over anchors, constructed samples and mined negatives (Eq. 5), in one forward.

    Args:
        encoder: The model of stage 1; with `mask_source="frozen"` a frozen copy of it computes the scores.
        args: The positives, negatives and masks to use.
        heads: Projection heads of stage 1, for the Mixed variant; None creates new ones.

    Raises:
        ValueError: `mask_level="input"`, but the text tower attends to padding, so it would see the masked words.
    """

    def __init__(
        self, encoder: JointEncoderModel, args: SolarStage2Config, heads: ProjectionHeads | None = None
    ) -> None:
        if args.mask_level == "input" and encoder.config.text_attends_padding:
            raise ValueError(
                'mask_level="input" masks words before a text tower that leaves masked tokens out; this one '
                f'({encoder.config.text_config.model_type}) attends to all: set mask_level to "feature"'
            )
        mixed = args.itc_weight > 0
        loss = ContrastiveLoss(args.temperature, args.learn_temperature) if mixed else nn.Identity()
        super().__init__(encoder, loss)
        self.temperature = Temperature(args.temperature, args.learn_temperature)
        self.heads = (heads or ProjectionHeads(encoder.config.hidden_size)) if mixed else None
        self.gcl = WeightedGcl(args, args.gcl_weight) if args.gcl_weight else None
        self.args = args
        self._scorer = (_frozen_copy(encoder) if args.mask_source == "frozen" else None,)  # not trained, not saved

    def encode(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the embeddings `{view: (N, d)}`, after the projection heads if there are any."""
        inputs, _ = split_teacher(batch["pairs"])
        image, text = self.encoder(**inputs, views=self.views).pooler_output.chunk(2)
        return {"image": image, "text": text} if self.heads is None else self.heads(image, text)

    def embed(self, **batch: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the embeddings of the given parts.

        `pairs` gives `anchors` `(N, d)`, `constructed` samples `(N, K, d)`, their mask `valid` `(N, K)`, and metrics
        repeated for every row; `augmented` and `mined` give the embeddings of their items.
        """
        embeddings = self._embed_pairs(batch["pairs"]) if "pairs" in batch else {}
        others = [name for name in ("augmented", "mined") if name in batch]
        return embeddings | {name: self.encoder(**batch[name], views=("fused",)).pooler_output for name in others}

    def _embed_pairs(self, pairs: dict[str, Any]) -> dict[str, Tensor]:
        anchors, teacher_inputs = split_teacher(pairs)
        views = ("fused", *(self.views if self.heads is not None or self.gcl is not None else ()))
        output = self.encoder(**anchors, views=views, output_tokens=True)
        parts = dict(zip(views, output.pooler_output.chunk(len(views)), strict=True))
        embeddings: dict[str, Tensor] = {"anchors": parts["fused"]}
        if self.heads is not None:
            embeddings |= self.heads(parts["image"], parts["text"])
        if self.gcl is not None:
            embeddings |= dict(zip(GCL_VIEWS, (parts["image"], parts["text"], parts["fused"]), strict=True))
        if self.args.positive == "augmented":
            return embeddings
        samples, metrics = self.once("samples", lambda: self.construct(anchors, output, teacher_inputs))
        constructed = self._embed_samples(anchors, output, samples).transpose(0, 1)
        embeddings |= {"constructed": constructed, "valid": samples.valid[: constructed.shape[1]].T}
        rows = len(constructed)
        return embeddings | {f"metric_{name}": value.float().expand(rows) for name, value in metrics.items()}

    def contrast(self, embeddings: dict[str, Tensor], ids: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `solar_loss` and metrics, and the further losses that have a weight."""
        anchors = embeddings["anchors"]
        samples, mask = self._samples(embeddings, batch)
        positive_mask = mask[:, :1]
        temperature = self.temperature()
        loss = multi_positive(
            anchors,
            samples[:, :1],
            samples[:, 1:],
            temperature,
            positive_mask,
            mask[:, 1:],
            gathered=gather_rows(anchors, ids=ids, present=positive_mask.any(1)),
        )
        terms = {"solar_loss": loss, "temperature": temperature.detach()}
        if self.heads is not None:
            contrastive = self.loss(image=embeddings["image"], text=embeddings["text"], ids=ids)
            terms["itc_loss"] = self.args.itc_weight * contrastive["contrastive_loss"]
        if self.gcl is not None:
            terms |= self.gcl(embeddings, ids)
        metrics = {name: value for name, value in embeddings.items() if name.startswith("metric_")}
        return terms | {name.removeprefix("metric_"): value.mean() for name, value in metrics.items()}

    def _samples(self, embeddings: dict[str, Tensor], batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the samples of each anchor `(N, K, d)`, positive first, and the mask `(N, K)` of existing samples."""
        rows = len(embeddings["anchors"])
        wanted = {"augmented": self.args.positive == "augmented", "mined": self.args.mined_per_anchor > 0}
        missing = [name for name, is_used in wanted.items() if is_used and name not in embeddings]
        if missing:
            raise ValueError(f"the batch has no {missing[0]} items; wrap the data in SolarStage2Rows")
        parts: list[tuple[Tensor, Tensor]] = []
        if wanted["augmented"]:
            positives = embeddings["augmented"].unflatten(0, (rows, -1))
            parts.append((positives, torch.ones(positives.shape[:2], dtype=torch.bool, device=positives.device)))
        else:
            parts.append((embeddings["constructed"], embeddings["valid"]))
        if wanted["mined"]:
            parts.append((embeddings["mined"].unflatten(0, (rows, -1)), batch["mined_mask"].bool()))
        samples, masks = zip(*parts, strict=True)
        return torch.cat(samples, dim=1), torch.cat(masks, dim=1)

    @torch.no_grad()
    def construct(
        self, anchors: dict[str, Any], output: JointEncoderOutput, teacher_inputs: dict[str, Any]
    ) -> tuple[ConstructedSamples, dict[str, Tensor]]:
        """Sample the tokens to mask, any tokens or tokens selected by the scores, and return metrics.

        `teacher_inputs` is the entry `teacher` of the part, which a subclass may use.
        """
        if self.args.positive == "random":
            tokens = pair_tokens(output)
            any_patch, any_word = (torch.zeros(mask.shape, device=mask.device) for mask in tokens[2:])
            samples = construct_samples(
                any_patch, tokens.image_mask, EVERYTHING_SHARED, any_word, tokens.text_mask, EVERYTHING_SHARED
            )
            return samples, {"positive_rate": samples.valid[0].float().mean()}
        tokens = pair_tokens(self._scored(anchors, output))
        if self.args.scores == "windows":
            image, text = score_windows(self._scorer[0] or self.encoder, tokens)
        else:
            image, text = align(tokens, reduce_scores_across_devices=self.args.reduce_scores_across_devices)[1:]
        image_tau, text_tau = (threshold_of(part).threshold for part in (image, text))
        metrics = {"image_threshold": image_tau, "text_threshold": text_tau} | self._check_scores(image, text)
        segments = None
        if self.args.segments:
            segments = segment_patches(tokens.image[:, 1:])
            metrics["num_segments"] = (segments.amax(1) + 1).float().mean()
        patches, words = (image.scores, tokens.image_mask), (text.scores, tokens.text_mask)
        samples = construct_samples(*patches, image_tau, *words, text_tau, segments)
        return samples, metrics | {"positive_rate": samples.valid[0].float().mean()}

    def _check_scores(self, image: LocalScores, text: LocalScores) -> dict[str, Tensor]:
        """Return how well the scores separate, and stop at the first step if they are too poor."""
        separations = {"image_separation": separation(image), "text_separation": separation(text)}
        if self.progress == 0 and self.args.min_separation:
            poor = {
                name: round(float(value), 3) for name, value in separations.items() if value < self.args.min_separation
            }
            if poor:
                raise ValueError(
                    f"{poor}, but min_separation={self.args.min_separation}: the scores of stage 1 hardly separate "
                    "matching from other tokens; train stage 1 for more steps, or set min_separation to 0"
                )
        return separations

    def _scored(self, anchors: dict[str, Any], output: JointEncoderOutput) -> JointEncoderOutput:
        """Return the output whose tokens are scored: the frozen copy's, or `output` without a copy."""
        (scorer,) = self._scorer
        if scorer is None:
            return output
        nn.Module.to(scorer, self.encoder.device)  # not a submodule, so nothing else moves it
        features = {}
        if scorer.vision_model is self.encoder.vision_model:  # shared frozen towers: reuse their output
            features = {"image_features": output.image_features, "text_features": output.text_features}
        return scorer(**anchors | features, views=(), output_tokens=True)

    def _embed_samples(
        self, anchors: dict[str, Any], output: JointEncoderOutput, samples: ConstructedSamples
    ) -> Tensor:
        """Embed the constructed samples `(4, N, d)`, or only the positives `(1, N, d)` without negatives."""
        roles = len(samples.valid) if self.args.constructed_negatives else 1
        image_weights, text_weights = (weights[:roles].flatten(0, 1) for weights in samples[:2])
        if self.args.mask_level == "feature":
            inputs = {name: value for name, value in anchors.items() if name not in ("pixel_values", "input_ids")}
            inputs |= {"image_features": output.image_features, "text_features": output.text_features}
            inputs = _repeat(inputs, roles) | {"image_weights": image_weights, "text_weights": text_weights}
        elif "pixel_values" not in anchors or "input_ids" not in anchors:
            raise ValueError('mask_level="input" needs pixels and words; cached tower features contain neither')
        else:
            inputs = _repeat(anchors, roles)
            patch_size = self.encoder.config.vision_config.patch_size
            inputs["pixel_values"] = mask_pixels(inputs["pixel_values"], image_weights, patch_size)
            inputs["attention_mask"] = inputs["attention_mask"] * text_weights.to(inputs["attention_mask"].dtype)
        return self.encoder(**inputs, views=("fused",)).pooler_output.unflatten(0, (roles, -1))


class SolarStage2Trainer(RetrievalTrainer):
    """Trains a joint encoder by stage 2 of SOLAR; `itc_weight` selects the Mixed variant.

    Args:
        model: The model of stage 1.
        args: The configuration.
        train_dataset: `SolarStage2Rows`; any rows of pairs if `args` uses no mined or augmented rows.
        data_collator: Collator of rows of pairs; it is wrapped in a `SolarStage2Collator`.
        heads: Folder of a stage-1 model with the initial projection heads of the Mixed variant.
        kwargs: Arguments of `RetrievalTrainer`.

    Raises:
        ValueError: `args` needs mined or augmented rows and `train_dataset` has none.
        FileNotFoundError: `heads` contains no projection heads.
    """

    def __init__(
        self,
        model: JointEncoderModel,
        args: SolarStage2Config,
        train_dataset: Any = None,  # noqa: ANN401
        data_collator: Any = None,  # noqa: ANN401
        heads: str | Path | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        needs_rows = args.mined_per_anchor or args.positive == "augmented"
        if needs_rows and train_dataset is not None and not isinstance(train_dataset, SolarStage2Rows):
            raise ValueError(
                f"mined_per_anchor={args.mined_per_anchor} and positive={args.positive!r} need SolarStage2Rows, "
                f"got {type(train_dataset).__name__}; set mined_per_anchor to 0 to train without mined negatives"
            )
        objective = SolarStage2Objective(model, args, None if heads is None else load_heads(heads))
        model.vl_encoder.layers[: args.trainable_vl_layers].requires_grad_(True)
        super().__init__(objective, args, train_dataset=train_dataset, data_collator=data_collator, **kwargs)
        self.data_collator = SolarStage2Collator(self.data_collator)


def load_heads(folder: str | Path) -> ProjectionHeads:
    """Load the projection heads from the folder of a stage-1 model.

    Raises:
        FileNotFoundError: The folder contains no projection heads.
    """
    path = Path(folder) / HEADS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r}: no projection heads; stage 1 writes them unless projection_heads is false"
        )
    state = load_file(str(path))
    heads = ProjectionHeads(len(state["image.weight"]))
    heads.load_state_dict(state)
    return heads


def _frozen_copy(encoder: JointEncoderModel) -> JointEncoderModel:
    """Return a frozen copy of the encoder that shares its towers if they are frozen."""
    towers = [encoder.vision_model, encoder.text_model]
    frozen = not any(parameter.requires_grad for tower in towers for parameter in tower.parameters())
    shared = {id(tower): tower for tower in towers} if frozen else {}
    return copy.deepcopy(encoder, shared).requires_grad_(False).eval()


def _repeat(tensors: dict[str, Any], times: int) -> dict[str, Any]:
    return {name: value.repeat(times, *(1,) * (value.ndim - 1)) for name, value in tensors.items()}
