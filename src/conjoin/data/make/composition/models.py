"""Vision-language models of transformers as judges and for cold-start expansion."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from conjoin.data.make.construction.models import chat_answer, pipeline_loader

from .judges import VisionModel


def ask_with(model: str, *, max_new_tokens: int = 16, **options: Any) -> VisionModel:  # noqa: ANN401
    """Wrap an `"image-text-to-text"` model of transformers; it decodes greedily.

    The model is loaded at the first call.

    Args:
        model: Folder or Hub name.
        max_new_tokens: Maximum length of the answer in tokens.
        options: Further arguments of `transformers.pipeline`, e.g. `device="cuda"`.
    """
    load = pipeline_loader("image-text-to-text", model, options)

    def ask(images: Sequence[Image.Image], prompt: str) -> str:
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": prompt})
        return chat_answer(load(), "text", [{"role": "user", "content": content}], max_new_tokens)

    return VisionModel(model, ask)
