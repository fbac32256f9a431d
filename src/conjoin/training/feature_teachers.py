"""What teachers say of the pictures and texts whose tower features are cached: for small data, held in memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from conjoin.processing import load_image
from conjoin.retrieval.atomic_files import atomic_path

from .feature_cache import TEACHERS_FILE, distinct_texts, drawn_images
from .teachers import IMAGE_TARGETS, TEXT_TARGETS, TeacherCollator, Teachers


@torch.no_grad()
def cache_teacher_features(
    teachers: Teachers,
    collator: TeacherCollator,
    rows: Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    augment: Callable[[Image.Image], Image.Image] | None = None,
    copies: int = 1,
    batch_size: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Add teachers to the cache of `cache_features`; read them with `CachedFeatures(folder, teachers=True)`.

    Each copy of a picture is drawn again as the student saw it, so `rows`, `copies`, `batch_size` and the seed of
    `augment`, a new one, must be those of `cache_features`. When that rebuilds its cache, it removes the teachers.

    Args:
        teachers: The teachers.
        collator: Prepares their inputs.
        rows: The rows of the cache.
        folder: The folder of the cache.
        augment: Applied to every copy of an image but the first.
        copies: How many versions of each image there are.
        batch_size: Images per forward.
        dtype: What is stored.

    Raises:
        FileNotFoundError: There is no complete cache of features in `folder`.
        ValueError: That cache has other rows or copies.
    """
    folder = Path(folder)
    marker = folder / "cache.json"
    if not marker.is_file():
        raise FileNotFoundError(f"no cached features in {str(folder)!r}; cache_features writes them")
    cached = json.loads(marker.read_text(encoding="utf-8"))
    if (cached["rows"], cached["copies"]) != (len(rows), copies):
        raise ValueError(
            f"the features in {str(folder)!r} are {cached['copies']} copies of {cached['rows']} rows, "
            f"the teachers are to see {copies} of {len(rows)}"
        )
    tensors = _text_tensors(teachers, collator, distinct_texts(rows)[0], batch_size, dtype)
    parts: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(copies)] for name in IMAGE_TARGETS}
    with tqdm(total=copies * len(rows), desc="Teacher features", unit="image") as progress:
        for copy, _, images, names in drawn_images(rows, augment, copies, batch_size):
            seen = [load_image(image, name) for image, name in zip(images, names, strict=True)]
            states = teachers.vision(collator.pixels(seen).to(teachers.vision.model.device))
            for name, state in zip(IMAGE_TARGETS, states, strict=True):
                parts[name][copy].append(state.to("cpu", dtype))
            progress.update(len(images))
    tensors |= {name: torch.stack([torch.cat(states) for states in found]) for name, found in parts.items()}
    with atomic_path(folder / TEACHERS_FILE) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(temporary))
    return folder


def _text_tensors(
    teachers: Teachers, collator: TeacherCollator, texts: Sequence[str], batch_size: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """States and spans of the distinct texts, `(M, ...)`."""
    texts = [text.strip() for text in texts]
    _, student_spans = collator.tokenize_student(texts)
    encoded, spans = collator.tokenize(texts)
    states: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(texts), batch_size):
        inputs = [encoded[name][start : start + batch_size] for name in ("input_ids", "attention_mask")]
        states.append(teachers.text(*(tensor.to(teachers.text.model.device) for tensor in inputs)))
    parts = zip(TEXT_TARGETS, zip(*states, strict=True), strict=True)
    found = {name: torch.cat(part).to("cpu", dtype) for name, part in parts}
    return found | {"teacher_student_spans": student_spans, "teacher_text_spans": spans}
