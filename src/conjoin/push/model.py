"""The files of a saved model that are pushed, without paths of this machine."""

import json
from pathlib import Path
from typing import Any

from conjoin.constants import SOLAR_HEADS
from conjoin.hub.card import has_library_card, render_card
from conjoin.hub.folder import local_model
from conjoin.hub.local_paths import without_paths
from conjoin.push.commit import Upload
from conjoin.storage import FOLDER_CHECKSUMS

_NEEDED = ("config.json", "modules.json", "processor_config.json", "model*.safetensors")
_NEEDED_BY_LIBRARY = ("modules.json", "**/model*.safetensors")
_PARTS = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", SOLAR_HEADS),
    *("config.json", "generation_config.json", "*processor_config.json", "chat_template.jinja", "*.py"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.json", "router_config.json", "recipe.json", FOLDER_CHECKSUMS),
)
"""Names of the files of a model, its code, its modules of sentence-transformers, and how it was trained."""


def model_upload(folder: str | Path, repo_id: str, **card: Any) -> Upload:  # noqa: ANN401
    """Choose the files of a model and render its card.

    The recipe is taken without absolute paths. The folder does not change.

    Args:
        folder: What training or `conjoin export` wrote, in its own or in stock format; any other folder of
            sentence-transformers, without code; or `"sample"`.
        repo_id: The repository, `OWNER/NAME`.
        card: What the folder does not say, see `conjoin.hub.card.render_card`: `license`, `results`, `languages`,
            `datasets`, `base_models`.

    Raises:
        FileNotFoundError: A file that loading needs is missing.
        ValueError: Damaged weights or results.
    """
    folder = Path(local_model(folder))
    is_library = has_library_card(folder)
    if absent := [
        name
        for name in (_NEEDED_BY_LIBRARY if is_library else _NEEDED)
        if not any(path.is_file() for path in folder.glob(name))
    ]:
        raise FileNotFoundError(f"{str(folder)!r} lacks {', '.join(absent)}: was it written by `conjoin train`?")
    names = [*_PARTS, "LICENSE", "NOTICE"]
    if is_library:  # a folder for each module
        names = [f"**/{name}" for name in names if name != "*.py"]
    chosen = {path for name in names for path in folder.glob(name) if path.is_file()}
    files: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in chosen}
    if "recipe.json" in files:
        recipe = without_paths(json.loads((folder / "recipe.json").read_text(encoding="utf-8")))
        files["recipe.json"] = (json.dumps(recipe, indent=2) + "\n").encode()
    top = {name.partition("/")[0] for name in files}
    left_out = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in top)
    files["README.md"] = render_card(folder, repo_id, **card).encode()
    return Upload(repo_id, "model", files, (*_PARTS, "adapter_*"), tuple(left_out))
