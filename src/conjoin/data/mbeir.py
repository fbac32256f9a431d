"""M-BEIR: its files on disk, its 16 test cells, training queries with their candidates, and pools of evaluation.

In the published data (Wei et al., "UniIR", arXiv 2311.17136), query ids and candidate ids are `dataset:number`, and a
task is a pair of modalities. A *cell* is one dataset and task, the unit of the result table.
"""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conjoin.data.columns import require_columns
from conjoin.data.json_files import JsonLines
from conjoin.data.pair_sources import SplitError
from conjoin.data.query_rows import Candidate, QueryDataset, QueryRow
from conjoin.data.row_checks import id_keys, repeated_id
from conjoin.data.row_images import path_inside
from conjoin.processing.item_error import ItemError

MBEIR_TITLES = {
    title.lower(): title
    for title in "VisualNews Fashion200K WebQA EDIS NIGHTS OVEN InfoSeek FashionIQ CIRR MSCOCO".split()
}
MBEIR_DATASETS = tuple(MBEIR_TITLES)
"""The index of a name is its dataset id."""
MBEIR_TASKS = {
    0: ("text", "image"),
    1: ("text", "text"),
    2: ("text", "image,text"),
    3: ("image", "text"),
    4: ("image", "image"),
    6: ("image,text", "text"),
    7: ("image,text", "image"),
    8: ("image,text", "image,text"),
}
"""Modality of the query and of the target; there is no task 5."""
MBEIR_GROUPS = ("single", "mixed", "multi")
_INSTRUCTION_COLUMNS = ("query_modality", "cand_modality", "dataset_name", "dataset_id")
_UNION_TRAIN_QUERIES = "query/union_train/mbeir_union_up_train.jsonl"
_MODALITIES = ("text", "image", "image,text")
Instructions = dict[tuple[int, str, str], list[str]]
"""Prompts by dataset id, query modality and target modality."""


class MbeirCell(NamedTuple):
    """One cell of the table: a dataset and a task."""

    dataset: str
    task: int

    @property
    def name(self) -> str:
        """Name as in the file names: `"visualnews_task0"`."""
        return f"{self.dataset}_task{self.task}"

    @property
    def dataset_id(self) -> int:
        """The number before the colon of its query ids."""
        return MBEIR_DATASETS.index(self.dataset)

    @property
    def query_modality(self) -> str:
        """Modality of the queries: `"text"`, `"image"` or `"image,text"`."""
        return MBEIR_TASKS[self.task][0]

    @property
    def target_modality(self) -> str:
        """Modality of the targets."""
        return MBEIR_TASKS[self.task][1]

    @property
    def group(self) -> str:
        """`"single"` when neither side has both modalities, `"multi"` when both sides do, else `"mixed"`."""
        return MBEIR_GROUPS[("," in self.query_modality) + ("," in self.target_modality)]

    @property
    def cutoff(self) -> int:
        """The k of its published hit rate: 10 for the two fashion datasets, else 5."""
        return 10 if self.dataset in ("fashion200k", "fashioniq") else 5


MBEIR_CELLS = tuple(
    MbeirCell(dataset, task)
    for task, names in (
        (0, "visualnews mscoco fashion200k"),
        (1, "webqa"),
        (3, "visualnews mscoco fashion200k"),
        (4, "nights"),
        (2, "edis webqa"),
        (6, "oven infoseek"),
        (7, "fashioniq cirr"),
        (8, "oven infoseek"),
    )
    for dataset in names.split()
)
"""The 16 cells in the order of the table: 8 single, 6 mixed, 2 multi."""


def find_cells(names: Sequence[str] | None = None) -> list[MbeirCell]:
    """Return the cells with these names (`"visualnews_task0"`), in the order of the table; all when None.

    Raises:
        ValueError: A name is unknown, or `names` is empty.
    """
    known = [cell.name for cell in MBEIR_CELLS]
    if names is not None and not names:
        raise ValueError(f"no M-BEIR cell is named; expected some of {', '.join(known)}, or None for all")
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"unknown M-BEIR cell {unknown[0]!r}; expected one of {', '.join(known)}")
    return [cell for cell in MBEIR_CELLS if names is None or cell.name in names]


