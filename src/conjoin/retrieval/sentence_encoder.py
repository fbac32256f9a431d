"""Models of sentence-transformers behind the interface of `ItemEncoder`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conjoin.hub.load import loading
from conjoin.processing.input_types import only_image
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import CONCATENATED, pad_to_square
from conjoin.processing.item_inputs import Item, parse_items
from conjoin.retrieval.encoder import EncoderOutput
from conjoin.storage import part_digest

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_MODALITY_NAMES: dict[str, Any] = {"text": "text", "image": "image", "image,text": ("image", "text")}
"""Our names of modalities, and those of sentence-transformers."""


def load_sentence_transformer(
    path: str | Path, trust_remote_code: bool = False, revision: str | None = None
) -> tuple["SentenceTransformerModel", "SentenceTransformerProcessor"]:
    """Load a model of sentence-transformers and what turns items into its inputs, as `ItemEncoder` takes them.

    An instruction becomes the prompt, with a space behind it unless it ends in white space. Without one the model's
    default prompt applies, as in the library.

    Args:
        path: A local folder or the name of a repository on the Hub, with a `modules.json`.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: sentence-transformers is not installed.
        ValueError: The weights are damaged, or the model needs code that is not trusted.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f'{str(path)!r} is a model of sentence-transformers, which is not installed: pip install "conjoin[st]"'
        ) from error
    with loading(path, revision):
        model = SentenceTransformer(str(path), device="cpu", trust_remote_code=trust_remote_code, revision=revision)
    return SentenceTransformerModel(model), SentenceTransformerProcessor(model)


class SentenceTransformerModel(torch.nn.Module):
    """A `SentenceTransformer` with one L2-normalised embedding per item.

    Args:
        model: The model.
    """

    def __init__(self, model: "SentenceTransformer") -> None:
        super().__init__()
        self.model = model
        self.config = _Settings(model)

    def forward(self, groups: list[dict[str, Any]], rows: list[Tensor]) -> EncoderOutput:
        """Embed the groups of the processor; `rows` holds the indices of each group's items in the batch."""
        parts = [self.model(features)["sentence_embedding"].float() for features in groups]
        embeddings = torch.cat(parts)[torch.cat(rows).argsort()]
        return EncoderOutput(torch.nn.functional.normalize(embeddings, dim=-1))


class _Settings:
    """The settings that, beside the weights, decide what vectors a model gives."""

    def __init__(self, model: "SentenceTransformer") -> None:
        self._model = model

    def to_dict(self) -> dict[str, Any]:
        """Describe every module in order, the longest text and the default prompt."""
        modules: list[Any] = [*self._model]
        configs = [part.config.to_dict() for part in self._model.modules() if isinstance(part, PreTrainedModel)]
        return {
            "modules": [[type(module).__name__, module.get_config_dict()] for module in modules],
            "transformers": configs,
            "max_seq_length": self._model.max_seq_length,
            "truncate_dim": self._model.truncate_dim,
            "prompt": _default_prompt(self._model),
        }


def _default_prompt(model: "SentenceTransformer") -> str | None:
    return None if model.default_prompt_name is None else model.prompts[model.default_prompt_name]


class SentenceTransformerProcessor:
    """What turns items into the inputs of a `SentenceTransformerModel`.

    Args:
        model: The model.
    """

    def __init__(self, model: "SentenceTransformer") -> None:
        self.model = model

    def __call__(self, items: Sequence[Any], instruction: Sequence[str | None] | None = None) -> Mapping[str, Any]:
        """The inputs of `forward`: one group per modality, form, order of the parts and prompt.

        The library needs it: its versions before 6.1 take the order of a batch from its first item.
        """
        model = self.model
        groups: dict[tuple[str, bool, tuple[str, ...], str | None], list[int]] = {}
        prompts = [None] * len(items) if instruction is None else instruction
        inputs = []
        for index, (value, item, prompt) in enumerate(zip(items, parse_items(items), prompts, strict=True)):
            if not model.supports(_MODALITY_NAMES[item.modality]):
                raise ItemError(f"item {index}", f"this model cannot take {item.modality!r}")
            inputs.append(_input(model, index, value, item))
            order = tuple(inputs[-1]) if isinstance(inputs[-1], dict) else ()
            groups.setdefault((item.modality, _is_chat(value), order, _prompt(model, prompt)), []).append(index)
        return {
            "groups": [
                model.preprocess([inputs[index] for index in indices], prompt=prompt)
                for (*_, prompt), indices in groups.items()
            ],
            "rows": [torch.tensor(indices) for indices in groups.values()],
        }

    def digest(self) -> str:
        """Equal for equal settings."""
        return part_digest(self.model.processor)


def _prompt(model: "SentenceTransformer", instruction: str | None) -> str | None:
    if instruction is None or not instruction.strip():
        return _default_prompt(model)
    return instruction if instruction[-1].isspace() else f"{instruction} "


def _input(model: "SentenceTransformer", index: int, value: Any, item: Item) -> Any:  # noqa: ANN401
    """An item as sentence-transformers takes it: its images decoded, a text never mistaken for a path."""
    if model.supports("message"):
        if _is_chat(value):
            return _with_images(value, iter(item.images))
        parts: dict[str, list[Any]] = {"image": [*item.images], "text": [*item.texts]}
        order = dict.fromkeys(_kind(part) for part in item.parts)
        return {kind: parts[kind] if len(parts[kind]) > 1 else parts[kind][0] for kind in order}
    image = only_image(item, f"item {index}")
    if image is not None and image.info.get(CONCATENATED):
        image = pad_to_square(image)  # these models may crop
    text = {"text": " ".join(item.texts)} if item.texts else {}
    return text | ({} if image is None else {"image": image})


def _is_chat(value: Any) -> bool:  # noqa: ANN401
    """Whether an item is one or more chat messages; the library cannot mix them with other items in a batch."""
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


def _kind(part: Any) -> str:  # noqa: ANN401
    return "text" if isinstance(part, str) else "image"
