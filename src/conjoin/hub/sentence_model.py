"""Models of sentence-transformers, and bare towers that it reads, as `ItemEncoder` takes model and processor."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES

from conjoin.constants import POOLINGS, Role
from conjoin.hub.folder import LATE_INTERACTION, loading
from conjoin.models.modeling_towers import TowersOutput
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import CONCATENATED, pad_to_square
from conjoin.processing.item_inputs import ImageSource, Item, is_chat, item_parts, parse_items
from conjoin.processing.processing_image_text import only_image
from conjoin.processing.sentence_files import instructions_of
from conjoin.storage import model_fingerprint, part_digest, settings_digest

_MODALITIES: dict[str, Any] = {"text": "text", "image": "image", "image,text": ("image", "text")}
"""Our names of modalities, and those of sentence-transformers."""


def load_sentence_model(
    path: str | Path, trust_remote_code: bool = False, revision: str | None = None
) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Load a folder of sentence-transformers; arguments and errors are those of `load_tower`.

    A model that does not rank by cosine, and one without a vector for the whole item, are errors, too.
    """
    with loading(path, revision):
        model = SentenceTransformer(str(path), device="cpu", trust_remote_code=trust_remote_code, revision=revision)
        has_unit_length = isinstance([*model][-1], Normalize) and model.truncate_dim is None
        if model.similarity_fn_name != "cosine" and not (has_unit_length and model.similarity_fn_name != "manhattan"):
            raise ValueError(
                f"it ranks by {model.similarity_fn_name} (similarity_fn_name in config_sentence_transformers.json) "
                "and its vectors differ in length; collections rank by cosine, which gives another order: rank with "
                'sentence-transformers itself, or set "cosine" there to accept that order'
            )
        return _checked(model)


def load_tower(
    path: str | Path, pooling: str | None = None, trust_remote_code: bool = False, revision: str | None = None
) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Load a bare checkpoint of transformers (CLIP, SigLIP, DINOv2, BERT ...) as sentence-transformers reads it.

    Args:
        path: A local folder or the name of a repository on the Hub.
        pooling: How the states of the tokens become one vector, one of `POOLINGS`; None for two towers, which have
            projections. The library would guess it.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: Weights are damaged, code is needed and not trusted, the model gives no embedding, or `pooling` is
            missing, or not one that it takes.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    with loading(path, revision), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of a pooler that the checkpoint lacks: the fingerprint must not change with each load
        config = AutoConfig.from_pretrained(path, **options)
        kind = config.model_type
        if type(config) not in MODEL_MAPPING and not hasattr(config, "auto_map"):
            raise ValueError(f"{kind!r} has no single vector that AutoModel gives: {LATE_INTERACTION}")
        has_projections = kind in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES and kind != "blip-2"
        if has_projections and pooling is not None:
            raise ValueError(f"pooling={pooling!r} of a {kind!r}; expected none, it has projections")
        if not has_projections and pooling not in POOLINGS:
            raise ValueError(
                f"pooling={pooling!r}: a {kind!r} does not say how the states of its tokens become one vector; pass "
                f"pooling= (--pooling), one of {', '.join(POOLINGS)}, as its authors do, or preset= (--preset) of a "
                "published embedder around an MLLM"
            )
        body: Any = Transformer(str(path), model_kwargs=options, processor_kwargs=options, config_kwargs=options)
        modules = [body]
        if not has_projections:
            modules.append(Pooling(body.get_embedding_dimension(), {"last": "lasttoken"}.get(pooling, pooling)))
        elif kind.startswith("siglip"):
            padded = {"padding": "max_length", "max_length": config.get_text_config().max_position_embeddings}
            eye = body.processor.image_processor  # whose sizes of SigLIP 2 its processor would replace
            sizes = {name: getattr(eye, name) for name in ("patch_size", "max_num_patches") if hasattr(eye, name)}
            body.processing_kwargs = {"text": padded, "image": sizes}
        return _checked(SentenceTransformer(modules=modules, device="cpu"))


def _checked(model: SentenceTransformer) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Return a model and its processor once it embeds an item, twice the same.

    Raises:
        ValueError: It does not.
    """
    for part in model.modules():
        if isinstance(part, Transformer) and part.tokenizer is not None:
            _fit_length(part)
    wrapped, processor = SentenceModel(model).eval(), SentenceProcessor(model)
    item = "a word" if "text" in processor.takes else Image.effect_noise((64, 64), 90).convert("RGB")
    try:
        with torch.inference_mode():
            once, again = (wrapped(**processor([item])).embeddings for _ in range(2))
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:  # of an unknown architecture
        raise ValueError(f"it cannot be read as an encoder: {error!r:.200}") from error
    if not torch.allclose(once, again, atol=1e-3):  # as ViTMAE, which hides patches at random
        raise ValueError("it gives another vector for the same item at each call")
    return wrapped, processor


def _fit_length(part: Transformer) -> None:
    """Let the tokenizer cut texts to the positions that a model has; those of RoBERTa begin behind the padding's."""
    tables = [module for name, module in part.model.named_modules()
              if isinstance(module, nn.Embedding) and "position" in name]  # fmt: skip
    positions = part.config.get_text_config().to_dict().get("max_position_embeddings")
    if tables and positions:
        behind = max(0 if table.padding_idx is None else table.padding_idx + 1 for table in tables)
        words: Any = part.tokenizer
        words.model_max_length = min(words.model_max_length, positions - behind)


