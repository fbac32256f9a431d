"""The joint encoder of SOLAR (Sec. 4): towers, adapters and a small vision-language encoder with its own CLS."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import capture_outputs

from .configuration_joint_encoder import JointEncoderConfig
from .modeling_towers import TowersModel, TowersOutput, build_tower, on_rows, outputs_to_record, parts_of

_Part = tuple[Tensor, Tensor, Tensor]


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attend by matrix products; the states `(N, Q, heads, d)` and the weights `(N, heads, Q, S)`."""
    weights = (query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]) + attention_mask).softmax(-1)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2), weights


class VLAttentionLayer(GradientCheckpointingLayer):
    """Pre-norm attention block that can compute the leading positions only (the last layer computes CLS alone)."""

    def __init__(self, config: JointEncoderConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.config = config
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        inner = config.intermediate_size or 4 * width
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(
        self, hidden: Tensor, key_bias: Tensor, num_queries: int | None = None, return_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the first `num_queries` positions of `hidden` (all by default) to all positions.

        Args:
            hidden: `(N, S, d)`.
            key_bias: `(N, 1, 1, S)` added to the attention logits: the log of each key's weight.
            num_queries: Number of leading positions `Q` to compute.
            return_attention: Also return the attention weights, which `eager_attention` computes.

        Returns:
            The states `(N, Q, d)` and the attention weights `(N, heads, Q, S)` or None.
        """
        queries = hidden[:, :num_queries]
        normed = self.norm1(hidden)
        q, k, v = (
            states.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)
            for states in (self.q_proj(normed[:, :num_queries]), self.k_proj(normed), self.v_proj(normed))
        )
        name = "eager" if return_attention else self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        attended, weights = attend(self, q, k, v, key_bias.to(q.dtype), dropout=dropout)
        queries = queries + self.o_proj(attended.flatten(2))
        return queries + self.fc2(F.gelu(self.fc1(self.norm2(queries)))), weights


class VLEncoder(nn.Module):
    """E_VL: bidirectional attention over [CLS, tokens]; returns the state of the learned CLS."""

    def __init__(self, config: JointEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(VLAttentionLayer(config) for _ in range(config.num_vl_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, tokens: Tensor, weights: Tensor, return_attention: bool = False) -> Tensor:
        """Encode `tokens` `(N, S, d)`, weighted as keys by `weights` `(N, S)`, none negative, into `(N, d)`.

        Every layer adds log w to the attention logits of a key of weight w, so a token of weight 0 has no effect (the
        mask of Eq. 2). CLS is never masked: in an item without tokens, CLS attends to itself.
        """
        weights = F.pad(weights, (1, 0), value=1.0)
        hidden = torch.cat([self.cls_token.expand(tokens.shape[0], 1, -1).to(tokens.dtype), tokens], dim=1)
        key_bias = weights.log()[:, None, None]
        for layer in self.layers[:-1]:
            hidden, _ = layer(hidden, key_bias, None, return_attention)
        hidden, _ = self.layers[-1](hidden, key_bias, 1, return_attention)
        return self.norm(hidden[:, 0])


def drop_tokens(tokens: Tensor, weights: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Keep a random fraction `1 - rate` of each item's tokens (at least one) and pack them to save compute.

    Args:
        tokens: `(N, S, d)`.
        weights: `(N, S)`, zero where there is no token.
        rate: Fraction to drop, in [0, 1).

    Returns:
        Tokens `(N, S', d)` and weights `(N, S')`, `S' = ceil((1 - rate) * S)`.
    """
    exists = weights > 0
    num_kept = ((1 - rate) * exists.sum(1)).ceil().long()
    width = math.ceil((1 - rate) * tokens.shape[1])
    order = (torch.rand_like(weights) + exists).topk(width, dim=1).indices  # existing tokens first, in random order
    kept = torch.arange(width, device=tokens.device) < num_kept[:, None]
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1])), weights.gather(1, order) * kept


