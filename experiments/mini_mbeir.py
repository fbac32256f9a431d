"""A miniature M-BEIR: all 16 cells, made of the emoji sample, in the layout of the published data."""

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from emoji_edits import Edit, find_edits
from made import check_queries, is_made, write_settings

from conjoin import load_emoji
from conjoin.data import MBEIR_CELLS, MbeirCell, emoji_concepts
from conjoin.data.emoji.sample import EmojiConcept
from conjoin.data.mbeir import MBEIR_DATASETS, instructions_file, qrels_file, query_file
from conjoin.storage import atomic_path, publish_folder

MARKER = "mini_mbeir.json"
SPLITS = {"train": "train", "val": "validation", "test": "test"}
"""M-BEIR's name of a split and the sample's."""

_VERSION = 1
_TITLES = "VisualNews Fashion200K WebQA EDIS NIGHTS OVEN InfoSeek FashionIQ CIRR MSCOCO".split()
_SPLIT_POOLS = ("mscoco",)  # as published, this dataset has a local pool for each split
_WITH_NEGATIVES = ("webqa", "edis", "oven", "infoseek", "cirr")
_STYLES = ("twemoji", "openmoji")


class Side(NamedTuple):
    """A query or a candidate: a text, a picture (its path inside the folder), or both."""

    text: str | None
    image: str | None

    @property
    def modality(self) -> str:
        """`"text"`, `"image"` or `"image,text"`."""
        return ",".join(name for name, value in (("image", self.image), ("text", self.text)) if value)


class Asked(NamedTuple):
    """A query with what answers it, and what nearly does."""

    query: Side
    positives: tuple[Side, ...]
    negatives: tuple[Side, ...] = ()


def make_mini_mbeir(
    out: str | Path,
    *,
    train_queries: int = 1000,
    val_queries: int = 100,
    test_queries: int = 300,
    cache_dir: str | Path | None = None,
) -> Path:
    """Write the miniature to `out`, always the same bytes for the same arguments.

    It is made beside `out` and moved there when it is whole; after an interruption the pictures already drawn are
    kept. Where it already is, nothing is done. Concepts never cross splits.

    Args:
        out: The folder to make.
        train_queries: The most queries of a cell for training, as the next two for validation and test.
        val_queries: Validation.
        test_queries: Test. A cell's pool holds the answers of the validation and test queries.
        cache_dir: Instead of the cache folder of `datasets`.

    Raises:
        FileExistsError: `out` is there and is something else.
        ImportError: The `sample` extra is not installed.
        ValueError: A number of queries is not positive.
    """
    limits = {"train": train_queries, "val": val_queries, "test": test_queries}
    check_queries(limits)
    out = Path(out)
    settings = {"version": _VERSION, "queries": limits}
    if is_made(out, MARKER, settings, "this miniature of M-BEIR"):
        return out
    partial = out.with_name(out.name + ".partial")
    for part in ("query", "cand_pool", "qrels", "instructions"):
        shutil.rmtree(partial / part, ignore_errors=True)
    writer = _Writer(partial)
    for split, limit in limits.items():
        asked = _ask_split(SPLITS[split], limit, cache_dir)
        for cell in MBEIR_CELLS:
            writer.add(cell, split, asked[cell.name])
    writer.write()
    _write_instructions(partial)
    _draw_pictures(partial, writer.pictures, cache_dir)
    write_settings(partial / MARKER, settings)
    publish_folder(partial, out)
    return out


