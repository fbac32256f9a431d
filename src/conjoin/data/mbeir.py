"""M-BEIR: its files on disk, its 16 test cells, training queries with their candidates, and pools of evaluation.

In the published data (Wei et al., "UniIR", arXiv 2311.17136), query ids and candidate ids are `dataset:number`, and a
task is a pair of modalities. A *cell* is one dataset and task, the unit of the result table.
"""

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from conjoin.data.columns import require_columns
from conjoin.data.json_files import JsonLines
from conjoin.data.pair_sources import SplitError
from conjoin.data.query_rows import Candidate, QueryDataset, QueryRow
from conjoin.data.row_checks import repeated_id
from conjoin.data.row_images import path_inside
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_parts

MBEIR_DATASETS = "visualnews fashion200k webqa edis nights oven infoseek fashioniq cirr mscoco".split()
"""The index of a name is its dataset id."""
MBEIR_TASKS = {
    0: ("text", "image", "visualnews mscoco fashion200k"),
    1: ("text", "text", "webqa"),
    3: ("image", "text", "visualnews mscoco fashion200k"),
    4: ("image", "image", "nights"),
    2: ("text", "image,text", "edis webqa"),
    6: ("image,text", "text", "oven infoseek"),
    7: ("image,text", "image", "fashioniq cirr"),
    8: ("image,text", "image,text", "oven infoseek"),
}
"""Modality of the query and of the target, and the datasets of a task, in the order of the published table."""
_MODALITIES = {"text": "text", "image": "image", "image,text": "image,text", "text,image": "image,text"}
"""Ours by the names in the files."""
Instructions = dict[tuple[str, str | None, str | None], list[str]]
"""Prompts by the digit of the dataset, query modality and target modality."""


class MbeirCell(NamedTuple):
    """One cell of the table: a dataset and a task."""

    dataset: str
    task: int

    @property
    def name(self) -> str:
        """Name as in the file names: `"visualnews_task0"`."""
        return f"{self.dataset}_task{self.task}"

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
        return ("single", "mixed", "multi")[("," in self.query_modality) + ("," in self.target_modality)]

    @property
    def cutoff(self) -> int:
        """The k of its published hit rate: 10 for the two fashion datasets, else 5."""
        return 10 if self.dataset in ("fashion200k", "fashioniq") else 5


MBEIR_CELLS = tuple(
    MbeirCell(dataset, task) for task, (_, _, names) in MBEIR_TASKS.items() for dataset in names.split()
)
"""The 16 cells in the order of the table: 8 single, 6 mixed, 2 multi."""


def find_cells(names: Sequence[str] | None = None) -> list[MbeirCell]:
    """Return the cells with these names (`"visualnews_task0"`), in the order of the table; all without names.

    Raises:
        ValueError: A name is unknown.
    """
    known = [cell.name for cell in MBEIR_CELLS]
    for name in names or known:
        if name not in known:
            raise ValueError(f"unknown M-BEIR cell {name!r}; expected one of {', '.join(known)}")
    return [cell for cell in MBEIR_CELLS if cell.name in (names or known)]


