"""The generative steps of `construct_symmetric`, as wrappers of transformers and diffusers pipelines.

Each wrapper returns a function that loads the model on its first call.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from PIL import Image

from conjoin.data.make.construction.symmetric import EDITS, Edited

DESCRIBE_PROMPT = (
    "Describe this picture in two or three plain sentences: every object, how many, their colours and where they "
    "are. Answer with the description only."
)
EDIT_PROMPT = (
    "Rewrite this description of a picture so that {change} and everything else stays. Answer with the new "
    "description only.\n\n"
)
CHANGES = {
    "replace": "one or two objects are replaced by others",
    "add": "one or two objects are added",
    "remove": "one or two objects are removed",
}
REWRITE_PROMPT = (
    "Say the same in other words, without adding or leaving out anything. Answer with the new text only.\n\n"
)


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


def describe_with(model: str, **options: Any) -> Callable[[Image.Image], str]:
    """Return a function that describes images with an `"image-text-to-text"` model; arguments as for `ask_with`."""
    ask = ask_with(model, **options)
    return lambda image: ask([image], DESCRIBE_PROMPT)


def edit_with(model: str, **options: Any) -> Callable[[str], Edited]:
    """Return a function that edits descriptions with a `"text-generation"` chat model; arguments as for `ask_with`.

    A checksum of the text chooses one of `EDITS`.
    """
    ask = ask_with(model, task="text-generation", **options)

    def edit(text: str) -> Edited:
        kind = EDITS[zlib.crc32(text.encode()) % len(EDITS)]
        return Edited(ask((), EDIT_PROMPT.format(change=CHANGES[kind]) + text), kind)

    return edit


def rewrite_with(model: str, **options: Any) -> Callable[[str], str]:
    """Return a function that says a text in other words with a chat model; arguments as for `ask_with`.

    It makes the variants X′ of `construct_symmetric`, and the column `alternative_text` of training pairs, which
    augmented positives (AP of Table 3) read.
    """
    ask = ask_with(model, task="text-generation", **options)
    return lambda text: ask((), REWRITE_PROMPT + text)


def synthesise_with(
    model: str, *, seed: int = 0, device: str | None = None, dtype: torch.dtype | None = None, **options: Any
) -> Callable[[str], Image.Image]:
    """Return a function that draws pictures with a text-to-image model of diffusers, deterministic per text.

    Args:
        model: Folder or Hub name, such as that of Stable Diffusion 3.5, the paper's choice.
        seed: Seed of the noise.
        device: Device; by default a GPU if there is one.
        dtype: Dtype of the weights.
        options: Further arguments of the pipeline's call, e.g. `num_inference_steps=28`.

    Raises:
        ImportError: On the first call, if diffusers is not installed.
    """

    @cache
    def load() -> Callable[..., Any]:
        try:
            from diffusers import AutoPipelineForText2Image
        except ImportError as error:
            raise ImportError("synthesise_with needs diffusers: pip install diffusers") from error
        pipeline = AutoPipelineForText2Image.from_pretrained(model, torch_dtype=dtype)
        return pipeline.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def synthesise(text: str) -> Image.Image:
        return load()(prompt=text, generator=torch.Generator().manual_seed(seed), **options).images[0]

    return synthesise
