"""Gradient cache: embed a large batch in chunks without a graph, then re-run each chunk with its gradient.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (arXiv 2101.06983). The result
equals the plain step: the same loss on the same batch, with the same random numbers in both passes. Computations in
`RetrievalTrainer.cached` run in the first pass only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import recursively_apply, slice_tensors
from torch import Tensor, nn

from conjoin.hub.sentence_model import split_sentence_batch

if TYPE_CHECKING:
    from conjoin.trainers.base import Step

_MASKS = ("attention_mask", "image_view_mask", "text_view_mask")
_TOKENS = {*_MASKS, "input_ids", "special_tokens_mask", "token_type_ids"}
"""The inputs `(N, T)` of a part that have a column for each token, and those of them that say which exist."""


class RandomState:
    """A snapshot of the random state of the CPU and of one accelerator, to repeat dropout exactly."""

    def __init__(self, device: torch.device) -> None:
        self.cpu = torch.get_rng_state()
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self.device: Any = module if hasattr(module, "get_rng_state") else None  # it has no random numbers
        self.arguments = () if device.type == "mps" else (device,)  # it has one generator
        self.state = None if self.device is None else self.device.get_rng_state(*self.arguments)

    def restore(self) -> None:
        """Reset the generators to the recorded state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            self.device.set_rng_state(self.state, *self.arguments)


class Replay:
    """Values of the first pass over some rows, for the second pass. Create it just before the first pass.

    Args:
        device: Device of both passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, RandomState(device)
        self._kept: dict[str, tuple[Any, RandomState]] = {}

    def cached(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return `compute()`; in the second pass return the stored value and restore the random state after it."""
        if name in self._kept:
            value, state = self._kept.pop(name)
            state.restore()
            return value
        value = compute()
        self._kept[name] = value, RandomState(self.device)
        return value


def total_loss(terms: dict[str, Tensor]) -> Tensor:
    """Sum the terms whose names end in `_loss`; other terms are metrics.

    Raises:
        ValueError: There is no such term, or a term is not a scalar.
    """
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.ndim:
            found = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"type {type(term).__name__}"
            raise ValueError(f"the term {name!r} of the loss has {found}; expected a scalar tensor, such as a mean")
    losses = [term for name, term in terms.items() if name.endswith("_loss")]
    if not losses:
        raise ValueError(f"no term of the loss ends in '_loss', only {sorted(terms)}")
    return sum(losses[1:], start=losses[0])


class Chunk(NamedTuple):
    """Rows of a batch that are embedded at once.

    Attributes:
        inputs: `{part: rows}`, of one part.
        indices: `(n,)` the rows in the batch, counted over its parts in turn.
    """

    inputs: dict[str, Any]
    indices: Tensor


def cached_backward(
    step: "Step",
    batch: dict[str, Any],
    chunk_size: int,
    backward: Callable[[Tensor], None],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    max_over_devices: Callable[[int], int] = lambda count: count,
    chunk_tokens: int = 0,
) -> dict[str, Tensor]:
    """Run one forward and backward over `batch` with the graph of at most `chunk_size` rows in memory.

    Args:
        step: `embed` is called twice per chunk, `terms` once on all rows.
        batch: Parts with model inputs, and inputs of the loss; see `split_rows`.
        chunk_size: Rows whose activations are in memory at once; 0 if `chunk_tokens` alone limits them.
        backward: Receives the total loss, scales it like the trainer, and runs backward.
        autocast: Creates a fresh mixed-precision context for each pass: a pass must not reuse weights that an earlier
            pass cast without a graph.
        max_over_devices: Returns the number of chunks to embed, given those of this device. With sharded weights, all
            devices embed equally many: after its last chunk a device embeds it again, with a gradient of zero.
        chunk_tokens: Most tokens of a chunk, its padding included; see `split_rows`. 0 for no such limit.

    Returns:
        The loss terms, detached.
    """
    chunks = list(split_rows(batch, chunk_size, chunk_tokens))
    count = len(chunks)
    chunks += chunks[-1:] * (max_over_devices(count) - count)
    device = next(step.parameters()).device
    replays, parts, chunk_terms = [], [], []
    with torch.no_grad(), autocast():
        for chunk in chunks:
            step.replay = Replay(device)
            replays.append(step.replay)
            embeddings, terms_of_chunk = step.embed(**chunk.inputs)
            parts.append(embeddings)
            chunk_terms.append(terms_of_chunk)
    step.replay, end_state = None, RandomState(device)
    orders = _orders(chunks[:count], parts)
    leaves = {
        name: torch.cat([part[name] for part in parts[:count] if name in part])[order.argsort().to(device)]
        for name, order in orders.items()
    }
    sizes = [len(chunk.indices) for chunk in chunks]
    repeated: dict[str, list[Tensor]] = {}  # for each row of its chunk
    for size, of_chunk in zip(sizes[:count], chunk_terms, strict=False):
        for name, term in of_chunk.items():
            term = term.to(torch.promote_types(term.dtype, torch.float32))
            repeated.setdefault(name, []).append(term.expand(size))
    means = {name: torch.cat(terms).mean() for name, terms in repeated.items()}
    for leaf in (*leaves.values(), *means.values()):
        leaf.requires_grad_(leaf.is_floating_point())
    with autocast():
        terms = step.terms(leaves, means, batch)
    backward(total_loss(terms))
    replayed = dict.fromkeys(leaves, 0)
    for number, (chunk, replay) in enumerate(zip(chunks, replays, strict=True)):
        replay.start.restore()
        step.replay = replay
        with autocast():
            embeddings, terms_of_chunk = step.embed(**chunk.inputs)
        outputs: list[_Output] = []
        for name, rows in embeddings.items():
            start, replayed[name] = replayed[name], replayed[name] + len(rows)
            places = orders[name][start : replayed[name]].to(device)
            outputs.append(_Output(name, rows, places, 1.0 if number < count else 0.0))
        for name, term in terms_of_chunk.items():
            share = sizes[number] / sum(map(len, repeated[name])) if number < count else 0.0
            outputs.append(_Output(name, term, ..., share))
        shares = step.trainer.shares
        for name, gradients in shares.pending.items():
            shares.pull(name, *_reached(outputs, gradients))
        gradients = {name: leaf.grad for name, leaf in (leaves | means).items() if leaf.grad is not None}
        torch.autograd.backward(*_reached(outputs, gradients))
    step.replay = None
    end_state.restore()
    return {name: term.detach() for name, term in terms.items()}


