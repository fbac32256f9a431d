"""The layout of M-BEIR on disk: its 16 test cells, files, modalities and instructions.

In the published data (Wei et al., "UniIR", arXiv 2311.17136), query ids and candidate ids are `dataset:number`, and a
task is a pair of modalities. A *cell* is one dataset and task, the unit of the result table.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from conjoin.processing.item_error import ItemError

MBEIR_DATASETS = (
    "visualnews",
    "fashion200k",
    "webqa",
    "edis",
    "nights",
    "oven",
    "infoseek",
    "fashioniq",
    "cirr",
    "mscoco",
)
"""The index of a name is its dataset id."""

MBEIR_TITLES = dict(
    zip(
        MBEIR_DATASETS,
        "VisualNews Fashion200K WebQA EDIS NIGHTS OVEN InfoSeek FashionIQ CIRR MSCOCO".split(),
        strict=True,
    )
)

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
    own = folder / f"cand_pool/local/mbeir_{cell.name}_{split}_cand_pool.jsonl"
    return own if own.is_file() else folder / f"cand_pool/local/mbeir_{cell.name}_cand_pool.jsonl"


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
    header, *lines = required(path).read_text(encoding="utf-8").splitlines() or [""]
    columns = header.split("\t")
    missing = [name for name in (*_INSTRUCTION_COLUMNS, "prompt_1") if name not in columns]
    if missing:
        raise ValueError(f"{str(path)!r}: no column {missing[0]!r}; the columns are {columns}")
    instructions: Instructions = {}
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        where = f"{str(path)!r}, line {number}"
        row = dict.fromkeys(columns, "") | dict(zip(columns, line.split("\t"), strict=False))
        prompts = [format_text(text) for name, text in row.items() if name.startswith("prompt") and text.strip()]
        if not prompts or not row["dataset_id"].strip().isdigit():
            raise ItemError(where, "expected a dataset id and at least one prompt")
        query, target = (check_modality(row[name], where) for name in ("query_modality", "cand_modality"))
        instructions[int(row["dataset_id"]), query, target] = prompts
    return instructions


def find_prompts(instructions: Instructions, dataset: int, query: str, target: str, name: str) -> list[str]:
    """Return the prompts for a query.

    Raises:
        ValueError: There are none; the message starts with `name`.
    """
    prompts = instructions.get((dataset, query, target))
    if prompts is None:
        raise ItemError(name, f"there is no instruction for dataset {dataset}, {query} -> {target}")
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


def required(path: Path) -> Path:
    """Return `path` if it is a file.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"M-BEIR: no such file: {str(path)!r}")
    return path