def query_file(folder: Path, cell: MbeirCell | None, split: str) -> Path:
    """Return the query file of a cell; None means all training data."""
    if cell is None:
        return folder / "query/union_train/mbeir_union_up_train.jsonl"
    return folder / f"query/{split}/mbeir_{cell.name}_{split}.jsonl"


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
        ValueError: A column is missing.
    """
    path = instructions_file(Path(folder))
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        columns = ("query_modality", "cand_modality", "dataset_id", "prompt_1")
        require_columns(columns, rows.fieldnames or ())
        instructions: Instructions = {}
        for row in rows:
            query, target = (_modality(row[name]) for name in ("query_modality", "cand_modality"))
            prompts = [format_text(row[name]) for name in row if str(name).startswith("prompt") and row[name].strip()]
            instructions[row["dataset_id"].strip(), query, target] = prompts
    return instructions


def _find_prompts(instructions: Instructions, qid: str, query: str, target: str) -> list[str]:
    """Return the prompts of a query by its modality and that of its target."""
    prompts = instructions.get((qid[0], query, target))
    if not prompts:
        raise ItemError(f"query {qid!r}", f"there is no instruction for dataset {qid[0]}, {query} -> {target}")
    return prompts


def fixed_choice(options: Sequence[str], name: str) -> str:
    """Return one of `options` by a hash of `name`; random sampling would make each evaluation differ."""
    return options[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % len(options)]


def format_text(text: str, capitalise: bool = True) -> str:
    """Format a text as M-BEIR: no carriage returns, outer spaces or quotes; first letter upper case; final stop."""
    text = text.replace("\r", "").strip().strip('"').strip()
    if capitalise:
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "?", "!")) else text + "."


def _modality(value: object) -> str | None:
    """Return our name of a modality; None if it is unknown."""
    return _MODALITIES.get(str(value).replace(" ", ""))


def _field(row: Mapping[str, Any], key: str, name: str) -> Any:
    if key not in row:
        raise ItemError(name, f"the field {key!r} is missing; there are {', '.join(row)}")
    return row[key]


def _id(row: Mapping[str, Any], key: str, name: str) -> str:
    """Return the id of a query or a candidate, whose first character is its dataset; an error starts with `name`."""
    value = row.get(key)
    if not isinstance(value, str) or not re.fullmatch("[0-9]:[0-9]+", value):
        raise ItemError(name, f"{key} {value!r:.80} is not dataset:number with a dataset below {len(MBEIR_DATASETS)}")
    return value


class MbeirCandidates:
    """A candidate pool; it yields rows for `encode_collection`: `id`, `image` (a path or None), `text`, `modality`.

    Rows stay on disk; memory holds the ids and the lines (about 120 MB for a million).

    Args:
        folder: The root of M-BEIR: image paths are relative to it.
        path: The pool's JSON-lines file, see `pool_file`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The pool is empty, or an id is missing, malformed or repeated.
    """

    def __init__(self, folder: str | Path, path: str | Path) -> None:
        self.folder, self.lines = Path(folder), JsonLines(path)
        self._places: dict[str, int] = {}
        for place, row in enumerate(self.lines):
            did = _id(row, "did", f"{str(path)!r}, line {place + 1}")
            if did in self._places:
                raise repeated_id(did, repr(str(path)))
            self._places[did] = place

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._row, self.lines)

    def __contains__(self, did: str) -> bool:
        return did in self._places

    def __getitem__(self, did: str) -> dict[str, Any]:
        return self._row(self.lines[self._places[did]])

    @property
    def ids(self) -> list[str]:
        """All candidate ids, in the order of the file."""
        return list(self._places)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        modality, parts = _read_item(self.folder, row, "candidate")
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
        ValueError: Another split, an unknown dataset, no rows, or a row with a malformed id, no positives or a
            candidate that is not in the pool.
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
        for name in datasets:
            if name not in MBEIR_DATASETS:
                raise ValueError(f"unknown M-BEIR dataset {name!r}; expected one of {', '.join(MBEIR_DATASETS)}")
        self.folder = Path(folder)
        self.instructions = load_instructions(folder) if instructions else None
        self.lines = JsonLines(query_file(self.folder, None, "train"))
        self.candidates = MbeirCandidates(self.folder, pool_file(self.folder, None, "train"))
        self._places: list[int] = []
        for place, row in enumerate(self.lines):
            qid = _id(row, "qid", f"{str(self.lines.path)!r}, line {place + 1}")
            source = MBEIR_DATASETS[int(qid[0])]
            if datasets and source not in datasets:
                continue
            name, positives = f"query {qid!r}", _candidate_ids(row, "pos_cand_list")
            if not positives:
                raise ItemError(name, "it has no positive candidate")
            for did in positives + (_candidate_ids(row, "neg_cand_list") if hard_negatives else []):
                if did not in self.candidates:
                    raise ItemError(name, f"candidate {did!r} is not in the pool {str(self.candidates.lines.path)!r}")
            self.sources.append(source)
            self.positives.append(tuple(positives))
            self._places.append(place)
        if not self._places:
            raise ValueError(f"{str(self.lines.path)!r} has no queries of {', '.join(datasets)}")

    def read(self, index: int) -> QueryRow:
        """Read the row of a query; its candidates are ids in the pool."""
        row, prompts = self.lines[self._places[index]], None
        modality, query = _read_item(self.folder, row, "query", capitalise=self.instructions is None)
        if self.instructions is not None:
            prompts = partial(_find_prompts, self.instructions, row["qid"], modality)
        return QueryRow(row["qid"], query, self.positives[index], _candidate_ids(row, "neg_cand_list"), prompts)

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
        ValueError: A row is malformed, an id occurs twice, or there is no instruction for the cell.
    """
    folder = Path(folder)
    prompts = load_instructions(folder) if instructions else None
    rows: dict[str, dict[str, Any]] = {}
    for line, row in enumerate(JsonLines(query_file(folder, cell, split)), start=1):
        qid, instruction = _id(row, "qid", f"{cell.name} {split}, line {line}"), None
        if qid in rows:
            raise repeated_id(qid, f"the queries of {cell.name}")
        modality, query = _read_item(folder, row, "query", capitalise=not instructions)
        if prompts is not None:
            instruction = fixed_choice(_find_prompts(prompts, qid, modality, cell.target_modality), qid)
        rows[qid] = {"id": qid, "query": query, "instruction": instruction}
    return list(rows.values())


def _read_item(
    folder: Path, row: Mapping[str, Any], role: Literal["query", "candidate"], capitalise: bool = True
) -> tuple[str, dict[str, str]]:
    """Return the modality, the image's path and the text of a row; the file is checked only when it is opened.

    The text of a query is not capitalised after an instruction, as published.
    """
    id_, prefix = ("qid", "query_") if role == "query" else ("did", "")
    name = f"{role} {row[id_]!r}"
    named, text, image = (_field(row, f"{prefix}{part}", name) for part in ("modality", "txt", "img_path"))
    modality, parts = _modality(named), {}
    if modality is None:
        raise ItemError(name, f"unknown modality {named!r}; expected one of {', '.join(_MODALITIES)}")
    if "image" in modality:
        if not image:
            raise ItemError(name, f"its modality is {modality}, but its image path is empty")
        parts["image"] = str(path_inside(folder, image, name))
    if text := format_text(text or "", capitalise):
        parts["text"] = text
    return modality, check_parts(parts, name)


def _candidate_ids(row: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of candidate ids, given as strings or as objects with a `did`."""
    entries = _field(row, key, f"query {row['qid']!r}") or []
    return [entry.get("did", "") if isinstance(entry, Mapping) else entry for entry in entries]
