"""Coral: contrastive learning, and masked reconstruction of the target from the query's and the target's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedModel

from conjoin.data.training_rows import QueryRows
from conjoin.hub.pruned_checkpoint import fetch_small_files, find_shards
from conjoin.losses import embedding_reconstruction, mean_over_devices, mean_over_rows, token_reconstruction
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.mllm_retriever.prompt_rows import move_to_front
from conjoin.models.shortcuts import without_shortcuts
from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.item_inputs import Item
from conjoin.storage import reading
from conjoin.trainers.queries import QueryCandidateConfig, QueryCandidateTrainer, query_info_nce

HEAD = "lm_head.weight"
HEAD_WIDTH = 64
"""Width of an attention head in BERT."""
IMAGE, PADDING = -1, -2
"""The ids of image tokens and of padding among those of targets."""
INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights in BERT."""
MODALITIES = ("vision", "language")
SEED = "mask_seed"
STATES = {"reg": "queries", "rec": "positives"}
"""The state that each term reconstructs the target from: the query's, or the target's own."""


@dataclass
class CoralConfig(QueryCandidateConfig):
    """Arguments of `CoralTrainer`: `L_cl + λ1 L_reg + λ2 L_rec` (Coral Eq. 7); defaults are the paper's (App. E.3).

    Args:
        temperature: Of the contrastive loss.
        reconstruct: What to reconstruct, of `vision` and `language` (Table 3); empty for the contrastive loss alone.
        reg_weight: λ1, of the target's reconstruction from the query's state; 0 for none.
        rec_weight: λ2, of its reconstruction from its own state; 0 for none.
        mask_ratio: Masked share of the tokens of one modality.
        masked_only: Predict the masked tokens only, in place of all tokens of the modality.
        normalize_targets: Standardise each image embedding over its dimensions before the vision decoder predicts it
            (as the pixels of a patch in He et al., "Masked Autoencoders", arXiv 2111.06377, Sec. 3), for a model whose
            image embeddings are small; not in the paper.
        kind: Error of an image token: `mean` of its squared differences, or their sum, the `squared_norm` of Eq. 5.
        language_head: Folder or name on the Hub of the MLLM whose output embeddings predict text tokens, frozen. None
            for those of the MLLM that the model is built on, if it has all layers and a head of its own, else for the
            input embeddings.
        decoder_positions: Largest number of tokens of a target, images and texts.
        decoder_dropout: Dropout rate of the decoders.
        decoder_learning_rate: Learning rate of the decoders, which start from random weights; None for
            `learning_rate`, which hardly moves them: see `{reg,rec}_{vision,language}_own` and `_other` in the log.
        decoded_rows: Targets decoded at once; the activations of their decoders are in memory.

    Raises:
        ValueError: An argument is out of range.
    """

    temperature: float = field(default=0.02)
    reconstruct: list[str] = field(default_factory=lambda: list(MODALITIES))
    reg_weight: float = field(default=0.1)
    rec_weight: float = field(default=0.1)
    mask_ratio: float = field(default=0.5)
    masked_only: bool = field(default=False)
    normalize_targets: bool = field(default=False)
    kind: Literal["mean", "squared_norm"] = field(default="mean")
    language_head: str | None = field(default=None)
    decoder_positions: int = field(default=1024)
    decoder_dropout: float = field(default=0.1)
    decoder_learning_rate: float | None = field(default=1e-3)
    decoded_rows: int = field(default=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.reconstruct) - set(MODALITIES) or len(set(self.reconstruct)) < len(self.reconstruct):
            raise ValueError(f"reconstruct={self.reconstruct!r}; expected a list of some of {MODALITIES}, each once")
        if not 0 < self.mask_ratio <= 1:
            raise ValueError(f"mask_ratio={self.mask_ratio} must lie in (0, 1]")
        if self.decoded_rows < 1:
            raise ValueError(f"decoded_rows={self.decoded_rows} must be at least 1")

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the terms that are not zero, by the names of `STATES`; none if nothing is reconstructed."""
        weights = {"reg": self.reg_weight, "rec": self.rec_weight} if self.reconstruct else {}
        return {name: weight for name, weight in weights.items() if weight}


class SeededRows(QueryRows):
    """Adds `mask_seed` to each row: another one in every epoch, the same on any number of processes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {SEED: int(self.numpy_random(index, 1).integers(2**62))}


