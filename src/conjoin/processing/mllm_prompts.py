"""Prompts of the MLLM retriever: the text before, between and after an item's images, as token ids.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from .item_error import ItemError
from .item_inputs import cut_text, warn_of_cuts

NOUNS = {(True, False): "image", (False, True): "sentence", (True, True): "image and sentence"}
"""What a prompt asks to summarise, by whether it has an image and a sentence."""
VIEWS = ("image", "text", "fused")
GUARD = "\uffff"
"""Put inside a special token that occurs in an item's text, so that it is not read as one; no Unicode character."""


class Ask(NamedTuple):
    """What a prompt is written from: the texts of an item and, as None, its images, in order."""

    parts: tuple[str | None, ...]
    instruction: str | None = None

    @property
    def modalities(self) -> tuple[bool, bool]:
        """Whether the item has images, and texts."""
        return None in self.parts, any(part is not None for part in self.parts)

    def view(self, image: bool) -> "Ask":
        """The images alone, or the texts alone."""
        return self._replace(parts=tuple(part for part in self.parts if (part is None) == image))


class Piece(NamedTuple):
    """A part of a prompt: token ids, and the views of the item that contain it."""

    ids: list[int]
    views: tuple[str, ...]


class _Chunk(NamedTuple):
    """A text of a prompt; in the template's, special tokens are parsed."""

    text: str
    template: bool


class Run(NamedTuple):
    """A text that is tokenised at once.

    Args:
        text: The text.
        parsed: Whether special tokens in it are parsed.
        inner: Whether other tokens precede it. Some tokenizers mark the start of a text, which it then is not.
    """

    text: str
    parsed: bool
    inner: bool


