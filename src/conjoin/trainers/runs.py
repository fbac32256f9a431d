"""Run a recipe: count what it would do; or build its trainer, train until it ends or a signal comes, and save."""

import math
import os
import shutil
import signal
from collections.abc import Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from conjoin.data import SkippedFile
from conjoin.data.row_checks import remove_skipped
from conjoin.hub import check_model
from conjoin.hub.build import empty_model, empty_towers
from conjoin.losses.gather import is_distributed
from conjoin.processing import MllmRetrieverProcessor
from conjoin.storage import locked, make_folder
from conjoin.trainers.base import RetrievalTrainer
from conjoin.trainers.peft import add_adapters, save_adapter
from conjoin.trainers.recipe import SAMPLE, Recipe, check_folder, class_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\ninterrupted: saving a checkpoint after this step; press Ctrl-C again to stop without it\n"
GIGABYTE = 1e9
ADAM_BYTES = 16
"""Bytes of a trained parameter: weight, gradient and two moments of Adam, in float32."""


def describe_run(recipe: Recipe) -> str:
    """Return the numbers of a run as text; rows are opened, no weight is read.

    Raises:
        FileNotFoundError: The model or the rows are missing.
        ValueError: A part does not fit another.
    """
    args, model_args = recipe.training, recipe.model
    rows, evaluation = recipe.data.load(args.seed)
    batch = args.per_device_train_batch_size * args.world_size
    per_step = batch * args.gradient_accumulation_steps
    count = len(rows) if isinstance(rows, Sized) else None
    steps, epochs = args.max_steps, ""
    if steps <= 0 and count is not None:
        steps = math.ceil(max(count // batch // args.gradient_accumulation_steps, 1) * args.num_train_epochs)
        epochs = f" ({args.num_train_epochs:g} epochs)"
    held = "" if evaluation is None else f", {len(evaluation):,} of evaluation"
    unfilled = "" if count is None or count >= batch else ", which the rows do not fill"
    per_device = f"{args.world_size} x {args.per_device_train_batch_size}"
    shown = [
        f"rows:       {'a stream' if count is None else f'{count:,}'}{held}",
        f"batch:      {batch:,} ({per_device}), {per_step:,} rows per step{unfilled}",
        f"steps:      {steps:,}{epochs}, of which {args.get_warmup_steps(steps):,} of warm-up",
    ]
    vision, text = model_args.vision_model_name_or_path, model_args.text_model_name_or_path
    options: Any = model_args.model_init_kwargs or {}
    name = model_args.model_name_or_path
    if name is not None and name != SAMPLE:
        check_model(name)
        model = empty_model(name, **options)
        model_args.choose_parameters(model)
    elif SAMPLE in (vision, text) or vision is None or text is None or model_args.model_type is None:
        model, _ = model_args.load()  # small, and in the package; or an error
    else:
        model = empty_towers(model_args.model_type, vision, text, **options)
        model_args.choose_parameters(model)
    adapters = model_args.peft_config()
    if adapters is not None:
        add_adapters(model, adapters)
    numbers = [(each.numel(), each.requires_grad) for each in model.parameters()]
    whole, trained = sum(number for number, _ in numbers), sum(number for number, learns in numbers if learns)
    memory = (4 * (whole - trained) + ADAM_BYTES * trained) / GIGABYTE
    shown += [
        f"model:      {model.config.model_type}, {whole / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained",
        f"memory:     {memory:,.1f} GB for weights, gradients and Adam in float32; activations, teachers and the",
        "            parameters of the loss come on top: gradient_cache_chunk_size limits the activations",
    ]
    return "\n".join(shown)


def build_trainer(recipe: Recipe) -> RetrievalTrainer:
    """Load the model and the rows of a recipe, and make its trainer.

    Raises:
        ValueError: A part does not fit another.
    """
    args, is_query = recipe.training, recipe.data.has_queries and recipe.trainer == "contrastive"
    kind = class_of(f"query_{recipe.trainer}" if is_query else recipe.trainer, "Trainer")
    torch.manual_seed(args.seed)
    model, processor = recipe.model.load()
    folder = Path(str(args.output_dir))
    if args.should_save and not args.resume_from_checkpoint:
        remove_skipped(folder)
    skipped = SkippedFile(folder, args.should_save, args.process_index)
    rows, evaluation = recipe.data.load(args.seed, skipped)
    return kind(model, args, rows, evaluation, processor, peft_config=recipe.model.peft_config())


def train(recipe: Recipe) -> RetrievalTrainer:
    """Build the trainer of a recipe and `run` it.

    Raises:
        ValueError: As `run` and `build_trainer`; or `output_dir` holds a model or checkpoints.
    """
    check_folder(recipe.training)
    trainer = build_trainer(recipe)
    run(trainer)
    return trainer


def run(trainer: RetrievalTrainer) -> None:
    """Train, or resume as `resume_from_checkpoint` says; save the model and `recipe.json`; push if `push_to_hub`.

    The adapters of an embedder with all its layers are also in `adapter`, for PEFT. SIGINT (Ctrl-C) and SIGTERM end
    the run after the next step, with a checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint to resume from.
        KeyboardInterrupt: A signal ended the run; the message says how to resume.
        ValueError: Another process trains into `output_dir`.
    """
    args = trainer.args
    folder = Path(str(args.output_dir))
    with ExitStack() as stack:
        with args.main_process_first(local=False, desc="opening the output folder"):
            if args.should_save:
                make_folder(folder)
                stack.enter_context(locked(folder))
                for path in folder.glob("checkpoint-*") if args.overwrite_output_dir else ():
                    shutil.rmtree(path)
        interruption = Interruption()
        trainer.add_callback(interruption)
        former = {number: signal.signal(number, interruption.request) for number in SIGNALS}
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            trainer.save_model()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        processor, base = trainer.processing_class, args.recipe.get("model_name_or_path")
        is_whole = "keep_layers" not in (args.recipe.get("model_init_kwargs") or {})
        is_embedder = isinstance(processor, MllmRetrieverProcessor) and processor.sentence_files is not None
        adapted = "peft_config" in vars(trainer.encoder) and not trainer.sharding.fsdp
        if args.should_save and is_embedder and adapted and base and is_whole:
            save_adapter(trainer.encoder, folder / "adapter", base)
        trainer.accelerator.wait_for_everyone()  # who loads the model next, on any process, finds it
        if args.push_to_hub:
            trainer.push_to_hub()


class Interruption(TrainerCallback):
    """Ends a run at the next step after SIGINT or SIGTERM, with a checkpoint; a second SIGINT ends it at once.

    transformers' own `enable_jit_checkpoint` knows no SIGINT, and its processes do not agree on the step.

    Raises:
        KeyboardInterrupt: From the trainer, once the checkpoint is saved; the message says how to resume.
    """

    def __init__(self) -> None:
        self._requested = self._stopping = False
        self._process = os.getpid()

    def request(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:  # Ctrl-C reaches the workers of the data loader, too
            return
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        os.write(2, NOTICE)  # a handler may not use buffered streams

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, if a signal reached any process."""
        requested = torch.tensor(float(self._requested))
        if is_distributed():
            requested = requested.to(args.device)
            dist.all_reduce(requested, dist.ReduceOp.MAX)
        if requested and state.global_step < state.max_steps:
            self._stopping = control.should_log = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run after the checkpoint that a signal asked for."""
        if self._stopping:
            raise KeyboardInterrupt(
                f"stopped after step {state.global_step} of {state.max_steps}; checkpoint-{state.global_step} in "
                f"{str(args.output_dir)!r} is complete: run the same with --resume to continue"
            )