class CoralTrainer(QueryCandidateTrainer):
    """Trains an MLLM retriever on queries and candidates by Coral (Sec. 4.1).

    The loss is InfoNCE over the candidates of all devices, and the reconstruction of each query's positive. The
    decoders are trained beside the model. They are part of checkpoints, not of the saved model.

    Args:
        model: An MLLM or a retriever around one: all layers or the first ones, with any readout.
        args: The configuration.
        train_dataset: Rows as for `QueryCandidateTrainer`.
        eval_dataset: Like `train_dataset`, with a length.
        processing_class: The model's processor.
        kwargs: As for `RetrievalTrainer`: `peft_config` ...

    Raises:
        ValueError: The model is no MLLM retriever, the processor is not its own, or there is something to reconstruct
            and it writes prompts by the chat template of a published embedder, in which own tokens are not known.
    """

    config_class = CoralConfig
    model_class = MllmRetrieverModel
    rows_class = SeededRows
    supports_token_chunks = False
    args: CoralConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        processor: Any = self.processing_class
        if not isinstance(processor, MllmRetrieverProcessor):
            raise ValueError(
                "Coral reconstructs the input of an MLLM retriever; expected its processor (processing_class), got "
                f"{type(processor).__name__}"
            )
        if self.args.weights and processor.sentence_files is not None:
            raise ValueError(
                f"reconstruct={self.args.reconstruct}, but the prompts of this published embedder come from its chat "
                "template, in which the item's own tokens are not known; expected reconstruct=[] or an MLLM"
            )
        self.frame = PromptFrame.of(processor)
        self.language_head = find_language_head(self.encoder, self.args)

    def make_loss(self, model: PreTrainedModel, args: CoralConfig) -> nn.ModuleDict:
        """Return the decoders."""
        width = model.config.get_text_config().hidden_size
        decoders = nn.ModuleDict()
        for name in args.reconstruct if args.weights else ():
            decoders[name] = ReconstructionDecoder(width, args.decoder_positions, args.decoder_dropout)
        return decoders

    def embed(self, model: MllmRetrieverModel, inputs: dict[str, Any]) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the raw embeddings of the given parts, and the positives' own tokens, those of all rows in one.

        `target_tokens` `(P, D)` are what entered the language model: of images behind the projector. `target_ids` are
        `(P,)`, and `target_lengths` `(N,)` cuts both into rows.
        """
        if not self.loss or "positives" not in inputs:
            return super().embed(model, inputs)
        outputs, seen = super().embed(model, {name: part for name, part in inputs.items() if name != "positives"}), []

        def record(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            seen.append(given["inputs_embeds"].detach())

        with without_shortcuts(model), model.text_model.register_forward_pre_hook(record, with_kwargs=True):
            outputs["positives"] = model(**inputs["positives"]).pooler_output
        ids, is_own = self.frame.own_tokens(inputs["positives"], model.config.backbone_config.image_token_id)
        return outputs | {  # without padding, so that chunks of a batch can be concatenated
            "target_tokens": seen[0][is_own],
            "target_ids": ids[is_own],
            "target_lengths": is_own.sum(1),
        }

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the terms of `L = L_cl + λ1 L_reg + λ2 L_rec` (Eq. 7), and two metrics of each reconstruction.

        `{reg,rec}_{vision,language}_own` is the error from the state of the term, over `decoded_rows` targets, and
        `_other` that from the state of another row. Where they are equal, the decoder does not read the state.
        """
        terms = self.matryoshka(
            lambda cut: {"contrastive_loss": query_info_nce(cut, inputs, self.args.temperature)}, embeddings
        )
        count, size = len(embeddings["positives"]), self.args.decoded_rows
        seeds = inputs.get(SEED)
        seeds = torch.randint(2**62, (count,)) if seeds is None else seeds
        for name in self.loss:
            for term, weight in self.args.weights.items():
                states = embeddings[STATES[term]]
                errors, present = self._row_errors(name, states, embeddings, seeds)
                terms[f"{term}_{name}_loss"] = weight * mean_over_devices(errors, present)
                terms[f"{term}_{name}_own"] = mean_over_devices(errors[:size].detach(), present[:size])
                with torch.no_grad():
                    other = self._row_errors(name, states.roll(1, 0)[:size], embeddings, seeds)
                terms[f"{term}_{name}_other"] = mean_over_devices(*other)
        return terms

    def _row_errors(
        self, name: str, states: Tensor, embeddings: dict[str, Tensor], seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean error `(N,)` of each row, 0 without tokens of the modality, and which rows have some.

        Blocks of rows are decoded again in the backward pass.

        Args:
            name: What to reconstruct, one of `MODALITIES`.
            states: `(N, D)` what to reconstruct it from, of the first N rows.
            embeddings: What `embed` returned.
            seeds: Of the masks of all rows.
        """
        decoder: Any = self.loss[name]
        dtype = decoder.output_norm.weight.dtype

        def decode(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            tokens, ids = pad_targets(embeddings, rows)
            is_kind = ids == IMAGE if name == "vision" else ids >= 0
            masked = choose_masked(is_kind, seeds[rows].tolist(), self.args.mask_ratio)
            wanted = masked if self.args.masked_only else is_kind
            counts = wanted.sum(1)
            positions = (~wanted).int().argsort(dim=1, stable=True)[:, : int(counts.max())]
            valid = torch.arange(positions.shape[1], device=ids.device) < counts[:, None]
            attended = (ids != PADDING) & ~masked
            predicted = decoder(states[rows].to(dtype), tokens.to(dtype), attended, positions)[valid]
            at = torch.arange(len(ids), device=ids.device)[:, None], positions
            if name == "vision":
                targets = tokens[at][valid]
                targets = F.layer_norm(targets, targets.shape[-1:]) if self.args.normalize_targets else targets
                predicted = embedding_reconstruction(predicted, targets, self.args.kind)
            return predicted, ids[at][valid], valid

        size = self.args.decoded_rows
        blocks = [slice(start, min(start + size, len(states))) for start in range(0, len(states), size)]
        values, ids, valid = zip(*(checkpoint(decode, rows, use_reentrant=False) for rows in blocks), strict=True)
        if name == "language":  # one pass over the language head for all blocks
            table = self.language_head
            table = self.encoder.get_input_embeddings().weight if table is None else table
            values = token_reconstruction(torch.cat(values), table, torch.cat(ids)).split([len(own) for own in ids])
        losses, present = zip(*map(mean_over_rows, values, valid), strict=True)
        return torch.cat(losses), torch.cat(present)

    def learning_rates(self) -> dict[nn.Module, float]:
        """Return the rate of the decoders, if they have one of their own."""
        rate = self.args.decoder_learning_rate
        return {} if rate is None else {self.loss: rate}


class PromptFrame(NamedTuple):
    """What a prompt has beside the item: its start, its request and readout token, special tokens and separators.

    Args:
        start: Number of tokens before the item.
        ends: `(2,)` number of tokens after an item with a text, by whether it has images.
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

        tokenizer = processor.tokenizer
        starts, ends = [], []
        for parts in (("...",), (None, "...")):
            before, _, after = processor.render(Item(parts)).partition("...")
            starts.append(count(before.rstrip(" ")))
            ends.append(count(after) - count("\n"))
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        breaks = [token for token, text in enumerate(texts) if not text.strip() and "\n" in text]
        spaces = [token for token, text in enumerate(texts) if not text.strip() and "\n" not in text]
        outside = torch.tensor([*tokenizer.added_tokens_encoder.values(), *breaks], dtype=torch.long)
        return cls(starts[0], torch.tensor(ends), outside, torch.tensor(spaces, dtype=torch.long))

    def own_tokens(self, inputs: Mapping[str, Any], image_token_id: int) -> tuple[Tensor, Tensor]:
        """Return the ids `(N, T)` of the prompts, in front, `IMAGE` for image tokens, and which are the items' own.

        Args:
            inputs: The processor's output for N items.
            image_token_id: Of the model.
        """
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask
        (ids,), lengths = move_to_front(mask.bool(), inputs["input_ids"])
        positions = torch.arange(ids.shape[1], device=ids.device)
        is_image = (ids == image_token_id) & (positions < lengths[:, None])
        has_text = inputs.get("text_mask")
        if has_text is None:  # the same for all items
            has_text = torch.full_like(lengths, "text_view_mask" in inputs or inputs.get("pixel_values") is None)
        ends = self.ends.to(ids.device)[is_image.any(1).long()]
        inside = (positions >= self.start) & (positions < (lengths - ends)[:, None]) & has_text.bool()[:, None]
        is_text = inside & ~is_image & ~torch.isin(ids, self.outside.to(ids.device))
        first = is_text & ~F.pad(is_text[:, :-1], (1, 0))
        is_text &= ~(first & torch.isin(ids, self.spaces.to(ids.device)))
        return ids.masked_fill(is_image, IMAGE), is_image | is_text


def pad_targets(embeddings: Mapping[str, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    """Return the tokens `(N, T, D)`, without gradient, and the ids `(N, T)` of some targets that were embedded."""
    lengths = embeddings["target_lengths"].tolist()
    start, stop = sum(lengths[: rows.start]), sum(lengths[: rows.stop])
    tokens = embeddings["target_tokens"][start:stop].detach().split(lengths[rows])
    ids = embeddings["target_ids"][start:stop].split(lengths[rows])
    padded = pad_sequence(list(ids), batch_first=True, padding_value=PADDING)
    return pad_sequence(list(tokens), batch_first=True), padded


def choose_masked(kind: Tensor, seeds: Sequence[int], ratio: float) -> Tensor:
    """Choose a fixed share of each row's tokens of one modality, at least one, by a seed of its own.

    Args:
        kind: `(N, T)` bool, the tokens to choose from; more padding does not change the choice.
        seeds: Of the N rows.
        ratio: Share of the tokens of a row, rounded to a number of tokens.

    Returns:
        `(N, T)` bool.
    """
    noise = [torch.rand(kind.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    wanted = (kind.sum(1, keepdim=True) * ratio + 0.5).floor().clamp(min=1)
    order = torch.stack(noise).to(kind.device).masked_fill(~kind, torch.inf).argsort(dim=1).argsort(dim=1)
    return kind & (order < wanted)


class ReconstructionDecoder(nn.Module):
    """One randomly initialised BERT layer with cross-attention (Coral Eq. 3), and a linear layer behind it.

    Queries are a state plus the embedding of the position to predict; keys and values are the tokens, each plus the
    embedding of its position, and the state. Eq. 3 names position embeddings behind the queries; RetroMAE, which it
    builds on, adds them to both. Each position is predicted on its own, so only wanted positions are computed. The
    linear layer is not in the paper: a BERT layer ends in a layer norm, whose outputs have variance one, and image
    embeddings may be ten times smaller.

    Args:
        width: D.
        positions: Largest number of tokens.
        dropout: Dropout rate (BERT: 0.1).
    """

    def __init__(self, width: int, positions: int = 1024, dropout: float = 0.1) -> None:
        super().__init__()
        heads = next(count for count in range(max(width // HEAD_WIDTH, 1), 0, -1) if width % count == 0)
        self.positions = nn.Embedding(positions, width)
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.output_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, state: Tensor, tokens: Tensor, attended: Tensor, wanted: Tensor) -> Tensor:
        """Predict the tokens at `wanted`.

        Args:
            state: `(N, D)`.
            tokens: `(N, T, D)` input embeddings.
            attended: `(N, T)` bool, the tokens that are keys (M of Eq. 3); masked tokens and padding are not.
            wanted: `(N, Q)` positions in `tokens`.

        Returns:
            `(N, Q, D)`.

        Raises:
            ValueError: There are more tokens than positions.
        """
        if tokens.shape[1] > self.positions.num_embeddings:
            raise ValueError(
                f"a target has {tokens.shape[1]} tokens, but decoder_positions={self.positions.num_embeddings}; raise "
                "it, or lower max_pixels or max_text_length"
            )
        queries = state[:, None] + self.positions(wanted)
        keys = torch.cat([tokens + self.positions.weight[: tokens.shape[1]], state[:, None]], dim=1)
        masked = F.pad(~attended, (0, 1))  # the state is attended always
        attention, _ = self.attention(queries, keys, keys, key_padding_mask=masked, need_weights=False)
        states = self.attention_norm(queries + self.dropout(attention))
        output: Tensor = self.output(self.output_norm(states + self.dropout(self.feed_forward(states))))
        return output


def find_language_head(model: MllmRetrieverModel, args: CoralConfig) -> Tensor | None:
    """Return the frozen output embeddings `(V, D)` of the language decoder, as `CoralConfig.language_head` says.

    Only the file that holds the head is downloaded and opened. None if no file has one: then it is tied to the input
    embeddings.
    """
    name = str(args.language_head or model.config.backbone_config.name_or_path)
    if not args.weights or "language" not in args.reconstruct or name in ("", "None"):  # of a saved retriever
        return None
    if args.language_head is None:
        config = AutoConfig.from_pretrained(fetch_small_files(name), trust_remote_code=False)
        if config.get_text_config().num_hidden_layers > model.config.keep_layers:
            return None
    folder, shards = find_shards(name, lambda key: key.endswith(HEAD))
    for shard in shards:
        with reading(folder / shard), safe_open(str(folder / shard), framework="pt") as file:
            for key in filter(lambda key: key.endswith(HEAD), file.keys()):
                head: Tensor = file.get_tensor(key)
                return head.to(args.device)
    return None
