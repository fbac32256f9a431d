"""Teachers of a pruned model: the whole un-pruned model, or its deep layers on top of the student's layers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.shortcuts import use_shortcuts, without_shortcuts

DeepTeacher = Callable[[MllmRetrieverModel, Mapping[str, Any]], tuple[Tensor, Tensor]]
"""Maps the student and the inputs of N items to both models' states at the readout position, `(N, D)` each.

The states follow the final norm and are not L2-normalised; the teacher's states have no gradient.
"""


class FullTeacher:
    """A frozen un-pruned model, as in the authors' code.

    Args:
        model: The model; it will be frozen and set to evaluation mode.
    """

    def __init__(self, model: MllmRetrieverModel) -> None:
        self.model = model.requires_grad_(False).eval()
        use_shortcuts(model)

    def __call__(self, student: MllmRetrieverModel, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        states = student(**inputs).pooler_output
        with torch.no_grad():
            return states, self.model(**inputs).pooler_output

    def to(self, device: torch.device) -> "FullTeacher":
        self.model.to(device)
        return self


class SharedTeacher:
    """The pruned-away layers, frozen, applied to the output of the student's layers (PUMA Fig. 2).

    It needs half the memory of a full teacher and skips the first layers, but it changes with the student.

    Args:
        model: The un-pruned model; only the layers from `keep_layers` on stay in memory.
        keep_layers: Number of layers of the student.
    """

    def __init__(self, model: MllmRetrieverModel, keep_layers: int) -> None:
        language_model: Any = model.text_model
        self.layers = nn.ModuleList(list(language_model.layers)[keep_layers:]).requires_grad_(False).eval()

    def __call__(self, student: MllmRetrieverModel, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Run the student, and the deep layers on its states of all tokens.

        A hook on the language model's norm (an identity) stacks the deep states with the student's states, so the
        retriever's final norm applies to both.
        """
        arguments: dict[str, Any] = {}
        language_model: Any = student.text_model

        def remember(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments.update(kwargs)

        def stack(_module: nn.Module, _args: tuple[Tensor], shallow: Tensor) -> Tensor:
            return torch.stack([shallow, self._go_deeper(shallow, arguments)], dim=2)

        hooks = [
            language_model.layers[-1].register_forward_pre_hook(remember, with_kwargs=True),
            language_model.norm.register_forward_hook(stack),
        ]
        try:
            with without_shortcuts(student):
                both = student(**inputs).pooler_output
        finally:
            for hook in hooks:
                hook.remove()
        return both[:, 0], both[:, 1].detach()

    @torch.no_grad()
    def _go_deeper(self, states: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Run the deep layers on `(N, T, D)`."""
        for layer in self.layers:
            states = layer(states, **arguments)
        return states

    def to(self, device: torch.device) -> "SharedTeacher":
        self.layers.to(device)
        return self


def make_teacher(kind: str, model: MllmRetrieverModel, student: MllmRetrieverModel) -> FullTeacher | SharedTeacher:
    """Create a teacher from an un-pruned model.

    Args:
        kind: `"full"` or `"shared"`.
        model: The un-pruned model; a `"shared"` teacher keeps only its deep layers.
        student: The pruned model.

    Raises:
        ValueError: The kind is unknown, or the student is not the model with fewer layers.
    """
    depths = [each.config.keep_layers for each in (student, model)]
    widths = [each.config.get_text_config().hidden_size for each in (student, model)]
    if depths[0] >= depths[1] or widths[0] != widths[1]:
        raise ValueError(
            f"the teacher must be the un-pruned student: it has {depths[1]} layers of width {widths[1]}, "
            f"the student {depths[0]} of width {widths[0]}"
        )
    if kind == "full":
        return FullTeacher(model)
    if kind == "shared":
        return SharedTeacher(model, depths[0])
    raise ValueError(f'unknown teacher {kind!r}; expected "full" or "shared"')
