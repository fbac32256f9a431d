"""The benchmarks, one file of data each, and what each declares. The help of a benchmark is shown without torch."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.evaluation.benchmark import CellScores
    from conjoin.evaluation.results import Table

TASKS = ("emoji", "mbeir", "merit", "mmeb", "pairs", "symmetric")
"""The name of each benchmark, which is that of its file."""


@dataclass(frozen=True)
class Rows:
    """Rows that are encoded together: queries, or a part of a corpus.

    Args:
        name: Of the rows and of their collection. In one evaluation, equal names mean equal rows.
        rows: Rows for `encode_collection`, with an id each, that can be read several times.
        instruction: Of the task: for all rows; or one for each row, and then the vectors are not stored. None for the
            model's own prompt.
        lookup: Returns the row of an id; None finds it in `rows`.
    """

    name: str
    rows: Iterable[Mapping[str, Any]] = field(repr=False)
    instruction: str | Sequence[str | None] | None = None
    lookup: Callable[[str], Mapping[str, Any]] | None = None

    @property
    def folder(self) -> str:
        """Name of the collection."""
        if not isinstance(self.instruction, str):
            return self.name
        return f"{self.name}-{hashlib.sha256(self.instruction.encode()).hexdigest()[:8]}"

    def row(self, id_: str) -> Mapping[str, Any]:
        """The row of an id."""
        if self.lookup is not None:
            return self.lookup(id_)
        if not isinstance(self.rows, Sized):  # a stream
            return next(row for row in self.rows if row["id"] == id_)
        return self.rows[self._numbers[id_]]  # type: ignore[index]

    def item(self, id_: str) -> Any:  # noqa: ANN401 - an item
        """The row of an id as an item."""
        from conjoin.data.row_images import row_item

        row = self.row(id_)
        return row_item({part: row.get(part) for part in ("image", "text")}, f"item {id_!r}")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        is_dataset = hasattr(self.rows, "column_names")
        ids = self.rows["id"][:] if is_dataset else (row["id"] for row in self.rows)  # type: ignore[index]
        return {str(id_): number for number, id_ in enumerate(ids)}


@dataclass(frozen=True)
class Cell:
    """Queries that search a corpus for the candidates that are right for them: one row of a benchmark's table.

    Args:
        name: Of the cell and of its run file.
        queries: The queries.
        corpus: What they search.
        qrels: By id of a query the ids of the right candidates, at least one. Queries without an entry are not scored.
        candidates: Ids of the corpus: only these are searched; or by id of a query its own ids. None: all.
        excluded: By id of a query the ids of candidates that are left out of its ranking.
        groups: Subsets of the queries: by kind (`"language"`) and name (`"th"`) the ids of queries.
        negatives: By id of a query a candidate that looks like the right one. The cell is then scored by the symmetric
            protocol: precision beside the ranks.
        variants: Other forms of some queries, under their ids: they are compared with `negatives`.
        section: Title of the table that the cell is in.
        labels: Further columns of that table, by name.
        published: The metric that published tables print, such as `"hit_rate@10"`.
    """

    name: str
    queries: Rows
    corpus: Rows
    qrels: Mapping[str, Collection[str]] = field(repr=False)
    candidates: Collection[str] | Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    excluded: Mapping[str, Collection[str]] = field(default_factory=dict, repr=False)
    groups: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict, repr=False)
    negatives: Mapping[str, str] = field(default_factory=dict, repr=False)
    variants: Rows | None = None
    section: str = "Scores"
    labels: Mapping[str, str] = field(default_factory=dict)
    published: str | None = None


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Args:
        name: Of the benchmark.
        title: Of its report.
        summary: What is measured, one paragraph.
        options: A dataclass of the options of `cells`; the `Args` of its docstring are their help.
        cells: Reads the data that the options name.
        ks: Cut-offs of the hit rates.
        mrr: Ranks that the mean reciprocal rank counts; None leaves it out.
        headline: The main metrics.
        averages: Whether the average over the cells of a table is the main score, not each cell.
        by: A label of the cells: each of its values has an average of its own.
        tables: Makes further tables.
    """

    name: str
    title: str
    summary: str
    options: type
    cells: Callable[[Any], Sequence[Cell]]
    ks: Sequence[int] = (1, 5, 10)
    mrr: int | None = 10
    headline: Sequence[str] = ("hit_rate@1",)
    averages: bool = False
    by: str | None = None
    tables: "Callable[[Sequence[CellScores]], list[Table]]" = lambda scores: []


def find_task(name: str) -> Task:
    """The benchmark of a name.

    Raises:
        ValueError: There is none; the message names all.
    """
    if name not in TASKS:
        raise ValueError(f"there is no benchmark {name!r}; expected one of {', '.join(TASKS)}")
    task: Task = import_module(f"{__name__}.{name}").TASK
    return task
