"""The files of a saved model that are pushed, without paths of this machine."""

import hashlib
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from conjoin.constants import SOLAR_HEADS
from conjoin.hub.card import CARDS, card_name, render_card
from conjoin.hub.commit import Upload
from conjoin.hub.local_paths import without_paths
from conjoin.hub.onnx_export import SETTINGS as ONNX_SETTINGS
from conjoin.storage import FOLDER_CHECKSUMS, check_listed, file_digest

NEEDED = ("config.json", "modules.json", "processor_config.json")
SETTINGS = (
    *("config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
"""Settings; an absolute path in one of them is shortened to its last part."""
BELONGS = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    SOLAR_HEADS,
    *SETTINGS,
    *("tokenizer.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("onnx/*.onnx", "onnx/*.onnx_data", "openvino/*.xml", "openvino/*.bin"),
    *(FOLDER_CHECKSUMS, "LICENSE", "NOTICE"),
)
"""What is pushed; besides these the modules of sentence-transformers, the code that the configurations name,
`recipe.json` and the card."""

_CODE_OWNERS = ("config.json", "processor_config.json", "tokenizer_config.json", "preprocessor_config.json")
_RECIPE = "recipe.json"


def model_upload(
    folder: str | Path,
    repo_id: str,
    *,
    license: str | None = None,
    results: Sequence[str | Path] = (),
    languages: Sequence[str] = (),
    datasets: Sequence[str] = (),
    base_models: Sequence[str] = (),
) -> Upload:
    """Choose the files of a model and render its card.

    The recipe and the settings are taken without absolute paths. The folder does not change.

    Args:
        folder: What training or `conjoin export` wrote, in its own or in stock format.
        repo_id: The repository, `OWNER/NAME`.
        license: Licence of the weights.
        results: `results.json` of evaluations.
        languages: Codes of the languages that it was trained for.
        datasets: Ids of its training data on the Hub; those of the recipe when empty.
        base_models: Ids of the models that it was trained from; those of the recipe when empty.

    Raises:
        FileNotFoundError: There is no such folder, or a file that loading needs is missing.
        ValueError: A model without a card, a symbolic link, a file that is not JSON, or damaged results.
    """
    folder = Path(folder)
    check_folder(folder)
    chosen = choose_files(folder)
    files: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in chosen}
    sums = (folder / FOLDER_CHECKSUMS).read_text(encoding="utf-8") if FOLDER_CHECKSUMS in files else ""
    for name in sorted(files.keys() & {*SETTINGS, _RECIPE}):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        public = without_paths(content, in_texts=name == _RECIPE)
        if public != content:
            raw = files[name] = (json.dumps(public, indent=2) + "\n").encode()
            sums = sums.replace(file_digest(folder / name), hashlib.sha256(raw).hexdigest())
    if sums:
        files[FOLDER_CHECKSUMS] = sums.encode()
    for path in results:
        check_listed(Path(path), "evaluate again")
    card = render_card(
        folder,
        repo_id,
        license=license,
        results=[(Path(path).stem, read_json(Path(path))) for path in results],
        languages=languages,
        datasets=datasets,
        base_models=base_models,
    )
    top = {name.partition("/")[0] for name in files}
    left_out = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in top)
    parts = (*BELONGS, "[0-9]*_*/*", "*.py", "adapter_*", _RECIPE)
    return Upload(repo_id, "model", files | {"README.md": card.encode()}, tuple(left_out), parts)


def check_folder(folder: Path) -> None:
    """Check that a folder holds a whole model.

    Raises:
        FileNotFoundError: The folder does not exist, or lacks weights or a file that loading needs.
        ValueError: The folder has a model type without a card, or is an ONNX export.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}")
    if (folder / ONNX_SETTINGS).is_file():
        raise ValueError(
            f"{str(folder)!r} is an ONNX export, which push does not take: push the model that it was made from, and "
            f"the export as it is: hf upload OWNER/NAME {folder}"
        )
    if (folder / "config.json").is_file() and card_name(folder) is None:
        kind = read_json(folder / "config.json").get("model_type")
        known = sorted(path.stem for path in CARDS.glob("*.md"))
        raise ValueError(f"{str(folder)!r} holds a model of type {kind!r}; there are cards for {known}")
    absent = [name for name in NEEDED if not (folder / name).is_file()]
    if not list(folder.glob("model*.safetensors")):
        absent.append("*.safetensors")
    if absent:
        raise FileNotFoundError(f"{str(folder)!r} lacks {', '.join(absent)}: was it written by `conjoin train`?")


def choose_files(folder: Path) -> list[Path]:
    """Return the files that belong to a model: those of `BELONGS`, its modules, its code, and the recipe.

    Raises:
        ValueError: One of them is a symbolic link, so what it points to would be published.
    """
    names = {name for owner in _CODE_OWNERS if (folder / owner).is_file() for name in _code_files(folder / owner)}
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    paths = [PurePosixPath(module["path"]) for module in modules if module.get("path")]
    names |= {str(path / name) for path in paths for name in ("config.json", "model.safetensors")} | {_RECIPE}
    chosen = []
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if name not in names and not any(fnmatchcase(name, pattern) for pattern in BELONGS):
            continue
        if path.resolve() != folder.resolve() / name or not path.is_file():
            raise ValueError(
                f"{str(path)!r} is a symbolic link or no file; push takes real files: copy its target here"
            )
        chosen.append(path)
    return chosen


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON object.

    Raises:
        ValueError: The file has no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__}, expected an object")
    return content


def _code_files(owner: Path) -> set[str]:
    """Return the names of the files with the classes of a configuration's `auto_map`, and of those they import."""
    entries = (read_json(owner).get("auto_map") or {}).values()
    references = [part for entry in entries for part in (entry if isinstance(entry, list) else [entry]) if part]
    modules = [owner.with_name(f"{part.rpartition('--')[2].rpartition('.')[0]}.py") for part in references]
    files = [
        file for module in modules if module.is_file() for file in (str(module), *get_relative_import_files(module))
    ]
    return {Path(file).name for file in files}