def query_file(folder: Path, cell: MbeirCell | None, split: str) -> Path:
    """Return the query file of a cell; None means all training data."""
    return folder / (_UNION_TRAIN_QUERIES if cell is None else f"query/{split}/mbeir_{cell.name}_{split}.jsonl")


def pool_file(folder: Path, cell: MbeirCell | None, split: str) -> Path:
    """Return the local candidate pool of a cell (for some datasets one per split); None means the global pool."""
    if cell is None:
        return folder / f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl"
    split_pool = folder / f"cand_pool/local/mbeir_{cell.name}_{split}_cand_pool.jsonl"
    return split_pool if split_pool.is_file() else folder / f"cand_pool/local/mbeir_{cell.name}_cand_pool.jsonl"


def qrels_file(folder: Path, cell: MbeirCell, split: str) -> Path:
    """Return the file of a cell's relevance judgements, with five columns."""
    return folder / f"qrels/{split}/mbeir_{cell.name}_{split}_qrels.txt"


def instructions_file(folder: Path) -> Path:
    """Return the file of the prompts of all datasets and tasks."""
    return folder / "instructions/query_instructions.tsv"


def load_instructions(folder: str | Path) -> Instructions:
    """Read the instructions without empty prompts.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A column is missing, or a row has no prompt (the message names the row).
    """
    path = instructions_file(Path(folder))
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        require_columns((*_INSTRUCTION_COLUMNS, "prompt_1"), [*(rows.fieldnames or ())])
        instructions: Instructions = {}
        for row in rows:
            where = f"{str(path)!r}, line {rows.line_num}"
            prompts = [format_text(row[name]) for name in row if str(name).startswith("prompt") and row[name].strip()]
            if not prompts or not row["dataset_id"].strip().isdigit():
                raise ItemError(where, "expected a dataset id and at least one prompt")
            query, target = (check_modality(row[name], where) for name in ("query_modality", "cand_modality"))
            instructions[int(row["dataset_id"]), query, target] = prompts
    return instructions


def _find_prompts(instructions: Instructions | None, qid: str, query: str, target: str) -> list[str]:
    """Return the prompts of a query; none without instructions."""
    if instructions is None:
        return []
    dataset = dataset_of(qid)
    if (dataset, query, target) not in instructions:
        raise ItemError(f"query {qid!r}", f"there is no instruction for dataset {dataset}, {query} -> {target}")
    return instructions[dataset, query, target]


def fixed_choice(options: Sequence[str], name: str) -> str:
    """Return one of `options` by a hash of `name`; random sampling would make each evaluation differ."""
    return options[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % len(options)]


def format_text(text: str, capitalise: bool = True) -> str:
    """Format a text as M-BEIR: no carriage returns, outer spaces or quotes; first letter upper case; final stop."""
    text = text.replace("\r", "").strip().strip('"').strip()
    if capitalise:
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "?", "!")) else text + "."


def check_modality(value: object, name: str) -> str:
    """Return `"text"`, `"image"` or `"image,text"`, for parts in any order.

    Raises:
        ValueError: Another value; the message starts with `name`.
    """
    modality = ",".join(sorted(part.strip() for part in value.split(","))) if isinstance(value, str) else value
    if modality not in _MODALITIES:
        raise ItemError(name, f"unknown modality {value!r}; expected one of {', '.join(_MODALITIES)}")
    return str(modality)


def dataset_of(qid: str) -> int:
    """Return the dataset id of a query id or candidate id.

    Raises:
        ValueError: The id is not `dataset:number`, or the dataset is unknown.
    """
    dataset, colon, number = qid.partition(":")
    if not colon or not dataset.isdigit() or not number.isdigit() or int(dataset) >= len(MBEIR_DATASETS):
        raise ValueError(f"id {qid!r} is not dataset:number with a dataset below {len(MBEIR_DATASETS)}")
    return int(dataset)


