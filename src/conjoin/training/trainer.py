"""The base trainer of all methods, and what it needs to train on a stream."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from conjoin.data import EpochRows, PairCollator, PairStream, SkippedFile
from conjoin.evaluation import best_ranks
from conjoin.evaluation.metrics import integer_labels
from conjoin.hub import model_upload, push, save_model
from conjoin.losses.gather import is_distributed
from conjoin.processing import ImageTextProcessor
from conjoin.processing.sentence_files import SENTENCE_FILES
from conjoin.storage import write_text
from conjoin.training.config import RetrievalConfig
from conjoin.training.features import CachedFeatures
from conjoin.training.gradient_cache import average_gradients, cached_backward
from conjoin.training.lora import merge_lora
from conjoin.training.objective import Objective, total_loss
from conjoin.training.run_folder import (
    begin_checkpoint,
    complete_checkpoint,
    explain_failed_save,
    last_checkpoint,
    remove_old,
)
from conjoin.training.sharded import Sharding

EVAL_KS = (1, 5, 10)
"""The values of k for the hit rates measured in evaluation."""


class StreamTraining:
    """Connects a trainer with its stream.

    Args:
        trainer: The trainer; its configuration gives the batch size, the workers and the seed.
        stream: The training rows.

    Raises:
        ValueError: Workers are persistent.
    """

    def __init__(self, trainer: "RetrievalTrainer", stream: PairStream) -> None:
        self.trainer, self.rows = trainer, stream
        self.rank, self.processes = trainer.args.process_index, trainer.args.world_size
        self.skipped = SkippedFile(str(trainer.args.output_dir), trainer.args.should_save, self.rank)
        trainer.args.ignore_data_skip = True  # the stream itself resumes

    def loader(self) -> DataLoader[Any]:
        """Return the batches of this process from the position of the stream on."""
        args = self.trainer.args
        return self.rows.loader(
            self.trainer.data_collator,
            args.per_device_train_batch_size,
            rank=self.rank,
            processes=self.processes,
            seed=args.seed,
            workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def take(self, batch: Any) -> dict[str, Any]:  # noqa: ANN401 - a batch and its mark
        """Return the model inputs of a batch, and record that it is used."""
        inputs, mark = batch
        self.rows.advance(mark)
        self.skipped.add(mark.skipped)
        return inputs

    def save(self, checkpoint: Path) -> None:
        """Write the position of this process to a checkpoint."""
        state = {"processes": self.processes, **self.rows.position}
        write_text(checkpoint / self._name, json.dumps(state) + "\n")

    def load(self, checkpoint: Path) -> None:
        """Continue from the position in a checkpoint.

        Raises:
            FileNotFoundError: It holds no position of this process.
            ValueError: It was written by another number of processes.
        """
        path = checkpoint / self._name
        if not path.is_file():
            raise FileNotFoundError(f"no {self._name} in {str(checkpoint)!r}: the run read no stream")
        state = json.loads(path.read_text(encoding="utf-8"))
        processes = state.pop("processes")
        if processes != self.processes:
            raise ValueError(
                f"the stream was divided among {processes} processes; resume with as many, not {self.processes}"
            )
        self.rows.position = state

    @property
    def _name(self) -> str:
        return f"stream-{self.rank}.json"


class EpochCallback(TrainerCallback):
    """Sets the current epoch of rows and samplers.

    Args:
        followers: Objects with an attribute `epoch`.
    """

    def __init__(self, followers: list[Any]) -> None:
        self.followers = followers

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Set the epoch before its rows are read, also after a resume within an epoch.

        Raises:
            ValueError: Workers are persistent and would repeat the samples of the first epoch.
        """
        if args.dataloader_persistent_workers and self.followers:
            raise ValueError("rows are resampled in every epoch; remove dataloader_persistent_workers")
        for follower in self.followers:
            follower.epoch = int(state.epoch or 0)


