"""Stopping a run by a signal: it saves a checkpoint first."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\ninterrupted: saving a checkpoint after this step; press Ctrl-C again to stop without it\n"


class Interruption(TrainerCallback):
    """Ends a run at the next step after SIGINT or SIGTERM, with a checkpoint; a context manager and a callback.

    The processes of a run agree on the step. A second SIGINT stops at once. In a thread other than the main one,
    signals cannot be handled and keep their meaning.

    Raises:
        KeyboardInterrupt: From the trainer, once the checkpoint is saved; the message says how to resume.
    """

    def __init__(self) -> None:
        self._requested = self._stopping = False
        self._process = os.getpid()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of the data loader, which inherits the handlers
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return  # Ctrl-C reaches workers too; the step still needs their rows
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        os.write(2, NOTICE)  # a handler may not use buffered streams

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Save within an epoch; at its last step wait for the epoch's evaluation, which no resumed run repeats."""
        self._stop(args, state, control, now=not float(state.epoch or 0).is_integer())

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Save at the end of an epoch."""
        self._stop(args, state, control, now=True)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """End the run after the checkpoint that `_stop` asked for."""
        if self._stopping:
            raise KeyboardInterrupt(
                f"stopped after step {state.global_step} of {state.max_steps}; checkpoint-{state.global_step} in "
                f"{str(args.output_dir)!r} is complete: run the same with --resume to continue"
            )

    def _stop(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, now: bool) -> None:
        if self._agree(args) and now and state.global_step < state.max_steps:
            self._stopping = control.should_log = control.should_save = True

    def _agree(self, args: TrainingArguments) -> bool:
        """Whether a signal reached any process."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            requested = torch.tensor(float(self._requested), device=args.device)
            dist.all_reduce(requested, dist.ReduceOp.MAX)
            return bool(requested.item())
        return self._requested
