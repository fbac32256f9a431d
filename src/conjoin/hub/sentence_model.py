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
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

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
_TOWERS = {"text_config", "vision_config"}
_ELSE = (
    "expected two towers for images and texts, a vision or a text encoder, or a folder of sentence-transformers or "
    "this package; of an MLLM, pass pooling= (--pooling) or, for a published embedder, preset= (--preset)"
)


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
        pooling: How the states of the tokens become one vector, one of `POOLINGS`. None: by the projections of two
            towers, else by the pooled output that its class was trained with.
        trust_remote_code: Run the Python code that it brings.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: Weights are damaged or missing, code is needed and not trusted, the model gives no embedding, or it
            does not say how it pools and `pooling` is not given.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    with loading(path, revision):
        config = AutoConfig.from_pretrained(path, **options)
        kind, two_towers = config.model_type, set(config.sub_configs) >= _TOWERS
        is_aligned = kind in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES
        is_mllm = two_towers and pooling is not None and not is_aligned
        if not is_mllm:
            if two_towers and (kind == "blip-2" or not is_aligned):  # loses its projections
                raise ValueError(f"{kind!r} gives no embedding; {_ELSE}")
            if type(config) not in MODEL_MAPPING and not hasattr(config, "auto_map"):
                raise ValueError(f"{kind!r} has no single vector that AutoModel gives: {LATE_INTERACTION}")
            reads = getattr(MODEL_MAPPING.get(type(config), None), "main_input_name", "input_ids")
            if not two_towers and reads not in ("input_ids", "pixel_values"):
                raise ValueError(f"a {kind!r} reads {reads}; {_ELSE}")
            sees = reads == "pixel_values"
            able = [] if two_towers else [name for name in POOLINGS if name != "last" or not sees]
            if pooling not in (None, *able):
                expected = f"one of {', '.join(able)}" if able else "none, it has projections"
                raise ValueError(f"pooling={pooling!r} of a {kind!r}; expected {expected}")
        # ViTMAE hides random patches otherwise
        hidden = {"mask_ratio": 0.0} if hasattr(config, "mask_ratio") else {}
        body = _Body(str(path), model_kwargs=options, processor_kwargs=options, config_kwargs=options | hidden)
        body.__class__ = Transformer  # so that it is saved as the library's
        absent = _absent_poolers(body)
        if "decoder" in dict(body.model.named_children()):
            body.model = body.model.get_encoder()
        modules, words = list[Any]([body]), body.tokenizer
        if words is not None and not kind.startswith("siglip"):
            words.padding_side = "right"  # so that the positions of a text do not depend on its batch
            words.pad_token = words.pad_token or words.eos_token
        if kind.startswith("siglip") and two_towers:
            padded = {"padding": "max_length", "max_length": config.get_text_config().max_position_embeddings}
            eye: Any = body.processor.image_processor  # whose sizes of SigLIP 2 its processor would replace
            sizes = {name: getattr(eye, name) for name in ("patch_size", "max_num_patches") if hasattr(eye, name)}
            body.processing_kwargs = {"text": padded, "image": sizes}
        elif pooling is not None:
            modules.append(Pooling(body.get_embedding_dimension(), {"last": "lasttoken"}.get(pooling, pooling)))
        if not two_towers and pooling is None:  # a masked language model's pooler was trained for another end
            _read_pooled_output(body, is_trained=not absent and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES)
        if pooling == "cls" and not _has_cls(body):
            raise ValueError(f'pooling="cls": a {kind!r} has no CLS token; pass another pooling')
        return _checked(SentenceTransformer(modules=modules, device="cpu"), is_known=False)


class _Body(Transformer):
    """The module of the library, which keeps the report of what its checkpoint lacks."""

    def _load_model(self, *given: Any, **options: Any) -> PreTrainedModel:  # noqa: ANN401
        loaded: Any = super()._load_model(*given, output_loading_info=True, **options)
        model, self.report = loaded
        return model


