"""What the folder of a model holds, asked before anything is loaded, and one wording for whatever is wrong with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError
from safetensors import SafetensorError, safe_open
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.utils import cached_file

from conjoin.constants import SAMPLE_MODEL
from conjoin.hub.onnx_export import SETTINGS as ONNX_SETTINGS
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.mllm_retriever.configuration_mllm_retriever import ARCHITECTURES
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.storage import read_json, reading

MODELS: dict[str, tuple[type[PreTrainedModel], type[ProcessorMixin]]] = {
    "joint_encoder": (JointEncoderModel, ImageTextProcessor),
    "mllm_retriever": (MllmRetrieverModel, MllmRetrieverProcessor),
    "score_fusion": (ScoreFusionModel, ImageTextProcessor),
    "token_fusion": (TokenFusionModel, ImageTextProcessor),
}
"""The classes of each `model_type` of this package."""
ADAPTER = "adapter_config.json"
CONFIGS = ("config.json", "modules.json", ADAPTER)
LATE_INTERACTION = "a late-interaction model (ColBERT, ColPali) has a vector for each token, and no one for an item"
_NO_VECTORS = {
    "CrossEncoder": "it is a reranker, which scores pairs and gives no vectors; pass it as reranker (--reranker)",
    "SparseEncoder": "it is a sparse model (SPLADE), with a weight for each word of a vocabulary and no dense vector",
    "MultiVectorEncoder": LATE_INTERACTION,
}
"""What models are whose vectors cannot be searched here, by their class in sentence-transformers."""
_MODULES = {
    "SparseEncoder": ("splade", "sparse", "csr"),
    "MultiVectorEncoder": ("pylate", "colbert", "multivector", "multi_vector"),
}
"""Words in the names of modules that only such models have."""
Kind = Literal["own", "onnx", "embedder", "sentence-transformers", "adapter", "mllm", "tower"]
_EXPECTED = (
    f"expected whole files, weights as safetensors, and a model that transformers {transformers.__version__} has"
)
MAX_SETTINGS = 2**27
"""Bytes of the largest file of settings or words that is read, such as a vocabulary."""
TIMEOUT = 5.0
"""Seconds that the one request to the hub may take."""


def model_kind(path: str | Path, revision: str | None = None) -> Kind:
    """Ask the files of a model what it is.

    Returns:
        `"own"`, a model of this package, or `"onnx"`, an export of one; `"embedder"`, a folder of
        sentence-transformers around an MLLM that the MLLM retriever supports, or `"sentence-transformers"`, any other;
        `"adapter"`, adapters of peft without the model that they adapt; `"mllm"`, a bare MLLM that the MLLM retriever
        supports, or `"tower"`, any other bare checkpoint.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: It is a reranker, a sparse or a late-interaction model: the message names what it is.
    """
    with loading(path, revision):
        names = ("config_sentence_transformers.json", "modules.json", "config.json")
        settings, modules, config = (_json(path, name, revision) for name in names)
        settings, config = ({} if given is None else given for given in (settings, config))
        made = [*(config.get("architectures") or []), *(str(module["type"]) for module in modules or [])]
        kind = settings.get("model_type")
        for name, words in _MODULES.items():
            if any(word in made_of.lower() for made_of in made for word in words):
                kind = name
        scores = (
            any(name.endswith("ForSequenceClassification") for name in made) and len(config.get("id2label", "")) == 1
        )
        if scores and modules is None:
            kind = "CrossEncoder"
        if kind in _NO_VECTORS:
            raise ValueError(_NO_VECTORS[kind])
        if config.get("model_type") in MODELS:
            return "own" if _json(path, ONNX_SETTINGS, revision) is None else "onnx"
        is_mllm = config.get("model_type") in ARCHITECTURES
        if modules is not None:
            return "embedder" if is_mllm else "sentence-transformers"
        if not config and _json(path, ADAPTER, revision) is not None:
            return "adapter"
        return "mllm" if is_mllm else "tower"


def local_model(path: str | Path) -> str | Path:
    """Return the path of a model; that of `"sample"` is a folder, which `sample_model` makes."""
    if str(path) != SAMPLE_MODEL:
        return path
    from conjoin.hub.sample import sample_model

    return sample_model()


def check_model(name: str | Path, revision: str | None = None) -> None:
    """Refuse the name of a model that cannot be loaded; a folder and a model in the cache need no request.

    Args:
        name: A local folder or the name of a repository on the hub.
        revision: Branch, tag or commit of the repository.

    Raises:
        ValueError: A local folder has no revisions.
        FileNotFoundError: The folder holds no model; or there is no such folder, and no such repository, or the hub
            cannot be reached.
    """
    path, name = Path(local_model(name)), str(name)
    if revision is not None and path.exists():
        raise ValueError(f"revision={revision!r}: {name!r} is on this machine; only a model on the hub has revisions")
    if any((path / config).is_file() for config in CONFIGS):
        return
    problem = f"cannot load the model {name!r}: "
    if path.exists():
        if (path / "trainer_state.json").is_file():
            raise FileNotFoundError(f"{problem}it is a checkpoint of training; `--resume` resumes it")
        raise FileNotFoundError(f"{problem}it is no folder with a file {' or '.join(CONFIGS)}")
    try:
        if not any(isinstance(try_to_load_from_cache(name, config, revision=revision), str) for config in CONFIGS):
            HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except (HFValidationError, HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(f"{problem}there is no such folder, and not on the hub: {reason}") from error


def is_two_towers(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint has a tower for images and one for texts that were trained for each other (CLIP)."""
    features_of_tokens = ("blip-2", "flava")  # which `get_text_features` of theirs returns
    return config.model_type not in features_of_tokens and has_both_features(MODEL_MAPPING.get(type(config), None))


