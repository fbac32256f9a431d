"""One folder that `AutoModel` and `SentenceTransformer` both load, with or without this package installed."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin


def export(
    model: PreTrainedModel, processor: ProcessorMixin, folder: str | Path, prompts: dict[str, str] | None = None
) -> Path:
    """Save a model of this package as a self-contained checkpoint.

    The folder holds safetensors weights, the processor, the code of both (loaded with `trust_remote_code=True`), and
    the three files that make `SentenceTransformer(folder, trust_remote_code=True)` take text, images, pairs of both,
    lists that mix these, and lists of chat messages.

    Args:
        model: A model of `conjoin.models`.
        processor: Its processor.
        folder: Where to write.
        prompts: Named prompts for sentence-transformers, e.g. `{"query": "Find: "}`.

    Raises:
        ValueError: The model's class is not registered for the auto classes, so its code would be lost.
    """
    for part in (model, processor):
        if part._auto_class is None:
            raise ValueError(f"{type(part).__name__} is not registered for auto classes; its code cannot be exported")
    folder = Path(folder)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    add_sentence_transformers_files(folder, prompts)
    return folder


def add_sentence_transformers_files(folder: str | Path, prompts: dict[str, str] | None = None) -> None:
    """Write what sentence-transformers reads; the vectors it returns are the model's own `embeddings`."""
    embed = {"method": "forward", "method_output_name": "embeddings"}
    files: dict[str, Any] = {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {name: embed for name in ("text", "image")}
            | {"message": embed | {"format": "structured"}},
            "module_output_name": "sentence_embedding",
        },
        "config_sentence_transformers.json": {
            "prompts": prompts or {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