def _absent_poolers(body: Any) -> list[str]:  # noqa: ANN401 - a `_Body`
    """The weights of a pooler that a checkpoint lacks, set to zero.

    Raises:
        ValueError: It lacks others, or has a projection that its class leaves out.
    """
    kind, report, has_decoder = body.config.model_type, body.report, hasattr(body.model, "decoder")
    absent = [name for name in sorted(report["missing_keys"]) if not (has_decoder and name.startswith("decoder."))]
    if missing := [name for name in absent if "pooler" not in name]:
        raise ValueError(f"{len(missing)} weights of a {kind!r} are missing, such as {missing[:3]}")
    if left := [name for name in sorted(report["unexpected_keys"]) if "_projection" in name]:
        raise ValueError(f"it is one tower with a projection {left}, which AutoModel leaves out; load both towers")
    for name in absent:  # random in each process and never used: its fingerprint must not depend on them
        nn.init.zeros_(body.model.get_parameter(name))
    return absent


def _read_pooled_output(body: Transformer, is_trained: bool) -> None:
    """Let a module give the pooled output of its class in place of the states of tokens.

    Raises:
        ValueError: It has none that was trained.
    """
    read: Any = {"method": "forward", "method_output_name": "pooler_output"}
    body.modality_config, body.module_output_name = dict.fromkeys(body.modality_config, read), "sentence_embedding"
    try:
        if not is_trained:
            raise AttributeError("a pooler without training")
        body(body.preprocess([_example(body.modalities)]))
    except AttributeError as error:  # of an output without it
        raise ValueError(
            f"a {body.config.model_type!r} by itself does not say how the states of its tokens become one vector: "
            f"pass pooling= (--pooling), one of {', '.join(POOLINGS)}, as its authors do"
        ) from error


def _example(modalities: Any) -> Any:  # noqa: ANN401
    return "a word" if "text" in modalities else Image.effect_noise((64, 64), 90).convert("RGB")


def _has_cls(body: Transformer) -> bool:
    if body.tokenizer is not None and "text" in body.modalities:
        return bool(body.tokenizer("a")["input_ids"][0] == body.tokenizer.cls_token_id)
    names = {name.rpartition(".")[2] for name, _ in body.model.named_parameters()}
    return bool(names & {"cls_token", "class_embedding"})


def _checked(model: SentenceTransformer, is_known: bool = True) -> tuple["SentenceModel", "SentenceProcessor"]:
    """Return a model and its processor once it embeds an item, and a text longer than its limit.

    Raises:
        ValueError: It does not, or a model that is not known embeds an item in another way each time.
    """
    for part in model.modules():
        if isinstance(part, Transformer) and part.tokenizer is not None:
            _fit_length(part)
    wrapped, processor = SentenceModel(model).eval(), SentenceProcessor(model)
    item = _example(processor.takes)
    try:
        with torch.inference_mode():
            found = [wrapped(**processor([item])).embeddings for _ in range(1 if is_known else 2)]
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:  # of an unknown architecture
        raise ValueError(f"it cannot be read as an encoder: {error!r:.200}") from error
    if not torch.allclose(found[0], found[-1], atol=1e-3):
        raise ValueError("it gives another vector for the same item at each call")
    return wrapped, processor


def _fit_length(part: Transformer) -> None:
    """Let the tokenizer cut texts to the positions that a model has, which a text of one token more proves.

    Those of RoBERTa begin behind the padding token's.

    Raises:
        ValueError: Texts of the length that the model names fail.
    """
    tables = [name for name, module in part.model.named_modules() if isinstance(module, nn.Embedding)]
    positions = part.config.get_text_config().to_dict().get("max_position_embeddings") or 0
    if positions < 1 or not any("position" in name for name in tables):
        return
    problem: Exception | None = None
    words: Any = part.tokenizer
    first = min(positions, words.model_max_length)
    for limit in (first, positions - (part.config.get_text_config().pad_token_id or 0) - 1):
        words.model_max_length = limit
        try:
            with torch.inference_mode():
                part(part.preprocess(["a " * (limit + 1)]))
            return
        except (IndexError, RuntimeError, ValueError) as error:
            problem = error
    raise ValueError(f"texts of {first} tokens, which it claims to take, fail: {problem}") from problem


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
