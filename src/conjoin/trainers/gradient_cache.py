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
    replays: list[Replay] = []
    parts: list[dict[str, Tensor]] = []
    names: dict[str, None] = {}  # of terms
    with torch.no_grad(), autocast():
        for chunk in chunks:
            step.replay = Replay(device)
            replays.append(step.replay)
            embeddings, chunk_terms = step.embed(**chunk.inputs)
            outputs = embeddings | chunk_terms
            parts.append({name: each.detach() for name, each in outputs.items()})
            names |= dict.fromkeys(chunk_terms)
    step.replay, end_state = None, RandomState(device)
    leaves = [each.requires_grad_() for part in parts for each in part.values() if each.is_floating_point()]
    joined = {
        name: _join([(chunk, part[name]) for chunk, part in zip(chunks[:count], parts, strict=False) if name in part])
        for name in dict.fromkeys(name for part in parts for name in part)
    }
    means = {name: joined.pop(name) for name in names}
    with autocast():
        terms = step.terms(joined, means, batch)
    shares, pending = step.trainer.shares, {}
    for name, at in shares.pending.items():
        whole = [(joined | means)[output] for output in at]
        found = torch.autograd.grad(whole, leaves, list(at.values()), retain_graph=True, allow_unused=True)
        pending[name] = dict(zip(map(id, leaves), found, strict=True))
    backward(total_loss(terms))
    for number, (chunk, replay) in enumerate(zip(chunks, replays, strict=True)):
        replay.start.restore()
        step.replay = replay
        with autocast():
            embeddings, chunk_terms = step.embed(**chunk.inputs)
        known = parts[min(number, count - 1)]
        trained = [(each, known[name]) for name, each in (embeddings | chunk_terms).items() if each.requires_grad]
        for name, gradients in pending.items():
            reached = [each for each, leaf in trained if gradients[id(leaf)] is not None]
            shares.pull(name, reached, [gradients[id(leaf)] for _, leaf in trained if gradients[id(leaf)] is not None])
        reached = [each for each, leaf in trained if leaf.grad is not None]
        given = [leaf.grad for _, leaf in trained if leaf.grad is not None]
        torch.autograd.backward(reached, given if number < count else [torch.zeros_like(each) for each in reached])
    step.replay = None
    end_state.restore()
    return {name: term.detach() for name, term in terms.items()}


def _join(parts: Sequence[tuple[Chunk, Tensor]]) -> Tensor:
    """Join what chunks returned under one name: rows in the order of the batch, scalars as their mean over rows.

    Outputs with another number of rows than the chunks, such as the concatenated tokens of all rows, stay in the order
    of the chunks; only trainers that need the order of the batch have such outputs.
    """
    if not parts[0][1].ndim:
        repeated = [term.expand(len(chunk.indices)) for chunk, term in parts]
        return torch.cat([term.to(torch.promote_types(term.dtype, torch.float32)) for term in repeated]).mean()
    indices, rows = torch.cat([chunk.indices for chunk, _ in parts]), torch.cat([rows for _, rows in parts])
    return rows[indices.argsort().to(rows.device)] if len(indices) == len(rows) else rows


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
        if masks:
            tokens = torch.stack(masks).any(dim=0)  # of any view
            widths = tokens.sum(dim=1).cpu()
            order = widths.argsort(descending=True, stable=True)
        while len(order):
            fitting = min(most, max(1, chunk_tokens // max(1, int(widths[order[0]])))) if masks else most
            rows, order = order[:fitting], order[fitting:]
            chosen: Any = rows.to(tokens.device) if masks else slice(int(rows[0]), int(rows[-1]) + 1)
            inputs = slice_tensors(dict(part), chosen)
            if masks:
                columns = tokens[chosen].any(dim=0).nonzero().flatten().tolist() or [0]
                inputs |= {key: inputs[key][:, columns[0] : columns[-1] + 1] for key in _TOKENS & inputs.keys()}
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
