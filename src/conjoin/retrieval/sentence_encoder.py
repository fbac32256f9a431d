"""Models of sentence-transformers behind the interface of `ItemEncoder`: the library itself encodes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module, Normalize, Router, Transformer
from transformers import PreTrainedModel

from conjoin.hub.load import loading
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import CONCATENATED, pad_to_square
from conjoin.processing.item_inputs import ImageSource, Item, is_chat, item_parts, parse_items
from conjoin.processing.processing_image_text import only_image
from conjoin.retrieval.encoder import ItemEncoder, Role
from conjoin.storage import model_fingerprint, part_digest, settings_digest

_MODALITIES: dict[str, Any] = {"text": "text", "image": "image", "image,text": ("image", "text")}
"""Our names of modalities, and those of sentence-transformers."""


def load_sentence_transformer(
    path: str | Path, trust_remote_code: bool = False, revision: str | None = None
) -> tuple[SentenceTransformer, "SentenceItems"]:
    """Load a model of sentence-transformers and what turns items into its inputs, as `SentenceEncoder` takes them.

    Arguments and errors are those of `load_stock_model`; a model that does not rank by cosine is an error, too.
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
    held = [vars(module).get(name) for module in model.modules() for name in ("processor", "tokenizer")]
    digest = settings_digest({"parts": [part_digest(part) for part in held if part is not None]})
    return model, SentenceItems(takes, model.supports("message"), {**model.prompts}, digest)


class SentenceEncoder(ItemEncoder):
    """An `ItemEncoder` whose model is a `SentenceTransformer`: its `encode_query`, `encode_document` and `encode`."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the settings of all modules, the prompts and the weights."""
        model: Any = self.model
        settings = {
            "modules": [[type(m).__name__, m.get_config_dict()] for m in model.modules() if isinstance(m, Module)],
            "transformers": [m.config.to_dict() for m in model.modules() if isinstance(m, PreTrainedModel)],
            "max_seq_length": model.max_seq_length,
            "truncate_dim": model.truncate_dim,
            "prompts": dict(model.prompts),
            "default_prompt_name": model.default_prompt_name,
        }
        return model_fingerprint(model, settings)

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and documents get the same prompt and the same modules."""
        parts = [*self.model.modules()]
        lengths = all(part.query_length == part.document_length for part in parts if isinstance(part, Transformer))
        return super().is_symmetric and lengths and not any(isinstance(part, Router) for part in parts)

    def _embed(self, batch: dict[str, Any], role: Role | None, normalize: bool) -> torch.Tensor:
        encode = self.model.encode if role is None else getattr(self.model, f"encode_{role}")
        options = {"normalize_embeddings": normalize, "convert_to_tensor": True, "show_progress_bar": False}
        vectors: dict[int, torch.Tensor] = {}
        for prompt, rows in batch["groups"]:
            inputs = [batch["inputs"][row] for row in rows]
            vectors |= zip(rows, encode(inputs, prompt=prompt, batch_size=len(rows), **options), strict=True)
        return torch.stack([vectors[row] for row in range(len(vectors))])


class SentenceItems(NamedTuple):
    """What turns items into the inputs of a `SentenceTransformer`.

    Attributes:
        takes: The modalities that the model takes.
        has_messages: Whether it takes several images, and chat messages.
        prompts: Its own prompts by name.
        digest: Of its tokenizers and image processors.
    """

    takes: frozenset[str]
    has_messages: bool
    prompts: Mapping[str, Any]
    digest: str

    def __call__(self, items: Sequence[Any], instruction: Sequence[str | None] | None = None) -> dict[str, Any]:
        """The inputs of the library, and the groups of them that it can encode in one call, each with its prompt."""
        prompts = [None] * len(items) if instruction is None else instruction
        groups: dict[Any, list[int]] = {}
        inputs = []
        for index, (value, item, prompt) in enumerate(zip(items, parse_items(items), prompts, strict=True)):
            if item.modality not in self.takes:
                raise ItemError(f"item {index}", f"this model cannot take {item.modality!r}")
            inputs.append(self._input(index, value, item))
            order = tuple(inputs[-1]) if isinstance(inputs[-1], dict) else ()  # before 6.1, that of the first item
            groups.setdefault((prompt, item.modality, is_chat(value), order), []).append(index)
        return {"inputs": inputs, "groups": [(prompt, indices) for (prompt, *_), indices in groups.items()]}

    def _input(self, index: int, value: Any, item: Item) -> Any:  # noqa: ANN401
        """An item as sentence-transformers takes it: its images decoded, a text never mistaken for a path."""
        if self.takes == {"text"}:
            return " ".join(item.texts)
        if self.has_messages:
            if is_chat(value):
                return _with_images(value, iter(item.images))
            parts: dict[str, list[Any]] = {"image": [*item.images], "text": [*item.texts]}
            order = dict.fromkeys("text" if isinstance(part, str) else "image" for part in item.parts)
            return {kind: parts[kind] if len(parts[kind]) > 1 else parts[kind][0] for kind in order}
        image = only_image(item, f"item {index}")
        if image is not None and image.info.get(CONCATENATED):
            image = pad_to_square(image)  # these models may crop
        text = {"text": " ".join(item.texts)} if item.texts else {}
        return text | ({} if image is None else {"image": image})


def _with_images(value: Any, images: Iterator[Any]) -> Any:  # noqa: ANN401
    """Return a message, or a list of them, with images in place of paths and URLs, which the library would fetch."""
    if not isinstance(value, Mapping):
        return [_with_images(message, images) for message in value]
    if isinstance(value["content"], str):
        return value
    content: list[Any] = []
    for entry in value["content"]:
        shown = [part for part in item_parts({**value, "content": [entry]}) if isinstance(part, ImageSource)]
        content += [{"type": "image", "image": next(images)} for _ in shown] or [entry]
    return {**value, "content": content}
