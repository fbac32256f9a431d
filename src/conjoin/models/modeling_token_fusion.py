"""Token fusion (VISTA): image patches enter a text encoder as tokens between CLS and the text."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from .configuration_token_fusion import TokenFusionConfig
from .modeling_towers import TowersModel, TowersOutput, build_tower, on_rows, outputs_to_record, parts_of

_Tokens = tuple[Tensor, Tensor]


class TokenFusionModel(TowersModel):
    """Embeds text, image, or image + text items with a text encoder that also reads image patches (VISTA).

    The encoder reads `[CLS, projected patches, text, SEP]`, without the parts that an item lacks, at consecutive
    positions of its own position table and through its own embedding norm. A text-only item therefore has exactly the
    text encoder's own embedding.

    The published VISTA weights (bge-visualized) cannot be loaded: they are a pickled `.pth` file, which this package
    never unpickles, and transformers does not have their vision tower (EVA02-CLIP). BGE-VL-base and -large are CLIP
    checkpoints with score fusion: `conjoin.from_clip` builds it.
    """

    config_class = TokenFusionConfig
    config: TokenFusionConfig

    def __init__(self, config: TokenFusionConfig) -> None:
        super().__init__(config)
        self.vision_model = build_tower(config.vision_config, config.num_vision_layers)
        self.text_model = build_tower(config.text_config)
        if "embeddings.position_embeddings" not in dict(self.text_model.named_modules()):
            raise ValueError(
                f"text_config: {config.text_config.model_type!r} has no table of learned positions; "
                "expected a BERT-family text encoder"
            )
        self.visual_projection = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        views: Sequence[str] | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None,
    ) -> TowersOutput:
        """Embed N items, each with an image, a text or both.

        Args:
            pixel_values: `(N, 3, H, W)`; rows without an image are ignored. Absent when no item has an image.
            input_ids: `(N, T)` token ids, CLS first, SEP and padding last.
            attention_mask: `(N, T)` 1 for real tokens; all ones when absent.
            special_tokens_mask: Unused; accepted because the processor returns it.
            image_mask: `(N,)` bool, True for items with an image; all when absent.
            text_mask: `(N,)` bool, True for items with a text; all when absent.
            views: Views to embed, of `"image"`, `"text"`, `"fused"`, in one pass of the vision tower. The outputs are
                stacked view by view, `(len(views) * N, d)`. By default each item is embedded once, from all its
                parts.
            token_type_ids: Unused, an item is one segment; accepted because tokenizers return it.
            output_attentions: Return `attentions` (not with the attention `sdpa`); for one view.
            output_hidden_states: Return `hidden_states`, or those at the given indices and None elsewhere; for one
                view.

        Raises:
            ValueError: Neither images nor texts are given, a view is unknown or not in the batch, or a text and its
                patches exceed the text encoder's positions.
        """
        views = views or ("fused",)
        record = outputs_to_record(
            self.config, views, output_attentions=output_attentions, output_hidden_states=output_hidden_states
        )
        parts: dict[str, _Tokens] = {}
        if pixel_values is not None:
            patches = on_rows(self.run_vision_tower, image_mask, pixel_values)
            patches = self.visual_projection(patches.to(self.visual_projection.weight.dtype))
            exists = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
            parts["image"] = patches, exists if image_mask is None else exists & image_mask.bool()[:, None]
        if input_ids is not None:
            parts["text"] = self._text_tokens(input_ids, attention_mask, text_mask)
        outputs = [self._read_view(parts, view, record) for view in views]
        pooled = torch.cat([output.pooler_output for output in outputs])
        return TowersOutput(
            embeddings=F.normalize(pooled.float(), dim=-1),
            pooler_output=pooled,
            hidden_states=outputs[0].hidden_states,
            attentions=outputs[0].attentions,
        )

    def run_vision_tower(self, pixel_values: Tensor) -> Tensor:
        """Return the vision tower's patch tokens `(N, P, h_v)`, without CLS, of `pixel_values` `(N, 3, H, W)`."""
        states, _, num_patches = self.read_vision_layer(pixel_values)
        return states[:, -num_patches:]

    def _text_tokens(self, input_ids: Tensor, attention: Tensor | None, mask: Tensor | None) -> _Tokens:
        """Return word embeddings `(N, T, d)` and the token mask `(N, T)`; a missing text is CLS and SEP alone."""
        exists = torch.ones_like(input_ids, dtype=torch.bool) if attention is None else attention.bool()
        if mask is not None:
            rows = mask.bool()[:, None]
            length = input_ids.shape[1]
            input_ids = torch.where(rows, input_ids, F.pad(self._empty_text(input_ids), (0, length - 2)))
            exists = torch.where(rows, exists, torch.arange(length, device=input_ids.device) < 2)
        return self.text_model.get_input_embeddings()(input_ids), exists

    def _empty_text(self, like: Tensor) -> Tensor:
        """Return the ids of CLS and SEP, `(1, 2)`, on the device of `like`."""
        return torch.tensor([[self.config.cls_token_id, self.config.sep_token_id]], device=like.device)

    def _read_view(self, parts: dict[str, _Tokens], view: str, record: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return the text encoder's output for a view, `pooler_output` `(N, d)` included."""
        first, _ = parts_of(parts, view)[0]
        if "text" in parts and view != "image":
            tokens, exists = parts["text"]
        else:
            tokens, exists = self._text_tokens(self._empty_text(first).expand(len(first), -1), None, None)
        if "image" in parts and view != "text":
            patches, are_patches = parts["image"]
            tokens = torch.cat([tokens[:, :1], patches.to(tokens.dtype), tokens[:, 1:]], dim=1)
            exists = torch.cat([exists[:, :1], are_patches, exists[:, 1:]], dim=1)
        output = self.text_model(
            inputs_embeds=tokens, attention_mask=exists.long(), position_ids=self._positions(exists), **record
        )
        states = output.last_hidden_state
        weights = exists[..., None].to(states.dtype)
        is_mean = self.config.pooling == "mean"
        output.pooler_output = (states * weights).sum(1) / weights.sum(1) if is_mean else states[:, 0]
        return output

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


__all__ = ["TokenFusionModel"]