@dataclass
class JointEncoderOutput(TowersOutput):
    """Output of `JointEncoderModel` for `N` items (times the requested views), `P` patches and `T` text tokens.

    The last layer of `hidden_states` and `attentions`, those of the vision-language encoder, computes CLS alone.

    Args:
        embeddings: `(N, d)` float32, L2-normalised, for indexing and comparison.
        pooler_output: `(N, d)` CLS state before normalisation, the input of losses.
        hidden_states: On request, the input of the vision-language encoder and the output of each of its layers,
            `(N, 1 + S, d)`, CLS first.
        attentions: On request, the attention weights of each of its layers, `(N, heads, 1 + S, 1 + S)`.
        image_features: `(N, 1 + P, h_v)` tokens of the vision tower, global token first; zero without an image.
        text_features: `(N, 1 + T, h_t)` tokens of the text tower, global token first.
        image_tokens: `(N, 1 + P, d)` image tokens after the adapter, `[v_cls; V']`.
        text_tokens: `(N, 1 + T, d)` text tokens after the adapter, `[l_cls; L']`.
        image_token_mask: `(N, P)` bool, True for the tokens of V' that exist.
        text_token_mask: `(N, T)` bool, True for the tokens of L' that exist; special tokens and padding are excluded.
    """

    image_features: Tensor | None = None
    text_features: Tensor | None = None
    image_tokens: Tensor | None = None
    text_tokens: Tensor | None = None
    image_token_mask: Tensor | None = None
    text_token_mask: Tensor | None = None


class AdapterInput(nn.Linear):
    """First layer of an adapter."""


class AdapterOutput(nn.Linear):
    """Second layer of an adapter."""


class Adapter(nn.Sequential):
    """Two-layer MLP from a tower's tokens, or from its pooled state, into the shared width."""

    def __init__(self, input_size: int, config: JointEncoderConfig) -> None:
        width = config.hidden_size * (2 if config.adapter_init == "identity" else 1)
        input_size *= 1 if config.num_vl_layers else 2  # [global; mean of local]
        super().__init__(AdapterInput(input_size, width), nn.GELU(), AdapterOutput(width, config.hidden_size))

    def forward(self, features: Tensor) -> Tensor:
        """Map `(..., h)` to `(..., d)`; `features` may have the dtype of the tower or of a cache."""
        return super().forward(features.to(next(self.parameters()).dtype))