@dataclass
class _Writer:
    """Numbers queries and candidates and writes the files of the layout."""

    folder: Path
    pictures: set[str] = field(default_factory=set)
    _candidates: dict[tuple[str, Side], str] = field(default_factory=dict)
    _queries: list[tuple[MbeirCell, str, Asked, dict[str, Any]]] = field(default_factory=list)
    _pools: dict[str, dict[str, Side]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, cell: MbeirCell, split: str, asked: Sequence[Asked]) -> None:
        """Add the queries of a cell and split."""
        for question in asked:
            for side in (question.query, *question.positives, *question.negatives):
                self.pictures |= {side.image} if side.image else set()
            row = {
                "qid": self._next(f"query {cell.dataset}", cell.dataset),
                "query_txt": question.query.text,
                "query_img_path": question.query.image,
                "query_modality": question.query.modality,
                "query_src_content": None,
                "pos_cand_list": [self._candidate(cell, split, side) for side in question.positives],
                "neg_cand_list": [self._candidate(cell, split, side) for side in question.negatives],
            }
            self._queries.append((cell, split, question, row))

    def write(self) -> None:
        """Write everything but the pictures and the instructions."""
        files: dict[Path, list[str]] = {}
        equal = {split: self._equal_candidates(split) for split in SPLITS}
        for cell, split, question, row in self._queries:
            # what equals a right candidate is right under any id, as with OVEN and InfoSeek in the published data
            same = [did for side in question.positives for did in equal[split][side]]
            row["pos_cand_list"] = list(dict.fromkeys([*row["pos_cand_list"], *same]))
            line = json.dumps(row, ensure_ascii=False)
            if split == "train":
                files.setdefault(self.folder / f"query/train/mbeir_{cell.dataset}_train.jsonl", []).append(line)
                files.setdefault(query_file(self.folder, None, "train"), []).append(line)
                continue
            files.setdefault(query_file(self.folder, cell, split), []).append(line)
            judged = [f"{row['qid']} 0 {did} 1 {cell.task}" for did in row["pos_cand_list"]]
            files.setdefault(qrels_file(self.folder, cell, split), []).extend(judged)
        for name, pool in self._pools.items():
            rows = [_candidate_row(did, side) for did, side in pool.items()]
            files[self.folder / f"cand_pool/{name}_cand_pool.jsonl"] = rows
        for file, lines in files.items():
            _write_lines(file, lines)

    def _equal_candidates(self, split: str) -> dict[Side, list[str]]:
        """The ids of every candidate of a split's global pool by what it is."""
        equal: dict[Side, list[str]] = {}
        for did, side in self._pools[f"global/mbeir_union_{split}"].items():
            equal.setdefault(side, []).append(did)
        return equal

    def _candidate(self, cell: MbeirCell, split: str, side: Side) -> str:
        """Return the id of a candidate, and add it to the pools of its cell and split."""
        did = self._candidates.get((cell.dataset, side))
        if did is None:
            did = self._candidates[cell.dataset, side] = self._next(f"candidate {cell.dataset}", cell.dataset)
        names = [f"global/mbeir_union_{split}"]
        if split != "train":
            suffix = f"_{split}" if cell.dataset in _SPLIT_POOLS else ""
            names.append(f"local/mbeir_{cell.name}{suffix}")
            if not suffix:  # a shared local pool is part of both global ones
                names += ["global/mbeir_union_val", "global/mbeir_union_test"]
        for name in names:
            self._pools.setdefault(name, {})[did] = side
        return did

    def _next(self, counter: str, dataset: str) -> str:
        self._numbers[counter] = self._numbers.get(counter, 0) + 1
        return f"{MBEIR_DATASETS.index(dataset)}:{self._numbers[counter]}"


class _Concept(NamedTuple):
    """What the cells are made of."""

    name: str
    other: str
    kind: str
    twemoji: str
    openmoji: str


def _ask_split(split: str, limit: int, cache_dir: str | Path | None) -> dict[str, list[Asked]]:
    """Make the queries of every cell."""
    drawn = _drawn(split, cache_dir)
    plain = [_concept(each) for each in emoji_concepts() if each.split == split and each.concept in drawn]
    edits = find_edits(each for each in emoji_concepts(skin_tones=True) if each.concept in drawn)
    asked: dict[str, list[Asked]] = {}
    for cell in MBEIR_CELLS:
        if cell.dataset in ("fashioniq", "cirr"):
            toned = cell.dataset == "fashioniq"
            asked[cell.name] = _spread(list(_ask_edits(edits, toned)), limit)
            continue
        ask = _CELL_QUERIES[cell.name]
        questions: list[Asked] = []
        for index, concept in enumerate(plain):
            question = ask(concept)
            if cell.name == "webqa_task1" and concept.other == concept.name:
                continue
            if cell.dataset in _WITH_NEGATIVES:  # the list is sorted by meaning: neighbours are alike
                near = [plain[other] for other in (index - 1, index + 1) if 0 <= other < len(plain)]
                question = question._replace(negatives=tuple(ask(other).positives[0] for other in near))
            questions.append(question)
        asked[cell.name] = _spread(questions, limit)
    return asked


def _ask_edits(edits: Iterable[Edit], toned: bool) -> Iterator[Asked]:
    """Composed queries: a picture and what should be different. The reference is the hard negative."""
    for number, edit in enumerate(each for each in edits if bool(each.target.skin_tone) == toned):
        style = _STYLES[number % 2]
        reference, target = (Side(None, _path(style, each.concept)) for each in (edit.reference, edit.target))
        yield Asked(Side(edit.text, reference.image), (target,), () if toned else (reference,))


