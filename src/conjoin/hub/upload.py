"""The files of a saved model that are pushed, without paths of this machine."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from conjoin.constants import SOLAR_HEADS
from conjoin.hub.card import CARDS, card_name, render_card
from conjoin.hub.commit import Upload
from conjoin.hub.local_paths import without_paths
from conjoin.storage import FOLDER_CHECKSUMS

NEEDED = ("config.json", "modules.json", "processor_config.json")
BELONGS = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", SOLAR_HEADS),
    *("config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "modules.json", "sentence_bert_config.json"),
    *("config_sentence_transformers.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("onnx/*.onnx", "onnx/*.onnx_data", "openvino/*.xml", "openvino/*.bin"),
    *(FOLDER_CHECKSUMS, "LICENSE", "NOTICE"),
)
"""What is pushed; besides these the modules of sentence-transformers, the code that the configurations name,
`recipe.json` and the card."""
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

    The recipe is taken without absolute paths. The folder does not change.

    Args:
        folder: What training or `conjoin export` wrote, in its own or in stock format.
        repo_id: The repository, `OWNER/NAME`.
        license: Licence of the weights.
        results: `results.json` of evaluations.
        languages: Codes of the languages that it was trained for.
        datasets: Ids of its training data on the Hub; those of the recipe when empty.
        base_models: Ids of the models that it was trained from; those of the recipe when empty.

    Raises:
        FileNotFoundError: A file that loading needs is missing.
        ValueError: A model without a card, a symbolic link, or damaged results.
    """
    folder = Path(folder)
    check_folder(folder)
    chosen = choose_files(folder)
    files: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in chosen}
    if _RECIPE in files:
        recipe = without_paths(json.loads((folder / _RECIPE).read_text(encoding="utf-8")))
        files[_RECIPE] = (json.dumps(recipe, indent=2) + "\n").encode()
    card = render_card(
        folder,
        repo_id,
        license=license,
        results=[(Path(path).stem, json.loads(Path(path).read_text(encoding="utf-8"))) for path in results],
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
        FileNotFoundError: The folder lacks weights or a file that loading needs.
        ValueError: It has a model type without a card.
    """
    absent = [name for name in NEEDED if not (folder / name).is_file()]
    if not list(folder.glob("model*.safetensors")):
        absent.append("*.safetensors")
    if absent:
        raise FileNotFoundError(f"{str(folder)!r} lacks {', '.join(absent)}: was it written by `conjoin train`?")
    if card_name(folder) is None:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        known = sorted(path.stem for path in CARDS.glob("*.md"))
        raise ValueError(f"{str(folder)!r} holds a model of type {kind!r}; there are cards for {known}")


def choose_files(folder: Path) -> list[Path]:
    """Return the files that belong to a model: those of `BELONGS`, its modules, its code, and the recipe.

    Raises:
        ValueError: One of them is a symbolic link, so what it points to would be published.
    """
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    of_modules = {f"{each['path']}/{name}" for each in modules for name in ("config.json", "model.safetensors")}
    names = _code_files(folder) | of_modules | {_RECIPE}
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


def _code_files(folder: Path) -> set[str]:
    """Return the names of the files with the classes of `auto_map`, and of those that they import."""
    names: set[str] = set()
    for owner in ("config.json", "processor_config.json"):
        for reference in json.loads((folder / owner).read_text(encoding="utf-8")).get("auto_map", {}).values():
            module = folder / f"{reference.partition('.')[0]}.py"
            names |= {Path(file).name for file in (str(module), *get_relative_import_files(module))}
    return names
