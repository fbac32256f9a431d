"""Token fusion (VISTA): image patches enter a text encoder as tokens between CLS and the text."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_token_fusion import TokenFusionConfig

VIEWS = ("image", "text", "fused")


@dataclass
class TokenFusionOutput(ModelOutput):
    """Output of `TokenFusionModel` for `N` items (times the requested views).

    Args:
        embeddings: `(N, d)` float32, L2-normalised, for indexing and comparison.
        pooler_output: `(N, d)` pooled state before normalisation, the input of losses.
        hidden_states: On request, the hidden states of the text encoder, `(N, S, d)` each, over CLS, patches, text.
        attentions: On request, its attention weights, `(N, heads, S, S)` each.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class TokenFusionModel(PreTrainedModel):
    """Embeds text, image, or image + text items with a text encoder that also reads image patches (VISTA).

    The encoder reads `[CLS, projected patches, text, SEP]`, without the parts that an item lacks, at consecutive
    positions of its own position table and through its own embedding norm. A text-only item therefore has exactly the
    text encoder's own embedding.

    The published VISTA weights (bge-visualized) cannot be loaded: they are a pickled `.pth` file, which this package
    never unpickles, and transformers does not have their vision tower (EVA02-CLIP). BGE-VL-base and -large are CLIP
    checkpoints with score fusion: load them with `ScoreFusionModel.from_clip`.
    """

    config_class = TokenFusionConfig
    config: TokenFusionConfig
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True

    def __init__(self, config: TokenFusionConfig) -> None:
        super().__init__(config)
        self.vision_model = _build_tower(_with_depth(config.vision_config, config.num_vision_layers))
        self.text_model = _build_tower(config.text_config)
        if "embeddings.position_embeddings" not in dict(self.text_model.named_modules()):
            raise ValueError(
                f"text_config: {config.text_config.model_type!r} has no table of learned positions; "
                "expected a BERT-family text encoder"
            )
        self.visual_projection = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.post_init()

    @classmethod
    def from_backbones(
        cls,
        vision: str | Path | PreTrainedModel,
        text: str | Path | PreTrainedModel,
        **config_kwargs: Any,  # noqa: ANN401
    ) -> "TokenFusionModel":
        """Build token fusion on two pretrained towers; only the projection between them is untrained.

        Args:
            vision: A model id, a folder, or a loaded vision model. A two-tower model (CLIP, SigLIP) gives its
                vision tower.
            text: The same for a BERT-family text encoder.
            config_kwargs: Fields of `TokenFusionConfig`; the ids of CLS and SEP come from the text encoder's
                tokenizer unless given.

        Raises:
            ValueError: There is no vision tower, the text encoder is not of the BERT family, or it is a loaded model
                without the path of its tokenizer.
        """
        config = TokenFusionConfig(
            _vision_config(vision),
            copy.deepcopy(text.config)
            if isinstance(text, PreTrainedModel)
            else AutoConfig.from_pretrained(text, trust_remote_code=False),
            **_special_token_ids(text, config_kwargs),
        )
        model = cls(config)
        for tower, source in ((model.vision_model, vision), (model.text_model, text)):
            _load_tower(tower, source)
        return model

    def get_input_embeddings(self) -> nn.Module:
        """Return the text encoder's token embeddings."""
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the text encoder's token embeddings."""
        self.text_model.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        image_features: Tensor | None = None,
        views: Sequence[str] | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None,
    ) -> TokenFusionOutput:
        """Embed N items, each with an image, a text or both.

        Args:
            pixel_values: `(N, 3, H, W)`; rows without an image are ignored. Absent when no item has an image.
            input_ids: `(N, T)` token ids, CLS first, SEP and padding last.
            attention_mask: `(N, T)` 1 for real tokens; all ones when absent.
            special_tokens_mask: Unused; accepted because the processor returns it.
            image_mask: `(N,)` bool, True for items with an image; all when absent.
            text_mask: `(N,)` bool, True for items with a text; all when absent.
            image_features: `(N, P, h_v)` cached outputs of `run_vision_tower` in place of `pixel_values`.
            views: Views to embed, of `"image"`, `"text"`, `"fused"`, in one pass of the vision tower. The outputs are
                stacked view by view, `(len(views) * N, d)`. By default each item is embedded once, from all its
                parts.
            inputs_embeds: `(N, T, d)` token embeddings in place of `input_ids`.
            token_type_ids: Unused, an item is one segment; accepted because tokenizers return it.
            output_attentions: Return `attentions` (not with the attention `sdpa`); for one view.
            output_hidden_states: Return `hidden_states`, or those at the given indices and None elsewhere; for one
                view.

        Raises:
            ValueError: Neither images nor texts are given, a view is unknown or not in the batch, or a text and its
                patches exceed the text encoder's positions.
        """
        views = views or ("fused",)
        record = self._to_record(views, output_attentions, output_hidden_states)
        if image_features is None and pixel_values is not None:
            image_features = _on_rows(self.run_vision_tower, image_mask, pixel_values)
        words = inputs_embeds if input_ids is None else input_ids
        if image_features is None and words is None:
            raise ValueError("the batch has neither images (pixel_values) nor texts (input_ids)")
        image = None if image_features is None else self._image_tokens(image_features, image_mask)
        text = None if words is None else self._text_tokens(words, attention_mask, text_mask)
        embedded = [self._embed_view(image, text, view, record) for view in views]
        pooled = torch.cat([states for states, _ in embedded])
        recorded = {name.removeprefix("output_"): embedded[0][1][name.removeprefix("output_")] for name in record}
        return TokenFusionOutput(embeddings=F.normalize(pooled.float(), dim=-1), pooler_output=pooled, **recorded)

    def _to_record(
        self, views: Sequence[str], attentions: bool | None, hidden_states: bool | Sequence[int] | None
    ) -> dict[str, Any]:
        """Return which outputs the text encoder has to return beside its states."""
        asked = {
            "output_attentions": self.config.output_attentions if attentions is None else attentions,
            "output_hidden_states": self.config.output_hidden_states if hidden_states is None else hidden_states,
        }
        record = {name: value for name, value in asked.items() if value is not False}
        if record and len(views) > 1:
            raise ValueError(f"{' and '.join(record)} need a single view, got {tuple(views)}")
        return record

    def run_vision_tower(self, pixel_values: Tensor) -> Tensor:
        """Return the vision tower's patch tokens `(N, P, h_v)`, without CLS, of `pixel_values` `(N, 3, H, W)`."""
        from_layer = self.config.vision_hidden_layer is not None
        output = self.vision_model(pixel_values.to(self.vision_model.dtype), output_hidden_states=from_layer)
        states = output.hidden_states[-1] if from_layer else output.last_hidden_state
        patch = self.config.vision_config.patch_size
        num_patches = (pixel_values.shape[-2] // patch) * (pixel_values.shape[-1] // patch)
        return states[:, -num_patches:]

    def _image_tokens(self, features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the patches as text-encoder tokens `(N, P, d)` and the mask of those that exist `(N, P)`."""
        patches = self.visual_projection(features.to(self.visual_projection.weight.dtype))
        exists = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        return patches, exists if mask is None else exists & mask.bool()[:, None]

    def _text_tokens(self, words: Tensor, attention: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return word embeddings `(N, T, d)` and the token mask `(N, T)`; a missing text is CLS and SEP alone.

        `words` are ids `(N, T)` or word embeddings.
        """
        shape, embed = words.shape[:2], self.text_model.get_input_embeddings()
        exists = torch.ones(shape, dtype=torch.bool, device=words.device) if attention is None else attention.bool()
        tokens = words if words.is_floating_point() else embed(words)
        if mask is not None:
            empty = embed(F.pad(self._empty_text(words), (0, shape[1] - 2)))
            tokens = torch.where(mask.bool()[:, None, None], tokens, empty)
            exists = torch.where(mask.bool()[:, None], exists, torch.arange(shape[1], device=words.device) < 2)
        return tokens, exists

    def _empty_text(self, like: Tensor) -> Tensor:
        """Return the ids of CLS and SEP, `(1, 2)`, on the device of `like`."""
        return torch.tensor([[self.config.cls_token_id, self.config.sep_token_id]], device=like.device)

    def _embed_view(
        self,
        image: tuple[Tensor, Tensor] | None,
        text: tuple[Tensor, Tensor] | None,
        view: str,
        record: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Return the pooled state `(N, d)` of a view, and the text encoder's output."""
        if view not in VIEWS:
            raise ValueError(f"unknown view {view!r}; expected one of {VIEWS}")
        image, text = None if view == "text" else image, None if view == "image" else text
        if text is None:
            if image is None:
                raise ValueError(f"view {view!r} was asked for, but no item of the batch has it")
            text = self._text_tokens(self._empty_text(image[0]).expand(image[0].shape[0], -1), None, None)
        tokens, exists = text
        if image is not None:
            tokens = torch.cat([tokens[:, :1], image[0].to(tokens.dtype), tokens[:, 1:]], dim=1)
            exists = torch.cat([exists[:, :1], image[1], exists[:, 1:]], dim=1)
        output = self.text_model(
            inputs_embeds=tokens, attention_mask=exists.long(), position_ids=self._positions(exists), **record
        )
        states = output.last_hidden_state
        if self.config.pooling == "cls":
            return states[:, 0], output
        weights = exists[..., None].to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1), output

    def _positions(self, exists: Tensor) -> Tensor:
        """Return consecutive position ids `(N, S)` of existing tokens, from the text encoder's first position."""
        table: Any = self.text_model.get_submodule("embeddings.position_embeddings")
        start = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa's positions follow the padding's
        limit = table.num_embeddings - start
        if exists.shape[1] > limit and (longest := int(exists.sum(1).max())) > limit:
            raise ValueError(
                f"an item has {longest} tokens, patches included, but the text encoder has {limit} positions; "
                "lower the processor's max_text_length or the size of the images"
            )
        return start + (exists.cumsum(1) - 1).clamp(min=0)


def _on_rows(tower: Callable[..., Tensor], mask: Tensor | None, *inputs: Tensor) -> Tensor:
    """Run `tower` only on the rows where `mask` is True; the other rows of the result are zero."""
    if mask is None:
        return tower(*inputs)
    rows = mask.bool().nonzero().squeeze(1)
    features = tower(*(tensor[rows if len(rows) else slice(1)] for tensor in inputs))
    if not len(rows):  # the modality is absent; one row has run, since towers reject an empty batch
        features = features.detach()[:0]
    return features.new_zeros(len(mask), *features.shape[1:]).index_copy(0, rows, features)


def _with_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """Return a tower's configuration with `depth` layers: the same object, or a copy if the tower is cut."""
    if config.num_hidden_layers == depth:
        return config
    config = copy.deepcopy(config)
    config.num_hidden_layers = depth
    return config


def _build_tower(config: PreTrainedConfig) -> PreTrainedModel:
    """Build an untrained tower without pooling head and with its mask token as a buffer; both are unused."""
    tower = AutoModel.from_config(config, dtype=torch.get_default_dtype())
    if "pooler" in dict(tower.named_children()):
        tower.register_module("pooler", None)
    for path, parameter in list(tower.named_parameters()):
        owner, _, name = path.rpartition(".")
        if name == "mask_token":
            delattr(tower.get_submodule(owner), name)
            tower.get_submodule(owner).register_buffer(name, parameter.data)
    return tower


def _vision_config(source: str | Path | PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the configuration of the vision tower of a checkpoint or loaded model."""
    config = (
        source.config
        if isinstance(source, PreTrainedModel)
        else AutoConfig.from_pretrained(source, trust_remote_code=False)
    )
    if "vision_config" in config.sub_configs:
        config = config.vision_config
    if "patch_size" not in config.to_dict():
        raise ValueError(f"{config.model_type!r} is not a vision tower: {type(config).__name__} has no 'patch_size'")
    return copy.deepcopy(config)


def _special_token_ids(text: str | Path | PreTrainedModel, config_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `config_kwargs` with the ids of CLS and SEP filled in from the tokenizer of `text`."""
    if {"cls_token_id", "sep_token_id"} <= set(config_kwargs):
        return config_kwargs
    folder = text.name_or_path if isinstance(text, PreTrainedModel) else text
    if not folder:
        raise ValueError("text is a loaded model without a path: also pass cls_token_id and sep_token_id")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id} | config_kwargs


def _load_tower(tower: PreTrainedModel, source: str | Path | PreTrainedModel) -> None:
    """Copy pretrained weights into `tower`, except pooling heads and blocks that were not built."""
    loaded: Any = source
    if not isinstance(source, PreTrainedModel):
        loaded = type(tower).from_pretrained(source, config=tower.config)
    elif "vision_config" in source.config.sub_configs:
        loaded = source.vision_model
    missing = tower.load_state_dict(loaded.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"{type(loaded).__name__} lacks weights of {type(tower).__name__}: {missing[:3]} ...")


__all__ = ["TokenFusionModel", "TokenFusionOutput"]