_CELL_QUERIES: dict[str, Callable[[_Concept], Asked]] = {
    "visualnews_task0": lambda c: Asked(Side(c.name, None), (Side(None, c.twemoji),)),
    "visualnews_task3": lambda c: Asked(Side(None, c.twemoji), (Side(c.name, None),)),
    "mscoco_task0": lambda c: Asked(Side(f"a drawing of {c.name}", None), (Side(None, c.openmoji),)),
    "mscoco_task3": lambda c: Asked(
        Side(None, c.openmoji), (Side(f"a drawing of {c.name}", None), Side(f"a picture that shows {c.other}", None))
    ),
    "fashion200k_task0": lambda c: Asked(Side(f"{c.kind}, {c.name}", None), (Side(None, c.openmoji),)),
    "fashion200k_task3": lambda c: Asked(Side(None, c.openmoji), (Side(f"{c.kind}, {c.name}", None),)),
    "webqa_task1": lambda c: Asked(
        Side(f"what is another name for {c.name}", None), (Side(f"{c.name} is also called {c.other}", None),)
    ),
    "webqa_task2": lambda c: Asked(Side(f"what does {c.other} look like", None), (Side(c.name, c.openmoji),)),
    "edis_task2": lambda c: Asked(Side(f"a story about {c.other}", None), (Side(c.name, c.twemoji),)),
    "nights_task4": lambda c: Asked(Side(None, c.openmoji), (Side(None, c.twemoji),)),
    "oven_task6": lambda c: Asked(
        Side("what is shown here?", c.openmoji), (Side(f"{c.name}. It is of the kind {c.kind}.", None),)
    ),
    "oven_task8": lambda c: Asked(Side("what is shown here?", c.openmoji), (Side(c.name, c.twemoji),)),
    "infoseek_task6": lambda c: Asked(
        Side("what else is this called?", c.twemoji), (Side(f"it is called {c.other}", None),)
    ),
    "infoseek_task8": lambda c: Asked(Side("who else drew this, and how?", c.openmoji), (Side(c.name, c.twemoji),)),
}
"""What each cell asks about a concept, but for the two of composed queries."""

_PROMPTS = {
    0: ("Find the picture that this text describes.", "Which picture shows this?", "Match the text to it.", ""),
    1: ("Find a text that answers the question.", "Which text has the answer?", "Answer this with a text.", ""),
    2: (
        "Find a captioned picture for this.",
        "Which picture and caption fit?",
        "Answer with a captioned picture.",
        "",
    ),
    3: ("Find the text that describes the picture.", "What does this picture show?", "Caption this picture.", ""),
    4: ("Find a picture of the same thing.", "Which picture shows the same?", "Match this with another drawing.", ""),
    6: ("Find a text that answers this about the picture.", "What is known of this?", "Answer with a text.", ""),
    7: ("Find the picture with this change.", "What does it look like changed so?", "Apply the change to it.", ""),
    8: ("Find a captioned picture that answers this.", "Which captioned picture fits?", "Answer with both.", ""),
}


def _write_instructions(folder: Path) -> None:
    header = ["query_modality", "cand_modality", "dataset_name", "dataset_id", *(f"prompt_{n}" for n in range(1, 5))]
    rows = []
    for cell in sorted(MBEIR_CELLS, key=lambda cell: (MBEIR_DATASETS.index(cell.dataset), cell.task)):
        number = MBEIR_DATASETS.index(cell.dataset)
        rows.append([cell.query_modality, cell.target_modality, _TITLES[number], str(number), *_PROMPTS[cell.task]])
    _write_lines(instructions_file(folder), ("\t".join(row) for row in [header, *rows]))


def _drawn(split: str, cache_dir: str | Path | None) -> set[str]:
    """The concepts of a split, skin tones included, that both artists drew."""
    rows = load_emoji(split, styles=_STYLES, skin_tones=True, cache_dir=cache_dir)
    ids = set(rows["id"])
    return {concept for concept in rows.unique("concept") if all(f"{concept}/{style}" in ids for style in _STYLES)}


def _concept(concept: EmojiConcept) -> _Concept:
    other = concept.alternative_text or concept.text
    return _Concept(concept.text, other, concept.kind, *(_path(style, concept.concept) for style in _STYLES))


def _path(style: str, concept: str) -> str:
    return f"mbeir_images/{style}_images/{concept}.png"


def _spread(questions: Sequence[Asked], limit: int) -> list[Asked]:
    """At most `limit` of `questions`, evenly spread over them."""
    count = min(limit, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def _draw_pictures(folder: Path, pictures: set[str], cache_dir: str | Path | None) -> None:
    """Write the pictures that are not there yet, each at once."""
    for split in SPLITS.values():
        rows = load_emoji(split, styles=_STYLES, skin_tones=True, cache_dir=cache_dir)
        for row in rows.cast_column("image", datasets.Image(decode=False)):
            path = _path(row["style"], row["concept"])
            target = folder / path
            if path in pictures and not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(target) as temporary:
                    temporary.write_bytes(row["image"]["bytes"])


def _candidate_row(did: str, side: Side) -> str:
    row = {"txt": side.text, "img_path": side.image, "modality": side.modality, "did": did, "src_content": None}
    return json.dumps(row, ensure_ascii=False)


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write the miniature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder to make")
    for split, default in (("train", 1000), ("val", 100), ("test", 300)):
        parser.add_argument(f"--{split}-queries", type=int, default=default, metavar="N", help="at most")
    options = vars(parser.parse_args())
    print(f"M-BEIR in miniature in {make_mini_mbeir(options.pop('out'), **options)}")


if __name__ == "__main__":
    main()