class RetrievalTrainer(Trainer):
    """Trains an encoder with a contrastive objective over rows of image-text pairs.

    One forward embeds the batch in every view of `views`. The loss gathers embeddings from all devices with gradient
    and returns named terms. The trainer sums them, scales the sum for gradient accumulation and logs each term.
    Checkpoints contain the full training state (encoder, loss parameters, optimiser, schedule, random state).
    `save_model` writes only the encoder, with LoRA adapters merged, for `AutoModel.from_pretrained`.

    Args:
        model: The encoder, or an `Objective` around it for a method that needs more than a loss over views.
        args: The method's configuration.
        loss: Module that maps embeddings by view to named terms; None with an `Objective`.
        train_dataset: Rows with the columns `image` and `text`, optionally `id` and `group`. `EpochRows` receive the
            current epoch.
        eval_dataset: Rows of the same form, for R@k.
        processing_class: The model's processor.
        data_collator: Maps rows to model inputs; by default a `PairCollator` with the processor.
        kwargs: Passed to `transformers.Trainer` (callbacks, optimizers).
    """

    views: ClassVar[tuple[str, ...]] = ("image", "text")
    args: RetrievalConfig
    model: Objective
    objective: Objective

    def __init__(
        self,
        model: PreTrainedModel | Objective,
        args: RetrievalConfig,
        loss: nn.Module | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: ProcessorMixin | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if data_collator is None:
            if processing_class is None:
                raise ValueError("pass processing_class (the model's processor) or a data_collator")
            data_collator = PairCollator(processing_class)
        if loss is not None and not isinstance(model, Objective):
            model = Objective(model, loss, self.views)
        elif loss is not None or not isinstance(model, Objective):
            raise ValueError(f"pass an encoder and a loss, or an Objective alone; got {type(model).__name__}, {loss}")
        self.objective = model
        if args.gradient_cache_chunk_tokens:
            _check_sortable(model, processing_class)
        model.widths = args.matryoshka_dims
        self._term_sums: dict[str, Tensor] = {}
        self._term_count = 0
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            **kwargs,
        )
        self.sharding = Sharding(self.accelerator, model)
        self.add_callback(self.sharding)
        self.epochs = EpochCallback([train_dataset] if isinstance(train_dataset, EpochRows) else [])
        self.add_callback(self.epochs)
        self.stream = StreamTraining(self, train_dataset) if isinstance(train_dataset, PairStream) else None

    @property
    def encoder(self) -> PreTrainedModel:
        """The encoder being trained."""
        return self.model.encoder

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Train; a stream resumes from its saved state, without reading the rows before."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_checkpoint(Path(str(self.args.output_dir))))
        if self.stream is not None and resume_from_checkpoint:
            self.stream.load(Path(resume_from_checkpoint))
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.args.should_save:  # an interruption after the last checkpoint may have left older ones
            remove_old(Path(str(self.args.output_dir)), self.args.save_total_limit, self.state.best_model_checkpoint)
        return output

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches of this process."""
        return super().get_train_dataloader() if self.stream is None else self.stream.loader()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the batches of a step; none, which ends the training, if it was resumed from its last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """Sum the terms of the objective over one batch."""
        with self.sharding.autocast():
            terms = model(**self._objective_inputs(inputs))
        self._record(terms)
        return total_loss(terms)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run a plain step, or a gradient-cached step if the arguments set the size of a chunk."""
        if self.stream is not None:
            inputs = self.stream.take(inputs)
        self.objective.progress = self.state.global_step / max(self.state.max_steps, 1)
        if not (self.args.gradient_cache_chunk_size or self.args.gradient_cache_chunk_tokens):
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        losses: list[Tensor] = []

        def backward(loss: Tensor) -> None:
            losses.append(loss.detach() / self.current_gradient_accumulation_steps)
            self.sharding.backward(loss / self.current_gradient_accumulation_steps)

        batch = self._objective_inputs(self._prepare_inputs(inputs))
        terms = cached_backward(
            self.model,
            batch,
            self.args.gradient_cache_chunk_size,
            backward,
            self.accelerator.autocast,
            self.sharding.chunk_backward,
            self.sharding.max_over_devices,
            self.args.gradient_cache_chunk_tokens,
        )
        self._record(terms)
        if is_distributed() and not self.sharding.is_sharded and self.accelerator.sync_gradients:
            average_gradients(self.model)
        return losses[0]

    def _objective_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Drop the ids unless `mask_false_negatives` is set."""
        return {name: value for name, value in inputs.items() if name != "ids" or self.args.mask_false_negatives}

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure hit rates between image and text over the whole evaluation set; ties count as misses.

        Rows of one group, and rows of the same text, are right answers for one another.

        Returns:
            `{prefix}_{query}_to_{candidate}_hit_rate@{k}` in both directions, and `{prefix}_mean_hit_rate@{k}`.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if not isinstance(dataset, Dataset | datasets.Dataset):
            raise ValueError(f"expected an eval_dataset with a length to evaluate on, got {type(dataset).__name__}")
        embeddings, labels = self._embed_dataset(dataset)
        ranks = self._rank(embeddings, labels, dataset)
        metrics: dict[str, float] = {}
        for k in EVAL_KS:
            hits = {name: (rank <= k).float().mean().item() for name, rank in ranks.items()}
            metrics |= {f"{metric_key_prefix}_{name}_hit_rate@{k}": hit_rate for name, hit_rate in hits.items()}
            metrics[f"{metric_key_prefix}_mean_hit_rate@{k}"] = sum(hits.values()) / len(hits)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _rank(self, embeddings: dict[str, Tensor], labels: Tensor, dataset: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Return the rank `(N,)` of every row's best match, by direction; rows of equal texts match, too."""
        texts = _text_labels(dataset)
        pairs = [(a, b) for a in ("image", "text") for b in ("image", "text") if a != b and {a, b} <= set(embeddings)]
        same = None if texts is None else (texts, texts)
        return {f"{a}_to_{b}": best_ranks(embeddings[a], embeddings[b], labels, labels, texts=same) for a, b in pairs}

    @torch.no_grad()
    def _embed_dataset(self, dataset: Dataset[Any] | datasets.Dataset) -> tuple[dict[str, Tensor], Tensor]:
        self.model.eval()
        loader = self.accelerator.prepare(
            DataLoader(
                dataset,
                batch_size=self.args.eval_batch_size,
                collate_fn=self.data_collator,
                num_workers=self.args.dataloader_num_workers,
            )
        )
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for batch in loader:
            inputs = self._prepare_inputs(batch)
            named = {"ids": inputs.pop("ids")} if "ids" in inputs else {}
            with self.accelerator.autocast():
                embedded = self.model.encode(**inputs)
            for name, rows in self.accelerator.gather_for_metrics(embedded | named).items():
                parts[name].append(rows)
        self.model.train()
        embeddings = {view: torch.cat(parts[view]).float() for view in self.model.views}
        every_row = torch.arange(len(embeddings[self.model.views[0]]))
        return embeddings, torch.cat(parts["ids"]) if "ids" in parts else every_row

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the matrices only: no decay for biases, norms, the CLS token or a learned temperature."""
        matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the encoder to a folder; inside a checkpoint, save the full training state."""
        if _internal_call and output_dir is not None:
            if self.sharding.fsdp:
                self._save(output_dir, self.sharding.weights())
            else:
                super().save_model(output_dir, _internal_call=True)
            for name in SENTENCE_FILES if self.args.should_save else ():  # a checkpoint is not a model
                Path(output_dir, name).unlink(missing_ok=True)
            return
        folder, weights = str(output_dir or self.args.output_dir), self.sharding.encoder_weights()  # of all processes
        if not self.args.should_save:
            return
        model = merge_lora(self.encoder) if weights is None else self.encoder
        if isinstance(self.processing_class, ProcessorMixin) and model._auto_class is not None:
            save_model(model, self.processing_class, folder, weights)
            return
        model.save_pretrained(folder, state_dict=weights)  # a class without an auto class
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message: str | None = "End of training",
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> str | None:
        """Save the model and push its files and a card in one commit, as `conjoin push` does.

        Args:
            commit_message: Of the commit.
            token: In place of `hub_token`.
            revision: Branch, in place of `hub_revision`.
            kwargs: Passed to `conjoin.hub.model_upload`: `license`, `languages`, `datasets` ...

        Returns:
            The URL of the commit; None on further processes.

        Raises:
            PushError: The Hub refused, failed, or cannot be reached.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model()
        if not self.is_world_process_zero():
            return None
        upload = model_upload(str(self.args.output_dir), str(self.hub_model_id), **kwargs)
        settings = {"revision": revision or self.args.hub_revision, "message": commit_message}
        # `init_hf_repo` made the repository, as `hub_private_repo` says
        return push(upload, public=True, replace=True, api=HfApi(token=token or self.args.hub_token), **settings)

    def objective_weights(self) -> dict[str, Tensor]:
        """Return the weights of the objective, whole on the main process; all processes must call this."""
        state = self.sharding.weights()
        return self.objective.state_dict() if state is None else state

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ANN401 - of a hyperparameter search
        """Write a checkpoint with checksums. Older ones are removed after that; `transformers` has no hook between."""
        folder = Path(self._get_output_dir(trial))
        checkpoint, limit = folder / f"checkpoint-{self.state.global_step}", self.args.save_total_limit
        with explain_failed_save(checkpoint.name, folder):
            if self.args.should_save:
                begin_checkpoint(checkpoint)
            self.accelerator.wait_for_everyone()
            self.args.save_total_limit = None
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.save_total_limit = limit
            if self.stream is not None:
                self.stream.save(checkpoint)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                complete_checkpoint(checkpoint)
                remove_old(folder, limit, self.state.best_model_checkpoint)

    def _record(self, terms: dict[str, Tensor]) -> None:
        for name, term in terms.items():
            self._term_sums[name] = self._term_sums.get(name, torch.zeros_like(term)) + term.detach()
        self._term_count += 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the mean of every loss term since the last log, over all devices, to the log entry."""
        if self._term_count and "loss" in logs:
            logs |= {name: self._mean(value / self._term_count) for name, value in self._term_sums.items()}
            self._term_sums, self._term_count = {}, 0
        super().log(logs, start_time)

    def _mean(self, value: Tensor) -> float:
        return self.accelerator.gather(value.detach().float().reshape(1)).mean().item()


def _check_sortable(objective: Objective, processor: ProcessorMixin | None) -> None:
    """Refuse chunks of a number of tokens where padding has a meaning.

    Raises:
        ValueError: The objective compares single tokens, or the text tower was trained on texts of one length.
    """
    problem = None
    if not objective.sorts_rows:
        problem = f"{type(objective).__name__} needs rows in their order, with their padding"
    elif isinstance(processor, ImageTextProcessor) and processor.text_padding == "max_length":
        problem = "the processor pads all texts to one length (text_padding='max_length')"
    if problem is not None:
        raise ValueError(f"gradient_cache_chunk_tokens cannot be used: {problem}; set gradient_cache_chunk_size")


def _text_labels(dataset: Any) -> Tensor | None:  # noqa: ANN401 - any rows
    """Return a label `(N,)` of each row's text, equal for equal texts; None if rows have no texts or hide them."""
    if isinstance(dataset, CachedFeatures):
        return dataset.first_texts
    if not isinstance(dataset, datasets.Dataset) or "text" not in dataset.column_names:
        return None
    return integer_labels([row if text is None else text for row, text in enumerate(dataset["text"][:])])[0]
