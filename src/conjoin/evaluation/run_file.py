"""TREC run files (`qid Q0 docid rank score tag`) and qrels (`qid 0 docid rel`, optionally with a task)."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from conjoin.storage import check_listed

REMEDY = "evaluate again, or remove SHA256SUMS if you changed the file yourself"
"""What mends a damaged file of an evaluation."""

Run = dict[str, list[tuple[str, float]]]
Qrels = dict[str, dict[str, int]]


def write_run(path: str | os.PathLike[str], rankings: Mapping[str, Sequence[tuple[str, float]]], tag: str) -> None:
    """Write rankings, best first, with ranks from 1.

    Args:
        path: The file to write.
        rankings: For each query id the (document id, score) pairs; scores do not rise.
        tag: Name of the run, one word.

    Raises:
        ValueError: An id or the tag is empty or holds white space, a score is not finite, scores rise along a
            ranking, or a document is ranked twice for one query.
    """
    _check_word(tag, "tag")
    lines = []
    for query, ranking in rankings.items():
        _check_word(query, "query id")
        for document, _ in ranking:
            _check_word(document, "document id")
        _check_ranking(ranking, f"query {query!r}")
        lines += [
            f"{query} Q0 {doc} {rank} {float(score)!r} {tag}\n" for rank, (doc, score) in enumerate(ranking, start=1)
        ]
    Path(path).write_text("".join(lines), encoding="utf-8")


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run file; for each query the (document id, score) pairs, best first.

    Raises:
        ValueError: A row without six columns, a rank or score that is not a number, a repeated rank or document, or a
            score that rises with the rank. The message names the file and the line or query. Or the file differs from
            its checksum.
    """
    check_listed(Path(path), REMEDY)
    rows: dict[str, dict[int, tuple[str, float]]] = {}
    for where, columns in _rows(path, (6,), "qid Q0 docid rank score tag"):
        query, _, document, rank, score, _ = columns
        ranking = rows.setdefault(query, {})
        position = _integer(rank, f"{where}: rank")
        if position in ranking:
            raise ValueError(f"{where}: query {query!r} already has a document at rank {position}")
        ranking[position] = document, _finite(score, f"{where}: score")
    run = {query: [ranking[position] for position in sorted(ranking)] for query, ranking in rows.items()}
    for query, pairs in run.items():
        _check_ranking(pairs, f"{path}, query {query!r}")
    return run


def write_qrels(path: str | os.PathLike[str], qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Write judgements, the grade of each document by query id, in four columns.

    Raises:
        ValueError: An id is empty or holds white space.
    """
    lines = []
    for query, judged in qrels.items():
        _check_word(query, "query id")
        for document, grade in judged.items():
            _check_word(document, "document id")
            lines.append(f"{query} 0 {document} {grade}\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def read_qrels(path: str | os.PathLike[str]) -> Qrels:
    """Read the judgements of positive grade from a file of four or five columns.

    Raises:
        ValueError: A row with another number of columns, a grade that is not an integer, or a document that is judged
            twice for one query. The message names the file and the line. Or the file differs from its checksum.
    """
    check_listed(Path(path), REMEDY)
    qrels: Qrels = {}
    for where, columns in _rows(path, (4, 5), "qid 0 docid rel [task]"):
        query, _, document, grade = columns[:4]
        judged = qrels.setdefault(query, {})
        if document in judged:
            raise ValueError(f"{where}: document {document!r} is judged twice for query {query!r}")
        judged[document] = _integer(grade, f"{where}: relevance")
    kept = {query: {doc: grade for doc, grade in judged.items() if grade > 0} for query, judged in qrels.items()}
    return {query: judged for query, judged in kept.items() if judged}


def _rows(path: str | os.PathLike[str], widths: tuple[int, ...], layout: str) -> Iterator[tuple[str, list[str]]]:
    """The file and line, for errors, and the columns of each line that is not blank."""
    with open(path, "rb") as lines:
        for number, content in enumerate(lines, start=1):
            try:
                line = content.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid UTF-8 ({error})") from error
            columns = line.split()
            where = f"{path}, line {number}"
            if columns and len(columns) not in widths:
                raise ValueError(f"{where}: expected {layout!r}, got {len(columns)} columns: {line.strip()[:80]!r}")
            if columns:
                yield where, columns


def _check_word(text: str, name: str) -> None:
    if not isinstance(text, str) or len(text.split()) != 1 or text != text.strip():
        raise ValueError(f"{name} must be one word without white space, got {text!r}")


def _check_ranking(ranking: Sequence[tuple[str, float]], name: str) -> None:
    seen: set[str] = set()
    previous = math.inf
    for document, score in ranking:
        if document in seen:
            raise ValueError(f"{name}: document {document!r} is ranked twice")
        if not math.isfinite(score) or score > previous:
            raise ValueError(f"{name}: scores must be finite and not rise, got {score} after {previous}")
        seen.add(document)
        previous = score


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name} must be an integer, got {text!r}") from error


def _finite(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"{name} must be a number, got {text!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {text!r}")
    return number
