"""Ask a chat model of transformers about pictures."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from PIL import Image


def ask_with(
    model: str, *, task: Any = "image-text-to-text", max_new_tokens: int = 160, **options: Any
) -> Callable[[Sequence[Image.Image], str], str]:
    """Return a function of pictures and a prompt that answers with a chat model of transformers, decoding greedily.

    Args:
        model: Folder or Hub name.
        task: Of the pipeline; with `"text-generation"` there are no pictures.
        max_new_tokens: Maximum length of the answer in tokens.
        options: Further arguments of `transformers.pipeline`, e.g. `device="cuda"`.
    """

    @cache
    def load() -> Callable[..., Any]:
        from transformers import pipeline

        return pipeline(task, model=model, **options)

    def ask(images: Sequence[Image.Image], prompt: str) -> str:
        content: Any = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": prompt}]
        argument, content = ("text_inputs", prompt) if task == "text-generation" else ("text", content)
        chat = {argument: [{"role": "user", "content": content}]}
        made = load()(**chat, max_new_tokens=max_new_tokens, do_sample=False, return_full_text=False)
        return str(made[0]["generated_text"])

    return ask
