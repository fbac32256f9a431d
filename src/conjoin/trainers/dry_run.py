"""What a recipe would run: rows, steps, batch, parameters and memory, without weights."""

import math
from collections.abc import Sized
from typing import Any

from conjoin.hub.build import empty_model, empty_towers
from conjoin.trainers.peft import add_adapters
from conjoin.trainers.recipe import SAMPLE, Recipe, check_is_made

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
        check_is_made(name)
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
