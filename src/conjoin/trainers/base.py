"""The base of all trainers: `embed` and `loss_terms` in one forward, in a `Trainer` that keeps its habits."""

import copy
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from inspect import signature
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args, get_origin

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from huggingface_hub import HfApi
from peft.helpers import disable_input_dtype_casting
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalPrediction, HubStrategy, rotate_checkpoints

import conjoin
from conjoin.data import EpochRows, PairCollator
from conjoin.data.cells import is_missing
from conjoin.data.collators import TEXT_IDS
from conjoin.data.columns import ROLES, grade_columns, guess_columns, require_columns, undecoded
from conjoin.devices import choose_bf16
from conjoin.evaluation import best_ranks
from conjoin.hub import load_trainable, save_model
from conjoin.hub.folder import MODELS
from conjoin.hub.load import export_problem
from conjoin.hub.sentence_model import SentenceModel, SentenceProcessor
from conjoin.losses.gather import is_distributed
from conjoin.losses.temperature import Temperature
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing.sentence_files import SENTENCE_FILES
from conjoin.progress import shows_bars
from conjoin.push import model_upload, push
from conjoin.storage import FOLDER_CHECKSUMS, write_checksums, write_text, writing
from conjoin.trainers.checkpoints import check_checkpoint, last_checkpoint, remove_partial
from conjoin.trainers.features import CachedFeatures, collate_features
from conjoin.trainers.gradient_cache import RandomState, Replay, average_gradients, cached_backward, total_loss
from conjoin.trainers.peft import add_adapters, merge_lora
from conjoin.trainers.sharded import Sharding
from conjoin.trainers.shares import TermShares

logger = logging.getLogger(__name__)

EVAL_KS = (1, 5, 10)
"""The values of k for the hit rates measured in evaluation."""
_INHERITED = {each.name for each in fields(TrainingArguments)}
REFUSED: dict[str, tuple[Any, ...]] = {
    "auto_find_batch_size": ("a smaller batch has fewer negatives; see gradient_cache_chunk_size", False),
    "batch_eval_metrics": ("R@k needs all embeddings", False),
    "eval_do_concat_batches": ("R@k needs all embeddings", True),
    "label_smoothing_factor": ("a contrastive loss has no classes to smooth", 0),
    "include_for_metrics": ("compute_metrics gets embeddings and ids, no inputs", [], ["loss"]),
    "gradient_checkpointing_kwargs": (
        "use_reentrant gives no gradient below adapters and frozen layers", None, {}, {"use_reentrant": False},
    ),
    "hub_strategy": (
        "a checkpoint holds the state of training, no model to push; expected 'end', which pushes the trained model",
        HubStrategy.END,
    ),
    "label_names": ("rows are named by the columns group and id", None, []),
    "use_liger_kernel": ("its kernels are those of heads of language models", False),
    "include_num_input_tokens_seen": ("items are images and texts, not tokens", "no"),
    "remove_unused_columns": ("the collator reads whole rows", False),
    "train_sampling_strategy": (
        "rows have no length before they are processed; see gradient_cache_chunk_tokens", "random", "sequential",
    ),
}  # fmt: skip
"""The arguments of `TrainingArguments` that cannot work here: why, and the values that are accepted."""
NO_EFFECT = {"compute_loss_func": "a subclass with its own `loss_terms`", "model_init": "the model itself"}
"""The arguments of `Trainer` that cannot work here, and what to use."""
_ALONE = "alone"
"""The name of the share of batches in which no row had a negative, among the sums of the terms."""


