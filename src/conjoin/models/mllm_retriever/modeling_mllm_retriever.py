"""A multimodal language model as a retriever: first layers, final norm, one readout position (PUMA)."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_mllm_retriever import MllmRetrieverConfig
from .prompt_rows import WITHOUT_RET, mean_state, move_to_front, readout_positions, view_mask

DEEPSTACK_INPUTS = ("visual_pos_masks", "deepstack_visual_embeds")
"""What the language model of Qwen3-VL calls the image positions and the features that it adds there."""

PATCHES_AT_ONCE = 2048
"""Patches per pass of the vision tower on a CPU; an image with more is processed alone."""


@dataclass
class MllmRetrieverOutput(ModelOutput):
    """Output of `MllmRetrieverModel` for `N` items (times the requested views); `D` is the language model's width.

    Args:
        embeddings: `(N, d)` float32, L2-normalised, for indexing and comparison; `d` is `embedding_dim` or, if None,
            `D`.
        pooler_output: `(N, D)` normed state at the readout position, the input of losses.
        hidden_states: On request, the hidden states of the language model, `(N, T', D)` each, without the final norm;
            the `T'` tokens of each prompt come first, padding last.
        attentions: On request, its attention weights, `(N, heads, T', T')` each.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class ImageFeatures:
    """The vision tower's features of the `M` image tokens of a batch, in reading order.

    Args:
        tokens: `(M, D)`.
        deepstack: For each of the first layers of Qwen3-VL, `(M, D)` to add to its output; empty elsewhere.
    """

    tokens: Tensor
    deepstack: list[Tensor]


class Prompts(NamedTuple):
    """The prompts of N items and the images in them.

    Args:
        input_ids: `(N, T)`.
        image_rows: `(N, T)` the number of each image token in the batch, counted from 1; 0 for other tokens.
        features: Of all image tokens of the batch; None without images.
        grids: `(N, I, 3)` the patch grid of each image (Qwen-VL); None elsewhere.
    """

    input_ids: Tensor
    image_rows: Tensor
    features: ImageFeatures | None
    grids: Tensor | None

    def only(self, mask: Tensor) -> "tuple[Prompts, Tensor]":
        """Return the prompts of the tokens where `mask` is True, moved to the front, and their lengths `(N,)`."""
        (input_ids, image_rows), lengths = move_to_front(mask, self.input_ids, self.image_rows)
        return self._replace(input_ids=input_ids, image_rows=image_rows), lengths


def images_at_once(num_patches: list[int]) -> list[int]:
    """Return the sizes of consecutive groups of images to run together, given each image's patch count."""
    groups, taken = [0], 0
    for patches in num_patches:
        if groups[-1] and taken + patches > PATCHES_AT_ONCE:
            groups.append(0)
            taken = 0
        groups[-1] += 1
        taken += patches
    return groups


def _existing_grids(grid: Tensor) -> Tensor:
    """Return the grids `(I, 3)` of existing images in the padded `(N, I', 3)`."""
    grid = grid.flatten(0, 1)
    return grid[grid.prod(1) > 0]


def project_by_product(vision_model: nn.Module) -> None:
    """Make the `Conv3d` of a vision tower, which projects one patch at a time, a matrix product.

    PyTorch's convolution of patches is several times slower on a CPU, and up to thousands of times on some GPUs.
    Parameters and their names do not change.
    """
    for child in vision_model.modules():
        if isinstance(child, nn.Conv3d):
            child.forward = partial(_project, child)  # type: ignore[method-assign]


def _project(convolution: nn.Conv3d, patches: Tensor) -> Tensor:
    """Project patches `(R, in, *kernel_size)` to `(R, out, 1, 1, 1)`."""
    return F.linear(patches.flatten(1), convolution.weight.flatten(1), convolution.bias)[..., None, None, None]