class MbeirCandidates:
    """A candidate pool; it yields rows for `encode_collection`: `id`, `image` (a path or None), `text`, `modality`.

    Args:
        folder: The root of M-BEIR: image paths are relative to it.
        path: The pool's JSON-lines file, see `pool_file`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The pool is empty, or an id is missing, malformed or repeated.
    """

    def __init__(self, folder: str | Path, path: str | Path) -> None:
        self.folder = Path(folder)
        self.lines = JsonLines(path)
        where = f"{str(self.lines.path)!r}, line"
        keys = id_keys(_id(row, "did", f"{where} {index}") for index, row in enumerate(self.lines, start=1))
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        repeated = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if len(repeated):
            raise repeated_id(self.lines[int(self._order[repeated[0]])]["did"], repr(str(self.lines.path)))

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._row, self.lines)

    def __contains__(self, did: str) -> bool:
        return bool(self.find(id_keys([did]))[0] >= 0)

    def __getitem__(self, did: str) -> dict[str, Any]:
        index = int(self.find(id_keys([did]))[0])
        if index < 0:
            raise ValueError(f"candidate {did!r} is not in the pool {str(self.lines.path)!r}")
        return self._row(self.lines[index])

    @property
    def ids(self) -> list[str]:
        """All candidate ids, in the order of the file."""
        return [row["did"] for row in self.lines]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the lines `(N,)` of the candidates with these `id_keys`, from 0; -1 for those not in the pool."""
        places = np.searchsorted(self._sorted, keys).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[places] == keys, self._order[places], -1)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        modality, parts = _parts(self.folder, row, f"candidate {row['did']!r}", ("modality", "txt", "img_path"))
        return {"id": row["did"], "image": None, "text": None, **parts, "modality": modality}


class MbeirTraining(QueryDataset):
    """Training queries of M-BEIR, see `QueryDataset`.

    Args:
        folder: The root of M-BEIR.
        split: There is only `"train"`.
        datasets: Names of the datasets to use; all when empty.
        hard_negatives: Negatives of each row.
        instructions: Whether rows have an instruction.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Another split, an unknown dataset, no rows, or a row with a missing field, a malformed id, no
            positives or a candidate that is not in the pool.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        split: str = "train",
        datasets: Sequence[str] = (),
        hard_negatives: int = 0,
        instructions: bool = True,
    ) -> None:
        super().__init__(hard_negatives)
        if split != "train":
            raise SplitError(split, "format mbeir")
        unknown = [name for name in datasets if name not in MBEIR_DATASETS]
        if unknown:
            raise ValueError(f"unknown M-BEIR dataset {unknown[0]!r}; expected one of {', '.join(MBEIR_DATASETS)}")
        self.folder = Path(folder)
        self.instructions = load_instructions(folder) if instructions else None
        self.lines = JsonLines(query_file(self.folder, None, "train"))
        self.candidates = MbeirCandidates(self.folder, pool_file(self.folder, None, "train"))
        self._indices: list[int] = []
        for index, row in enumerate(self.lines):
            name = f"{str(self.lines.path)!r}, line {index + 1}"
            source = MBEIR_DATASETS[dataset_of(_id(row, "qid", name))]
            if datasets and source not in datasets:
                continue
            positives = _dids(row, "pos_cand_list")
            dids = positives + (_dids(row, "neg_cand_list") if hard_negatives else [])
            keys = id_keys(dids)
            absent = np.flatnonzero(self.candidates.find(keys) < 0)
            if len(absent):
                problem = f"candidate {dids[absent[0]]!r} is not in the pool {str(self.candidates.lines.path)!r}"
                raise ItemError(f"query {row['qid']!r}", problem)
            self.sources.append(source)
            self.positives.append(tuple(keys[: len(positives)].tolist()))
            self._indices.append(index)
        if not self._indices:
            raise ValueError(f"{str(self.lines.path)!r} has no queries of {', '.join(datasets)}")

    def read(self, index: int) -> QueryRow:
        """Read the row of a query; its candidates are ids in the pool."""
        row = self.lines[self._indices[index]]
        modality, query = _query(self.folder, row, self.instructions is not None)
        prompts = partial(_find_prompts, self.instructions, row["qid"], modality)
        return QueryRow(row["qid"], query, _dids(row, "pos_cand_list"), _dids(row, "neg_cand_list"), prompts)

    def candidate(self, name: str) -> Candidate:
        """Return a candidate of the pool."""
        row = self.candidates[name]
        return Candidate(name, {part: row[part] for part in ("image", "text") if row[part]}, row["modality"])


