"""Prompts of a published embedder: its own chat template, as token ids.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from .mllm_prompts import Ask, PromptWriter, Run

GUARD = "\uffff"
"""Put inside a special token that occurs in an item's text, so that it is not read as one; no Unicode character."""


class ChatPromptWriter(PromptWriter):
    """Writes prompts with the chat template of an embedder: an instruction is the system message, an item the user's.

    The ids are those that the tokenizer gives for the rendered prompt, except that special tokens that occur in an
    item's text are read as ordinary words.

    Args:
        tokenizer: The tokenizer.
        chat_template: The template, in Jinja.
        options: Its variables, such as `add_generation_prompt`.
        image_token: The placeholder of image features. If the tokenizer names tokens that surround an image, as
            InternVL's does, they are added, since InternVL's processor adds them to the rendered prompt.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        chat_template: str,
        options: Mapping[str, Any],
        image_token: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.options = dict(options)
        self.image_token = image_token
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | {image_token}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._ends = _ends(tokenizer)

    def text_before(self, ask: Ask, place: int) -> str:
        """Return nothing: the instruction is a message of its own."""
        return ""

    def gaps(self, ask: Ask) -> list[list[Run]]:
        """Return what is tokenised at once, before, between and after the images.

        Raises:
            ValueError: The template shows another number of images.
        """
        rendered = self._render(ask)
        texts = rendered.split(self.image_token)
        if len(texts) != 1 + ask.parts.count(None):
            raise ValueError(
                f"the chat template shows {len(texts) - 1} of {ask.parts.count(None)} images: {rendered[:200]!r}"
            )
        named = self.tokenizer.special_tokens_map
        before, after = (str(named.get(f"{side}_image_token", "")) for side in ("start", "end"))
        for place in range(len(texts) - 1):
            texts[place] += before
            texts[place + 1] = after + texts[place + 1]
        first, last = self._ends if not _starts_with_bos(self.tokenizer, rendered) else ("", "")
        texts[0], texts[-1] = first + texts[0], texts[-1] + last
        return [self._split(text, first=place == 0) for place, text in enumerate(texts)]

    def _render(self, ask: Ask) -> str:
        content = [
            {"type": "image"} if part is None else {"type": "text", "text": self._guarded(part)} for part in ask.parts
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if ask.instruction is not None:
            told = [{"type": "text", "text": self._guarded(ask.instruction)}]
            messages.insert(0, {"role": "system", "content": told})
        named = self.tokenizer.special_tokens_map
        options = named | self.options
        try:
            rendered: Any = render_jinja_template([messages], chat_template=self.chat_template, **options)[0]
        except ImportError:
            raise
        except Exception as error:  # a template can raise any
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path!r} fails: {problem}") from error
        return rendered[0]

    def _guarded(self, text: str) -> str:
        return self._special.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)

    def _split(self, text: str, first: bool) -> list[Run]:
        """Return the special tokens, and what is between two of them."""
        runs: list[Run] = []
        start = 0
        for found in self._special.finditer(text):
            runs += [Run(text[start : found.start()], False, not first or bool(runs)), Run(found[0], True, False)]
            start = found.end()
        runs.append(Run(text[start:], False, not first or bool(runs)))
        return [run._replace(text=run.text.replace(GUARD, "")) for run in runs if run.text]


def _ends(tokenizer: Any) -> tuple[str, str]:  # noqa: ANN401
    """Return the special tokens that the tokenizer puts before and after every text."""
    (alone,) = tokenizer(["a"], add_special_tokens=False)["input_ids"]
    (whole,) = tokenizer(["a"])["input_ids"]
    start = next(place for place in range(len(whole)) if whole[place : place + len(alone)] == alone)
    first, last = whole[:start], whole[start + len(alone) :]
    return "".join(tokenizer.convert_ids_to_tokens(first)), "".join(tokenizer.convert_ids_to_tokens(last))


def _starts_with_bos(tokenizer: Any, text: str) -> bool:  # noqa: ANN401
    """Whether a rendered prompt has all special tokens already, as the library's processors take it."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


__all__ = ["ChatPromptWriter"]