class _Output(NamedTuple):
    """What a chunk returned, with its places among the rows of the batch, and its share of their gradient."""

    name: str
    value: Tensor
    places: Any
    share: float


def _reached(outputs: Sequence[_Output], gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of a chunk that gradients of the batch reach, and the gradients there."""
    found = [each for each in outputs if each.name in gradients and each.value.requires_grad]
    parts = [
        (gradients[each.name][each.places] * each.share).to(each.value.dtype)
        if each.share
        else torch.zeros_like(each.value)  # of a chunk that is embedded again, which has no places
        for each in found
    ]
    return [each.value for each in found], parts


def _orders(chunks: Sequence[Chunk], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return for each output of `embed` where its rows `(n,)`, chunk by chunk, stand among those of the batch.

    An output with another number of rows than the chunks, such as the concatenated tokens of all rows, stays in the
    order of the chunks; only trainers that need the order of the batch have such outputs.
    """
    orders: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts[: len(chunks)] for name in part):
        with_name = [(chunk, part[name]) for chunk, part in zip(chunks, parts, strict=False) if name in part]
        indices, count = torch.cat([chunk.indices for chunk, _ in with_name]), sum(len(rows) for _, rows in with_name)
        orders[name] = indices.argsort().argsort() if len(indices) == count else torch.arange(count)
    return orders


def split_rows(batch: Mapping[str, Any], chunk_size: int, chunk_tokens: int = 0) -> Iterator[Chunk]:
    """Split each part of a batch in turn into chunks of at most `chunk_size` rows.

    With `chunk_tokens`, the rows of a part are sorted by their number of tokens, longest first, and a chunk takes rows
    while they have at most so many tokens together, padded to the longest of them. Columns that are padding in all
    rows of a chunk are dropped. A single longer row is a chunk of its own.

    Tensors outside the parts are skipped: they are inputs of the loss, which sees the whole batch.

    Args:
        batch: Parts with model inputs.
        chunk_size: Most rows; 0 for no limit, if there is one of tokens.
        chunk_tokens: Most tokens, 0 for no limit.

    Raises:
        ValueError: There is no part, the tensors of a part differ in length, or no limit is positive.
    """
    parts = {name: part for name, part in batch.items() if isinstance(part, Mapping)}
    if min(chunk_size, chunk_tokens) < 0 or not (chunk_size or chunk_tokens) or not parts:
        raise ValueError(f"cannot cut a batch with the parts {sorted(parts)} into chunks of {chunk_size} rows")
    start = 0
    for name, part in parts.items():
        if "groups" in part:  # of a model of sentence-transformers
            for cut, rows in split_sentence_batch(part, chunk_size, chunk_tokens):
                yield Chunk({name: cut}, rows + start)
            start += len(part["order"])
            continue
        sizes: set[int] = set()
        recursively_apply(lambda value, seen: seen.add(len(value)), dict(part), sizes)
        if len(sizes) != 1:
            raise ValueError(f"cannot cut the part {name!r} with {sorted(sizes)} rows into chunks of {chunk_size}")
        (count,) = sizes
        order, most = torch.arange(count), chunk_size or count
        masks = [part[mask].bool() for mask in _MASKS if mask in part] if chunk_tokens else []
        if not masks:
            for rows in order.split(most):
                place = slice(int(rows[0]), int(rows[-1]) + 1)
                yield Chunk({name: slice_tensors(dict(part), place)}, rows + start)
        else:
            tokens = torch.stack(masks).any(dim=0)  # of any view
            widths = tokens.sum(dim=1).cpu()
            order = widths.argsort(descending=True, stable=True)
        while masks and len(order):
            fitting = min(most, max(1, chunk_tokens // max(1, int(widths[order[0]]))))
            rows, order = order[:fitting], order[fitting:]
            chosen = rows.to(tokens.device)
            inputs = slice_tensors(dict(part), chosen)
            columns = tokens[chosen].any(dim=0).nonzero().flatten().tolist() or [0]
            for key in _TOKENS & inputs.keys():
                inputs[key] = inputs[key][:, columns[0] : columns[-1] + 1]
            yield Chunk({name: inputs}, rows + start)
        start += count


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all ranks in the buckets of DDP, for steps that bypass its forward.

    All backward passes are over, so the one from this zero finds the gradients of all parameters and sends them. A
    parameter that no rank used keeps no gradient, so the optimiser skips it, as on one device.

    Args:
        model: A `Step` in DDP that finds unused parameters, as transformers' trainer sets it.
    """
    model().backward()