def has_both_features(model: Any) -> bool:  # noqa: ANN401 - a module or its class
    """Whether a model gives features of images and of texts."""
    return all(hasattr(model, name) for name in ("get_image_features", "get_text_features"))


def adapter_base(path: str | Path, revision: str | None = None) -> str:
    """The model that adapters of peft adapt.

    Raises:
        ValueError: Their files do not name it.
    """
    with loading(path, revision):
        base = (_json(path, ADAPTER, revision) or {}).get("base_model_name_or_path")
        if not base:
            raise ValueError(f"{ADAPTER} names no base_model_name_or_path")
    return str(base)


def _json(path: str | Path, name: str, revision: str | None = None) -> Any:  # noqa: ANN401 - any JSON value
    """The content of a file of a model; None if there is no such file."""
    file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else read_json(Path(file))


def model_type(path: str | Path, revision: str | None = None) -> str:
    """The `model_type` of a saved model's configuration, empty when it names none.

    Args:
        path: A local folder or the name of a repository on the Hub.
        revision: Branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: There is no configuration.
    """
    with loading(path, revision):
        return str((_json(path, "config.json", revision) or {}).get("model_type", ""))


def check_sizes(folder: Path) -> None:
    """Refuse settings that ask for far more than their weights hold, before a model is built by them.

    Raises:
        ValueError: A file of settings or of words is larger than `MAX_SETTINGS`, or the configuration has more layers,
            or wider ones, than the weights could have.
    """
    settings = {file: file.stat().st_size for kind in ("*.json", "*.txt", "*.model") for file in folder.glob(kind)}
    largest, longest = max(settings.items(), key=lambda each: each[1], default=(folder, 0))
    if longest > MAX_SETTINGS:
        raise ValueError(f"{largest.name} has {longest:,} bytes; the limit is {MAX_SETTINGS:,}")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file() or not (single.is_file() or index.is_file()):
        return
    if single.is_file():
        try:
            with safe_open(str(single), "numpy") as opened:
                files, tensors = {single}, len(opened.keys())
        except SafetensorError:  # its checksum, or what loads it, says more
            return
    else:
        shards = read_json(index)["weight_map"]
        files, tensors = {folder / shard for shard in shards.values()}, len(shards)
    size, parts = sum(file.stat().st_size for file in files if file.is_file()), [read_json(folder / "config.json")]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            limit = 10 * tensors if key.endswith(("layers", "layer", "depth")) else size
            if isinstance(value, int) and key.endswith(("layers", "layer", "depth", "size", "dim")) and value > limit:
                raise ValueError(f"config.json has {key}={value:,}; its weights: {tensors:,} tensors, {size:,} bytes")


@contextmanager
def loading(path: str | Path, revision: str | None = None) -> Iterator[None]:
    """Name the model in whatever goes wrong while it is loaded.

    Raises:
        FileNotFoundError: There is no such model, or a part of it is missing.
        ImportError: Its processor needs torchvision.
        ValueError: It is damaged, its weights are a pickle of code, it is of another kind than expected, or it needs
            code of its own.
    """
    check_model(path, revision)
    try:
        with reading("it", _EXPECTED, (OSError, ValueError)):
            check_sizes(Path(path))
            yield
    except ImportError as error:
        if "torchvision" not in str(error).lower():
            raise
        raise ImportError(f'{str(path)!r}: its processor needs torchvision: pip install "conjoin[vision]"') from error
    except OSError as error:
        where = "" if Path(path).exists() else "from the hub: "
        raise FileNotFoundError(f"cannot load the model {str(path)!r}: {where}{error}") from error
    except ValueError as error:
        if "trust_remote_code=True" in str(error):  # how the libraries say that code would have to run
            raise ValueError(
                f"the model {str(path)!r} needs Python code from its own folder; to run it, pass "
                "trust_remote_code=True (on the command line --trust-remote-code)"
            ) from error
        raise ValueError(f"cannot load the model {str(path)!r}: {error}") from error
