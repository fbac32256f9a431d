"""Run a recipe: build the trainer, train until it ends or a signal comes, and save the model."""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, cast

import datasets
import torch
import torch.distributed as dist
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from conjoin.data import SkippedFile, without_problems
from conjoin.data.row_checks import remove_skipped
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor
from conjoin.storage import write_text

from .adapters import save_adapter
from .config import RetrievalConfig
from .features import cache_run_features, collate_features
from .method import METHODS
from .models import build_model
from .recipe import ModelArguments, Recipe
from .run_folder import explain_failed_save, open_run_folder, remove_checkpoints
from .trainer import RetrievalTrainer

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\ninterrupted: saving a checkpoint after this step; press Ctrl-C again to stop without it\n"


@dataclass
class Run:
    """The state of a run that `Method.prepare` receives.

    Args:
        recipe: The recipe.
        model: The model to train.
        processor: Its processor.
        rows: The training rows of the section `data`.
        train_dataset: `rows`, or their cached features.
        eval_dataset: The evaluation rows or their cached features; None without evaluation.
    """

    recipe: Recipe
    model: PreTrainedModel
    processor: ProcessorMixin
    rows: Any
    train_dataset: Any
    eval_dataset: Any


def build_trainer(recipe: Recipe, model: PreTrainedModel, processor: ProcessorMixin) -> RetrievalTrainer:
    """Load the data of a recipe, cache tower features if the recipe asks for it, and build the trainer.

    Raises:
        ValueError: There are too few rows for a batch, or a section does not fit the model or the data.
    """
    method, training = METHODS[recipe.method], recipe.training
    rows, evaluation = recipe.data.load()
    if recipe.data.on_error == "skip" and isinstance(rows, datasets.Dataset):
        rows, bad = without_problems(rows, recipe.data.source)
        if training.should_save:
            SkippedFile(str(training.output_dir)).add(bad)
    run = Run(recipe, model, processor, rows, rows, evaluation)
    _fit_batch(rows, training)
    collator = None
    if recipe.features is not None:
        if recipe.data.has_queries:
            raise ValueError(
                "features: only those of pairs can be cached, not of queries; remove the section features"
            )
        run.train_dataset, run.eval_dataset = cache_run_features(
            recipe.features, model, processor, rows, evaluation, training
        )
        collator = collate_features
    arguments = {
        "train_dataset": run.train_dataset,
        "eval_dataset": run.eval_dataset,
        "data_collator": collator,
        "processing_class": processor,
    }
    if method.prepare is not None:
        arguments |= method.prepare(run)
    if arguments["eval_dataset"] is None and training.eval_strategy != "no":
        raise ValueError(
            "training.eval_strategy asks for evaluation, but there are no evaluation rows: name them by "
            "--data.eval_split or --data.eval_source, or pass --training.eval_strategy no"
        )
    chosen = method.query_trainer if recipe.data.has_queries else None
    make_trainer: Callable[..., RetrievalTrainer] = chosen or method.trainer
    return make_trainer(model, training, **arguments)


def _fit_batch(rows: Any, training: RetrievalConfig) -> None:  # noqa: ANN401 - any dataset
    """Lower a batch size that exceeds the training data: a partial batch is dropped, so no step would be possible."""
    if not isinstance(rows, Sized) or training.per_device_train_batch_size * training.world_size <= len(rows):
        return
    fitting = len(rows) // training.world_size
    if fitting < 2:
        raise ValueError(f"{len(rows)} rows of training data are too few: each device needs 2 or more in a batch")
    note = "per_device_train_batch_size lowered from %d to %d: there are %d rows of training data"
    logger.warning(note, training.per_device_train_batch_size, fitting, len(rows))
    training.per_device_train_batch_size = fitting


def train(recipe: Recipe, resume: bool = False, overwrite: bool = False) -> RetrievalTrainer:
    """Run a recipe; write the model, its processor and `recipe.json` to `output_dir`; with `push_to_hub` push them.

    The adapters of an embedder with all its layers are also in `adapter`, for PEFT.

    SIGINT (Ctrl-C) and SIGTERM end the run after the next step, with a checkpoint.

    Args:
        recipe: The recipe.
        resume: Resume from the last intact checkpoint in `output_dir`.
        overwrite: Replace a model in `output_dir` when the new one is complete; remove its checkpoints when training
            starts.

    Raises:
        FileNotFoundError: There is no checkpoint to resume from.
        KeyboardInterrupt: A signal ended the run; the message says how to resume.
        OSError: The disk is full or fails; the message says which checkpoint is safe. Or the push failed.
        ValueError: `output_dir` holds something that the run would replace, or another process trains into it; and as
            `build_trainer`.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    with open_run_folder(recipe.training, resume, overwrite) as checkpoint:
        if checkpoint is None and recipe.training.should_save:
            remove_skipped(Path(str(recipe.training.output_dir)))
        torch.manual_seed(recipe.training.seed)
        model, processor = build_model(recipe.model)
        trainer = build_trainer(recipe, model, processor)
        folder = Path(str(trainer.args.output_dir))
        if overwrite and trainer.args.should_save:
            remove_checkpoints(folder)
        with Interruption() as interruption:
            trainer.add_callback(interruption)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            with explain_failed_save("the model", folder):
                trainer.save_model()
                if trainer.args.should_save:
                    _save_adapter(recipe.model, trainer, processor, folder / "adapter")
                    write_text(folder / "recipe.json", json.dumps(_record(recipe, trainer), indent=2) + "\n")
            if trainer.args.push_to_hub:
                trainer.push_to_hub()
    return trainer


def _save_adapter(
    arguments: ModelArguments, trainer: RetrievalTrainer, processor: ProcessorMixin, folder: Path
) -> None:
    """Save the adapters of an embedder with all its layers for PEFT, unless they are sharded over devices."""
    is_embedder = isinstance(processor, MllmRetrieverProcessor) and processor.sentence_files is not None
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if not is_embedder or arguments.lora is None or "text_model" not in arguments.lora.towers or sharded:
        return
    if arguments.mllm is not None and arguments.config.get("keep_layers") is None:
        save_adapter(cast(MllmRetrieverModel, trainer.encoder), folder, arguments.mllm)


def _record(recipe: Recipe, trainer: RetrievalTrainer) -> dict[str, Any]:
    """Return the recipe and the log; paths inside the current folder are relative to it."""
    record: dict[str, Any] = {"method": recipe.method, "model": asdict(recipe.model), "data": asdict(recipe.data)}
    optional = {"features": recipe.features, **recipe.sections}
    record |= {name: asdict(section) for name, section in optional.items() if section is not None}
    record |= {"training": recipe.training.to_sanitized_dict(), "log": trainer.state.log_history}
    here, plain = f"{Path.cwd()}{os.sep}", json.loads(json.dumps(record, default=str))
    return _replace_text(plain, lambda text: text.removeprefix(here))


def _replace_text(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _replace_text(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [_replace_text(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


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