def mbeir_queries(
    folder: str | Path, cell: MbeirCell, split: str = "test", instructions: bool = True
) -> list[dict[str, Any]]:
    """Return the queries of a cell, in order: rows `id`, `query` (an item, its image as a path) and `instruction`.

    The id of a query determines its prompt, so every call gives the same one.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A field is missing, an id is malformed or occurs twice, or there is no instruction for the cell.
    """
    folder = Path(folder)
    prompts = load_instructions(folder) if instructions else None
    rows: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(JsonLines(query_file(folder, cell, split))):
        qid = _id(row, "qid", f"{cell.name} {split}, line {index + 1}")
        if qid in rows:
            raise repeated_id(qid, f"the queries of {cell.name}")
        modality, query = _query(folder, row, instructions)
        choices = _find_prompts(prompts, qid, modality, cell.target_modality)
        instruction = fixed_choice(choices, qid) if choices else None
        rows[qid] = {"id": qid, "query": query, "instruction": instruction}
    return list(rows.values())


def _query(folder: Path, row: Mapping[str, Any], instructed: bool) -> tuple[str, dict[str, str]]:
    """Return the modality and the parts of a query; after an instruction its text is not capitalised, as published."""
    columns = ("query_modality", "query_txt", "query_img_path")
    return _parts(folder, row, f"query {row['qid']!r}", columns, capitalise=not instructed)


def _parts(
    folder: Path, row: Mapping[str, Any], name: str, columns: tuple[str, str, str], capitalise: bool = True
) -> tuple[str, dict[str, str]]:
    """Return the modality, the image's path and the text of a row; the file is checked only when it is opened."""
    modality, text, image = (_field(row, column, name) for column in columns)
    modality, parts = check_modality(modality, name), {}
    if "image" in modality:
        if not image:
            raise ItemError(name, f"its modality is {modality}, but its image path is empty")
        parts["image"] = str(path_inside(folder, image, name))
    text = format_text(text or "", capitalise)
    if modality == "text" and not text:
        raise ItemError(name, f"its modality is text, but {columns[1]} is empty")
    return modality, parts | ({"text": text} if text else {})


def _field(row: Mapping[str, Any], key: str, name: str) -> Any:
    if key not in row:
        raise ItemError(name, f"the field {key!r} is missing; there are {', '.join(row)}")
    return row[key]


def _id(row: Mapping[str, Any], key: str, name: str) -> str:
    value = _field(row, key, name)
    if not isinstance(value, str):
        raise ItemError(name, f"{key} is {value!r:.80}; expected a text dataset:number")
    dataset_of(value)
    return value


def _dids(row: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of candidate ids, given as strings or as objects with a `did`; positives are required."""
    name = f"query {row['qid']!r}"
    entries = _field(row, key, name) or []
    named = (entry if isinstance(entry, Mapping) else {"did": entry} for entry in entries)
    dids = [_id(entry, "did", f"{name}, {key}") for entry in named]
    if not dids and key == "pos_cand_list":
        raise ItemError(name, "it has no positive candidate")
    return dids
