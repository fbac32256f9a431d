"""An encoder as `mteb.evaluate` takes a model: any model of `load_encoder` on tasks of images and texts."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ScoringFunction
from PIL import Image

from conjoin.evaluation.benchmark import as_prompt
from conjoin.hub.local_paths import is_local, public_name
from conjoin.hub.sentence_model import SentenceModel
from conjoin.retrieval import ItemEncoder


def mteb_model(encoder: ItemEncoder) -> AbsEncoder:
    """Return what `mteb.evaluate` takes: MTEB's own wrapper of what sentence-transformers loads, else `MtebModel`.

    That is also for two towers, whose vectors of image and text sentence-transformers does not add. The scores are
    those of MTEB itself. A model in the wrapper is converted to the type of the encoder, and cuts its vectors alike.
    """
    is_stock = isinstance(encoder.model, SentenceModel)
    if not is_stock or (len(encoder.processor.takes) > 1 and not encoder.processor.is_joint):
        return MtebModel(encoder)
    meta, model = _describe(encoder), encoder.model.model
    if encoder.dtype is not None:
        model.to(encoder.dtype)
    if encoder.truncate_dim is not None:
        model.truncate_dim = encoder.truncate_dim
    wrapper = SentenceTransformerEncoderWrapper(model)
    wrapper.mteb_model_meta = meta
    return wrapper


class MtebModel(AbsEncoder):
    """A model of MTEB's protocol. An item has the text, the image or both of a row.

    A model that follows instructions (`ItemEncoder.follows_instructions`) gets the one of the task: for queries, for
    items of tasks without queries, and for documents if MTEB has one for them. Others have their own prompts.

    Args:
        encoder: The model.
    """

    def __init__(self, encoder: ItemEncoder) -> None:
        self.encoder, self.mteb_model_meta = encoder, _describe(encoder)

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
        role = None if prompt_type is None else str(prompt_type.value)
        told = task_metadata.prompt
        if isinstance(told, Mapping):
            told = told.get(role or "query")
        elif role == "document":
            told = None
        prompt = as_prompt(self.encoder, told or None) if self.encoder.follows_instructions else None
        how: dict[str, Any] = {"prompt": prompt, "role": role}
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


def _describe(encoder: ItemEncoder) -> ModelMeta:
    """What MTEB's results say of the model; no path of this machine."""
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
        "use_instructions": encoder.follows_instructions,
    }
    return ModelMeta.create_empty(overwrites=facts)
