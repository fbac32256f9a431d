"""Models of sentence-transformers, and bare towers that it reads, as `ItemEncoder` takes model and processor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import _create_minibatch
from sentence_transformers.base.modules import Module, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor

from conjoin.constants import POOLINGS, ROLE_PROMPTS, Role
from conjoin.hub.folder import LATE_INTERACTION, is_two_towers, loading
from conjoin.models.modeling_towers import TowersOutput
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import CONCATENATED, load_image, pad_to_square
from conjoin.processing.item_inputs import ImageSource, Item, check_list, is_chat, item_names, item_parts, parse_item
from conjoin.processing.item_pixels import PictureReader, moved, picture_reader
from conjoin.processing.processing_image_text import only_image
from conjoin.processing.sentence_files import instructions_of
from conjoin.storage import model_fingerprint, part_digest, settings_digest

_MODALITIES: dict[str, Any] = {"text": "text", "image": "image", "image,text": ("image", "text")}
"""Our names of modalities, and those of sentence-transformers."""


def load_sentence_model(
    path: str | Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **weights: Any,  # noqa: ANN401
) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Load a folder of sentence-transformers; arguments and errors are those of `load_tower`.

    A model that does not rank by cosine, and one without a vector for the whole item, are errors, too.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision, "model_kwargs": weights}
    with loading(path, revision), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # as in `load_tower`
        model = SentenceTransformer(str(path), device="cpu", **options)
        has_unit_length = isinstance([*model][-1], Normalize) and model.truncate_dim is None
        if model.similarity_fn_name != "cosine" and not (has_unit_length and model.similarity_fn_name != "manhattan"):
            raise ValueError(
                f"it ranks by {model.similarity_fn_name} (similarity_fn_name in config_sentence_transformers.json) "
                "and its vectors differ in length; collections rank by cosine, which gives another order: rank with "
                'sentence-transformers itself, or set "cosine" there to accept that order'
            )
        return _checked(model, path, revision)


def load_tower(
    path: str | Path,
    pooling: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **weights: Any,  # noqa: ANN401
) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Load a bare checkpoint of transformers (CLIP, SigLIP, DINOv2, BERT ...) as sentence-transformers reads it.

    Args:
        path: A local folder or the name of a repository on the Hub.
        pooling: How the states of the tokens become one vector, one of `POOLINGS`; None for two towers, which have
            projections. The library would guess it.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.
        weights: How the weights are loaded: `dtype`, `quantization_config`.

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
        has_projections = is_two_towers(config)
        if has_projections and pooling is not None:
            raise ValueError(f"pooling={pooling!r} of a {kind!r}; expected none, it has projections")
        if not has_projections and pooling not in POOLINGS:
            raise ValueError(
                f"pooling={pooling!r}: a {kind!r} does not say how the states of its tokens become one vector; pass "
                f"pooling= (--pooling), one of {', '.join(POOLINGS)}, as its authors do, or preset= (--preset) of a "
                "published embedder around an MLLM"
            )
        of_weights = options | weights
        body: Any = Transformer(str(path), model_kwargs=of_weights, processor_kwargs=options, config_kwargs=options)
        modules = [body]
        if not has_projections:
            modules.append(Pooling(body.get_embedding_dimension(), "lasttoken" if pooling == "last" else str(pooling)))
            if "image" in body.modalities and body.tokenizer is not None:  # a language model that sees
                modules.append(Normalize())
                body.tokenizer.padding_side = "right"
                body.tokenizer.pad_token = body.tokenizer.pad_token or body.tokenizer.eos_token
        elif kind.startswith("siglip"):
            padded = {"padding": "max_length", "max_length": config.get_text_config().max_position_embeddings}
            eye = body.processor.image_processor  # whose sizes of SigLIP 2 its processor would replace
            sizes = {name: getattr(eye, name) for name in ("patch_size", "max_num_patches") if hasattr(eye, name)}
            body.processing_kwargs = {"text": padded, "image": sizes}
        return _checked(SentenceTransformer(modules=modules, device="cpu"), path, revision)


def _checked(
    model: SentenceTransformer, path: str | Path, revision: str | None
) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Return a model and its processor once it embeds an item, twice the same.

    Raises:
        ValueError: It does not.
    """
    for part in model.modules():
        if isinstance(part, Transformer) and part.tokenizer is not None:
            _fit_length(part)
    wrapped, processor = SentenceModel(model, (path, revision)).eval(), SentenceProcessor(model)
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
    """A `SentenceTransformer` as a retriever: it embeds, trains and is saved as the models of this package.

    The vectors of an item's image and text are added where the model embeds them only apart, as score fusion does.
    Attributes that it lacks, such as `config` and `get_input_embeddings`, are those of `body`.

    Args:
        model: The model.
        source: Its folder or repository, and the revision.
    """

    _no_split_modules, is_quantized = None, False  # of its body, whose adapters the library's trainer cannot see

    def __init__(self, model: SentenceTransformer, source: tuple[str | Path, str | None] = ("", None)) -> None:
        super().__init__()
        self.model, self.source = model, source

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self.body, name)

    def forward(
        self,
        order: Tensor,
        groups: Sequence[Mapping[str, Any]],
        role: Role | None = None,
        views: Sequence[str] | None = None,
        **masks: Tensor,
    ) -> TowersOutput:
        """Embed a batch of `SentenceProcessor`.

        Args:
            order: `(N,)` the item at each place of the groups.
            groups: What the library embeds at once: `places` `(M,)` of its items, `views` `(M, V)` that it is a part
                of, and `features` of the library.
            role: What the items are.
            views: For which views the processor made the batch.
            masks: `image_mask` and `text_mask` `(N,)`, which the losses read.

        Returns:
            `(V N, D)`, one view after the other; a row without a part is zero.

        Raises:
            ValueError: The batch is for other views, or the model gives no vector for a whole item.
        """
        count, width = len(order), groups[0]["views"].shape[1]
        if len(views or "1") != width:
            raise ValueError(f"views={views} of a batch that was made for {width}; pass them to the processor")
        task, total = {} if role is None else {"task": role}, None
        for group in groups:
            features = dict(group["features"])
            if isinstance(features.get("modality"), list):  # of a pinned batch
                features["modality"] = tuple(features["modality"])
            output = self.model(features, **task)
            if "sentence_embedding" not in output:
                raise ValueError(f"it gives no vector for a whole item: {LATE_INTERACTION}")
            vectors = output["sentence_embedding"].flatten(1).float()
            views_of, parts = group["views"].T.nonzero(as_tuple=True)
            total = vectors.new_zeros(width * count, vectors.shape[1]) if total is None else total
            total = total.index_add(0, views_of * count + group["places"][parts], vectors[parts])
        total = total.unflatten(0, (width, count))[:, order.argsort()].flatten(0, 1)  # type: ignore[union-attr]
        total = total[:, : self.model.truncate_dim]
        return TowersOutput(F.normalize(total, dim=-1), total)

    @property
    def body(self) -> PreTrainedModel:
        """The model of transformers that the library runs first; of several, the one that reads words."""
        parts = [part for part in self.model.modules() if isinstance(part, Transformer)]
        return next((part for part in parts if part.tokenizer is not None), parts[0]).model

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:  # noqa: ANN401
        """Save it as a folder of sentence-transformers."""
        self.model.save_pretrained(str(folder), create_model_card=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the settings of all modules, the prompts and the weights."""
        model: Any = self.model
        settings = {
            "modules": [[type(m).__name__, m.get_config_dict()] for m in model.modules() if isinstance(m, Module)],
            "transformers": [m.config.to_dict() for m in model.modules() if isinstance(m, PreTrainedModel)],
        }
        names = ("max_seq_length", "truncate_dim", "prompts", "default_prompt_name")
        return model_fingerprint(model, settings | {name: getattr(model, name) for name in names})

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and documents go through the same modules."""
        parts = [*self.model.modules()]
        lengths = all(part.query_length == part.document_length for part in parts if isinstance(part, Transformer))
        routes = {name for part in parts if isinstance(part, Router) for name in part.sub_modules}
        tasks = {task for part in parts if isinstance(part, Router) for task, _ in part.route_mappings}
        return lengths and tasks <= {None} and not routes & {"query", "document"}


class ReadItem(NamedTuple):
    """An item as it was given, and as it was read: its images are resized if `SentenceProcessor.pictures` is known."""

    value: Any
    item: Item


class SentenceProcessor:
    """What turns items into the inputs of a `SentenceModel`: the library's own `preprocess`.

    Attributes:
        takes: The modalities that the model takes.
        has_messages: Whether it takes several images, and chat messages.
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
        held = [vars(module).get(name) for module in model.modules() for name in ("processor", "tokenizer")]
        self.digest = settings_digest({"parts": [part_digest(part) for part in held if part is not None]})

    @property
    def prompts(self) -> dict[str, Any]:
        """The model's own prompts by name, which are saved with it."""
        return self.model.prompts

    @prompts.setter
    def prompts(self, prompts: Mapping[str, str]) -> None:
        self.model.prompts = dict(prompts)

    @property
    def max_text_length(self) -> int | None:
        """The most tokens of an item."""
        return self.model.max_seq_length

    @max_text_length.setter
    def max_text_length(self, length: int) -> None:
        self.model.max_seq_length = length

    def save_pretrained(self, folder: str | Path) -> None:
        """Write nothing: the model is saved with its processor, and a checkpoint of training needs none."""

    def __call__(
        self,
        items: Sequence[Any],
        instruction: Sequence[str | None] | None = None,
        role: Role | None = None,
        ids: Sequence[str | int] | None = None,
        views: Sequence[str] | None = None,
        device: str | torch.device | None = None,
    ) -> dict[str, Any]:
        """Return the inputs of `SentenceModel.forward`: what the library can embed at once, and of which items.

        Items of like cost are neighbours in the groups, so that a part of a group has little padding.

        Args:
            items: As for `parse_items`; or what `reader()` gave for them.
            instruction: The prompt of each item; where it is None, the model's own of the role, or its default.
            role: What the items are.
            ids: Names of the items in messages.
            views: Of `"image"`, `"text"` and `"fused"`, what to embed of each item; None for the item as it is.
            device: Where the tensors are to be.
        """
        check_list(items)
        names = item_names(len(items), ids)
        pairs = [self._read(item, name) for item, name in zip(items, names, strict=True)]
        items, parsed = [item for item, _ in pairs], [each.shortened(self.max_text_length) for _, each in pairs]
        own = ROLE_PROMPTS[role] if role is not None else ()
        own_prompt = next((name for name in own if name in self.prompts), self.model.default_prompt_name)
        prompts = instructions_of(instruction, len(items))
        order = sorted(range(len(items)), key=lambda n: (len(parsed[n].images), sum(map(len, parsed[n].texts))))[::-1]
        groups: dict[Any, tuple[list[Any], list[int], list[list[bool]]]] = {}
        for place, index in enumerate(order):
            value, item, prompt = items[index], parsed[index], prompts[index]
            if item.modality not in self.takes:
                raise ItemError(names[index], f"this model cannot take {item.modality!r}")
            prompt = self.prompts.get(own_prompt or "") if prompt is None else prompt
            known: dict[Any, list[bool]] = {}  # a picture of two views is embedded once
            for number, view in enumerate(views or ("fused",)):
                shown = item if view == "fused" else Item(tuple({"image": item.images, "text": item.texts}[view]))
                whole = value if shown.modality == item.modality else None
                for before, part in self._inputs(whole, shown, prompt, names[index]) if shown.parts else ():
                    # before sentence-transformers 6.1, the order of keys is that of the first item
                    kind = tuple(part) if isinstance(part, dict) else type(part)
                    if kind not in known:
                        known[kind] = [False] * len(views or "1")
                        inputs, places, of_views = groups.setdefault((before, kind, shown.modality), ([], [], []))
                        inputs.append(part)
                        places.append(place)
                        of_views.append(known[kind])
                    known[kind][number] = True
        task = {} if role is None else {"task": role}
        batch: dict[str, Any] = {"order": torch.tensor(order)}
        for name in ("image", "text") if views is not None else ():
            has = [name in item.modality for item in parsed]
            batch |= {} if all(has) else {f"{name}_mask": torch.tensor(has)}
        pictures = self.pictures if any(item.images for item in parsed) else None
        levels = {} if pictures is None else {"processing_kwargs": {"image": pictures.skipped}}
        batch["groups"] = [
            {
                "places": torch.tensor(places),
                "views": torch.tensor(of_views),
                "features": dict(self.model.preprocess(inputs, prompt=before or None, **task, **levels)),
            }
            for (before, *_), (inputs, places, of_views) in groups.items()
        ]
        batch = moved(batch, device)
        for group in batch["groups"] if levels else ():
            if (pixels := group["features"].get("pixel_values")) is not None:
                group["features"]["pixel_values"] = pictures.normalize(pixels)  # type: ignore[union-attr]
        return batch | {"role": role}

    def reader(self) -> Callable[[Any, str], ReadItem]:
        """Return what reads an item with its images, given its name in messages; threads may share it."""
        _ = self.pictures  # found in this thread, since it calls the tokenizer
        return self._read

    def _read(self, item: Any, name: str) -> ReadItem:  # noqa: ANN401
        return item if isinstance(item, ReadItem) else ReadItem(item, parse_item(item, name, self._read_image))

    def _read_image(self, source: Any, name: str) -> Image.Image:  # noqa: ANN401
        image = load_image(source, name)
        if image.info.get(CONCATENATED) and not self.has_messages:
            image = pad_to_square(image)  # these models may crop
        return image if self.pictures is None else Image.fromarray(self.pictures.resize(image))

    @cached_property
    def pictures(self) -> PictureReader | None:
        """What resizes pictures as the image processor of the model does; None if the library has to do it."""
        parts = [module for module in self.model.modules() if isinstance(module, Transformer)]
        held = [getattr(part.processor, "image_processor", part.processor) for part in parts]
        eyes = [each for each in held if isinstance(each, BaseImageProcessor)]
        if "image" not in self.takes or len(eyes) != 1 or any(part.processing_kwargs.get("image") for part in parts):
            return None
        reader, picture = picture_reader(eyes[0]), Image.effect_noise((90, 70), 90).convert("RGB")
        if not reader.is_known:
            return None
        wanted = self.model.preprocess([{"image": picture}])
        ready = {"image": Image.fromarray(reader.resize(picture))}
        found = self.model.preprocess([ready], processing_kwargs={"image": reader.skipped})
        own, other = reader.normalize(found["pixel_values"]), wanted["pixel_values"]
        is_same = set(found) == set(wanted) and own.shape == other.shape and torch.allclose(own, other, atol=1e-5)
        return reader if is_same else None

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


def split_sentence_batch(
    batch: Mapping[str, Any], chunk_size: int, chunk_tokens: int = 0
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Cut a batch of `SentenceProcessor` into chunks for the gradient cache, with the rows `(n,)` of each.

    Args:
        batch: Inputs of `SentenceModel.forward`.
        chunk_size: Most items; 0 for no limit.
        chunk_tokens: Most tokens of the items of a chunk with their padding, 0 for no limit; an item with more is a
            chunk of its own. Pictures count as their tokens.

    Raises:
        ValueError: The model reads static word vectors, whose features have no rows.
    """
    order, groups = batch["order"], batch["groups"]
    widths = torch.zeros(len(order), dtype=torch.long)
    for group in groups:
        if "offsets" in group["features"]:
            raise ValueError("a model of static word vectors has no chunks: set gradient_cache_chunk_size to 0")
        mask = group["features"].get("attention_mask")
        if mask is not None:
            tokens = mask.sum(1).cpu()
            places = group["places"].cpu()
            widths[places] = torch.maximum(widths[places], tokens)
    start = 0
    while start < len(order):
        end, widest = start, 0
        while end < len(order) and (end == start or not chunk_size or end - start < chunk_size):
            widest = max(widest, int(widths[end]))
            if chunk_tokens and end > start and widest * (end + 1 - start) > chunk_tokens:
                break
            end += 1
        rows, chosen = order[start:end], []
        for group in groups:
            inside = (group["places"] >= start) & (group["places"] < end)
            if inside.any():  # the places of a group ascend
                first = int(inside.nonzero()[0])
                last = first + int(inside.sum())
                features = _create_minibatch(group["features"], first, last)
                part = {"places": group["places"][first:last] - start, "views": group["views"][first:last]}
                chosen.append(part | {"features": features})
        masks = {name: batch[name][rows] for name in ("image_mask", "text_mask") if name in batch}
        local = torch.arange(end - start, device=order.device)
        yield {"order": local, "groups": chosen, "role": batch["role"], **masks}, rows.cpu()
        start = end
