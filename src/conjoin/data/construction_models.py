"""The three generative steps of `construct_symmetric` as thin wrappers of transformers and diffusers pipelines.

Each returns a function; the model is loaded when that function is first called.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from PIL import Image

DESCRIBE_PROMPT = (
    "Describe this picture in two or three plain sentences: every object, how many, their colours and where they "
    "are. Answer with the description only."
)
EDIT_PROMPT = (
    "Rewrite this description of a picture so that one or two objects are added or removed and everything else stays. "
    "Answer with the new description only.\n\n"
)


def describe_with(
    model: str,
    *,
    prompt: str = DESCRIBE_PROMPT,
    max_new_tokens: int = 160,
    **options: Any,  # noqa: ANN401
) -> Callable[[Image.Image], str]:
    """A description by a vision-language model that transformers knows as `"image-text-to-text"`.

    Args:
        model: Folder or Hub name.
        prompt: What it is asked.
        max_new_tokens: Longest answer.
        options: Further arguments of `transformers.pipeline`, e.g. `device="cuda"`.
    """
    load = _pipeline_loader("image-text-to-text", model, options)

    def describe(image: Image.Image) -> str:
        content = [{"type": "image", "image": image}, {"type": "text", "text": prompt}]
        return _answer(load(), "text", [{"role": "user", "content": content}], max_new_tokens)

    return describe


def edit_with(
    model: str,
    *,
    prompt: str = EDIT_PROMPT,
    max_new_tokens: int = 160,
    **options: Any,  # noqa: ANN401
) -> Callable[[str], str]:
    """A modified description by a chat model that transformers knows as `"text-generation"`; as `describe_with`."""
    load = _pipeline_loader("text-generation", model, options)

    def edit(text: str) -> str:
        return _answer(load(), "text_inputs", [{"role": "user", "content": prompt + text}], max_new_tokens)

    return edit


def synthesise_with(
    model: str,
    *,
    seed: int = 0,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,  # noqa: ANN401
) -> Callable[[str], Image.Image]:
    """A picture by a text-to-image model of diffusers; the same text gives the same picture.

    Args:
        model: Folder or Hub name, such as that of Stable Diffusion 3.5, which the paper uses.
        seed: Of the noise.
        device: Where to run; a GPU when there is one.
        dtype: Of the weights.
        options: Further arguments of the pipeline's call, e.g. `num_inference_steps=28`.

    Raises:
        ImportError: When first called, if diffusers is not installed.
    """

    @cache
    def load() -> Callable[..., Any]:
        try:
            from diffusers import AutoPipelineForText2Image
        except ImportError as error:
            raise ImportError("synthesise_with needs diffusers: pip install diffusers") from error
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return AutoPipelineForText2Image.from_pretrained(model, torch_dtype=dtype).to(place)

    def synthesise(text: str) -> Image.Image:
        return load()(prompt=text, generator=torch.Generator().manual_seed(seed), **options).images[0]

    return synthesise


def _pipeline_loader(task: Any, model: str, options: dict[str, Any]) -> Callable[[], Callable[..., Any]]:  # noqa: ANN401
    @cache
    def load() -> Callable[..., Any]:
        from transformers import pipeline

        return pipeline(task, model=model, **options)

    return load


def _answer(pipe: Callable[..., Any], argument: str, chat: list[dict[str, Any]], max_new_tokens: int) -> str:
    """What the model says to a chat, greedily decoded so that the same input gives the same text."""
    made = pipe(**{argument: chat}, max_new_tokens=max_new_tokens, do_sample=False, return_full_text=False)
    return str(made[0]["generated_text"])
