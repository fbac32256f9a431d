"""The arguments of a recipe that name its rows, and the mixing of several sources."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import signature
from typing import Any, Literal

import datasets
import yaml

from conjoin.data.columns import columns_by_role
from conjoin.data.emoji.sample import load_emoji
from conjoin.data.pair_sources import SAMPLE_SOURCE
from conjoin.data.pairs import load_pairs
from conjoin.data.queries import QUERY_FORMATS, QueryMix, QueryTable
from conjoin.data.row_checks import Skipped, SkippedFile, problem_of, without_problems
from conjoin.storage import reading

_OF_SOURCE = {"path", "split", "weight", "columns", "instruction", "name"}


class _Numbers(yaml.SafeLoader):
    """Reads `1e-6` as a number, as YAML 1.2 does; for YAML 1.1 it is a text without a point in it."""


_Numbers.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: It is not YAML; the message starts with `where`.
    """
    with reading(where, "expected YAML"):
        return yaml.load(text, _Numbers)


def parse_field(value: Any, key: str, expected: type = dict) -> Any:
    """Parse the YAML of a field that has no words of its own, a mapping or a list.

    Raises:
        ValueError: It is neither None nor `expected`.
    """
    value = parse_yaml(value, f"--{key}") if isinstance(value, str) else value
    if value is not None and not isinstance(value, expected):
        raise ValueError(f"{key}={value!r}; expected a {'list' if expected is list else 'mapping'}, such as {{a: b}}")
    return value


