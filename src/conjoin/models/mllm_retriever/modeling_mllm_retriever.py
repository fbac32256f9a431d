"""A multimodal language model read as a retriever: its first layers, its final norm, one position (PUMA)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_mllm_retriever import MllmRetrieverConfig, check_fields
from .patch_projection import project_by_product
from .pruned_checkpoint import fetch_small_files, load_pruned_backbone
from .readout_shortcuts import SharedPrefix, is_readable, make_readable, shared_prefix_length

VIEWS = ("image", "text", "fused")
PATCHES_AT_ONCE = 2048
"""What the vision tower takes together on a CPU; an image with more goes through it alone."""


@dataclass
class MllmRetrieverOutput(ModelOutput):
    """Output of `MllmRetrieverModel`; `N` items (times the views asked for), `D` the width of the language model.

    Args:
        embeddings: `(N, d)` float32, L2-normalised: what is indexed and compared; `d = D` unless `embedding_dim` says
            otherwise.
        pooler_output: `(N, D)` the normed state at the readout position: what losses take.
    """

    embeddings: Tensor | None = None
    pooler_output: Tensor | None = None


@dataclass
class ImageFeatures:
    """What the vision tower made of the `M` image tokens of a batch, in reading order.

    Args:
        tokens: `(M, D)`.
        deepstack: For each of the first layers of Qwen3-VL, `(M, D)` to add to its output; empty elsewhere.
    """

    tokens: Tensor
    deepstack: list[Tensor]


class MllmRetrieverModel(PreTrainedModel):
    """Embeds text, image, image + text or interleaved items with the first layers of an MLLM (PUMA).

    The embedding is the state of one token of the prompt, [RET] by default, after `keep_layers` layers and the
    backbone's own final norm. There is no head, no cache of keys and values, and the norm sees that one state only.
    In evaluation mode without gradients, what the embedding does not need is left out as well: the last layer runs for
    that one token (all others give it keys and values only), and what all prompts of a batch begin with runs once.

    Every input has the N items as dimension 0, so that a batch can be cut along its rows. To this end the vision
    tower's rows of pixels (patches in Qwen-VL, pictures or tiles elsewhere) are padded per item to `(N, P, ...)`, and
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
    shortcuts: bool = True
    """Leave out what the embedding does not need, in evaluation without gradients. Set to False where hooks on the
    language model want the states of all tokens."""

    def __init__(self, config: MllmRetrieverConfig) -> None:
        super().__init__(config)
        if config.ret_token_id is None and config.readout != "last":
            raise ValueError(f"readout={config.readout!r} needs ret_token_id, the id of [RET]")
        width = config.get_text_config().hidden_size
        self.ret_embedding = nn.Parameter(torch.zeros(width))
        self._adopt(AutoModel.from_config(copy.deepcopy(config.backbone_config), dtype=torch.get_default_dtype()))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Load a saved retriever; the library makes every parameter trainable, so what is not is frozen again."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze_tokens()
        return loaded

    @classmethod
    def from_mllm(
        cls,
        checkpoint: str | Path,
        keep_layers: int | None = None,
        *,
        ret_token: str = "[RET]",
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        **config_kwargs: Any,  # noqa: ANN401
    ) -> "MllmRetrieverModel":
        """Build a retriever on a pretrained MLLM, reading only what is kept.

        Neither deeper layers nor the head are ever allocated; shards that hold nothing else are not opened, nor
        downloaded from the Hub. If the tokenizer does not know [RET] yet, its vector starts as the mean of all
        tokens', and its id is the next one.

        Args:
            checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
            keep_layers: How many layers of the language model to keep; all when None.
            ret_token: How the readout token is spelled.
            dtype: What the weights are held in; what the checkpoint says when None.
            revision: Branch, tag or commit on the Hub.
            config_kwargs: Other fields of `MllmRetrieverConfig`.

        Raises:
            FileNotFoundError: A file that is needed is missing.
            ValueError: The checkpoint is of another architecture, a field is unknown or out of range.
        """
        check_fields(config_kwargs)
        checkpoint = str(checkpoint)
        folder = fetch_small_files(checkpoint, revision)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{checkpoint!r} has no config.json")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        num_tokens = len(tokenizer)
        is_new = bool(tokenizer.add_tokens([ret_token], special_tokens=True))
        config_kwargs = {"ret_token_id": tokenizer.convert_tokens_to_ids(ret_token)} | config_kwargs
        config = cls.config_class(AutoConfig.from_pretrained(folder), keep_layers, **config_kwargs)
        stored = config.backbone_config.dtype or config.get_text_config().dtype or torch.float32
        backbone: Any = load_pruned_backbone(checkpoint, config.backbone_config, dtype or stored, revision)
        with torch.device("meta"):
            model = cls(config)
        table = backbone.get_input_embeddings().weight.detach()
        vector = table[:num_tokens].float().mean(0) if is_new else table[model.config.ret_token_id]
        model.ret_embedding = nn.Parameter(vector.to(table.dtype, copy=True))
        model._adopt(backbone)
        return model.eval()

    def _adopt(self, backbone: Any) -> None:  # noqa: ANN401
        """Take the backbone, and its final norm out of it, so that it norms the readout position only."""
        self.backbone = backbone
        self.norm = backbone.language_model.norm
        backbone.language_model.norm = nn.Identity()
        project_by_product(self.vision_model)
        if is_readable(self.config.get_text_config()):
            make_readable(backbone.language_model.layers[-1])
        self._freeze_tokens()

    def _freeze_tokens(self) -> None:
        """Let the vector of [RET] be trained, and then no other token's, only if the configuration says so."""
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
        """The language model's table of token embeddings; the vector of [RET] is `ret_embedding`."""
        return self.backbone.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_mask: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        image_view_mask: Tensor | None = None,
        text_view_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        views: Sequence[str] | None = None,
        return_dict: bool = True,
    ) -> MllmRetrieverOutput:
        """Embed N items, each the prompt that the processor made of it; padding may be on either side.

        Args:
            input_ids: `(N, T)` token ids; after an item's prompt may follow what its other views end in.
            attention_mask: `(N, T)` 1 for the prompt of the whole item; all ones when absent.
            pixel_values: `(N, P, ...)` rows of pixels: patches in Qwen-VL, pictures or tiles elsewhere. Absent when no
                item has an image.
            pixel_mask: `(N, P)` bool, which of these rows exist; all when absent.
            image_grid_thw: `(N, I, 3)` the patch grid of each image (Qwen-VL); zero where an item has fewer images.
            image_view_mask: `(N, T)` 1 for the prompt of the item's images alone, of the whole item if it has none.
            text_view_mask: `(N, T)` the same for its texts alone.
            image_mask: `(N,)` which items have an image; accepted because the processor gives it, losses read it.
            text_mask: `(N,)` the same for text.
            views: Which of `"image"`, `"text"`, `"fused"` to embed each item as, from one pass of the vision tower;
                the outputs are stacked view by view, `(len(views) * N, D)`. By default each item is embedded once,
                with all it has.
            return_dict: Accepted for interface compatibility; the output is always an `MllmRetrieverOutput`.

        Raises:
            ValueError: There is no prompt, a view is unknown or not in the batch, [RET] is not in a prompt, or the
                image tokens are not as many as the vision tower gives.
        """
        if input_ids is None:
            raise ValueError("the batch has neither images (pixel_values) nor texts (input_ids)")
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        masks = {"image": image_view_mask, "text": text_view_mask, "fused": attention_mask}
        if image_view_mask is None and text_view_mask is None:  # all items have one and the same modality
            masks["text" if pixel_values is None else "image"] = attention_mask
        is_image = input_ids == self.backbone.config.image_token_id
        image_rows = is_image.flatten().cumsum(0).view_as(input_ids).masked_fill(~is_image, 0)  # 1 is the first
        features = self._image_features(pixel_values, pixel_mask, image_grid_thw, int(is_image.sum()))
        pooled = torch.cat(
            [
                self._embed_view(input_ids, image_rows, _view_mask(masks, view), features, image_grid_thw)
                for view in (views or ("fused",))
            ]
        )
        embeddings = F.normalize(pooled[:, : self.config.hidden_size].float(), dim=-1)
        return MllmRetrieverOutput(embeddings=embeddings, pooler_output=pooled)

    def run_vision_tower(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None) -> ImageFeatures:
        """The image tokens that enter the language model.

        On a CPU few images go through the tower at once: what they are between two layers should fit its caches.

        Args:
            pixel_values: `(R, ...)` rows of pixels of all images, in order.
            image_grid_thw: `(I, 3)` the patch grids of these images, for Qwen-VL.
        """
        if image_grid_thw is None or pixel_values.device.type != "cpu":
            return self._image_tokens(pixel_values, image_grid_thw)
        grids = image_grid_thw.split(_images_at_once(image_grid_thw.prod(1).tolist()))
        images = pixel_values.split([int(grid.prod(1).sum()) for grid in grids])
        parts = [self._image_tokens(*part) for part in zip(images, grids, strict=True)]
        levels = zip(*(part.deepstack for part in parts), strict=True)
        return ImageFeatures(torch.cat([part.tokens for part in parts]), [torch.cat(level) for level in levels])

    def _image_tokens(self, pixel_values: Tensor, grid: Tensor | None = None) -> ImageFeatures:
        inputs = {} if grid is None else {"image_grid_thw": grid}
        output = self.backbone.get_image_features(pixel_values.to(self.dtype), **inputs, return_dict=True)
        deepstack = output.get("deepstack_features") or []
        return ImageFeatures(torch.cat(list(output.pooler_output)), [torch.cat(list(level)) for level in deepstack])

    def _image_features(
        self, pixel_values: Tensor | None, pixel_mask: Tensor | None, grid: Tensor | None, num_tokens: int
    ) -> ImageFeatures | None:
        """The image tokens of a batch; None if there are none (as in a chunk of a batch that holds texts only)."""
        if pixel_values is not None:
            rows = pixel_values.flatten(0, 1) if pixel_mask is None else pixel_values[pixel_mask.bool()]
            if len(rows):
                if grid is None and self.config.backbone_config.model_type.startswith("qwen"):
                    raise ValueError("pixel_values need image_grid_thw: the processor is not this model's")
                features = self.run_vision_tower(rows, None if grid is None else _existing(grid))
                if len(features.tokens) == num_tokens:
                    return features
                raise ValueError(
                    f"the prompts hold {num_tokens} image tokens, but the vision tower gives {len(features.tokens)}: "
                    "the processor is not this model's"
                )
        if num_tokens:
            raise ValueError(f"the prompts hold {num_tokens} image tokens, but there are no pixel_values")
        return None

    def _embed_view(
        self, input_ids: Tensor, image_rows: Tensor, mask: Tensor, features: ImageFeatures | None, grid: Tensor | None
    ) -> Tensor:
        """The state `(N, D)` at the readout position of the tokens where `mask` holds.

        The tokens are moved to the front. Since no token attends to later ones, what follows the last one cannot reach
        it, and the language model needs no mask of padding.
        """
        (input_ids, image_rows), lengths = _move_to_front(mask.bool(), input_ids, image_rows)
        is_image = image_rows > 0
        tokens = self._token_embeddings(input_ids)
        inputs: dict[str, Any] = {}
        if features is not None:
            chosen = image_rows[is_image] - 1
            tokens = tokens.masked_scatter(is_image[..., None], features.tokens[chosen].to(tokens.dtype))
            if features.deepstack:
                inputs["visual_pos_masks"] = is_image
                inputs["deepstack_visual_embeds"] = [level[chosen] for level in features.deepstack]
            if grid is not None and self.config.position_mode == "mrope":
                inputs["position_ids"] = self._mrope_positions(input_ids, is_image, grid)
        at = self._readout_positions(input_ids, lengths)
        if not self.training and not torch.is_grad_enabled() and self.shortcuts:
            shared = shared_prefix_length(input_ids, is_image, at)
            if shared:
                tokens, at, inputs = self._after_prefix(shared, tokens, at, inputs)
            depth_of_images = 0 if features is None else len(features.deepstack)
            if depth_of_images < self.config.keep_layers and is_readable(self.config.get_text_config()):
                inputs["readout"] = at
        states = self.backbone.language_model(inputs_embeds=tokens, use_cache=False, **inputs).last_hidden_state
        if "readout" not in inputs:
            return self.norm(states[torch.arange(len(at), device=at.device), at])
        return self.norm(states[:, 0])

    def _after_prefix(
        self, shared: int, tokens: Tensor, at: Tensor, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Run the first tokens, which all rows share, for one of them; what is left to run, with their keys."""
        prefix = SharedPrefix()
        self.backbone.language_model(inputs_embeds=tokens[:1, :shared], past_key_values=prefix, use_cache=False)
        inputs = {name: value[..., shared:] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return tokens[:, shared:], at - shared, inputs | {"past_key_values": prefix}

    def _token_embeddings(self, input_ids: Tensor) -> Tensor:
        """`(N, T, D)`; the id of [RET] need not be in the table."""
        if self.config.ret_token_id is None:
            return self.get_input_embeddings()(input_ids)
        is_ret = input_ids == self.config.ret_token_id
        tokens = self.get_input_embeddings()(input_ids.masked_fill(is_ret, 0))
        return torch.where(is_ret[..., None], self.ret_embedding.to(tokens.dtype), tokens)

    def _mrope_positions(self, input_ids: Tensor, is_image: Tensor, grid: Tensor) -> Tensor:
        """The backbone's own three-dimensional positions `(3, N, T)`, worked out on the CPU: it loops over rows."""
        grid = _existing(grid[is_image.any(1)])
        positions, _ = self.backbone.get_rope_index(
            input_ids.cpu(), mm_token_type_ids=is_image.int().cpu(), image_grid_thw=grid.cpu()
        )
        return positions.to(input_ids.device)

    def _readout_positions(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """`(N,)` where to read, given ids `(N, T)` whose first `lengths` are the prompt."""
        if self.config.readout == "last":
            return lengths - 1
        places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        found = (input_ids == self.config.ret_token_id) & (places <= lengths[:, None])
        last = (found * places).amax(1) - 1
        without = (last < 0).nonzero().flatten().tolist()
        if without:
            raise ValueError(
                f"no [RET] (token id {self.config.ret_token_id}) in the prompts of rows {without[:5]}: "
                "was the tokenizer changed, or the processor made for another model?"
            )
        return (last - 1).clamp(min=0) if self.config.readout == "before_token" else last

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MllmRetrieverModel):
            init.normal_(module.ret_embedding, std=self.config.get_text_config().initializer_range)


def _view_mask(masks: dict[str, Tensor | None], view: str) -> Tensor:
    if view not in masks:
        raise ValueError(f"unknown view {view!r}; expected one of {VIEWS}")
    mask = masks[view]
    if mask is None:
        raise ValueError(f"view {view!r} was asked for, but no item of the batch has it")
    return mask


def _move_to_front(mask: Tensor, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of each row of `(N, T)` tensors, put what `mask` keeps first, in order, and zeros behind it.

    Returns:
        The tensors `(N, T')`, `T'` the most that a row keeps, and how many each keeps `(N,)`.
    """
    lengths = mask.sum(1)
    order = (~mask).int().argsort(dim=1, stable=True)[:, : int(lengths.max())]
    kept = mask.gather(1, order)
    return [tensor.gather(1, order).masked_fill(~kept, 0) for tensor in tensors], lengths


def _images_at_once(num_patches: list[int]) -> list[int]:
    """How many images to take together, one group after the other, given how many patches each has."""
    groups, taken = [0], 0
    for patches in num_patches:
        if groups[-1] and taken + patches > PATCHES_AT_ONCE:
            groups.append(0)
            taken = 0
        groups[-1] += 1
        taken += patches
    return groups


def _existing(grid: Tensor) -> Tensor:
    """The grids `(I, 3)` of the images that exist among `(N, I', 3)`."""
    grid = grid.flatten(0, 1)
    return grid[grid.prod(1) > 0]


__all__ = ["MllmRetrieverModel", "MllmRetrieverOutput"]
