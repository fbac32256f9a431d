"""Models of sentence-transformers behind the interface of `ItemEncoder`: the library itself encodes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router
from transformers import PreTrainedModel

from conjoin.hub.load import loading
from conjoin.processing.input_types import only_image
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import CONCATENATED, pad_to_square
from conjoin.processing.item_inputs import Item, parse_items
from conjoin.retrieval.encoder import ItemEncoder, Role
from conjoin.storage import model_fingerprint, part_digest, settings_digest

_MODALITIES: dict[str, Any] = {"text": "text", "image": "image", "image,text": ("image", "text")}
"""Our names of modalities, and those of sentence-transformers."""


def load_sentence_transformer(
    path: str | Path, trust_remote_code: bool = False, revision: str | None = None
) -> tuple[SentenceTransformer, "SentenceItems"]:
    """Load a model of sentence-transformers and what turns items into its inputs, as `SentenceEncoder` takes them.

    Args:
        path: A local folder or the name of a repository on the Hub, with a `modules.json`.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The weights are damaged, the model needs code that is not trusted, or it does not rank by cosine.
    """
    with loading(path, revision):
        model = SentenceTransformer(str(path), device="cpu", trust_remote_code=trust_remote_code, revision=revision)
    has_unit_length = isinstance([*model][-1], Normalize) and model.truncate_dim is None
    if model.similarity_fn_name != "cosine" and not (has_unit_length and model.similarity_fn_name != "manhattan"):
        raise ValueError(
            f"the model {str(path)!r} ranks by {model.similarity_fn_name} (similarity_fn_name in "
            "config_sentence_transformers.json) and its vectors differ in length; collections rank by cosine, which "
            'gives another order: rank with sentence-transformers itself, or set "cosine" there to accept that order'
        )
    takes = frozenset(name for name, modality in _MODALITIES.items() if model.supports(modality))
    return model, SentenceItems(takes, model.supports("message"), {**model.prompts}, _digest(model))


class SentenceEncoder(ItemEncoder):
    """An `ItemEncoder` whose model is a `SentenceTransformer`: its `encode_query`, `encode_document` and `encode`."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all modules' settings, the prompts, and the weights."""
        model: Any = self.model
        settings = {
            "modules": [[type(m).__name__, m.get_config_dict()] for m in model.modules() if _has_settings(m)],
            "transformers": [m.config.to_dict() for m in model.modules() if isinstance(m, PreTrainedModel)],
            "max_seq_length": model.max_seq_length,
            "truncate_dim": model.truncate_dim,
            "prompts": dict(model.prompts),
            "default_prompt_name": model.default_prompt_name,
        }
        return model_fingerprint(model, settings)

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and documents get the same prompt and run through the same modules, as far as is known."""
        lengths = {(module.query_length, module.document_length) for module in self.model if _has_lengths(module)}
        routes = any(isinstance(module, Router) for module in self.model.modules())
        return super().is_symmetric and not routes and all(query == document for query, document in lengths)

    def _embed(self, batch: dict[str, Any], role: Role | None) -> torch.Tensor:
        encode = {"query": self.model.encode_query, "document": self.model.encode_document}.get(
            str(role), self.model.encode
        )
        groups, options = batch["groups"], {"show_progress_bar": False, "convert_to_tensor": True}
        parts = [
            encode([batch["inputs"][index] for index in indices], prompt=prompt, batch_size=len(indices),
                   normalize_embeddings=True, **options).float()
            for prompt, indices in groups
        ]  # fmt: skip
        order = torch.tensor([index for _, indices in groups for index in indices], device=parts[0].device)
        return torch.cat(parts)[order.argsort()]


class SentenceItems(NamedTuple):
    """What turns items into the inputs of a `SentenceTransformer`.

    Attributes:
        takes: The modalities that the model takes.
        has_messages: Whether it takes several images, and chat messages.
        prompts: Its own prompts by name.
        settings: A fingerprint of its tokenizers and image processors.
    """

    takes: frozenset[str]
    has_messages: bool
    prompts: Mapping[str, Any]
    settings: str

    def __call__(self, items: Sequence[Any], instruction: Sequence[str | None] | None = None) -> dict[str, Any]:
        """The inputs of the library, and groups of them, each with its prompt, that it encodes in one call.

        It takes the order of the parts of a batch from the first item (before 6.1), and no messages beside others.
        """
        prompts = [None] * len(items) if instruction is None else instruction
        groups: dict[Any, list[int]] = {}
        inputs = []
        for index, (value, item, prompt) in enumerate(zip(items, parse_items(items), prompts, strict=True)):
            if item.modality not in self.takes:
                raise ItemError(f"item {index}", f"this model cannot take {item.modality!r}")
            inputs.append(self._input(index, value, item))
            order = tuple(inputs[-1]) if isinstance(inputs[-1], dict) else ()
            groups.setdefault((prompt, item.modality, _is_chat(value), order), []).append(index)
        return {"inputs": inputs, "groups": [(prompt, indices) for (prompt, *_), indices in groups.items()]}

    def _input(self, index: int, value: Any, item: Item) -> Any:  # noqa: ANN401
        """An item as sentence-transformers takes it: its images decoded, a text never mistaken for a path."""
        if self.takes == {"text"}:
            return " ".join(item.texts)
        if self.has_messages:
            if _is_chat(value):
                return _with_images(value, iter(item.images))
            parts: dict[str, list[Any]] = {"image": [*item.images], "text": [*item.texts]}
            order = dict.fromkeys("text" if isinstance(part, str) else "image" for part in item.parts)
            return {kind: parts[kind] if len(parts[kind]) > 1 else parts[kind][0] for kind in order}
        image = only_image(item, f"item {index}")
        if image is not None and image.info.get(CONCATENATED):
            image = pad_to_square(image)  # these models may crop
        text = {"text": " ".join(item.texts)} if item.texts else {}
        return text | ({} if image is None else {"image": image})

    def digest(self) -> str:
        """Equal for equal settings."""
        return self.settings


def _has_settings(module: torch.nn.Module) -> bool:
    return hasattr(module, "get_config_dict")


def _has_lengths(module: torch.nn.Module) -> bool:
    return hasattr(module, "query_length")


def _digest(model: SentenceTransformer) -> str:
    """A fingerprint of the tokenizers and image processors of all modules."""
    held = [vars(module).get(name) for module in model.modules() for name in ("processor", "tokenizer")]
    return settings_digest({"parts": [part_digest(part) for part in held if part is not None]})


def _is_chat(value: Any) -> bool:  # noqa: ANN401
    """Whether an item is one or more chat messages."""
    return isinstance(value, list | tuple) or (isinstance(value, Mapping) and "role" in value)


def _with_images(value: Any, images: Iterator[Any]) -> Any:  # noqa: ANN401
    """Return a message, or a list of them, with images in place of paths and URLs, which the library would fetch."""
    if not isinstance(value, Mapping):
        return [_with_images(message, images) for message in value]
    if isinstance(value["content"], str):
        return value
    content = [{"type": "image", "image": next(images)} if _is_image(entry) else entry for entry in value["content"]]
    return {**value, "content": content}


def _is_image(entry: Any) -> bool:  # noqa: ANN401
    """Whether a part of a message is an image; `{"image": None}` is none."""
    kind = entry["type"] if isinstance(entry, Mapping) else "text"
    return kind == "image_url" or (kind == "image" and entry.get("image", entry) is not None)
