"""An encoder as `mteb.evaluate` takes a model: any model of `load_encoder` on tasks of images and texts."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ScoringFunction
from PIL import Image

from conjoin.evaluation.benchmark import as_prompt
from conjoin.hub.local_paths import is_local, public_name
from conjoin.retrieval import ItemEncoder


class MtebModel(AbsEncoder):
    """A model of MTEB's protocol: `mteb.evaluate(MtebModel(encoder), tasks)`.

    An item has the text, the image or both of a row. Queries, and the items of tasks without queries, get the task's
    instruction: that of `instructions`, else the one that MTEB has. Documents get one only if MTEB has one for them.
    Without an instruction, the model's own prompts for queries and documents apply.

    Args:
        encoder: The model.
        instructions: By the name or the type of a task (`"Classification"`) its instruction.
    """

    def __init__(self, encoder: ItemEncoder, instructions: Mapping[str, str] | None = None) -> None:
        self.encoder, self.instructions = encoder, dict(instructions or {})
        name = public_name(encoder.name).replace("/", "__") if is_local(encoder.name) else encoder.name
        modalities = ["text", "image"]
        try:
            encoder.encode([Image.new("RGB", (32, 32))])
        except ValueError:  # it takes no pictures
            modalities = ["text"]
        facts = {
            "name": name if "/" in name else f"conjoin/{name}",
            "revision": encoder.fingerprint[:12],
            "modalities": modalities,
            "embed_dim": encoder.dimension,
            "n_parameters": sum(each.numel() for each in encoder.model.parameters()),
            "framework": ["PyTorch"],
            "similarity_fn_name": ScoringFunction.COSINE,
            "use_instructions": True,
        }
        self.mteb_model_meta = ModelMeta.create_empty(overwrites=facts)

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,  # noqa: ANN401 - of mteb
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,  # noqa: ANN401 - of mteb
        **kwargs: Any,  # noqa: ANN401 - of mteb
    ) -> np.ndarray:
        """Encode batches of rows into `(N, D)` float32, L2-normalised.

        Args:
            inputs: Batches: columns `text` and `image`, each a list.
            task_metadata: The task.
            hf_split: Its split.
            hf_subset: Its subset.
            prompt_type: Whether these are queries or documents; None where a task has neither.
            kwargs: Ignored; the encoder has its own batch size.

        Raises:
            ValueError: A row has neither text nor image; the message names task, split and row.
        """
        prompt = as_prompt(self.encoder, self._instruction(task_metadata, prompt_type))
        how: dict[str, Any] = {"prompt": prompt, "role": None if prompt_type is None else str(prompt_type.value)}
        rows: list[np.ndarray] = []
        count = 0
        for batch in inputs:
            columns = [name for name in ("image", "text") if name in batch]  # as in training data and M-BEIR
            items: list[dict[str, Any]] = []
            names: list[str] = []
            for parts in zip(*(batch[name] for name in columns), strict=True):
                item = {name: part for name, part in zip(columns, parts, strict=True) if part is not None}
                if "image" in item and not str(item.get("text", "")).strip():
                    item.pop("text", None)
                names.append(f"{count} of {task_metadata.name}, {hf_subset}, {hf_split}")
                items.append(item)
                count += 1
            rows.append(self.encoder.encode(items, ids=names, **how))
        return np.concatenate(rows)

    def _instruction(self, task: Any, prompt_type: Any) -> str | None:  # noqa: ANN401 - of mteb
        side = "query" if prompt_type is None else str(prompt_type.value)
        instruction = self.instructions.get(task.name, self.instructions.get(task.type))
        given: Any = task.prompt if instruction is None or side != "query" else instruction
        if isinstance(given, Mapping):
            return given.get(side) or None
        return given if side == "query" and given else None