@dataclass
class RetrievalConfig(TrainingArguments):
    """Arguments of `RetrievalTrainer`, added to `transformers.TrainingArguments`.

    Some defaults differ. No column is removed, because the collator reads whole rows. The last partial batch is
    dropped, because padding it would duplicate items, which would become false negatives of each other. R@k is
    evaluated on the whole evaluation set. Without a terminal the log is lines in place of a progress bar. A process
    uses one GPU: `accelerate launch` starts one for each. `push_to_hub` pushes the trained model, no checkpoint.

    Under gradient accumulation every micro-batch is a separate contrastive batch, and the step uses the mean of their
    gradients, so accumulation adds no negatives. To fit a larger batch in memory, set `gradient_cache_chunk_size`.

    Args:
        global_batch_size: Rows of a contrastive batch over all processes, in place of `per_device_train_batch_size`,
            whose default is 8.
        bf16: Compute in bfloat16, with weights in float32; `auto` as for `conjoin.devices.choose_bf16`, unless
            `fp16` or `accelerate launch` sets the precision. It holds the choice afterwards.
        gradient_cache_chunk_size: Rows embedded at once. A batch of any size then fits in memory, but costs a second
            forward pass; 0 runs the plain step.
        gradient_cache_chunk_tokens: Text tokens embedded at once, padding included. Rows are sorted by length and
            padded with rows like them, which is faster where texts differ in length; the gradients are the same. Alone
            or beside `gradient_cache_chunk_size`, which also limits the images of a chunk; 0 for no such limit.
        mask_false_negatives: Do not use rows that share an id (a group) as negatives of each other, and give no batch
            two queries with one positive. False is the papers' plain form: plain shuffling, all others are negatives.
        activation_checkpointing: Compute activations again in the backward pass: less memory, more compute. Earlier
            versions of transformers name it `gradient_checkpointing`.
        matryoshka_dims: Widths to train the embeddings at, such as 64 128 256 384: each contrastive loss is the mean
            over the embeddings cut to each width and normalised again, so vectors can be truncated later. Terms of a
            teacher and of reconstruction keep the whole width. Name the whole width too. Empty for the whole width.
        resume_from_checkpoint: A checkpoint to continue from; `true` for the last one in `output_dir`.
        feature_copies: For a joint encoder with frozen towers: compute their features once, for so many versions of
            each image (the first unchanged, the others augmented), in bfloat16 with `bf16`. 0 trains on images.
        features_dir: Where these features are kept.
        overwrite_output_dir: Replace a model in `output_dir` when the new one is complete; remove its checkpoints when
            training starts.
    """

    per_device_train_batch_size: int = field(default=None)  # type: ignore[assignment]
    global_batch_size: int | None = field(default=None)
    remove_unused_columns: bool = field(default=False)
    dataloader_drop_last: bool = field(default=True)
    bf16: str | None = field(default=None, metadata={"nargs": "?", "const": "true"})  # type: ignore[assignment]
    lr_scheduler_type: str = field(default="cosine")
    logging_steps: float = field(default=10)
    save_total_limit: int | None = field(default=2)
    hub_strategy: str = field(default="end")
    gradient_cache_chunk_size: int = field(default=0)
    gradient_cache_chunk_tokens: int = field(default=0)
    mask_false_negatives: bool = field(default=True)
    activation_checkpointing: bool | None = field(default=None)
    matryoshka_dims: list[int] = field(default_factory=list)
    feature_copies: int = field(default=0)
    features_dir: str = field(default="runs/features")
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"aliases": ["--resume"], "nargs": "?", "const": "true"}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"aliases": ["--overwrite"]})
    recipe: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """The model's and the data's fields, if a recipe was parsed; for `recipe.json`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Append the fields of the classes above to the docstring, for `help`."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            if issubclass(base, RetrievalConfig) and "Args:\n" in (base.__doc__ or ""):
                own = str(base.__doc__).partition("Args:\n")[2].partition("\n\n")[0].rstrip()
                cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n    Fields of {base.__name__}:\n{own}\n"

    def __post_init__(self) -> None:
        if self.activation_checkpointing and "activation_checkpointing" not in _INHERITED:
            self.gradient_checkpointing = True
        asked = str(self.bf16).lower()
        if asked not in ("none", "true", "false", "auto"):
            raise ValueError(f"bf16={self.bf16!r}; expected true, false or auto")
        chosen = asked == "true"
        if asked == "auto" and not self.fp16 and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no":
            gpu = None if self.use_cpu else torch.accelerator.current_accelerator(check_available=True)
            chosen = choose_bf16(gpu or "cpu")
            self.use_cpu |= chosen and gpu is None  # else transformers refuses bfloat16
        self.bf16 = chosen  # type: ignore[assignment]
        if self.disable_tqdm is None:
            self.disable_tqdm = not shows_bars()
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model, self.greater_is_better = "mean_hit_rate@1", True
        given, whole = self.per_device_train_batch_size, self.global_batch_size
        self.per_device_train_batch_size = given or 8  # transformers' default
        super().__post_init__()
        if whole is not None:
            if given is not None:
                raise ValueError("global_batch_size and per_device_train_batch_size exclude each other")
            if whole < 1 or whole % self.world_size:
                raise ValueError(f"global_batch_size={whole} does not divide among {self.world_size} processes")
            self.per_device_train_batch_size = whole // self.world_size
        if self.n_gpu > 1:  # nn.DataParallel would split a contrastive batch
            logger.warning("one of %d GPUs is used; start with `accelerate launch` to use all", self.n_gpu)
            self._n_gpu = 1
        self.dataloader_pin_memory &= torch.accelerator.is_available()  # torch warns if there is no accelerator
        accelerate: Any = self.accelerator_config
        if accelerate.dispatch_batches is None:  # else the first process cuts the batches of a stream in parts
            accelerate.dispatch_batches = False
        self._check()

    @property
    def uses_gradient_cache(self) -> bool:
        """Whether a batch is embedded in chunks."""
        return bool(self.gradient_cache_chunk_size or self.gradient_cache_chunk_tokens)

    def _check(self) -> None:
        """Refuse what cannot work here, and values out of range."""
        for name, (reason, *accepted) in REFUSED.items():
            given: Any = vars(self)[name]
            if given not in accepted:
                raise ValueError(f"{name}={getattr(given, 'value', given)!r}: {reason}")
        if self.neftune_noise_alpha is not None and self.feature_copies:
            raise ValueError("neftune_noise_alpha has no effect on stored features: set feature_copies to 0")
        if self.uses_gradient_cache:
            if self.torch_compile:
                logger.warning("torch_compile has no effect on the steps of the gradient cache")
            if self.ddp_find_unused_parameters is False:
                raise ValueError("ddp_find_unused_parameters=False: DDP sees no forward of the gradient cache")
            if self.torch_empty_cache_steps is not None:
                raise ValueError("torch_empty_cache_steps has no effect on the steps of the gradient cache")
        for each in fields(self):
            value: Any = vars(self).get(each.name)
            if get_origin(each.type) is Literal and value not in get_args(each.type):
                raise ValueError(f"{each.name}={value!r}; expected one of {get_args(each.type)}")
            if each.name.endswith(("_weight", "_chunk_size", "_chunk_tokens")) and value < 0:
                raise ValueError(f"{each.name}={value} must not be negative")
        self.matryoshka_dims = dims = list(self.matryoshka_dims)
        if any(dim < 1 for dim in dims) or len(set(dims)) < len(dims):
            raise ValueError(f"matryoshka_dims={dims}; expected positive numbers, each once")


@dataclass
class TemperatureConfig(RetrievalConfig):
    """Arguments of a contrastive trainer with one temperature.

    Args:
        temperature: Softmax temperature, or its initial value if it is learned.
        learn_temperature: Train the temperature, as CLIP does.
        temperature_learning_rate: Learning rate of a learned temperature; None for `learning_rate`, at which it hardly
            moves.
    """

    temperature: float = field(default=0.07)
    learn_temperature: bool = field(default=True)
    temperature_learning_rate: float | None = field(default=1e-3)


class Step(nn.Module):
    """What DDP and FSDP wrap: the retriever, with what else is trained, and a trainer's hooks as its forward.

    It behaves as the retriever: attributes that it lacks (`config`, `save_pretrained`, `get_input_embeddings` ...) are
    the retriever's, and so is a forward of a processor's output.
    """

    accepts_loss_kwargs = False

    encoder: Any

    def __init__(self, trainer: "RetrievalTrainer", encoder: Any, loss: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss = encoder, loss
        self.trainer = trainer
        self.replay: Replay | None = None

    @property
    def _no_split_modules(self) -> list[str]:
        """The classes of the layers that FSDP gathers one at a time; all devices run each of them equally often."""
        tower: Any = self.encoder
        if isinstance(tower, MllmRetrieverModel):
            tower = tower.backbone.language_model
        elif not self.trainer.same_layers:
            return []
        names = {type(module).__name__ for module in tower.modules()}
        return sorted(names & set(self.encoder._no_split_modules or ()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("encoder"), name)

    def get_input_embeddings(self) -> nn.Module | None:
        """Return those of the retriever; None under FSDP, which would gather them for their own forward alone."""
        return None if self.trainer.accelerator.is_fsdp2 else self.encoder.get_input_embeddings()

    @property
    def config(self) -> PreTrainedConfig:
        """A copy of the retriever's configuration, in which transformers sets tokens and `use_cache`."""
        return copy.deepcopy(self.encoder.config)

    def forward(self, **inputs: Any) -> Any:
        """Return the loss terms of a batch, which has parts; of a processor's output, what the retriever returns.

        Without inputs it returns a zero that depends on a parameter with a gradient, for `average_gradients`.
        """
        if not inputs:
            return next(each.sum() * 0 for each in self.parameters() if each.grad is not None)
        if not any(isinstance(part, Mapping) for part in inputs.values()):
            return self.encoder(**inputs)
        embeddings, chunk_terms = self.embed(**inputs)
        return self.terms(embeddings, chunk_terms, inputs)

    def embed(self, **inputs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the embeddings of some parts of a batch, and the terms that need the states of their tokens."""
        embeddings, terms = self.trainer.embed(self.encoder, inputs), self.trainer.chunk_terms(self.encoder, inputs)
        return embeddings, {name: term if term.is_floating_point() else term.float() for name, term in terms.items()}

    def encode(self, **inputs: Any) -> dict[str, Tensor]:
        """Return the embeddings for evaluation."""
        return self.trainer.embed_for_evaluation(self.encoder, inputs)

    def terms(
        self, embeddings: dict[str, Tensor], chunk_terms: dict[str, Tensor], inputs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Return the loss terms of a whole batch, by its embeddings and the means of what its chunks returned."""
        given = {**inputs, "chunk_terms": chunk_terms} if chunk_terms else inputs
        self.trainer.cuts_embeddings = False
        terms = self.trainer.loss_terms(embeddings, given)
        if self.trainer.args.matryoshka_dims and not self.trainer.cuts_embeddings:
            name = type(self.trainer).__name__
            raise ValueError(
                f"matryoshka_dims has no effect: {name}.loss_terms calls its loss without self.matryoshka"
            )
        state = self.trainer.state
        is_measured = self.trainer.is_in_train and torch.is_grad_enabled() and not self.trainer.sharding.fsdp
        if is_measured and state.global_step in (0, state.max_steps - 1):
            self.trainer.shares.measure(terms, embeddings, chunk_terms)
        return terms


class EpochCallback(TrainerCallback):
    """Sets the epoch of rows and samplers before their rows are read, also after a resume within an epoch.

    Args:
        followers: Objects with an attribute `epoch`.
    """

    def __init__(self, followers: list[Any]) -> None:
        self.followers = followers

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch."""
        for follower in self.followers:
            follower.epoch = int(state.epoch or 0)


class RetrievalTrainer(Trainer):
    """Trains an encoder on rows `{"image", "text", "id"?, "group"?}` by any loss on embeddings.

    A subclass has three hooks: `embed`, from a batch to embeddings; `loss_terms`, from the embeddings of a whole batch
    to all terms of the method, of which those that end in `_loss` are summed; and, for terms that need the states of
    tokens, `chunk_terms`. `make_loss` returns what else is trained, as `self.loss`. The losses gather the embeddings
    from all devices. Checkpoints hold the full training
    state. `save_model` writes the encoder alone, with its adapters merged, as `AutoModel`, sentence-transformers and
    this package load it.

    Args:
        model: A name or folder, or a loaded model: one of this package; CLIP, SigLIP or another module with
            `get_image_features` and `get_text_features`, which score fusion holds; an MLLM or an embedder around one,
            by its name. A loaded model is trained itself, with its `requires_grad` and its adapters (`PeftModel`).
        args: The method's configuration; its defaults when None. Of plain `TrainingArguments`, what differs from their
            defaults is used.
        train_dataset: Rows. `EpochRows` receive the current epoch.
        eval_dataset: Rows of the same form, for R@k, or a dictionary of them.
        processing_class: The model's processor; that of the model's folder when None.
        loss: Module that maps embeddings to one tensor or to named terms. Its `forward` names what it takes: the
            embeddings (`image`, `text`), `ids` `(N,)` and other inputs of the batch. That of the method when None.
        data_collator: Maps rows to a batch.
        peft_config: Adapters of peft to train in place of the weights; see `conjoin.trainers.peft.add_adapters`.
        columns: Names of the columns in the rows by those that the trainer knows: `{"text": "caption"}`. One column
            may have two names, `{"text": "title", "group": "title"}`; several texts are joined, `{"text": ["name",
            "brand"]}`. Those of pairs that are not named are guessed, by `conjoin.data.guess_columns`.
        kwargs: Passed to `transformers.Trainer`: `compute_metrics`, `callbacks`, `optimizers` ...

    Raises:
        ValueError: The model cannot be trained, a column is missing, or an argument has no effect here.
    """

    config_class: ClassVar[type[RetrievalConfig]] = RetrievalConfig
    views: ClassVar[tuple[str, ...]] = ("image", "text")
    """What to embed of each row: `"image"`, `"text"`, `"fused"`."""
    needed_columns: ClassVar[tuple[str, ...]] = ("image", "text")
    same_layers: ClassVar[bool] = True
    """Whether all devices run the same layers in every step: not if one device may have texts and another images."""
    evaluates_loss: bool = True
    """Whether rows of evaluation have what the loss needs, for `eval_loss`."""
    model_class: ClassVar[type[nn.Module]] = nn.Module
    """What a method can train that reads states of tokens, or prompts."""
    supports_token_chunks: ClassVar[bool] = True
    """Whether `embed` may get rows in any order, without the columns of tokens that are padding in all of them."""
    loss_file: ClassVar[str | None] = None
    """The file beside a saved encoder that keeps what else is trained, for a later stage; None to keep nothing."""
    args: RetrievalConfig
    model: Step

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        loss: nn.Module | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        peft_config: Any = None,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        if given := next((name for name in NO_EFFECT if kwargs.get(name) is not None), None):
            raise ValueError(f"{given} has no effect here; expected {NO_EFFECT[given]}")
        args = self.complete_args(model, args)
        encoder, processing_class = load_trainable(model, processing_class)
        is_fitting = isinstance(encoder, self.model_class)  # a name, which keeps its type for mypy
        if not is_fitting:
            raise ValueError(
                f"{type(self).__name__} reads states of tokens or prompts, which a {type(encoder).__name__} does not "
                f"give; expected a {self.model_class.__name__}"
            )
        self.export_problem = export_problem(encoder)
        if self.export_problem:
            logger.warning(
                "save_model will refuse this model: %s; save the object that you passed", self.export_problem
            )
        if processing_class is not None:
            own = self.make_collator(processing_class, encoder, args)
            data_collator = data_collator or own
        elif data_collator is None:
            raise ValueError("pass processing_class (the model's processor) or a data_collator")
        if args.uses_gradient_cache and type(self).compute_loss is not RetrievalTrainer.compute_loss:
            raise ValueError(
                f"{type(self).__name__}.compute_loss would be skipped under the gradient cache; override "
                "`loss_terms`, or set gradient_cache_chunk_size to 0"
            )
        keeps_padding = (
            not self.supports_token_chunks or getattr(processing_class, "text_padding", None) == "max_length"
        )
        if args.gradient_cache_chunk_tokens and keeps_padding:
            raise ValueError(
                f"gradient_cache_chunk_tokens sorts rows and drops padding, which {type(self).__name__} or the "
                "processor (text_padding='max_length') needs; set it to 0 and gradient_cache_chunk_size to the rows"
            )
        if peft_config is not None:
            add_adapters(encoder, peft_config)
        self._term_sums: dict[str, Tensor] = {}
        self._term_count = 0
        self.shares = TermShares()
        self._columns: dict[str, Any] = dict(columns or {})
        self.callers_metrics = kwargs.pop("compute_metrics", None)
        self.evaluated_rows: Any = None
        train_dataset = self.read_rows(train_dataset, "train_dataset")
        eval_dataset = self.read_rows(eval_dataset, "eval_dataset")
        if args.feature_copies:

            def cached(rows: Any, **options: Any) -> Any:
                if isinstance(rows, Mapping):
                    return {name: cached(each, **options) for name, each in rows.items()}
                dtype = torch.bfloat16 if args.bf16 else torch.float32
                options |= {"folder": args.features_dir, "seed": args.seed, "dtype": dtype, "args": args}
                return None if rows is None else CachedFeatures(encoder, processing_class, rows, **options)

            data_collator = collate_features
            train_dataset = cached(train_dataset, copies=args.feature_copies)
            eval_dataset = cached(eval_dataset, first_only=True)
        train_dataset = self.prepare_rows(train_dataset, args)
        if args.dataloader_persistent_workers and isinstance(train_dataset, EpochRows):
            raise ValueError("workers start anew in every epoch of these rows; remove dataloader_persistent_workers")
        super().__init__(
            model=Step(self, encoder, loss if loss is not None else self.make_loss(encoder, args)),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            compute_metrics=self.hit_rates,
            **kwargs,
        )
        if self.accelerator.is_fsdp2 and self.args.neftune_noise_alpha is not None:
            raise ValueError("neftune_noise_alpha has no effect under FSDP")
        self.sharding = Sharding(self.accelerator, self.model)
        if self.sharding.fsdp and isinstance(encoder, SentenceModel):
            raise ValueError("FSDP shards models of this package; train one of sentence-transformers without it (DDP)")
        self.add_callback(self.sharding)
        self.epochs = EpochCallback([train_dataset] if isinstance(train_dataset, EpochRows) else [])
        self.add_callback(self.epochs)

    # What a method defines

    def make_loss(self, model: PreTrainedModel, args: Any) -> nn.Module:
        """Return the loss, with what is trained besides the encoder: a temperature, heads, decoders."""
        return nn.Identity()

    def embed(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings `{view: (N, D)}` of a batch or of some of its rows.

        Args:
            model: The encoder.
            inputs: Parts of the batch by name. A part is the processor's output for some items; dimension 0 of every
                tensor is the item. Pairs are the part `pairs`.
        """
        stacked = model(**inputs["pairs"], views=self.views).pooler_output
        return dict(zip(self.views, stacked.chunk(len(self.views)), strict=True))

    def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return all terms `{name: scalar}` of a batch: those ending in `_loss` are summed, all are logged.

        Args:
            embeddings: What `embed` returned, for all rows.
            inputs: The batch. `inputs["ids"]` `(N,)` is equal for rows that show the same thing, where rows have ids;
                `inputs["chunk_terms"]` are the means over the batch of what `chunk_terms` returned.
        """
        masks = {view: inputs.get("pairs", {}).get(f"{view}_mask") for view in ("image", "text")}
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if any(mask is not None for mask in masks.values()):
            everything = torch.ones_like(next(mask for mask in masks.values() if mask is not None))
            image, text = (everything if mask is None else mask for mask in masks.values())
            given["present"] = torch.stack([image, text, image & text], dim=1)
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self.loss).__name__).lower()

        def loss(embeddings: dict[str, Tensor]) -> dict[str, Tensor]:
            terms = call_loss(self.loss, embeddings | given)
            return {f"{name.removesuffix('_loss')}_loss": terms} if isinstance(terms, Tensor) else terms

        return self.matryoshka(loss, embeddings)

    def chunk_terms(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return terms `{name: scalar}` that need more of a model's states than its embeddings, such as tokens.

        It is called after `embed` with the same `inputs`, where `embed` may leave states. The gradient cache calls it
        for each chunk. `loss_terms` receives the means over the rows of the batch, and weights them. States that
        `embed` names in `self.shares.states` are where the shares of all terms are measured.
        """
        return {}

    def matryoshka(
        self, loss: Callable[[dict[str, Tensor]], dict[str, Tensor]], embeddings: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the terms of a loss; with `matryoshka_dims`, their means over the embeddings cut to each width.

        `loss_terms` wraps its contrastive losses by this (Kusupati et al., "Matryoshka Representation Learning",
        arXiv 2205.13147, Eq. 1), not the terms of a teacher or a decoder.

        Args:
            loss: Maps embeddings to terms.
            embeddings: `{name: (..., D)}`; masks and vectors among them stay whole.

        Raises:
            ValueError: A width is larger than the embeddings.
        """
        widths, self.cuts_embeddings = self.args.matryoshka_dims, True
        terms: dict[str, Tensor] = {}
        for width in widths:
            cut = {name: _cut(value, width) for name, value in embeddings.items()}
            for name, term in loss(cut).items():
                terms[name] = terms.get(name, 0.0) + term / len(widths)
        return terms if widths else loss(embeddings)

    def embed_for_evaluation(self, model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the raw embeddings `{name: (N, D)}` of the unmodified items."""
        return self.embed(model, inputs)

    def learning_rates(self) -> dict[nn.Module, float]:
        """Return the learning rates of modules, in the encoder or the loss, that do not use `learning_rate`."""
        rate = getattr(self.args, "temperature_learning_rate", None)
        return {} if rate is None else {each: rate for each in self.model.modules() if isinstance(each, Temperature)}

    def make_collator(self, processor: Any, model: PreTrainedModel, args: Any) -> Callable[..., Any]:
        """Return what maps rows to a batch."""
        is_made_for_views = isinstance(processor, SentenceProcessor)
        return PairCollator(partial(processor, views=self.views) if is_made_for_views else processor)

    def prepare_rows(self, rows: Any, args: RetrievalConfig) -> Any:
        """Return the training rows as the trainer reads them: with sampled negatives, a teacher's states ..."""
        return rows

    def prepare_evaluation_rows(self, rows: Any) -> Any:
        """Return evaluation rows as the trainer reads them."""
        return rows

    def read_rows(self, rows: Any, name: str) -> Any:
        """Return rows in any container, or each of a dictionary of them, with the columns that this trainer reads.

        Args:
            rows: A dataset, a list of rows, a dictionary of columns, or a table of pandas, polars or pyarrow.
            name: Of the argument, for messages.

        Raises:
            ValueError: It is a path, or a dictionary of splits to train on; a row is no dictionary; or a column is
                missing.
        """
        if isinstance(rows, str | Path):
            raise ValueError(
                f"{name}={str(rows)!r} is a path; expected a dataset: load_dataset(..., split='train') or load_pairs"
            )
        if hasattr(rows, "iloc"):  # of pandas: its cells may be pictures
            rows = rows.to_dict("list")
        elif hasattr(rows, "__arrow_c_stream__"):
            rows = datasets.Dataset(pa.table(rows))
        if isinstance(rows, datasets.Dataset) and rows.format["type"] not in (None, "custom"):
            rows = rows.with_format(None, columns=rows.format["columns"])
        if isinstance(rows, Mapping):
            columns = [*rows.values()]
            known = {*self.needed_columns, *(old for old in self._columns.values() if isinstance(old, str))}
            first = next((each[0] for each in columns if isinstance(each, list) and each), None)
            is_row = isinstance(first, Mapping) and not {*first} <= {"bytes", "path"}  # and no cell of pictures
            if not {*rows} & known and (is_row or not all(isinstance(each, list) for each in columns)):
                if name == "train_dataset":
                    raise ValueError(
                        f"{name} is a {type(rows).__name__}; choose a split: dataset[{next(iter(rows))!r}]"
                    )
                return {each: self.read_rows(value, f"{name}[{each!r}]") for each, value in rows.items()}
            rows = [dict(zip(rows, values, strict=True)) for values in zip(*columns, strict=True)]
        if isinstance(rows, Iterator):
            raise ValueError(f"{name} is a {type(rows).__name__}, which is read once; expected a dataset or a list")
        if isinstance(rows, Sequence | Dataset) and isinstance(rows, Sized) and len(rows):
            if not isinstance(rows[0], Mapping):
                raise ValueError(
                    f"{name}: row 0 is a {type(rows[0]).__name__}; expected a dictionary of its columns, such as "
                    '{"image": ..., "text": ...}'
                )
        return None if rows is None else self.rename_columns(rows)

    def rename_columns(self, rows: Any) -> Any:
        """Return rows with the names of columns that this trainer reads: those of `columns`, the others guessed.

        Raises:
            ValueError: A column is missing.
        """
        is_dataset = isinstance(rows, datasets.Dataset | datasets.IterableDataset)
        transformed = isinstance(rows, datasets.Dataset) and rows.format["type"] == "custom"
        if transformed or (isinstance(rows, Sequence) and rows):
            names = [*rows[0]]
        else:
            names = (rows.column_names or []) if is_dataset else []
        columns = dict(self._columns)
        if names:
            named = [[old] if isinstance(old, str) else old for old in columns.values()]
            require_columns([each for several in named for each in several], names)
        if names and {"image", "text"} <= {*self.needed_columns}:
            guessed = guess_roles(rows, names, columns)
            if guessed:
                shown = ", ".join(f"{role}={old}" for role, old in guessed.items())
                logger.warning("columns are read as %s; %s(columns=...) names others", shown, type(self).__name__)
            columns |= guessed
            warn_of_grades(rows, {*names}.difference(*named))
        lacking = [role for role in self.needed_columns if names and role not in {*names, *columns}]
        if lacking:
            raise ValueError(
                f"found no column of the {lacking[0]} among {', '.join(names)}; name it, "
                f"{type(self).__name__}(columns={{{lacking[0]!r}: ...}})"
            )
        if isinstance(rows, datasets.Dataset) and not transformed and "id" in columns | dict.fromkeys(names):
            warn_of_equal_texts(rows, columns)
        changed = {new: old for new, old in columns.items() if new != old}
        if not changed:
            return rows
        plain = {old: new for new, old in changed.items() if isinstance(old, str)}
        if is_dataset and not transformed and not {*changed} & {*names} and len(plain) == len(changed):
            return rows.rename_columns(plain)
        if isinstance(rows, datasets.IterableDataset):
            return rows.map(lambda row: named_row(row, changed))
        return RenamedRows(rows, changed)

    # The state of a run

    @property
    def encoder(self) -> Any:
        """The encoder being trained."""
        return self.model.encoder

    @property
    def loss(self) -> Any:
        """The trained parts of the loss, such as its temperature."""
        return self.model.loss

    @property
    def progress(self) -> float:
        """The completed share of training, in [0, 1]."""
        return self.state.global_step / max(self.state.max_steps, 1)

    def cached(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute a value without gradient in `embed`; the gradient cache computes it in its first pass only.

        The gradient cache stores the values of all chunks of a batch until the second pass.
        """
        replay = self.model.replay
        return compute() if replay is None else replay.cached(name, compute)

    def complete_args(self, model: Any, args: TrainingArguments | None) -> RetrievalConfig:
        """Return the configuration of this trainer."""
        if isinstance(args, self.config_class):
            return args
        if args is None:
            name = str(model if isinstance(model, str | Path) else getattr(model, "name_or_path", "") or "model")
            return self.config_class(f"{Path(name).name}-{type(self).__name__.removesuffix('Trainer')}")
        known, defaults = {each.name for each in fields(self.config_class) if each.init}, vars(TrainingArguments())
        given = {name: value for name, value in vars(args).items() if name in known and value != defaults.get(name)}
        return self.config_class(**given)

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `Trainer.train`; True resumes from the last checkpoint that is complete.

        Raises:
            DamagedError: A file of the checkpoint is damaged.
            DiskFullError: There is no space for a checkpoint.
            FileNotFoundError: There is no complete checkpoint.
        """
        if resume_from_checkpoint is True or str(resume_from_checkpoint).lower() == "true":
            resume_from_checkpoint = str(last_checkpoint(str(self.args.output_dir)))
        if resume_from_checkpoint and self.args.local_process_index == 0:
            check_checkpoint(resume_from_checkpoint)
            if self.args.save_total_limit is not None:
                remove_partial(str(self.args.output_dir))
        modules = [module for module in self.model.modules() if not isinstance(module, Temperature)]
        if not any(each.requires_grad for module in modules for each in module.parameters(recurse=False)):
            raise ValueError(
                "all parameters of the model are frozen: requires_grad_(True); adapters are loaded for training by "
                "PeftModel.from_pretrained(..., is_trainable=True)"
            )
        with writing(str(self.args.output_dir)):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches of this process.

        Raises:
            ValueError: The rows do not fill a batch.
        """
        step = self.args.train_batch_size * self.args.world_size
        if self.args.dataloader_drop_last and isinstance(self.train_dataset, Sized) and len(self.train_dataset) < step:
            raise ValueError(
                f"{len(self.train_dataset)} rows do not fill a batch of {step}: lower per_device_train_batch_size "
                f"to at most {len(self.train_dataset) // self.args.world_size}"
            )
        return super().get_train_dataloader()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the batches of a step; none, which ends the training, if it was resumed from its last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Sum the terms of one batch."""
        with self.sharding.autocast():
            terms = model(**self._loss_inputs(inputs))
        self._record(terms, inputs)
        return (total_loss(terms), terms) if return_outputs else total_loss(terms)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run a plain step, or a gradient-cached step if the arguments set the size of a chunk."""
        with disable_input_dtype_casting(model, active=bool(self.args.bf16)):  # LoRA computes in bfloat16, too
            if not self.args.uses_gradient_cache:
                return super().training_step(model, inputs, num_items_in_batch)
            model.train()
            terms = cached_backward(
                self.model,
                self._loss_inputs(self._prepare_inputs(inputs)),
                self.args.gradient_cache_chunk_size,
                lambda loss: self.accelerator.backward(loss / self.current_gradient_accumulation_steps),
                self.accelerator.autocast,
                self.sharding.max_over_devices,
                self.args.gradient_cache_chunk_tokens,
            )
            self._record(terms, inputs)
            if is_distributed() and not self.sharding.fsdp and self.accelerator.sync_gradients:
                average_gradients(model)
            return total_loss(terms) / self.current_gradient_accumulation_steps

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with parameter groups of their own for `learning_rates`."""
        is_given, optimizer = self.optimizer is not None, super().create_optimizer(model)
        for module, rate in {} if is_given else self.learning_rates().items():
            own = {id(parameter) for parameter in module.parameters()}
            for group in list(optimizer.param_groups):
                if chosen := [parameter for parameter in group["params"] if id(parameter) in own]:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
                    optimizer.add_param_group({**group, "params": chosen, "lr": rate})
        return optimizer

    def _loss_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Drop the ids unless `mask_false_negatives` is set, and what only evaluation reads."""
        dropped = {TEXT_IDS} if self.args.mask_false_negatives else {TEXT_IDS, "ids"}
        return {name: value for name, value in inputs.items() if name not in dropped}

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the matrices only: no decay for biases, norms, the CLS token or a learned temperature."""
        matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    def _record(self, terms: dict[str, Tensor], inputs: Mapping[str, Any]) -> None:
        """Add up the terms of a batch, and how many batches had no negative, without waiting for the device."""
        loss, ids = total_loss(terms).detach(), inputs.get("ids")
        part = next(part for part in inputs.values() if isinstance(part, Mapping))
        is_alone = loss == 0
        if len(next(value for value in part.values() if isinstance(value, Tensor))) > 1:
            is_alone = is_alone & (ids == ids[0]).all() if ids is not None else torch.zeros_like(is_alone)
        for name, term in (terms | {_ALONE: is_alone.float()}).items():
            self._term_sums[name] = self._term_sums.get(name, torch.zeros_like(term)) + term.detach()
        self._term_count += 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the mean of every loss term since the last log, over all devices, to the log entry.

        Raises:
            ValueError: No batch before the first log had a negative.
        """
        if self._term_count and ("loss" in logs or "train_loss" in logs):
            means = {
                name: self.accelerator.gather((value / self._term_count).detach().float().reshape(1)).mean().item()
                for name, value in self._term_sums.items()
            }
            alone, is_first = means.pop(_ALONE), all("loss" not in entry for entry in self.state.log_history)
            if alone:
                problem = (
                    f"{alone:.0%} of the batches have no negative, so their loss is 0: their "
                    f"{self.args.per_device_train_batch_size} rows are alone or of one group; raise "
                    "per_device_train_batch_size, or correct the column group"
                )
                if is_first and alone == 1:
                    raise ValueError(problem)
                logger.warning(problem)
            logs |= means if "loss" in logs else {}
            self._term_sums, self._term_count = {}, 0
        if "loss" in logs or "train_loss" in logs:
            self.shares.log(logs, self)
        super().log(logs, start_time)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the batches of evaluation rows, with the last partial one.

        Raises:
            ValueError: The rows have no length.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]  # type: ignore[index]
        if not isinstance(rows, Dataset | datasets.Dataset | Sequence | Mapping) and not hasattr(rows, "iloc"):
            raise ValueError(f"expected an eval_dataset with a length to evaluate on, got {type(rows).__name__}")
        known = (self.train_dataset, *(self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else ()))
        if not any(rows is each for each in (*known, self.eval_dataset)):
            rows = self.read_rows(rows, "eval_dataset")
        self.evaluated_rows = rows
        return self.make_loader(self.prepare_evaluation_rows(rows), batch_size=self.args.eval_batch_size)

    def make_loader(self, rows: Any, **settings: Any) -> DataLoader[Any]:
        """Return a loader of batches with the workers of the arguments, one part of it on each process."""
        workers = ("num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context", "in_order")
        known = {name: getattr(self.args, f"dataloader_{name}", None) for name in workers}
        settings |= {name: value for name, value in known.items() if value is not None}
        return self.accelerator.prepare(DataLoader(rows, collate_fn=self.data_collator, **settings))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the batches of the rows of `predict`."""
        return self.get_eval_dataloader(test_dataset)

    @torch.no_grad()
    def prediction_step(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, dict[str, Tensor] | None, Tensor | None]:
        """Return the loss of a batch, its embeddings `{name: (N, D)}`, and the ids of its rows and texts `(N, 2)`.

        An id is -1 where rows have none. The loss is that of the rows as a batch of training.
        """
        inputs = self._prepare_inputs(inputs)
        self.model.eval()
        loss = None
        if self.evaluates_loss:
            state = RandomState(self.args.device)  # training draws the same numbers with and without evaluation
            try:
                with self.accelerator.autocast():
                    loss = total_loss(self.model(**self._loss_inputs(inputs))).mean()
            except ValueError as error:  # the rows lack what only the loss reads
                self.evaluates_loss = False
                logger.warning("evaluation has no eval_loss: %s", error)
            state.restore()
        if prediction_loss_only:
            return loss, None, None
        names = [inputs.pop(name, None) for name in ("ids", TEXT_IDS)]
        with self.accelerator.autocast():
            embeddings = self.model.encode(**inputs)
        first = next(iter(embeddings.values()))
        none = first.new_full((len(first),), -1, dtype=torch.long)
        names = [none if each is None or len(each) != len(first) else each for each in names]
        return loss, embeddings, torch.stack(names, dim=1)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return what a loop runs. A `Step` that accelerate prepared for evaluation would never be wrapped by DDP."""
        if training or self.sharding.fsdp:
            return super()._wrap_model(model, training, dataloader)
        return self.encoder

    def hit_rates(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the hit rates of an evaluation set, by both directions; ties count as misses.

        Rows of one group, and rows of the same text, are right answers for one another. The metrics are
        `{query}_to_{candidate}_hit_rate@{k}`, `mean_hit_rate@{k}`, and what the caller's `compute_metrics` returns for
        an `EvalPrediction` of the embeddings by name and the ids of the rows.
        """
        found, labels = cast("Any", prediction.predictions), cast("Any", prediction.label_ids)
        embeddings = {name: torch.from_numpy(rows).to(self.args.device).float() for name, rows in found.items()}
        alone = -1 - np.arange(len(labels))
        ids, texts = (
            torch.from_numpy(np.where(column < 0, alone, column)).to(self.args.device) for column in labels.T
        )
        ranks = self._rank(embeddings, ids, texts)
        metrics: dict[str, float] = {}
        for k in EVAL_KS:
            hits = {name: (rank <= k).float().mean().item() for name, rank in ranks.items()}
            metrics |= {f"{name}_hit_rate@{k}": rate for name, rate in hits.items()}
            metrics[f"mean_hit_rate@{k}"] = sum(hits.values()) / len(hits)
        if self.callers_metrics is not None:
            prediction.label_ids = labels[:, 0]
            metrics |= self.callers_metrics(prediction)
        return metrics

    def _rank(self, embeddings: Mapping[str, Tensor], ids: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """Return the rank of the best match of every row that has both views, by direction; equal texts match, too."""
        has_pair = {"image", "text"} <= embeddings.keys()
        ranks = {}
        for a, b in permutations([name for name in embeddings if name != "fused" or not has_pair], 2):
            rows = (embeddings[a].any(1) & embeddings[b].any(1)).nonzero()[:, 0]  # a missing view is zero
            labels, named = ids[rows], (texts[rows], texts[rows])
            ranks[f"{a}_to_{b}"] = best_ranks(embeddings[a][rows], embeddings[b][rows], labels, labels, texts=named)
        return ranks

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, and remove older ones only once it is complete: all processes wrote, it has checksums."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            write_checksums(folder, {*files} - {FOLDER_CHECKSUMS})
            rotate_checkpoints(str(folder.parent), limit, self.state.best_model_checkpoint, use_mtime=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the encoder to a folder; inside a checkpoint, save the full training state."""
        if _internal_call and output_dir is not None:
            if self.args.should_save:
                Path(output_dir, FOLDER_CHECKSUMS).unlink(missing_ok=True)  # of an earlier run
            if self.sharding.fsdp:
                self._save(output_dir, self.sharding.weights())
            else:
                super().save_model(output_dir, _internal_call=True)
            for name in SENTENCE_FILES if self.args.should_save else ():  # a checkpoint is not a model
                Path(output_dir, name).unlink(missing_ok=True)
            return
        if self.args.matryoshka_dims:  # a server reads there which widths may be asked for
            self.encoder.config.matryoshka_dimensions = sorted(self.args.matryoshka_dims)
        if self.export_problem:
            raise ValueError(f"the model cannot be saved as a retriever: {self.export_problem}; save your own object")
        folder, weights = str(output_dir or self.args.output_dir), self.sharding.encoder_weights()  # of all processes
        trained = self.sharding.weights() if self.loss_file else {}
        if not self.args.should_save:
            return
        if self.loss_file:  # before the encoder, whose weights say that the folder is whole
            Path(folder).mkdir(parents=True, exist_ok=True)
            own = {name: value.contiguous() for name, value in trained.items() if name.startswith("loss.")}
            save_file({name[5:]: value for name, value in own.items()}, Path(folder, self.loss_file))
        model = merge_lora(self.encoder) if weights is None else self.encoder
        is_own = type(model) in {each for each, _ in MODELS.values()}
        if isinstance(model, SentenceModel) or (is_own and isinstance(self.processing_class, ProcessorMixin)):
            save_model(model, self.processing_class, folder, weights)
        else:  # a class that a caller made
            model.save_pretrained(folder, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__.removesuffix("Trainer")).lower()
        source = getattr(self.encoder, "backbone", self.encoder).name_or_path
        batch = self.args.per_device_train_batch_size * self.args.world_size
        ran = {
            "world_size": self.args.world_size,
            "contrastive_batch": batch,
            "effective_batch": batch * self.args.gradient_accumulation_steps,
            "versions": {each: version(each) for each in ("torch", "transformers", "accelerate", "peft", "datasets")},
            "conjoin": conjoin.__version__,
            "datasets": hub_revisions(self.train_dataset),
        }
        record = (self.args.recipe or {"trainer": name, "model_name_or_path": source or None}) | self.args.to_dict()
        record |= {"ran": ran, "log": self.state.log_history}
        write_text(Path(folder, "recipe.json"), json.dumps(record, indent=2, default=str) + "\n")

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message: str | None = "End of training",
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Save the model and push its files and a card in one commit, as `conjoin push` does.

        Args:
            commit_message: Of the commit.
            token: In place of `hub_token`.
            revision: Branch, in place of `hub_revision`.
            kwargs: Passed to `conjoin.push.model_upload`: `license`, `languages`, `datasets` ...

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


def call_loss(loss: nn.Module, given: Mapping[str, Tensor]) -> Any:
    """Call a loss with what its `forward` names, of embeddings and other inputs; with all if it takes `**kwargs`.

    Raises:
        ValueError: The batch lacks an argument.
    """
    named = signature(loss.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in named):
        return loss(**given)
    for each in named:
        if each.default is each.empty and each.name not in given:
            raise ValueError(
                f"{type(loss).__name__} takes {each.name!r}, which the batch lacks; it has {', '.join(given)}"
            )
    return loss(**{each.name: given[each.name] for each in named if each.name in given})


def guess_roles(rows: Any, names: Sequence[str], columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of the roles of pairs that have no column of their name, as far as they can be guessed.

    Args:
        rows: A dataset, or rows with an order, of which the first are read; of a stream the names decide.
        names: The columns.
        columns: Those that are named.
    """
    given = {role: old for role, old in ({each: each for each in names} | dict(columns)).items() if role in ROLES}
    if len(given) == len(ROLES):
        return {}
    table: Any = {name: [] for name in names}
    if isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
        table = undecoded(rows)
    elif not isinstance(rows, datasets.IterableDataset):
        first = [rows[index] for index in range(min(len(rows), 100))]
        table = {name: [row.get(name) for row in first] for name in names}
    found = guess_columns(table, given, getattr(rows, "features", None))
    guessed = {"image": found.image, "text": next(iter(found.text), None), "id": found.id, "group": found.group}
    labels = [
        old for old, kind in (getattr(rows, "features", None) or {}).items() if isinstance(kind, datasets.ClassLabel)
    ]
    return {role: old for role, old in guessed.items() if role not in given and old is not None and old not in labels}


def warn_of_grades(rows: Any, names: Collection[str]) -> None:
    """Say which of some columns of pairs look as if they graded them."""
    features = getattr(rows, "features", None) or {}
    for name in grade_columns(names):
        if not isinstance(features.get(name), datasets.ClassLabel) and isinstance(next(iter(rows))[name], int | float):
            logger.warning("the column %r is no grade here: every image and its text are taken as a match", name)


def warn_of_equal_texts(rows: datasets.Dataset, columns: Mapping[str, Any]) -> None:
    """Say how many texts of rows with ids and without groups are those of other rows."""
    text = columns.get("text", "text")
    if "group" in {*columns, *rows.column_names} or not isinstance(text, str) or text not in rows.column_names:
        return
    texts = rows.select_columns([text]).with_format("arrow")[:][text] if len(rows) else []
    repeated = len(texts) - (pc.count_distinct(texts).as_py() if len(texts) else 0)
    if repeated:
        logger.warning(
            "%d of %d rows repeat the text of another row, and are negatives of it: name what they share, columns "
            "group=%s", repeated, len(texts), text,
        )  # fmt: skip


class RenamedRows(Dataset[dict[str, Any]]):
    """Rows with further names of columns: those of a list, of a transform, or of a dataset of torch.

    Args:
        rows: Rows with a length.
        columns: The column of each further name.
    """

    def __init__(self, rows: Any, columns: Mapping[str, Any]) -> None:
        self.rows, self.columns = rows, dict(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return named_row(self.rows[index], self.columns)


def named_row(row: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with further names of its columns; several texts of one name are joined."""
    several = {new: [row[each] for each in old] for new, old in columns.items() if not isinstance(old, str)}
    joined = {new: " ".join(str(text) for text in texts if not is_missing(text)) for new, texts in several.items()}
    return dict(row) | {new: row[old] for new, old in columns.items() if isinstance(old, str)} | joined


def hub_revisions(rows: Any) -> dict[str, str]:
    """The commit of each dataset of the Hub that rows were downloaded from, by its name in the cache of `datasets`."""
    files = [each["filename"] for each in getattr(rows, "cache_files", [])]
    found = (re.search(r"([^/\\]+)___([^/\\]+)(?:[/\\][^/\\]+){2}[/\\]([0-9a-f]{40})[/\\]", file) for file in files)
    return {f"{match[1]}/{match[2]}": match[3] for match in found if match}


def _cut(value: Tensor, width: int) -> Tensor:
    """Cut embeddings `(..., D)` to their first numbers; other tensors stay."""
    if not value.is_floating_point() or value.ndim < 2:
        return value
    if width > value.shape[-1]:
        raise ValueError(f"matryoshka_dims has {width}, the embeddings have {value.shape[-1]} numbers")
    return value[..., :width]
