"""Which terms of a loss train the model: their shares of its gradient, in the first and the last step."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from conjoin.trainers.base import RetrievalTrainer

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.01
"""The share of a term in the gradient below which it is said to be idle."""
MOST_OWN = 0.98
"""The error from a decoder's own state, as a share of that from another's, from which it is said to ignore it."""


class TermShares:
    """Measures the norm of each term's gradient, as a share of the sum of these norms.

    The gradient is that at the embeddings. Where terms act on states before them, `embed` names these in `states`, and
    the gradient is taken there.

    Attributes:
        states: States of the rows embedded last; empty where all terms act on embeddings.
        pending: The gradient of each term at the outputs of the whole batch, which the gradient cache pulls back to
            the states of each chunk.
    """

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.pending: dict[str, dict[str, Tensor]] = {}
        self._squares: dict[str, Tensor] = {}

    def measure(
        self, terms: Mapping[str, Tensor], embeddings: Mapping[str, Tensor], chunk_terms: Mapping[str, Tensor]
    ) -> None:
        """Measure the losses among `terms`, if there are several, while their graph is there."""
        losses = {name.removesuffix("_loss"): term for name, term in terms.items() if name.endswith("_loss")}
        outputs = dict(embeddings)
        if self.states:
            outputs |= chunk_terms
        else:
            losses = {name: term for name, term in losses.items() if name not in chunk_terms}
        outputs = {name: output for name, output in outputs.items() if output.requires_grad}
        if len(losses) < 2 or not outputs:
            return
        self._squares, self.pending = {}, {}
        for name, term in losses.items():
            given = list(outputs.values()) if term.requires_grad else []
            found = torch.autograd.grad(term, given, retain_graph=True, allow_unused=True) if given else []
            reached = {key: each for key, each in zip(outputs, found, strict=False) if each is not None}
            if not self.states:
                self._add(name, reached.values())
            elif self.states[0].requires_grad:
                self.pull(name, [outputs[key] for key in reached], list(reached.values()))
            else:  # states of the first pass of the gradient cache
                self.pending[name] = reached

    def pull(self, name: str, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add what gradients of a term at some outputs are at the states."""
        found = torch.autograd.grad(outputs, self.states, gradients, retain_graph=True, allow_unused=True)
        self._add(name, found)

    def _add(self, name: str, gradients: Iterable[Tensor | None]) -> None:
        square = sum((each.float().square().sum().cpu() for each in gradients if each is not None), torch.zeros(()))
        self._squares[name] = self._squares.get(name, torch.zeros(())) + square

    def log(self, logs: dict[str, Any], trainer: "RetrievalTrainer") -> None:
        """Add the shares that were measured, and warn of a term that hardly trains and a decoder without effect."""
        norms = {name: square.sqrt() for name, square in self._squares.items()}
        total, step = sum(norms.values(), torch.tensor(1e-30)), trainer.state.global_step
        weights = [each.name for each in fields(trainer.args) if each.name.endswith("_weight")]
        for number, (name, norm) in enumerate(norms.items()):
            share = (norm / total).reshape(1).to(trainer.args.device)
            logs[f"{name}_share"] = value = trainer.accelerator.gather(share).mean().item()
            fitting = next((each for each in weights if name.startswith(each.removesuffix("_weight"))), "its weight")
            if number and value < LEAST_SHARE:
                logger.warning(
                    "%s_loss has %.2g %% of the gradient at step %d, so it hardly trains: raise %s",
                    name, 100 * value, step, fitting,
                )  # fmt: skip
        self._squares, self.pending = {}, {}
        for name in [each.removesuffix("_own") for each in logs if each.endswith("_own")]:
            if step == trainer.state.max_steps and logs[f"{name}_own"] >= MOST_OWN * logs[f"{name}_other"] > 0:
                logger.warning(
                    "%s_own is not below %s_other at the end: the decoder does not read the state; raise "
                    "decoder_learning_rate, or train for more steps",
                    name, name,
                )  # fmt: skip