class PromptWriter:
    """Writes prompts: the images and texts in the item's own order, the request, and the readout token.

    The instruction and the first text are one text, joined by a space, and an instruction counts as a sentence in the
    request (UniIR, LamRA). The ids are those of the whole prompt.

    Args:
        tokenizer: The tokenizer.
        template: The texts around the parts.
        image_token: The placeholder of image features.
        ret_token: The readout token, if any.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        template: Mapping[str, str],
        image_token: str,
        ret_token: str | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.image_token = image_token
        self.ending = template["end"] + (ret_token or "")
        framing = "".join([*template.values(), self.ending])
        known = sorted((token for token in tokenizer.added_tokens_encoder if token in framing), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, known)) or '(?!)'})")

    def write(
        self,
        asks: Sequence[Ask],
        image_lengths: Sequence[Sequence[int]],
        max_length: int | None,
        max_text_length: int | None,
        names: Sequence[str],
    ) -> list[list[Piece]]:
        """Return the pieces of each item's prompt, and of its other views if it has images and texts.

        Args:
            asks: The items.
            image_lengths: The number of tokens of each image of each item.
            max_length: Longest prompt in tokens, images included; None for no limit.
            max_text_length: Longest text in tokens, its instruction included.
            names: The items in error messages and warnings.

        Raises:
            ValueError: What cannot be truncated exceeds `max_length`.
        """
        asks = list(asks)
        limits = [limit for limit in (max_length, max_text_length) if limit is not None]
        if limits:
            asks = [self._without_ends(ask, min(limits), name) for ask, name in zip(asks, names, strict=True)]
        if max_text_length is not None:
            self._shorten_texts(asks, max_text_length, names)
        prompts = self._tokenize(asks)
        if max_length is not None:
            self._shorten_prompts(asks, prompts, image_lengths, max_length, names)
        mixed = [ask for ask in asks if all(ask.modalities)]
        others = (iter(self._tokenize([ask.view(image=image) for ask in mixed])) for image in (True, False))
        return list(self._packed(asks, prompts, image_lengths, *others))

    def _shorten_prompts(
        self,
        asks: list[Ask],
        prompts: list[list[list[int]]],
        image_lengths: Sequence[Sequence[int]],
        limit: int,
        names: Sequence[str],
    ) -> None:
        """Truncate the texts of prompts of more than `limit` tokens."""
        cut = []
        for index, (ask, lengths, prompt) in enumerate(zip(asks, image_lengths, prompts, strict=True)):
            over = sum(map(len, prompt)) + sum(lengths) - limit
            if over > 0:
                asks[index] = self._fit(ask, over, limit, names[index])
                cut.append(index)
        warn_of_cuts([names[index] for index in cut], limit, self.tokenizer)
        for index, prompt in zip(cut, self._tokenize([asks[index] for index in cut]), strict=True):
            prompts[index] = prompt

    def _packed(
        self,
        asks: Iterable[Ask],
        prompts: Iterable[list[list[int]]],
        image_lengths: Iterable[Sequence[int]],
        image_prompts: Iterator[list[list[int]]],
        text_prompts: Iterator[list[list[int]]],
    ) -> Iterator[list[Piece]]:
        """Yield the pieces of each item; the prompts of the whole item and of its images share the image tokens."""
        placeholder = self.tokenizer.convert_tokens_to_ids(self.image_token)
        for ask, prompt, lengths in zip(asks, prompts, image_lengths, strict=True):
            images = [[placeholder] * length for length in lengths] + [[]]
            if not all(ask.modalities):
                yield [Piece([*gap, *image], VIEWS) for gap, image in zip(prompt, images, strict=True)]
                continue
            pieces = []
            for gap, alone, image in zip(prompt, next(image_prompts), images, strict=True):
                if gap == alone:
                    pieces.append(Piece([*gap, *image], ("image", "fused")))
                else:
                    pieces += [Piece(gap, ("fused",)), Piece(alone, ("image",)), Piece(image, ("image", "fused"))]
            (text,) = next(text_prompts)
            yield [*pieces, Piece(text, ("text",))]

    def gaps(self, ask: Ask) -> list[list[Run]]:
        """Return what is tokenised at once, before, between and after the images."""
        return [self._runs(gap, first=index == 0) for index, gap in enumerate(self._chunks(ask))]

    def text_before(self, ask: Ask, index: int) -> str:
        """Return what is on one line with a text, before it: the instruction and a space before the first text."""
        is_first = all(part is None for part in ask.parts[:index])
        return f"{ask.instruction} " if is_first and ask.instruction is not None else ""

    def _chunks(self, ask: Ask) -> list[list[_Chunk]]:
        """Return the texts before, between and after the images."""
        parts, instruction = list(ask.parts), ask.instruction
        if instruction is not None:
            first = next((index for index, part in enumerate(parts) if part is not None), len(parts))
            if first < len(parts):
                instruction = f"{instruction} {parts.pop(first)}"
            parts.insert(first, instruction)
        opening, closing = self.template["image_start"], self.template["image_end"]
        gaps = [[_Chunk(self.template["start"], True)]]
        for part in parts:
            if part is None:
                gaps[-1].append(_Chunk(opening, True))
                gaps.append([_Chunk(closing, True)])
            else:
                gaps[-1].append(_Chunk(f"{part}\n", False))
        line = "\n" if parts[-1] is None and not closing.endswith("\n") else ""
        noun = NOUNS[Ask(tuple(parts)).modalities]
        gaps[-1].append(_Chunk(line + self.template["ask"].format(noun) + self.ending, True))
        return gaps

    def _runs(self, gap: Sequence[_Chunk], first: bool) -> list[Run]:
        """Return what is tokenised at once: all that is between two special tokens."""
        runs: list[Run] = []
        text = ""
        for chunk in gap:
            parts = self._special.split(chunk.text) if chunk.template else [chunk.text]
            for index, part in enumerate(parts):  # every second one is a special token
                if index % 2 == 0:
                    text += part
                    continue
                runs += [Run(text, False, not first or bool(runs)), Run(part, True, False)]
                text = ""
        runs.append(Run(text, False, not first or bool(runs)))
        return [run for run in runs if run.text]

    def _tokenize(self, asks: Iterable[Ask]) -> list[list[list[int]]]:
        """Return for each prompt the token ids before, between and after its images."""
        prompts = [self.gaps(ask) for ask in asks]
        token_ids: dict[Run, list[int]] = {run: [] for gaps in prompts for gap in gaps for run in gap}
        for parsed, inner in ((True, False), (False, False), (False, True)):
            chosen = [run for run in token_ids if (run.parsed, run.inner) == (parsed, inner)]
            token_ids.update(zip(chosen, self._ids([run.text for run in chosen], parsed, inner), strict=True))
        return [[[token for run in gap for token in token_ids[run]] for gap in gaps] for gaps in prompts]

    def _ids(self, texts: list[str], parsed: bool, inner: bool = False) -> list[list[int]]:
        """Return the token ids of texts."""
        if not texts:
            return []
        options = {"add_special_tokens": False, "split_special_tokens": not parsed, "verbose": False}
        if inner and self._marks_starts():
            (before,) = self._ids(["\n"], parsed)
            return [ids[len(before) :] for ids in self._ids([f"\n{text}" for text in texts], parsed)]
        return self.tokenizer(texts, **options)["input_ids"]

    def _marks_starts(self) -> bool:
        """Whether the tokenizer marks the start of a text, but not what follows a special token (Llama's does)."""
        return self._ids([f"{self.image_token}\n"], True)[0][1:] != self._ids(["\n"], False)[0]

    def _without_ends(self, ask: Ask, limit: int, name: str) -> Ask:
        """Drop the ends of very long texts, which are truncated anyway, before they are tokenised."""
        parts = (part if part is None else cut_text(part, self.tokenizer, limit, name) for part in ask.parts)
        return ask._replace(parts=tuple(parts))

    def _shorten_texts(self, asks: list[Ask], limit: int, names: Sequence[str]) -> None:
        """Truncate each text, with the instruction before it, to `limit` tokens."""
        cut = []
        for number, ask in enumerate(asks):
            for index, part in enumerate(ask.parts):
                if part is not None and len(part.encode()) + len((ask.instruction or "").encode()) + 2 > limit:
                    asks[number] = self._cut(asks[number], index, limit=limit)
            cut += [names[number]] if asks[number] is not ask else []
        warn_of_cuts(cut, limit, self.tokenizer)

    def _fit(self, ask: Ask, over: int, limit: int, name: str) -> Ask:
        """Truncate texts, the last first, until the prompt has at most `limit` tokens, from which it is `over` off.

        Raises:
            ValueError: What cannot be truncated exceeds `limit`.
        """
        (prompt,) = self._tokenize([ask])
        room = sum(map(len, prompt)) - over
        for index in reversed(range(len(ask.parts))):
            while over > 0 and ask.parts[index] is not None:
                shorter = self._cut(ask, index, over=over)
                if shorter is ask:
                    break
                ask = shorter
                (prompt,) = self._tokenize([ask])
                over = sum(map(len, prompt)) - room
        if over > 0:
            raise ItemError(
                name,
                f"images, instruction and prompt take {limit + over} tokens, {over} more than "
                f"max_length={limit}, and they cannot be truncated; lower max_pixels, pass fewer images or raise "
                "max_length",
            )
        return ask

    def _cut(self, ask: Ask, index: int, limit: int | None = None, over: int = 0) -> Ask:
        """Truncate one text to `limit` tokens, or by `over` tokens, to no less than its first token."""
        text = ask.parts[index] or ""
        before = self.text_before(ask, index)
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        spans = self.tokenizer(before + text, return_offsets_mapping=True, **options)["offset_mapping"]
        kept = max(1, len(spans) - over if limit is None else limit)
        if kept >= len(spans):
            return ask
        end = max(min(spans[kept - 1][1], spans[kept][0]) - len(before), 1)
        parts = [*ask.parts[:index], text[:end], *ask.parts[index + 1 :]]
        return ask if end >= len(text) else ask._replace(parts=tuple(parts))


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

    def text_before(self, ask: Ask, index: int) -> str:
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
        for index in range(len(texts) - 1):
            texts[index] += before
            texts[index + 1] = after + texts[index + 1]
        bos = self.tokenizer.bos_token
        is_whole = bos is not None and rendered.startswith(bos)  # as the library's processors take it
        first, last = ("", "") if is_whole else self._ends
        texts[0], texts[-1] = first + texts[0], texts[-1] + last
        return [self._split(text, first=index == 0) for index, text in enumerate(texts)]

    def _render(self, ask: Ask) -> str:
        content = [
            {"type": "image"} if part is None else {"type": "text", "text": self._guarded(part)} for part in ask.parts
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if ask.instruction is not None:
            instruction = [{"type": "text", "text": self._guarded(ask.instruction)}]
            messages.insert(0, {"role": "system", "content": instruction})
        named = self.tokenizer.special_tokens_map
        options = named | self.options
        try:
            rendered: Any = render_jinja_template([messages], chat_template=self.chat_template, **options)[0]
        except Exception as error:  # a template can raise any
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path!r} fails: {problem}") from error
        return rendered[0]

    def _guarded(self, text: str) -> str:
        return self._special.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)

    def _split(self, text: str, first: bool) -> list[Run]:
        """Split a text into its special tokens and the runs between them."""
        runs: list[Run] = []
        start = 0
        for match in self._special.finditer(text):
            runs += [Run(text[start : match.start()], False, not first or bool(runs)), Run(match[0], True, False)]
            start = match.end()
        runs.append(Run(text[start:], False, not first or bool(runs)))
        return [run._replace(text=run.text.replace(GUARD, "")) for run in runs if run.text]


def _ends(tokenizer: Any) -> tuple[str, str]:  # noqa: ANN401
    """Return the special tokens that the tokenizer puts before and after every text."""
    (alone,) = tokenizer(["a"], add_special_tokens=False)["input_ids"]
    (whole,) = tokenizer(["a"])["input_ids"]
    start = next(index for index in range(len(whole)) if whole[index : index + len(alone)] == alone)
    first, last = whole[:start], whole[start + len(alone) :]
    return "".join(tokenizer.convert_ids_to_tokens(first)), "".join(tokenizer.convert_ids_to_tokens(last))


__all__ = ["NOUNS", "VIEWS", "Ask", "ChatPromptWriter", "Piece", "PromptWriter", "Run"]