@dataclass
class DataArguments:
    """The rows for training and evaluation: image-text pairs, or queries with candidates.

    Args:
        dataset_name: A folder, a CSV, JSONL or Parquet file, webdataset shards, a dataset id, the name of the
            embedded sample, or the root folder of a published data set.
        dataset_train_split: Training split.
        dataset_test_name: Rows for R@k during training; `dataset_name` when only `dataset_test_split` is set.
        dataset_test_split: Evaluation split; without it and `dataset_test_name` there is no evaluation.
        dataset_format: `pairs`; `queries`, rows of your own for `conjoin.data.QueryTable`; or one of
            `conjoin.data.QUERY_FORMATS`.
        dataset_streaming: Read pairs during training; needs `max_steps`.
        dataset_mixture: Several sources in place of `dataset_name`, as YAML: a list of `{"path", "split"?, "weight"?,
            "columns"?, "instruction"?, "name"?}`. The weight of a table of queries is how often its rows are used in
            an epoch; that of streamed pairs is the probability of its rows, in relation to the others.
        columns: Columns that are not guessed right, by role: `{image: photo, text: [name, brand], id: sku}`, as a flag
            image=photo text=name,brand id=sku; `group`, too, and of queries `query`, `positive` ...
        keep: Further columns of pairs to read, for a method that reads more than `image` and `text`.
        datasets: Of a collection: names of the data sets to use; empty for all.
        hard_negatives: Negatives per row, from those in the data; of a sentence table at most 1.
        instruction: For queries: the instruction of the rows that have none.
        instructions: Of a collection: whether queries include their instruction.
        ood: Drop the queries that an out-of-distribution test holds out: `language`, `attribute` or `class`.
        shuffle_window: Rows of streams that are held and shuffled; 1 keeps their order.
        on_error: `raise` stops at a row of pairs that cannot be used; `skip` skips it, counts it and lists it in
            `skipped.jsonl` in `output_dir`. Evaluation rows always raise.
    """

    dataset_name: str = SAMPLE_SOURCE
    dataset_train_split: str = "train"
    dataset_test_name: str | None = None
    dataset_test_split: str | None = None
    dataset_format: str = "pairs"
    dataset_streaming: bool = False
    dataset_mixture: list[dict[str, Any]] | str | None = None
    columns: dict[str, Any] | str | list[str] | None = field(default=None, metadata={"nargs": "+"})
    keep: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    hard_negatives: int = 0
    instruction: str | None = None
    instructions: bool = True
    ood: str | None = None
    shuffle_window: int = 1000
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        self.columns = columns_by_role(self.columns) or None
        self.dataset_mixture = parse_field(self.dataset_mixture, "dataset_mixture", list)
        options = {"pairs": {"columns", "dataset_streaming", "on_error", "keep"}}
        options["queries"] = {"columns", "hard_negatives", "instruction"}
        options |= {name: vars(self).keys() & signature(load).parameters for name, load in QUERY_FORMATS.items()}
        if self.dataset_format not in options:
            raise ValueError(f"dataset_format={self.dataset_format!r}; expected one of {', '.join(options)}")
        defaults = {each.name: each.default for each in fields(self)} | {"datasets": [], "keep": []}
        for name in sorted(set().union(*options.values()) - options[self.dataset_format]):
            if vars(self)[name] not in (defaults[name], None, {}):
                raise ValueError(f"{name}={vars(self)[name]!r} has no effect on rows of format {self.dataset_format}")

    @property
    def has_queries(self) -> bool:
        """Whether the rows are queries with candidates, not pairs."""
        return self.dataset_format != "pairs"

    def load(self, seed: int = 0, skipped: SkippedFile | None = None) -> tuple[Any, Any]:
        """Load the training rows and the evaluation rows (or None).

        Args:
            seed: Of the order of streams.
            skipped: Where the rows that cannot be used are listed, with `on_error="skip"`; None for no list.

        Raises:
            ValueError: Several sources of pairs are not streamed, two have one name, or no row can be used.
        """
        evaluation = None
        if self.dataset_test_name is not None or self.dataset_test_split is not None:
            if self.dataset_mixture and self.dataset_test_name is None:
                raise ValueError(
                    f"dataset_test_split={self.dataset_test_split!r}, but of which source of dataset_mixture? "
                    "Name the evaluation rows by dataset_test_name"
                )
            split = self.dataset_test_split or self.dataset_train_split
            evaluation = self._rows({"path": self.dataset_test_name or self.dataset_name, "split": split})
        sources: Any = self.dataset_mixture or [{"path": self.dataset_name, "split": self.dataset_train_split}]
        for source in sources:
            if "path" not in source or not {*source} <= _OF_SOURCE or not 0 < source.get("weight", 1) < float("inf"):
                expected = "expected path, split, weight (a positive number), columns, instruction, name"
                raise ValueError(f"dataset_mixture: {dict(source)}: {expected}")
        weights = [float(source.get("weight", 1.0)) for source in sources]
        if self.dataset_streaming:
            return self._stream(sources, weights, seed, skipped), evaluation
        if len(sources) > 1 and not self.has_queries:
            raise ValueError("dataset_mixture: several sources of pairs are streamed; set dataset_streaming: true")
        if self.dataset_mixture and self.dataset_format == "queries":
            return QueryMix([self._rows(source) for source in sources], weights), evaluation
        rows = self._rows(sources[0], on_error=self.on_error)
        if self.on_error == "skip":
            rows, bad = without_problems(rows, str(sources[0]["path"]))
            if skipped is not None and skipped.main:
                skipped.add(bad)
        return rows, evaluation

    def _stream(self, sources: list[dict[str, Any]], weights: list[float], seed: int, skipped: Any) -> Any:
        """Mix streams of pairs, each of which starts again at its end, by their weights."""
        names = [source.get("name") or source["path"] for source in sources]
        streams = []
        for name, source in zip(names, sources, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"dataset_mixture: two sources are called {name!r}; give one another name")
            rows = self._rows(source, streaming=True, on_error=self.on_error)
            if self.on_error == "skip":
                rows = rows.filter(partial(_is_usable, source=name, skipped=skipped)).remove_columns("problem")
                if next(iter(rows), None) is None:
                    raise ValueError(f"none of the rows of {name!r} can be used")
            streams.append(rows.repeat(None))
        shares = [weight / sum(weights) for weight in weights]
        how: Any = {"probabilities": shares if len({*weights}) > 1 else None, "seed": seed}
        mixed = datasets.interleave_datasets(streams, stopping_strategy="all_exhausted", **how)
        return mixed.shuffle(seed=seed, buffer_size=self.shuffle_window)

    def _rows(self, source: Mapping[str, Any], **options: Any) -> Any:
        """Load the rows of one source."""
        path, columns = source["path"], source.get("columns") or self.columns or {}
        where: dict[str, Any] = {"split": source.get("split", "train"), "columns": columns}
        if not self.has_queries:
            if path == SAMPLE_SOURCE:  # with second names, and concepts as groups
                return load_emoji(where["split"]).rename_column("concept", "group")
            rows: Any = load_pairs(path, only="both", keep=self.keep, **where, **options)
            return rows.map(dict, input_columns="metadata", remove_columns="metadata") if self.keep else rows
        if self.dataset_format == "queries":
            instruction = source.get("instruction") or self.instruction
            named: dict[str, Any] = {"instruction": instruction, "name": source.get("name")}
            return QueryTable(path, hard_negatives=self.hard_negatives, **where, **named)
        load = QUERY_FORMATS[self.dataset_format]
        values = vars(self) | {"datasets": tuple(self.datasets)} | where
        return load(path, **{name: values[name] for name in values.keys() & signature(load).parameters})


def _is_usable(row: Mapping[str, Any], source: str, skipped: SkippedFile | None) -> bool:
    reason = problem_of(row)
    if reason is not None and skipped is not None:
        skipped.add([Skipped(source, None, row["id"], reason)])
    return reason is None
