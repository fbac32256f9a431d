"""The retrieval targets that Coral reconstructs: their own tokens, and which of these are masked."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.mllm_retriever.prompt_rows import move_to_front
from conjoin.models.shortcuts import without_shortcuts
from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.mllm_prompts import NOUNS

IMAGE = -1
"""The id of an image token among `TargetTokens.ids`."""

PADDING = -2


class PromptFrame(NamedTuple):
    """What a prompt has beside the item: its start, its request and readout token, special tokens and separators.

    Args:
        start: Number of tokens before the item.
        ends: `(2, 2)` number of tokens after it, by whether it has images and whether it has texts.
        outside: Ids of special tokens, and of line breaks, which the template puts between the parts.
        spaces: Ids of other whitespace; at the start of a text it is the template's.
    """

    start: int
    ends: Tensor
    outside: Tensor
    spaces: Tensor

    @classmethod
    def of(cls, processor: MllmRetrieverProcessor) -> "PromptFrame":
        """Count the tokens of a processor's template."""

        def count(text: str) -> int:
            return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])

        template, ret = processor.template, processor.ret_token or ""
        ends = torch.zeros(2, 2, dtype=torch.long)
        for modalities, noun in NOUNS.items():
            ask = template["ask"].format(noun)
            ends[*map(int, modalities)] = count(f"\n{ask}{template['end']}{ret}") - count("\n")
        tokenizer = processor.tokenizer
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        spaces = [token for token, text in enumerate(texts) if not text.strip() and "\n" not in text]
        breaks = [token for token, text in enumerate(texts) if not text.strip() and "\n" in text]
        outside = torch.tensor([*tokenizer.added_tokens_encoder.values(), *breaks], dtype=torch.long)
        start = count(template["start"].rstrip(" "))
        return cls(start, ends, outside, torch.tensor(spaces, dtype=torch.long))

    def own_texts(self, inputs: Mapping[str, Any], ids: Tensor, lengths: Tensor, is_image: Tensor) -> Tensor:
        """Return the mask `(N, T)` of the tokens of the items' texts.

        Args:
            inputs: The processor's output for N items.
            ids: `(N, T)` their prompts, in front.
            lengths: `(N,)` tokens of each prompt.
            is_image: `(N, T)`.
        """
        has_text = inputs.get("text_mask")
        if has_text is None:  # the same for all items
            has_text = torch.full_like(lengths, "text_view_mask" in inputs or inputs.get("pixel_values") is None)
        has_text = has_text.bool()
        ends = self.ends.to(ids.device)[is_image.any(1).long(), has_text.long()]
        positions = torch.arange(ids.shape[1], device=ids.device)
        inside = (positions >= self.start) & (positions < (lengths - ends)[:, None]) & has_text[:, None]
        is_text = inside & ~is_image & ~torch.isin(ids, self.outside.to(ids.device))
        first = is_text & ~F.pad(is_text[:, :-1], (1, 0))
        return is_text & ~(first & torch.isin(ids, self.spaces.to(ids.device)))


class TargetTokens(NamedTuple):
    """The own tokens of N targets, padded to the longest.

    Args:
        embeddings: `(N, T, D)` input embeddings, without gradient: of images behind the projector, of texts.
        ids: `(N, T)` token ids, `IMAGE` or `PADDING`.
    """

    embeddings: Tensor
    ids: Tensor

    @property
    def kinds(self) -> dict[str, Tensor]:
        """The masks `(N, T)` of the tokens of images and of texts."""
        return {"vision": self.ids == IMAGE, "language": self.ids >= 0}


def pack_targets(
    inputs: Mapping[str, Any], embeddings: Tensor, frame: PromptFrame, image_token_id: int
) -> dict[str, Tensor]:
    """Return the own tokens of a part of a batch, one after another: `target_tokens` `(P, D)`, `target_ids` `(P,)`.

    `target_lengths` `(N,)` cuts them into rows. So chunks of a batch can be concatenated without padding.

    Args:
        inputs: The processor's output for N items.
        embeddings: `(N, T, D)` what entered the language model, each prompt in front.
        frame: Of the processor.
        image_token_id: Of the model.
    """
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask
    (ids,), lengths = move_to_front(mask.bool(), inputs["input_ids"])
    inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    is_image = (ids == image_token_id) & inside
    is_target = is_image | frame.own_texts(inputs, ids, lengths, is_image)
    return {
        "target_tokens": embeddings[is_target],
        "target_ids": ids.masked_fill(is_image, IMAGE)[is_target],
        "target_lengths": is_target.sum(1),
    }


def unpack_targets(packed: Mapping[str, Tensor], rows: slice) -> TargetTokens:
    """Return some rows of what `pack_targets` returned."""
    lengths = packed["target_lengths"].tolist()
    start, stop = sum(lengths[: rows.start]), sum(lengths[: rows.stop])
    embeddings = packed["target_tokens"][start:stop].detach().split(lengths[rows])
    ids = packed["target_ids"][start:stop].split(lengths[rows])
    return TargetTokens(
        pad_sequence(list(embeddings), batch_first=True),
        pad_sequence(list(ids), batch_first=True, padding_value=PADDING),
    )


def draw_noise(seeds: Sequence[int], length: int) -> Tensor:
    """Return uniform noise `(N, length)`, each row from its own seed: its first values do not depend on `length`."""
    rows = [torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows) if rows else torch.empty(0, length)


def choose_masked(kind: Tensor, noise: Tensor, ratio: float) -> Tensor:
    """Choose a fixed share of each row's tokens of one modality, at least one.

    Args:
        kind: `(..., T)` bool, the tokens to choose from.
        noise: `(..., T)`; the tokens with the least noise are chosen.
        ratio: Share of the tokens of a row, rounded to a number of tokens.

    Returns:
        `(..., T)` bool.
    """
    wanted = (kind.sum(-1, keepdim=True) * ratio + 0.5).floor().clamp(min=1)
    order = noise.masked_fill(~kind, torch.inf).argsort(dim=-1).argsort(dim=-1)
    return kind & (order < wanted)


@contextmanager
def recorded_embeddings(encoder: MllmRetrieverModel) -> Iterator[list[Tensor]]:
    """Record what enters the language model, `(N, T, D)` for each call, without gradient; all tokens run."""
    seen: list[Tensor] = []

    def keep(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:  # noqa: ANN401
        seen.append(kwargs["inputs_embeds"].detach())

    hook = encoder.text_model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with without_shortcuts(encoder):
            yield seen
    finally:
        hook.remove()