class JointEncoderModel(TowersModel):
    """Embeds text, image, or image + text items as comparable vectors (SOLAR / SUMMR).

    `f = E_VL([V', L', CLS])` with `V' = A_V(E_V(I))`, `L' = A_L(E_L(T))`; a missing modality is absent from the
    sequence. The towers can be any vision and text models that transformers builds from a configuration:
    `conjoin.from_backbones(vision, text)`.
    """

    config_class = JointEncoderConfig
    config: JointEncoderConfig
    _no_split_modules = ["VLAttentionLayer"]  # noqa: RUF012 - the library's convention
    _can_record_outputs = {"hidden_states": VLAttentionLayer, "attentions": VLAttentionLayer}  # noqa: RUF012

    def __init__(self, config: JointEncoderConfig) -> None:
        super().__init__(config)
        self.vision_model = build_tower(config.vision_config, config.num_vision_layers)
        self.text_model = build_tower(config.text_config)
        self.vision_adapter = Adapter(config.vision_config.hidden_size, config)
        self.text_adapter = Adapter(config.text_config.hidden_size, config)
        self.vl_encoder: Any = VLEncoder(config) if config.num_vl_layers else None
        self.post_init()

    def get_correct_attn_implementation(self, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        """Refuse what cannot add a bias to the keys of E_VL; the towers may use it.

        Raises:
            ValueError: It is another implementation than eager or sdpa.
        """
        if requested_attention not in (None, "eager", "sdpa"):
            raise ValueError(
                f"attn_implementation={requested_attention!r}: E_VL adds a bias to its keys; expected eager or sdpa, "
                f'or for a tower alone {{"vision_config": {requested_attention!r}}}'
            )
        return super().get_correct_attn_implementation(requested_attention, *args, **kwargs)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        image_weights: Tensor | None = None,
        text_weights: Tensor | None = None,
        image_tokens: Tensor | None = None,
        text_tokens: Tensor | None = None,
        views: Sequence[str] | None = None,
        output_tokens: bool = False,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None,
    ) -> JointEncoderOutput:
        """Embed N items, each with an image, a text or both.

        Args:
            pixel_values: `(N, 3, H, W)`; rows without an image are ignored. Absent when no item has an image.
            input_ids: `(N, T)` token ids.
            attention_mask: `(N, T)` 1 for real tokens; all ones when absent.
            special_tokens_mask: `(N, T)` 1 for BOS/CLS/EOS/SEP/padding, which are not local tokens; needed with text.
            image_mask: `(N,)` bool, True for items with an image; all when absent.
            text_mask: `(N,)` bool, True for items with a text; all when absent.
            image_features: `(N, 1 + P, h_v)` cached tower output in place of `pixel_values`.
            text_features: `(N, 1 + T, h_t)` cached tower output; the text masks are still needed.
            image_weights: `(N, P)` in [0, 1], the evolutionary mask M_V of SOLAR's Eq. 2; ones when absent.
            text_weights: `(N, T)` the same for text, M_L.
            image_tokens: `(N, 1 + P, d)` adapter tokens of an earlier call, beside the `image_features` they are of.
            text_tokens: `(N, 1 + T, d)` the same for text.
            views: Views to embed, of `"image"`, `"text"`, `"fused"`; the outputs are stacked view by view,
                `(len(views) * N, d)`. By default each item is embedded once, in full, as `config.readout` says; an
                empty list gives tokens only.
            output_tokens: Also return tower features and adapter tokens. Without E_VL (`num_vl_layers=0`) they are
                the embedding of each modality, then for each local token what it would be with this token alone.
            token_type_ids: Unused, a text is one segment; accepted because tokenizers return it.
            output_attentions: Return `attentions`; for one view.
            output_hidden_states: Return `hidden_states`, or those at the given indices and None elsewhere; for one
                view.

        Raises:
            ValueError: Neither images nor texts are given, or a mask or a view is invalid.
        """
        summed = views is None and self.config.readout != "fused"
        views = ("fused",) if views is None else views
        record = outputs_to_record(
            self.config,
            ("image", "text") if summed else views,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        image_exists: Tensor | None = None
        text_exists: Tensor | None = None
        if image_features is None and pixel_values is not None:
            image_features = on_rows(self.run_vision_tower, image_mask, pixel_values)
        if image_features is not None:
            image_exists = torch.ones_like(image_features[:, 1:, 0], dtype=torch.bool)
        if input_ids is not None or text_features is not None:
            if special_tokens_mask is None:
                raise ValueError("special_tokens_mask is missing: special tokens must not count as local text tokens")
            attended = torch.ones_like(special_tokens_mask) if attention_mask is None else attention_mask
            text_exists = attended.bool() & ~special_tokens_mask.bool()
            if text_features is None and input_ids is not None:
                text_features = on_rows(self.run_text_tower, text_mask, input_ids, attended)
        inputs = {
            "image": (image_features, image_exists, image_mask, image_weights, image_tokens),
            "text": (text_features, text_exists, text_mask, text_weights, text_tokens),
        }
        parts, found = self._adapt(inputs, output_tokens)
        pooled: Tensor | None = None
        if summed and self.vl_encoder is not None:
            pooled = self._sum_views(parts)
        elif views:
            pooled = torch.cat([self._embed_view(parts, view, "output_attentions" in record) for view in views])
        unit = None if pooled is None else F.normalize(pooled.float(), dim=-1)
        return JointEncoderOutput(embeddings=unit, pooler_output=pooled, **found if output_tokens else {})

    def _adapt(self, inputs: dict[str, Any], each: bool) -> tuple[dict[str, _Part], dict[str, Any]]:
        """Return what enters E_VL, by modality, and the tokens and masks to return."""
        parts: dict[str, _Part] = {}
        found: dict[str, Any] = {}
        for name, (features, exists, mask, weights, tokens) in inputs.items():
            if features is None:
                continue
            adapter = self.vision_adapter if name == "image" else self.text_adapter
            exists = exists if mask is None else exists & mask.bool()[:, None]
            weights = exists.float() if weights is None else exists * weights.float()
            if self.vl_encoder is None:
                tokens = _pool(adapter, features, weights, each)
            elif tokens is None:
                tokens = adapter(features)
            keys = tokens[:, :1] if self.vl_encoder is None else tokens[:, 1:]
            # a modality of which everything is masked counts as absent
            parts[name] = keys, weights, exists.sum(1, keepdim=True) * (weights > 0).any(1, keepdim=True)
            found |= {f"{name}_features": features, f"{name}_tokens": tokens, f"{name}_token_mask": exists}
        return parts, found

    def run_vision_tower(self, pixel_values: Tensor) -> Tensor:
        """Return the vision tower's tokens `(N, 1 + P, h_v)`, global token first, of `pixel_values` `(N, 3, H, W)`."""
        states, pooled, num_patches = self.read_vision_layer(pixel_values)
        prefix = states.shape[1] - num_patches
        if pooled is None or (self.config.vision_hidden_layer is not None and prefix):
            pooled = states[:, 0]
        return torch.cat([pooled[:, None], states[:, prefix:]], dim=1)

    def run_text_tower(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the text tower's tokens `(N, 1 + T, h_t)` of `input_ids` `(N, T)`, global token first."""
        mask = None if self.config.text_attends_padding else attention_mask
        output = self.text_model(input_ids=input_ids, attention_mask=mask)
        states, pooled = output.last_hidden_state, output.pooler_output
        return torch.cat([states[:, :1] if pooled is None else pooled[:, None], states], dim=1)

    def _embed_view(self, parts: dict[str, _Part], view: str, return_attention: bool = False) -> Tensor:
        """Embed a view `(N, d)`, of `(tokens (N, S, d), weights (N, S), how many exist (N, 1))` by modality."""
        chosen = parts_of(parts, view)
        if self.vl_encoder is None:
            return chosen[0][0][:, 0] if len(chosen) == 1 else self._sum_views(parts)
        pairs = [(keys, weights) for keys, weights, _ in chosen]
        if self.config.balance_modalities and len(chosen) > 1:  # the total stays, so CLS keeps its share
            counts = torch.cat([count for *_, count in chosen], dim=1)
            share = counts.sum(1, keepdim=True) / (counts > 0).sum(1, keepdim=True).clamp(min=1)
            scales = (share / counts.clamp(min=1)).split(1, dim=1)
            pairs = [(keys, weights * scale) for (keys, weights), scale in zip(pairs, scales, strict=True)]
        if self.training and self.config.token_dropout:
            pairs = [drop_tokens(*pair, self.config.token_dropout) for pair in pairs]
        keys, weights = (torch.cat(tensors, dim=1) for tensors in zip(*pairs, strict=True))
        return self.vl_encoder(keys, weights, return_attention)

    def _sum_views(self, parts: dict[str, _Part]) -> Tensor:
        """Return the sum `(N, d)` of the unit embeddings of the modalities that an item has; of CLS if it has none."""
        nothing = ~torch.cat([count > 0 for *_, count in parts_of(parts, "fused")], dim=1).any(1, keepdim=True)
        views = [
            F.normalize(self._embed_view(parts, name).float(), dim=-1) * ((count > 0) | nothing)
            for name, (*_, count) in parts.items()
        ]
        return torch.stack(views).sum(0)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AdapterInput | AdapterOutput) and self.config.adapter_init == "identity":
            _init_identity(module)
        if isinstance(module, VLEncoder):  # transformers skips modules without parameters of their own
            init.normal_(module.cls_token, std=self.config.initializer_range)
            layers: list[Any] = [*module.layers] if self.config.vl_init == "mean_pooling" else []
            for layer in layers:
                init.eye_(layer.v_proj.weight)
                init.eye_(layer.o_proj.weight)
                init.zeros_(layer.fc2.weight)


def _init_identity(layer: AdapterInput | AdapterOutput) -> None:
    """Start an adapter as `[I, -I] GELU([I; -I] x) = x`, with an orthogonal matrix for I where the widths differ."""
    is_input = isinstance(layer, AdapterInput)
    shape = (layer.out_features // 2, layer.in_features) if is_input else (layer.out_features, layer.in_features // 2)
    start = layer.weight.new_empty(shape)
    start = nn.init.eye_(start) if shape[0] == shape[1] else nn.init.orthogonal_(start)
    init.copy_(layer.weight, torch.cat([start, -start], dim=0 if is_input else 1))


def _pool(adapter: Adapter, features: Tensor, weights: Tensor, each: bool) -> Tensor:
    """Return an adapter's output for the pooled tower state `(N, 1, d)`.

    Args:
        adapter: Of the tower.
        features: `(N, 1 + S, h)` of the tower.
        weights: `(N, S)` of the local tokens.
        each: Also return what each local token gives in place of the mean of all: `(N, 1 + S, d)`.
    """
    mean = (features[:, 1:] * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1e-6)
    states = torch.cat([mean[:, None], features[:, 1:]], dim=1) if each else mean[:, None]
    halves = [F.layer_norm(half.float(), half.shape[-1:]) for half in (features[:, :1].expand_as(states), states)]
    return adapter(torch.cat(halves, dim=-1))


__all__ = ["JointEncoderModel", "JointEncoderOutput"]
