"""What sentence-transformers reads of a saved model, written beside the processor, so that every saved model has it.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin

REQUIREMENTS = {"sentence-transformers": ">=6.0", "transformers": ">=5.17"}
_EMBED = {"method": "forward", "method_output_name": "embeddings"}
_FILES: dict[str, Any] = {
    "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {name: _EMBED for name in ("text", "image")}
        | {"message": _EMBED | {"format": "structured"}},
        "module_output_name": "sentence_embedding",
    },
}
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
SENTENCE_FILES = (*_FILES, SETTINGS)


def save_sentence_files(folder: str | Path, prompts: dict[str, str] | None = None) -> None:
    """Write the files by which `SentenceTransformer(folder)` returns the model's own `embeddings`.

    Prompts that are in the folder stay: sentence-transformers writes those of a model before it saves the processor.

    Args:
        folder: The folder of the model; it is made if it does not exist.
        prompts: As for `sentence_settings`.
    """
    folder = Path(folder)
    for name, content in _FILES.items():
        write_json_file(folder / name, content)
    if not (folder / SETTINGS).exists():
        write_json_file(folder / SETTINGS, sentence_settings(prompts))


def sentence_settings(prompts: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the settings of a `SentenceTransformer`: its prompts, the versions that wrote it, those that it needs.

    Args:
        prompts: Instructions by name. `encode_query` uses `query`, `encode_document` uses `document`; both are empty
            unless given.
    """
    packages = {"sentence_transformers": "sentence-transformers", "transformers": "transformers", "pytorch": "torch"}
    versions = {}
    for name, package in packages.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a checkpoint needs no sentence-transformers
            continue
    return {
        "model_type": "SentenceTransformer",
        "__version__": versions,
        "requirements": REQUIREMENTS,
        "prompts": {"query": "", "document": ""} | (prompts or {}),
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }


class SentenceFilesMixin(ProcessorMixin):
    """A processor that is saved with what sentence-transformers reads of its model."""

    prompts: dict[str, str] | None = None

    def set_prompts(self, prompts: Any) -> None:  # noqa: ANN401
        """Set the prompts that are saved with the processor.

        Raises:
            ValueError: They are not texts by name.
        """
        if prompts is not None and not (
            isinstance(prompts, dict) and all(isinstance(t, str) for t in prompts.values())
        ):
            raise ValueError(
                f'prompts={prompts!r}; expected instructions by name, such as {{"query": "Find an image."}}'
            )
        self.prompts = prompts

    def save_pretrained(
        self,
        save_directory: Any,  # noqa: ANN401 - a path
        push_to_hub: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - the library's list of files
        """Save the processor, and beside it the files of sentence-transformers; `push_to_hub` then uploads all."""
        save_sentence_files(save_directory, self.prompts)
        saved = super().save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return saved


def write_json_file(path: Path, content: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a JSON file, and the folder around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


__all__ = [
    "MODULES",
    "SENTENCE_FILES",
    "SETTINGS",
    "TRANSFORMER",
    "SentenceFilesMixin",
    "save_sentence_files",
    "sentence_settings",
    "write_json_file",
]
