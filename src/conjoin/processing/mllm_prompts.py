"""Prompts of the MLLM retriever: what the chat template writes of an item, as token ids.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from .item_error import ItemError
from .texts import cut_text, warn_of_cuts

VIEWS = ("image", "text", "fused")
_MARK = "\uffff"
"""Stands around a special token that occurs in an item's text, written backwards; no Unicode character."""


class Prompt(NamedTuple):
    """What a prompt is written from: the texts of an item and, as None, its images, in order."""

    parts: tuple[str | None, ...]
    instruction: str | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether it has both."""
        return None in self.parts and {*self.parts} != {None}

    def view(self, image: bool) -> "Prompt":
        """The images alone, or the texts alone."""
        return self._replace(parts=tuple(part for part in self.parts if (part is None) == image))


class Piece(NamedTuple):
    """A part of a prompt: token ids, and the views of the item that contain it."""

    ids: list[int]
    views: tuple[str, ...]


class PromptWriter:
    """Writes prompts by a chat template: an instruction is the system message, the item is the user's message.

    The ids are those that the tokenizer gives for the whole prompt, except that special tokens that occur in an item's
    text are read as ordinary words, as `sanitize_control_tokens` of transformers does.

    Args:
        tokenizer: The tokenizer.
        chat_template: The template, in Jinja.
        variables: Its variables.
        image_token: The placeholder of image features. If the tokenizer names tokens that surround an image, as
            InternVL's does, they are added, since InternVL's processor adds them to the rendered prompt.
        of_embedder: Whether the template is a published embedder's. Then the tokens that the tokenizer puts around
            every text are added, and the instruction does not count as a part of the first text.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        chat_template: str,
        variables: Mapping[str, Any],
        image_token: str,
        of_embedder: bool,
    ) -> None:
        self.tokenizer, self.chat_template, self.image_token = tokenizer, chat_template, image_token
        self.variables = tokenizer.special_tokens_map | variables
        self.of_embedder = of_embedder
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | {image_token}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        self._ends = _ends(tokenizer) if of_embedder else ("", "")

    def write(
        self,
        prompts: Sequence[Prompt],
        image_lengths: Sequence[Sequence[int]],
        names: Sequence[str],
        max_length: int | None = None,
        max_text_length: int | None = None,
    ) -> list[list[Piece]]:
        """Return the pieces of each item's prompt, and of its other views if it has images and texts.

        Args:
            prompts: The items.
            image_lengths: The number of tokens of each image of each item.
            names: The items in error messages and warnings.
            max_length: Longest prompt in tokens, images included; None for no limit. The last texts are cut first.
            max_text_length: Longest text in tokens, its instruction included.

        Raises:
            ItemError: What cannot be truncated exceeds `max_length`.
        """
        prompts = list(prompts)
        limits = [limit for limit in (max_length, max_text_length) if limit is not None]
        if limits:  # not all of a very long text needs to be tokenised
            for index, prompt in enumerate(prompts):
                parts = (part and cut_text(part, self.tokenizer, min(limits)) for part in prompt.parts)
                prompts[index] = prompt._replace(parts=tuple(parts))
        if max_text_length is not None:
            whole, prompts = prompts, [self._shorten_texts(prompt, max_text_length) for prompt in prompts]
            cut = [name for name, old, new in zip(names, whole, prompts, strict=True) if new is not old]
            warn_of_cuts(cut, max_text_length, self.tokenizer)
        ids = self._tokenize(prompts)
        if max_length is not None:
            lengths = [sum(map(len, gaps)) + sum(images) for gaps, images in zip(ids, image_lengths, strict=True)]
            long = [index for index, length in enumerate(lengths) if length > max_length]
            for index in long:
                over = lengths[index] - max_length
                prompts[index], ids[index] = self._shorten(prompts[index], over, max_length, names[index])
            warn_of_cuts([names[index] for index in long], max_length, self.tokenizer)
        return self._with_views(prompts, ids, image_lengths)

    def render(self, prompt: Prompt) -> str:
        """Return the text of a prompt, with one placeholder for each image.

        Raises:
            ValueError: The template fails, or it shows another number of images.
        """
        roles = {"system": [prompt.instruction] * (prompt.instruction is not None), "user": prompt.parts}
        messages = [
            {"role": role, "content": [{"type": "image"} if part is None else self._text(part) for part in parts]}
            for role, parts in roles.items()
            if parts
        ]
        try:
            rendered: Any = render_jinja_template([messages], chat_template=self.chat_template, **self.variables)[0]
        except Exception as error:  # a template can raise any
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path!r} fails: {problem}") from error
        text: str = rendered[0]
        shown, count = text.count(self.image_token), prompt.parts.count(None)
        if shown != count:
            raise ValueError(f"the chat template shows {shown} of {count} images: {text[:200]!r}")
        named = self.tokenizer.special_tokens_map
        before, after = (str(named.get(f"{side}_image_token", "")) for side in ("start", "end"))
        text = text.replace(self.image_token, before + self.image_token + after)
        bos = self.tokenizer.bos_token
        is_whole = bos is not None and text.startswith(bos)  # as the library's processors take it
        return text if is_whole else f"{self._ends[0]}{text}{self._ends[1]}"

    def _text(self, text: str) -> dict[str, str]:
        marked = self._special.sub(lambda token: f"{_MARK}{token[0][::-1]}{_MARK}", text.replace(_MARK, ""))
        return {"type": "text", "text": marked}

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[list[int]]]:
        """Return for each prompt the token ids before, between and after its images."""
        split = [self.render(prompt).split(_MARK) for prompt in prompts]  # every second part was marked
        plain = iter(self._token_ids([part for parts in split for part in parts[::2]]))
        words = iter(
            self._token_ids([part[::-1] for parts in split for part in parts[1::2]], split_special_tokens=True)
        )
        placeholder = self.tokenizer.convert_tokens_to_ids(self.image_token)
        tokenized = []
        for parts in split:
            gaps: list[list[int]] = [[]]
            for token in (token for index in range(len(parts)) for token in next(words if index % 2 else plain)):
                if token == placeholder:
                    gaps.append([])
                else:
                    gaps[-1].append(token)
            tokenized.append(gaps)
        return tokenized

    def _token_ids(self, texts: list[str], **options: bool) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)["input_ids"] if texts else []

    def _with_views(
        self, prompts: Sequence[Prompt], ids: Sequence[list[list[int]]], image_lengths: Sequence[Sequence[int]]
    ) -> list[list[Piece]]:
        """Return the pieces of each item; the prompts of the whole item and of its images share the image tokens."""
        mixed = [prompt for prompt in prompts if prompt.is_mixed]
        of_images, of_texts = (iter(self._tokenize([each.view(image) for each in mixed])) for image in (True, False))
        placeholder = self.tokenizer.convert_tokens_to_ids(self.image_token)
        written = []
        for prompt, gaps, lengths in zip(prompts, ids, image_lengths, strict=True):
            images = [[placeholder] * length for length in lengths] + [[]]
            if not prompt.is_mixed:
                written.append([Piece([*gap, *image], VIEWS) for gap, image in zip(gaps, images, strict=True)])
                continue
            pieces = []
            for gap, alone, image in zip(gaps, next(of_images), images, strict=True):
                if gap == alone:
                    pieces.append(Piece([*gap, *image], ("image", "fused")))
                else:
                    pieces += [Piece(gap, ("fused",)), Piece(alone, ("image",)), Piece(image, ("image", "fused"))]
            written.append([*pieces, Piece(next(of_texts)[0], ("text",))])
        return written

    def _shorten_texts(self, prompt: Prompt, limit: int) -> Prompt:
        """Truncate each text, with the instruction before it, to `limit` tokens."""
        for index, part in enumerate(prompt.parts):
            if part is not None and len(f"{prompt.instruction or ''}  {part}".encode()) > limit:
                prompt = self._cut(prompt, index, limit=limit)
        return prompt

    def _shorten(self, prompt: Prompt, over: int, limit: int, name: str) -> tuple[Prompt, list[list[int]]]:
        """Truncate texts, the last first, until the prompt has at most `limit` tokens, from which it is `over` off.

        Raises:
            ItemError: What cannot be truncated exceeds `limit`.
        """
        (ids,) = self._tokenize([prompt])
        room = sum(map(len, ids)) - over
        for index in reversed(range(len(prompt.parts))):
            while over > 0 and (shorter := self._cut(prompt, index, over=over)) is not prompt:
                prompt, (ids,) = shorter, self._tokenize([shorter])
                over = sum(map(len, ids)) - room
        if over > 0:
            raise ItemError(
                name,
                f"images, instruction and prompt take {limit + over} tokens, {over} more than "
                f"max_length={limit}, and they cannot be truncated; lower max_pixels, pass fewer images or raise "
                "max_length",
            )
        return prompt, ids

    def _cut(self, prompt: Prompt, index: int, limit: int | None = None, over: int = 0) -> Prompt:
        """Truncate one text to `limit` tokens, or by `over` tokens, to no less than its first token."""
        text = prompt.parts[index]
        if text is None:
            return prompt
        is_joined = prompt.instruction is not None and not self.of_embedder and {*prompt.parts[:index]} <= {None}
        before = f"{prompt.instruction} " if is_joined else ""
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        spans = self.tokenizer(before + text, return_offsets_mapping=True, **options)["offset_mapping"]
        kept = max(1, len(spans) - over if limit is None else limit)
        if kept >= len(spans):
            return prompt
        end = max(min(spans[kept - 1][1], spans[kept][0]) - len(before), 1)
        parts = (*prompt.parts[:index], text[:end], *prompt.parts[index + 1 :])
        return prompt if end >= len(text) else prompt._replace(parts=parts)


def _ends(tokenizer: Any) -> tuple[str, str]:  # noqa: ANN401
    """Return the special tokens that the tokenizer puts before and after every text."""
    (alone,) = tokenizer(["a"], add_special_tokens=False)["input_ids"]
    (whole,) = tokenizer(["a"])["input_ids"]
    start = next(index for index in range(len(whole)) if whole[index : index + len(alone)] == alone)
    first, last = whole[:start], whole[start + len(alone) :]
    return "".join(tokenizer.convert_ids_to_tokens(first)), "".join(tokenizer.convert_ids_to_tokens(last))