class SentenceModel(nn.Module):
    """A `SentenceTransformer` with one L2-normalised embedding per item.

    The vectors of an item's image and text are added where the model embeds them only apart, as score fusion does.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, groups: Sequence[tuple[Tensor, dict[str, Any]]], role: Role | None = None) -> TowersOutput:
        """Embed a batch of `SentenceProcessor`: rows of the batch, and the inputs of the library for them."""
        count = 1 + max(int(rows.max()) for rows, _ in groups)
        task, total = {} if role is None else {"task": role}, torch.zeros(())
        for rows, features in groups:
            output = self.model(dict(features), **task)
            if "sentence_embedding" not in output:
                raise ValueError(f"it gives no vector for a whole item: {LATE_INTERACTION}")
            vectors = output["sentence_embedding"].flatten(1).float()
            empty = vectors.new_zeros(count, vectors.shape[1])
            total = (empty if total.ndim == 0 else total).index_add(0, rows, vectors)
        total = total[:, : self.model.truncate_dim]
        return TowersOutput(F.normalize(total, dim=-1), total)

    @property
    def body(self) -> PreTrainedModel:
        """The model of transformers that the library runs first."""
        return next(part.model for part in self.model.modules() if isinstance(part, Transformer))

    @property
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
        """Whether queries and documents go through the same modules."""
        parts = [*self.model.modules()]
        lengths = all(part.query_length == part.document_length for part in parts if isinstance(part, Transformer))
        routes = {name for part in parts if isinstance(part, Router) for name in part.sub_modules}
        tasks = {task for part in parts if isinstance(part, Router) for task, _ in part.route_mappings}
        return lengths and tasks <= {None} and not routes & {"query", "document"}


class SentenceProcessor:
    """What turns items into the inputs of a `SentenceModel`: the library's own `preprocess`.

    Attributes:
        takes: The modalities that the model takes.
        has_messages: Whether it takes several images, and chat messages.
        prompts: Its own prompts by name.
        digest: Of its tokenizers and image processors.
        takes_role: It is called with the role of the items.
    """

    takes_role = True

    def __init__(self, model: SentenceTransformer) -> None:
        self.model, self.has_messages = model, model.supports("message")
        self.takes = {name for name, modality in _MODALITIES.items() if model.supports(modality)}
        self.is_joint = "image,text" in self.takes
        if {"image", "text"} <= self.takes:
            self.takes.add("image,text")
        self.prompts: dict[str, Any] = {**model.prompts}
        held = [vars(module).get(name) for module in model.modules() for name in ("processor", "tokenizer")]
        self.digest = settings_digest({"parts": [part_digest(part) for part in held if part is not None]})

    def __call__(
        self, items: Sequence[Any], instruction: Sequence[str | None] | None = None, role: Role | None = None
    ) -> dict[str, Any]:
        """The inputs of `SentenceModel.forward`: what the library can embed in one call, and for which rows."""
        default = self.prompts.get(self.model.default_prompt_name or "")
        groups: dict[Any, tuple[list[int], list[Any]]] = {}
        given = zip(items, parse_items(items), instructions_of(instruction, len(items)), strict=True)
        for index, (value, item, prompt) in enumerate(given):
            if item.modality not in self.takes:
                raise ItemError(f"item {index}", f"this model cannot take {item.modality!r}")
            for before, part in self._inputs(value, item, default if prompt is None else prompt, f"item {index}"):
                # before sentence-transformers 6.1, the order of keys is that of the first item
                kind = tuple(part) if isinstance(part, dict) else type(part)
                rows, inputs = groups.setdefault((before, kind, item.modality), ([], []))
                rows.append(index)
                inputs.append(part)
        task = {} if role is None else {"task": role}
        return {
            "groups": [
                (torch.tensor(rows), dict(self.model.preprocess(inputs, prompt=prompt or None, **task)))
                for (prompt, *_), (rows, inputs) in groups.items()
            ],
            "role": role,
        }

    def _inputs(self, value: Any, item: Item, prompt: str | None, name: str) -> Iterator[tuple[str | None, Any]]:  # noqa: ANN401
        """Each part that the library embeds by itself, behind its prompt; a text is never mistaken for a path.

        The library sets prompts before texts alone and before conversations; before a picture it would drop them.
        """
        if self.has_messages:
            if is_chat(value):
                yield prompt, _with_images(value, iter(item.images))
                return
            parts: dict[str, list[Any]] = {"image": [*item.images], "text": [*item.texts]}
            order = dict.fromkeys("text" if isinstance(part, str) else "image" for part in item.parts)
            yield prompt, {kind: parts[kind] if len(parts[kind]) > 1 else parts[kind][0] for kind in order}
            return
        text, image = " ".join(item.texts), only_image(item, name)
        if image is None:
            yield prompt, text if self.takes == {"text"} else {"text": text}
            return
        if image.info.get(CONCATENATED):
            image = pad_to_square(image)  # these models may crop
        if "text" in self.takes:
            text = f"{prompt or ''}{text}" if text else (prompt or "").strip()
        if self.is_joint and text:
            yield None, {"text": text, "image": image}
            return
        yield None, {"image": image}
        if text:
            yield None, {"text": text}


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
