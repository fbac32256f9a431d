"""Run a recipe: build the trainer, train, and save the model."""

import json
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin

from .features import cache_run_features, collate_features
from .method import METHODS
from .models import build_model
from .recipe import Recipe
from .trainer import RetrievalTrainer


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
        ValueError: A batch is larger than the training data, or a section does not fit the model or the data.
    """
    method, training = METHODS[recipe.method], recipe.training
    rows, evaluation = recipe.data.load()
    run = Run(recipe, model, processor, rows, rows, evaluation)
    collator = None
    if recipe.features is not None:
        run.train_dataset, run.eval_dataset = cache_run_features(
            recipe.features, model, processor, rows, evaluation, training
        )
        collator = collate_features
    rows_per_step = training.per_device_train_batch_size * training.world_size
    if isinstance(run.train_dataset, Sized) and len(run.train_dataset) < rows_per_step:
        raise ValueError(
            f"a batch of {rows_per_step} rows (per_device_train_batch_size times devices) is larger than the training "
            f"data of {len(run.train_dataset)} rows: no step is possible"
        )
    arguments = {
        "train_dataset": run.train_dataset,
        "eval_dataset": run.eval_dataset,
        "data_collator": collator,
        "processing_class": processor,
    }
    if method.prepare is not None:
        arguments |= method.prepare(run)
    make_trainer: Callable[..., RetrievalTrainer] = method.trainer
    return make_trainer(model, training, **arguments)


def train(recipe: Recipe, resume: bool = False) -> RetrievalTrainer:
    """Run a recipe and write the model, its processor and `recipe.json` to `output_dir`.

    Args:
        recipe: The recipe.
        resume: Resume from the last checkpoint in `output_dir`.
    """
    torch.manual_seed(recipe.training.seed)
    model, processor = build_model(recipe.model)
    trainer = build_trainer(recipe, model, processor)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()
    if trainer.args.should_save:
        record: dict[str, Any] = {"method": recipe.method, "model": asdict(recipe.model), "data": asdict(recipe.data)}
        optional = {"features": recipe.features, **recipe.sections}
        record |= {name: asdict(section) for name, section in optional.items() if section is not None}
        record |= {"training": recipe.training.to_sanitized_dict(), "log": trainer.state.log_history}
        path = Path(str(trainer.args.output_dir)) / "recipe.json"
        path.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
    return trainer