class MllmRetrieverModel(PreTrainedModel):
    """Embeds text, image, image + text or interleaved items with the first layers of an MLLM (PUMA).

    The embedding is the state of one token of the prompt, [RET] by default, after `keep_layers` layers and the
    backbone's own final norm. There is no head and no KV cache, and only that state is normed.

    Dimension 0 of every input is the N items, so a batch can be split along its rows. For this, the vision tower's
    rows of pixels (patches in Qwen-VL, pictures or tiles elsewhere) arrive padded per item as `(N, P, ...)` and are
    flattened here.
    """

    config_class = MllmRetrieverConfig
    config: MllmRetrieverConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _supports_flash_attn = True
    backbone: Any
    norm: nn.Module
    shortcuts: Any = None
    """Reads all views in place of `read_view` if the package `conjoin` sets it (`conjoin.models.shortcuts`)."""

    def __init__(self, config: MllmRetrieverConfig) -> None:
        super().__init__(config)
        if config.ret_token_id is None and config.readout not in WITHOUT_RET:
            raise ValueError(f"readout={config.readout!r} needs ret_token_id, the id of [RET]")
        width = config.get_text_config().hidden_size
        self.ret_embedding = nn.Parameter(torch.zeros(width))
        self.adopt(AutoModel.from_config(config.backbone_config, dtype=torch.get_default_dtype()))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Load a saved retriever; freeze again what its configuration freezes (transformers unfreezes all)."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze_tokens()
        return loaded

    def adopt(self, backbone: Any) -> None:  # noqa: ANN401
        """Attach the backbone and detach its final norm, so that only the readout position is normed."""
        self.backbone = backbone
        self.norm = backbone.language_model.norm
        backbone.language_model.norm = nn.Identity()
        project_by_product(self.vision_model)
        inputs = ["position_ids", *(DEEPSTACK_INPUTS if backbone.config.model_type == "qwen3_vl" else ())]
        unknown = set(inputs) - set(inspect.signature(self.text_model.forward).parameters)
        if unknown:  # it would ignore them without an error
            raise ValueError(
                f"{type(self.text_model).__name__} no longer takes {sorted(unknown)}: use an older transformers"
            )
        self._freeze_tokens()

    def _freeze_tokens(self) -> None:
        """Train [RET] as the only token embedding if the configuration says so; else freeze [RET]."""
        self.ret_embedding.requires_grad_(self.config.train_ret_token)
        if self.config.train_ret_token:
            self.get_input_embeddings().requires_grad_(False)

    @property
    def vision_model(self) -> PreTrainedModel:
        """The vision tower."""
        return self.backbone.get_encoder(modality="image")

    @property
    def text_model(self) -> PreTrainedModel:
        """The language model."""
        return self.backbone.language_model

    def get_input_embeddings(self) -> nn.Module:
        """Return the language model's token embeddings; the vector of [RET] is `ret_embedding`."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the language model's token embeddings; those of [RET] stay."""
        self.backbone.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        image_grids: Tensor | None = None,
        image_view_mask: Tensor | None = None,
        text_view_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        views: Sequence[str] | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None,
    ) -> MllmRetrieverOutput:
        """Embed N items, given as the prompts of the processor; padding may be on either side.

        Args:
            input_ids: `(N, T)` token ids; the tokens of other views may be among those of an item's prompt.
            attention_mask: `(N, T)` 1 for the prompt of the whole item; all ones when absent.
            pixel_values: `(N, P, ...)` rows of pixels: patches in Qwen-VL, pictures or tiles elsewhere. Absent when no
                item has an image.
            pixel_attention_mask: `(N, P)` bool, True for rows that exist; all when absent.
            image_grids: `(N, I, 3)` the patch grid of each image (Qwen-VL); zero where an item has fewer images.
            image_view_mask: `(N, T)` 1 for the prompt of the item's images alone, or of the whole item if it has none.
            text_view_mask: `(N, T)` the same for its texts alone.
            image_mask: `(N,)` True for items with an image; unused here, read by losses.
            text_mask: `(N,)` the same for text.
            views: Views to embed, of `"image"`, `"text"`, `"fused"`, in one pass of the vision tower. The outputs are
                stacked view by view, `(len(views) * N, D)`. By default each item is embedded once, from all its parts.
            token_type_ids: Unused, a prompt is one segment; accepted because tokenizers return it.
            output_attentions: Return `attentions` (not with the attention `sdpa`); for one view.
            output_hidden_states: Return `hidden_states`, or those at the given indices and None elsewhere; for one
                view.

        Raises:
            ValueError: There is no prompt, a view is unknown or not in the batch, a prompt lacks [RET], or the number
                of image tokens differs from the number that the vision tower gives.
        """
        if input_ids is None:
            raise ValueError("the batch has neither images (pixel_values) nor texts (input_ids)")
        views = views or ("fused",)
        wanted = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        wanted = {name: getattr(self.config, name) if value is None else value for name, value in wanted.items()}
        record = {name: value for name, value in wanted.items() if value is not False}
        if record and len(views) > 1:
            raise ValueError(f"{' and '.join(record)} need a single view, got {tuple(views)}")
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        masks = {"image": image_view_mask, "text": text_view_mask, "fused": attention_mask}
        if image_view_mask is None and text_view_mask is None:  # all items have the same modality
            masks["text" if pixel_values is None else "image"] = attention_mask
        is_image = input_ids == self.backbone.config.image_token_id
        image_rows = is_image.flatten().cumsum(0).view_as(input_ids).masked_fill(~is_image, 0)  # numbered from 1
        features = self._image_features(pixel_values, pixel_attention_mask, image_grids, int(is_image.sum()))
        prompts = Prompts(input_ids, image_rows, features, image_grids)
        shown = [view_mask(masks, view).bool() for view in views]
        if self.shortcuts and not record:
            pooled, output = self.shortcuts(self, prompts, shown), {}
        else:
            states, (output, *_) = zip(*(self.read_view(prompts, mask, **record) for mask in shown), strict=True)
            pooled = torch.cat(states)
        embeddings = F.normalize(pooled[:, : self.config.hidden_size].float(), dim=-1)
        recorded = {name: output[name] for name in (each.removeprefix("output_") for each in record)}
        return MllmRetrieverOutput(embeddings=embeddings, pooler_output=pooled, **recorded)

    def run_vision_tower(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None) -> ImageFeatures:
        """Return the image tokens that enter the language model.

        On a CPU, few images run at once, so that the activations between two layers fit into its caches.

        Args:
            pixel_values: `(R, ...)` rows of pixels of all images, in order.
            image_grid_thw: `(I, 3)` patch grids of these images, for Qwen-VL.
        """
        if image_grid_thw is None or pixel_values.device.type != "cpu":
            return self._image_tokens(pixel_values, image_grid_thw)
        grids = image_grid_thw.split(images_at_once(image_grid_thw.prod(1).tolist()))
        images = pixel_values.split([int(grid.prod(1).sum()) for grid in grids])
        parts = [self._image_tokens(*part) for part in zip(images, grids, strict=True)]
        levels = zip(*(part.deepstack for part in parts), strict=True)
        return ImageFeatures(torch.cat([part.tokens for part in parts]), [torch.cat(level) for level in levels])

    def _image_tokens(self, pixel_values: Tensor, grid: Tensor | None = None) -> ImageFeatures:
        inputs = {} if grid is None else {"image_grid_thw": grid}
        output = self.backbone.get_image_features(pixel_values.to(self.dtype), **inputs, return_dict=True)
        levels = output["deepstack_features"] if self.config.backbone_config.model_type == "qwen3_vl" else []
        # transformers 5.17 gives each level whole, later versions image by image
        deepstack = [level if isinstance(level, Tensor) else torch.cat(list(level)) for level in levels]
        return ImageFeatures(torch.cat(list(output.pooler_output)), deepstack)

    def _image_features(
        self, pixel_values: Tensor | None, pixel_mask: Tensor | None, grid: Tensor | None, num_tokens: int
    ) -> ImageFeatures | None:
        """Return the image tokens of a batch; None if it has none (such as a text-only chunk of a batch)."""
        features, given = None, 0
        if pixel_values is not None:
            rows = pixel_values.flatten(0, 1) if pixel_mask is None else pixel_values[pixel_mask.bool()]
            if len(rows):
                if grid is None and self.config.backbone_config.model_type.startswith("qwen"):
                    raise ValueError("pixel_values need image_grids: the processor is for another model")
                features = self.run_vision_tower(rows, None if grid is None else _existing_grids(grid))
                given = len(features.tokens)
        if given != num_tokens:
            raise ValueError(
                f"the prompts hold {num_tokens} image tokens, but the vision tower gives {given}: "
                "the processor is for another model"
            )
        return features

    def read_view(self, prompts: Prompts, mask: Tensor, **record: Any) -> tuple[Tensor, Any]:  # noqa: ANN401
        """Return the normed state `(N, D)` at the readout position of the tokens where `mask` is True, and the output.

        These tokens are moved to the front. No token attends to later ones, so the language model needs no padding
        mask.
        """
        view, lengths = prompts.only(mask)
        output = self.text_model(**self.language_inputs(view), **record)
        if self.config.readout == "mean":
            return mean_state(self.norm(output.last_hidden_state), lengths), output
        at = self.readout_positions(view, lengths)
        return self.norm(output.last_hidden_state[torch.arange(len(at), device=at.device), at]), output

    def readout_positions(self, view: Prompts, lengths: Tensor) -> Tensor:
        """Return the positions `(N,)` to read in prompts of these lengths."""
        return readout_positions(view.input_ids, lengths, self.config.readout, self.config.ret_token_id)

    def language_inputs(self, view: Prompts, position_ids: Tensor | None = None) -> dict[str, Any]:
        """Return the inputs of the language model, with other positions `(..., N, T)` than its own if given."""
        is_image, tokens, features = view.image_rows > 0, self._token_embeddings(view.input_ids), view.features
        inputs: dict[str, Any] = {"use_cache": False}
        if features is not None:
            chosen = view.image_rows[is_image] - 1
            tokens = tokens.masked_scatter(is_image[..., None], features.tokens[chosen].to(tokens.dtype))
            if features.deepstack:
                levels = [level[chosen] for level in features.deepstack]
                inputs |= dict(zip(DEEPSTACK_INPUTS, (is_image, levels), strict=True))
            if position_ids is None and view.grids is not None and self.config.position_mode == "mrope":
                position_ids = self.positions(view)
        return inputs | {"inputs_embeds": tokens} | ({} if position_ids is None else {"position_ids": position_ids})

    def _token_embeddings(self, input_ids: Tensor) -> Tensor:
        """Return `(N, T, D)` token embeddings; the id of [RET] may be outside the table."""
        if self.config.ret_token_id is None:
            return self.get_input_embeddings()(input_ids)
        is_ret = input_ids == self.config.ret_token_id
        tokens = self.get_input_embeddings()(input_ids.masked_fill(is_ret, 0))
        return torch.where(is_ret[..., None], self.ret_embedding.to(tokens.dtype), tokens)

    def positions(self, view: Prompts) -> Tensor:
        """Return consecutive positions `(N, T)`, or the backbone's 3-D ones `(3, N, T)` if images have grids.

        The backbone computes them on the CPU, since it loops over rows.
        """
        ids, is_image = view.input_ids, view.image_rows > 0
        if view.features is None or view.grids is None or self.config.position_mode == "1d":
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions, _ = self.backbone.get_rope_index(
            ids.cpu(),
            mm_token_type_ids=is_image.int().cpu(),
            image_grid_thw=_existing_grids(view.grids[is_image.any(1)]).cpu(),
        )
        return positions.to(ids.device)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MllmRetrieverModel):
            init.normal_(module.ret_embedding, std=self.config.get_text_config().initializer_range)


__all__ = ["MllmRetrieverModel", "MllmRetrieverOutput"]
