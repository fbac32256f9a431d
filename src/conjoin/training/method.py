"""The registry of training methods, used by recipes and `conjoin train`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conjoin.registry import Registry

from .config import RetrievalConfig
from .trainer import RetrievalTrainer


@dataclass(frozen=True)
class Method:
    """A training method.

    Args:
        name: Value of the recipe key `method`.
        config: Dataclass of the recipe section `training`.
        trainer: Called as `trainer(model, config, train_dataset=..., processing_class=..., ...)`.
        sections: Dataclasses of further recipe sections by name; a key `data` replaces `PairArguments`.
        prepare: Called as `prepare(run)` with a `conjoin.training.Run` before the trainer is created; returns further
            trainer arguments, which may replace `train_dataset` or `data_collator`.
        query_trainer: Trainer for rows of queries with candidates, for a method that takes pairs or queries.
    """

    name: str
    config: type[RetrievalConfig]
    trainer: type[RetrievalTrainer]
    sections: Mapping[str, type[Any]] = field(default_factory=dict)
    prepare: Callable[[Any], dict[str, Any]] | None = None
    query_trainer: type[RetrievalTrainer] | None = None


METHODS: Registry[Method] = Registry("method", "conjoin.methods", "conjoin.methods")
"""All methods by name."""
