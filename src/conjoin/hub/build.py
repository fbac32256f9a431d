"""Build new models on pretrained ones: each function reads the checkpoints and returns a model, or its processor.

`from_mllm`, `from_clip` and `from_backbones` return both, as `load_model` does for a saved one.
"""

import copy
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from conjoin.hub.folder import MODELS, has_both_features, is_two_towers
from conjoin.hub.pruned_checkpoint import cut_checkpoint, fetch_small_files, load_whole, new_name
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.mllm_retriever import MllmRetrieverConfig, MllmRetrieverModel
from conjoin.models.mllm_retriever.configuration_mllm_retriever import ARCHITECTURES, cut_layers
from conjoin.models.modeling_towers import TowersModel
from conjoin.models.score_fusion import ScoreFusionConfig, ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor

Model = TypeVar("Model", bound=TowersModel)
TWO_TOWERS: dict[str, type[TowersModel]] = {"joint_encoder": JointEncoderModel, "token_fusion": TokenFusionModel}
"""The models on two towers of their own, by `model_type`."""
REQUEST = "Summarize above {} in one word: "
"""The request of every prompt (PUMA, after LamRA); `{}` is "image", "sentence" or "image and sentence"."""
_CHATML = {"start": "<|im_start|>user\n", "end": "<|im_end|>\n<|im_start|>assistant\n", "request": REQUEST}
_QWEN = _CHATML | {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
_SYSTEM = {"start": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"}
TEMPLATES = {
    "internvl": _CHATML | {"image": "<IMG_CONTEXT>\n"},  # its processor adds <img> and </img>
    "llava": {"start": "<s>USER: ", "image": "<image>\n", "end": "ASSISTANT: ", "request": REQUEST},
    "qwen2_5_vl": _QWEN | _SYSTEM,
    "qwen2_vl": _QWEN | _SYSTEM,
    "qwen3_vl": _QWEN,
}
"""The text around the parts of an item, and what stands for an image, by architecture."""
_EXPECTED = (
    "expected two towers such as CLIP or SigLIP, a model of this package, or an MLLM of a supported architecture "
    f"({', '.join(ARCHITECTURES)})"
)


def from_mllm(
    checkpoint: str | Path,
    keep_layers: int | None = None,
    *,
    ret_token: str = "[RET]",
    revision: str | None = None,
    processor: Mapping[str, Any] | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[MllmRetrieverModel, MllmRetrieverProcessor]:
    """Build an MLLM retriever on a pretrained MLLM, and its processor.

    Args:
        checkpoint: A folder or the name of a repository on the Hub, with safetensors weights.
        keep_layers: Number of layers of the language model to keep; all when None.
        ret_token: Text of the readout token; unused with `readout="last"`.
        revision: Branch, tag or commit on the Hub.
        processor: Arguments of `mllm_processor`, such as `{"max_pixels": 300 * 28 * 28}`.
        options: `dtype`, `quantization_config`, and fields of `MllmRetrieverConfig`, such as `readout`.

    Raises:
        FileNotFoundError: A required file is missing.
        ValueError: The checkpoint has another architecture, or an argument is unknown or out of range.
    """
    model = mllm_model(checkpoint, keep_layers, ret_token=ret_token, revision=revision, **options)
    token = None if model.config.readout == "last" or model.config.ret_token_id is None else ret_token
    return model, mllm_processor(checkpoint, ret_token=token, revision=revision, **processor or {})


def from_clip(
    checkpoint: str | Path,
    *,
    processor: Mapping[str, Any] | None = None,
    **config: Any,  # noqa: ANN401
) -> tuple[ScoreFusionModel, ImageTextProcessor]:
    """Build score fusion on CLIP, SigLIP or another two-tower model, and its processor.

    Args:
        checkpoint: A model id or a folder.
        processor: Arguments of `ImageTextProcessor`, such as `{"max_text_length": 32}`.
        config: Fields of `ScoreFusionConfig`.

    Raises:
        ValueError: The checkpoint does not have two towers.
    """
    return score_fusion_model(checkpoint, **config), image_text_processor(checkpoint, checkpoint, **processor or {})


def from_backbones(
    vision: str | Path,
    text: str | Path,
    model_type: str = "joint_encoder",
    *,
    processor: Mapping[str, Any] | None = None,
    **config: Any,  # noqa: ANN401
) -> tuple[TowersModel, ImageTextProcessor]:
    """Build a joint encoder or token fusion on two pretrained towers, and its processor.

    Args:
        vision: A model id or a folder. A two-tower model (CLIP, SigLIP) gives its vision tower.
        text: The same for text; it may be the same model.
        model_type: `"joint_encoder"` or `"token_fusion"`.
        processor: Arguments of `ImageTextProcessor`.
        config: Fields of the model's configuration, such as `hidden_size`.

    Raises:
        ValueError: `model_type` is unknown, or a checkpoint has no such tower.
    """
    if model_type not in TWO_TOWERS:
        raise ValueError(f"model_type={model_type!r}; expected one of {[*TWO_TOWERS]}")
    model: TowersModel = towers_model(TWO_TOWERS[model_type], vision, text, **config)
    return model, image_text_processor(vision, text, **{"torch_resize": True, **(processor or {})})


def mllm_model(
    checkpoint: str | Path,
    keep_layers: int | None = None,
    *,
    ret_token: str = "[RET]",
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    quantization_config: Any = None,  # noqa: ANN401
    **config_kwargs: Any,  # noqa: ANN401
) -> MllmRetrieverModel:
    """Build the model of `from_mllm`; only the kept weights are read.

    Deeper layers and the head are never allocated. Shards that hold only such weights are neither downloaded nor
    opened. If the tokenizer does not have [RET], the vector of [RET] is initialised to the mean of all token
    embeddings, and its id is the next free one.

    Args:
        checkpoint: As for `from_mllm`.
        keep_layers: As for `from_mllm`.
        ret_token: As for `from_mllm`.
        dtype: Dtype of the weights; the checkpoint's when None.
        revision: As for `from_mllm`.
        quantization_config: How to store the weights, such as transformers' `BitsAndBytesConfig(load_in_4bit=True)`.
        config_kwargs: Other fields of `MllmRetrieverConfig`.

    Raises:
        FileNotFoundError: A required file is missing.
        ValueError: The checkpoint has another architecture, or a field is unknown or out of range.
    """
    checkpoint = str(checkpoint)
    folder = fetch_small_files(checkpoint, revision)
    backbone_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    num_tokens = len(tokenizer)
    is_new = bool(tokenizer.add_tokens([ret_token], special_tokens=True))
    fields = {"keep_layers": keep_layers, "ret_token_id": tokenizer.convert_tokens_to_ids(ret_token)}
    config = configure(MllmRetrieverConfig, fields | config_kwargs, backbone_config=backbone_config)
    stored = config.backbone_config.dtype or config.get_text_config().dtype or torch.float32
    settings: dict[str, Any] = {"dtype": dtype or stored, "quantization_config": quantization_config}
    with cut_checkpoint(checkpoint, keep_layers, revision=revision) as cut:
        backbone = load_whole(AutoModel, cut, checkpoint, config=config.backbone_config, **settings)
    with torch.device("meta"):
        model = MllmRetrieverModel(config)
    table = backbone.get_input_embeddings().weight.detach()
    vector = table[:num_tokens].float().mean(0) if is_new else table[model.config.ret_token_id]
    model.ret_embedding = nn.Parameter(vector.to(table.dtype, copy=True))
    model.adopt(backbone)
    model.config.backbone_config = backbone.config
    model.config.backbone_config.name_or_path = checkpoint
    vars(model)["is_loaded_in_4bit"] = getattr(backbone, "is_loaded_in_4bit", False)  # read by peft
    return model.eval()


def prune(model: MllmRetrieverModel, keep_layers: int, keep_last: bool = False) -> MllmRetrieverModel:
    """Return a copy of the first `keep_layers` layers of an MLLM retriever; with `keep_last`, one less and the last.

    Raises:
        ValueError: It has fewer layers, or image features enter at a deeper layer (Qwen3-VL).
    """
    config = copy.deepcopy(model.config)
    config.backbone_config, kept = cut_layers(config.backbone_config, keep_layers, keep_last)
    config.keep_layers = keep_layers
    names = {name: new_name(name, kept) for name in model.state_dict()}
    state = {names[name]: value.clone() for name, value in model.state_dict().items() if names[name] is not None}
    pruned: MllmRetrieverModel = MllmRetrieverModel.from_pretrained(
        None, config=config, state_dict=state, dtype=model.dtype
    )
    pruned.config.dtype, pruned.config.name_or_path = model.config.dtype, model.name_or_path
    return pruned


def empty_model(checkpoint: str | Path, **config: Any) -> PreTrainedModel:  # noqa: ANN401
    """Return the model that a checkpoint holds or that is built to train it, on the device `meta`.

    Args:
        checkpoint: A folder or the name of a repository on the Hub; only its configuration is read.
        config: Fields of a new model's configuration.

    Raises:
        ValueError: A field is unknown.
    """
    settings = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    with torch.device("meta"):
        if settings.model_type in MODELS:
            return MODELS[settings.model_type][0](settings)
        if settings.model_type in TEMPLATES:
            given = {"ret_token_id": 0} | config
            given = {name: value for name, value in given.items() if name not in ("dtype", "ret_token", "revision")}
            return MllmRetrieverModel(configure(MllmRetrieverConfig, given, backbone_config=settings))
        if is_two_towers(settings):
            return ScoreFusionModel(configure(ScoreFusionConfig, config, backbone_config=settings))
        return AutoModel.from_config(cut_layers(settings, config.get("keep_layers"))[0])


def empty_towers(model_type: str, vision: str | Path, text: str | Path, **config: Any) -> PreTrainedModel:  # noqa: ANN401
    """Return the model that `from_backbones` builds, on the device `meta`; as `empty_model`."""
    parts = {"vision_config": _tower_config(vision, "vision"), "text_config": _tower_config(text, "text")}
    model_class: Any = TWO_TOWERS[model_type]
    with torch.device("meta"):
        return model_class(configure(model_class.config_class, config, **parts))


def configure(config_class: Any, given: Mapping[str, Any], **parts: PreTrainedConfig) -> Any:  # noqa: ANN401
    """Return a configuration of this package with the fields that a caller names.

    Args:
        config_class: The class, which itself takes any key, as that of a `config.json`.
        given: The fields by name.
        parts: The configurations of its parts.

    Raises:
        ValueError: A name is no field, which the message answers with the nearest, or a value is not of its type.
    """
    classes = config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
    known = sorted({name for each in classes for name in each.__annotations__} - {*config_class.sub_configs})
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(known)}"
            raise ValueError(f"unknown field {name!r} of the {config_class.model_type}; {hint}")
    try:
        return config_class(**parts, **given)
    except StrictDataclassError as error:
        raise ValueError(f"{config_class.model_type}: {' '.join(str(error).split())}") from error


def retriever_template(start: str, image: str, request: str, end: str) -> str:
    """Return the chat template, in Jinja, of a retriever without one of its own.

    Args:
        start: What precedes the item.
        image: What stands for an image.
        request: Follows the item; `{}` becomes "image", "sentence" or "image and sentence".
        end: Precedes the readout token.
    """
    texts = {"start": start, "image": image, "request": request, "end": end}
    head = "".join(f"{{%- set {name} = {json.dumps(text)} -%}}\n" for name, text in texts.items())
    return head + Path(__file__).with_name("retriever.jinja").read_text(encoding="utf-8")


def mllm_processor(
    checkpoint: str | Path,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    ret_token: str | None = "[RET]",
    revision: str | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> MllmRetrieverProcessor:
    """Build the processor of a pretrained MLLM and add the readout token to its tokenizer.

    Args:
        checkpoint: A folder or the name of a repository on the Hub; no video processor is read.
        min_pixels: Smaller images are enlarged to this many pixels (Qwen; PUMA: `4 * 28 * 28`).
        max_pixels: Larger images are reduced to this many pixels (Qwen; PUMA: `300 * 28 * 28`).
        ret_token: As for `MllmRetrieverProcessor`.
        revision: As for `from_mllm`.
        kwargs: Other arguments of `MllmRetrieverProcessor`. `max_length` defaults to the language model's number of
            positions, `chat_template` to the retriever's own, see `TEMPLATES`.

    Raises:
        ValueError: The architecture is unknown, its resolution is fixed but pixel limits are given, or not
            `0 < min_pixels <= max_pixels`.
    """
    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision}
    config = AutoConfig.from_pretrained(checkpoint, **options)
    if config.model_type not in TEMPLATES:
        raise ValueError(f"{config.model_type!r} is not a supported MLLM; expected one of {sorted(TEMPLATES)}")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    if ret_token is not None:
        tokenizer.add_tokens([ret_token], special_tokens=True)
    image_processor = AutoImageProcessor.from_pretrained(checkpoint, **options)
    if config.model_type.startswith("qwen"):
        limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        size = dict(image_processor.size) | {name: value for name, value in limits.items() if value is not None}
        least, most = size["shortest_edge"], size["longest_edge"]
        if not 0 < least <= most:
            raise ValueError(f"min_pixels={least}, max_pixels={most}; expected 0 < min_pixels <= max_pixels")
        image_processor.size = size
    else:
        kwargs.setdefault("tokens_per_picture", config.image_seq_length)
        if min_pixels is not None or max_pixels is not None:
            raise ValueError(f"{config.model_type!r} has a fixed resolution; omit min_pixels and max_pixels")
    kwargs["chat_template"] = kwargs.get("chat_template") or retriever_template(**TEMPLATES[config.model_type])
    if kwargs.get("max_length") is None:  # some tokenizers have no limit
        kwargs["max_length"] = config.get_text_config().max_position_embeddings
    image_token = tokenizer.convert_ids_to_tokens([config.image_token_id])[0]
    return MllmRetrieverProcessor(image_processor, tokenizer, image_token=image_token, ret_token=ret_token, **kwargs)


def score_fusion_model(checkpoint: str | Path | nn.Module, **config_kwargs: Any) -> ScoreFusionModel:  # noqa: ANN401
    """Build the model of `from_clip` around a loaded one, which it holds; fixed weights need no training.

    Args:
        checkpoint: A model id, a folder, or a loaded model with `get_image_features` and `get_text_features`: CLIP,
            SigLIP, or another module. A loaded model keeps its parameters and their `requires_grad`; the logit scale
            of one that is loaded here is frozen, since losses have their own.
        config_kwargs: Fields of `ScoreFusionConfig`.

    Raises:
        ValueError: The checkpoint does not have two towers.
    """
    loaded: Any = checkpoint
    if isinstance(checkpoint, str | Path):
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        if not is_two_towers(config):
            raise ValueError(f"{str(checkpoint)!r} is a {config.model_type!r}; {_EXPECTED}")
        loaded = AutoModel.from_pretrained(checkpoint, trust_remote_code=False)
        config = loaded.config
    elif not has_both_features(loaded):
        raise ValueError(f"{type(loaded).__name__} has no get_image_features and get_text_features; {_EXPECTED}")
    else:
        config = copy.deepcopy(getattr(loaded, "config", None))
    with torch.device("meta"):
        model = ScoreFusionModel(configure(ScoreFusionConfig, config_kwargs, backbone_config=config))
    model.backbone = loaded
    if loaded is not checkpoint:
        for parameter in loaded.parameters(recurse=False):
            parameter.requires_grad_(False)
    return model


def towers_model(
    model_class: type[Model],
    vision: str | Path | PreTrainedModel,
    text: str | Path | PreTrainedModel,
    **config_kwargs: Any,  # noqa: ANN401
) -> Model:
    """Build the model of `from_backbones`; its parts beside the towers start untrained.

    Args:
        model_class: `JointEncoderModel` or `TokenFusionModel`.
        vision: As for `from_backbones`, or a loaded model.
        text: Likewise.
        config_kwargs: Fields of the model's configuration; the ids of CLS and SEP of token fusion come from the text
            encoder's tokenizer unless given.

    Raises:
        ValueError: A checkpoint has no such tower; or, for token fusion, the text encoder is not of the BERT family or
            is a loaded model without the path of its tokenizer.
    """
    if model_class is TokenFusionModel and not {"cls_token_id", "sep_token_id"} <= set(config_kwargs):
        folder = text.name_or_path if isinstance(text, PreTrainedModel) else text
        if not folder:
            raise ValueError("text is a loaded model without a path: also pass cls_token_id and sep_token_id")
        known = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config_kwargs = {"cls_token_id": known.cls_token_id, "sep_token_id": known.sep_token_id} | config_kwargs
    towers = {"vision": vision, "text": text}
    configs: dict[str, Any] = {f"{kind}_config": _tower_config(source, kind) for kind, source in towers.items()}
    model = model_class(configure(model_class.config_class, config_kwargs, **configs))
    for kind, source in towers.items():
        _load_tower(getattr(model, f"{kind}_model"), source, kind)
    return model


def _tower_config(source: str | Path | PreTrainedModel, kind: str) -> PreTrainedConfig:
    """Return a copy of the configuration of the `kind` ("vision" or "text") tower of a checkpoint or loaded model."""
    if isinstance(source, PreTrainedModel):
        config, name = source.config, type(source).__name__
    else:
        config, name = AutoConfig.from_pretrained(source, trust_remote_code=False), repr(str(source))
    config = getattr(config, f"{kind}_config", config)
    needed = "patch_size" if kind == "vision" else "vocab_size"
    if needed not in config.to_dict():
        raise ValueError(f"{name} has no {kind} tower: its {type(config).__name__} has no {needed!r}")
    return copy.deepcopy(config)


def _load_tower(tower: PreTrainedModel, source: Any, kind: str) -> None:  # noqa: ANN401
    """Copy weights of the `kind` tower into `tower`, except pooling heads and blocks that were not built."""
    if not isinstance(source, PreTrainedModel):
        source = type(tower).from_pretrained(source, config=tower.config)
    elif f"{kind}_config" in source.config.sub_configs:
        source = getattr(source, f"{kind}_model")
    missing = tower.load_state_dict(source.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"{type(source).__name__} lacks weights of {type(tower).__name__}: {missing[:3]} ...")


def image_text_processor(vision: Any, text: Any, **kwargs: Any) -> ImageTextProcessor:  # noqa: ANN401
    """Combine the image processor and tokenizer of two checkpoints (ids or folders), which may be the same.

    Args:
        vision: A checkpoint or a loaded image processor.
        text: A checkpoint or a loaded tokenizer.
        kwargs: Other arguments of `ImageTextProcessor`.
    """
    config = None
    if isinstance(text, str | Path):
        config = AutoConfig.from_pretrained(text, trust_remote_code=False).get_text_config()
        text = AutoTokenizer.from_pretrained(text, trust_remote_code=False)
    if isinstance(vision, str | Path):
        vision = AutoImageProcessor.from_pretrained(vision, trust_remote_code=False)
    if config is not None and config.model_type.startswith("siglip"):  # SigLIP 2's tokenizer has another name
        kwargs["max_text_length"] = kwargs.get("max_text_length") or config.max_position_embeddings
        kwargs.setdefault("text_padding", "max_length")
    elif "siglip" in type(text).__name__.lower():
        kwargs.setdefault("text_padding", "max_length")
    return ImageTextProcessor(vision, text, **kwargs)
