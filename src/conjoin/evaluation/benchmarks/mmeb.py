"""MMEB (VLM2Vec, arXiv 2410.05160) as a benchmark: Precision@1 of each subset over its published rows."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conjoin.data.mmeb import find_subsets, mmeb_item, read_subset
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark
from conjoin.evaluation.metrics import tie_tolerance, unit_rows
from conjoin.evaluation.results import Headline, Metric, Results, Table
from conjoin.progress import progress
from conjoin.retrieval import ItemEncoder

COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")


class MmebSubset(NamedTuple):
    """The scores of a subset.

    Attributes:
        name: The subset.
        wins: Per query, whether the right target beats all others; a tie is a failure `(N,)`.
        chance: Expected precision of a random choice.
    """

    name: str
    wins: np.ndarray
    chance: float


def evaluate_mmeb(
    encoder: ItemEncoder,
    folder: str | Path,
    images: str | Path | None = None,
    *,
    subsets: Sequence[str] | None = None,
    seed: int = 0,
    show_progress: bool = False,
    **prompt: Any,  # noqa: ANN401 - of `ItemEncoder.encode_query`
) -> Results:
    """Evaluate an encoder on MMEB. A row has one query and its targets, the first of which is right.

    The instruction is part of the published texts. `<|image_1|>` marks the one image of an item and is left out of
    its text.

    Args:
        encoder: The model.
        folder: The subsets, as `find_subsets` finds them.
        images: Folder that the paths of images are relative to; `folder` when None.
        subsets: Names of the subsets to evaluate; all when None.
        seed: Of the bootstrap.
        show_progress: Show progress bars.
        prompt: `prompt` or `prompt_name` of `ItemEncoder.encode_query`, beside the instruction in the texts.

    Raises:
        FileNotFoundError: As `find_subsets`, or a missing image.
        ValueError: As `find_subsets`, or a malformed row; the message names file and row.
    """
    files = find_subsets(folder, subsets)
    root = Path(folder if images is None else images)
    with progress(files.items(), desc="MMEB", unit="subset", show=show_progress) as named:
        scores = [evaluate_subset(encoder, name, path, root, show_progress, **prompt) for name, path in named]
    rows: list[Any] = [
        [score.name, len(score.wins), Metric.from_values(score.wins, score.chance, seed=seed)] for score in scores
    ]
    average = Metric(float(np.mean([score.wins.mean() for score in scores])))
    return Results(
        title="MMEB",
        summary="Precision@1: the share of queries whose right target is closer than all others of the row. Ties are "
        "failures. The average is over subsets.",
        seed=seed,
        dataset={"subsets": len(scores), "queries": sum(len(score.wins) for score in scores)},
        headline=[Headline("average P@1", average, f"{len(scores)} subsets")],
        tables=[Table("Precision@1", ["subset", "queries", "P@1"], rows)],
    )


def evaluate_subset(
    encoder: ItemEncoder,
    name: str,
    path: Path,
    images: Path,
    show_progress: bool = False,
    **prompt: Any,  # noqa: ANN401 - as for `evaluate_mmeb`
) -> MmebSubset:
    """Score one subset.

    A target of several rows is encoded once. What equals the right target of a row is not among the others.
    """
    rows = list(_rows(path))
    queries = [mmeb_item(row["qry_text"], row["qry_img_path"], images, where) for where, row in rows]
    index_of: dict[tuple[str, str], int] = {}
    pools: list[np.ndarray] = []
    for where, row in rows:
        targets = list(zip(row["tgt_text"], row["tgt_img_path"], strict=True))
        numbers = [index_of.setdefault((text or "", image or ""), len(index_of)) for text, image in targets]
        pools.append(np.array(numbers[:1] + [other for other in numbers[1:] if other != numbers[0]], dtype=np.int64))
        if len(pools[-1]) < 2:
            raise ValueError(f"{where}: expected two different targets or more")
    items = [
        mmeb_item(text, image, images, f"{path.name}, target {index}") for index, (text, image) in enumerate(index_of)
    ]
    targets_vectors = unit_rows(encoder.encode_document(items, None, show_progress=show_progress), "targets")
    names, how = [where for where, _ in rows], {"show_progress": show_progress, **prompt}
    query_vectors = unit_rows(encoder.encode_query(queries, names, **how), "queries")
    wins = np.zeros(len(rows), dtype=np.float64)
    for index, pool in enumerate(pools):
        similarity = targets_vectors[pool] @ query_vectors[index]
        wins[index] = float(similarity[0] > similarity[1:].max() + tie_tolerance(similarity.dtype))
    return MmebSubset(name, wins, float(np.mean([1 / len(pool) for pool in pools])))


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows with their names; errors as `evaluate_mmeb`."""
    for number, row in enumerate(read_subset(path)):
        where = f"{path.parent.name}/{path.name}, row {number}"
        missing = [column for column in COLUMNS if column not in row]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}; expected {', '.join(COLUMNS)}")
        lists = [row["tgt_text"], row["tgt_img_path"]]
        if not all(isinstance(each, list) for each in lists) or len(lists[0]) != len(lists[1]):
            raise ValueError(f"{where}: tgt_text and tgt_img_path must be lists of one length, got {lists!r:.80}")
        yield where, row


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of mmeb")
    options.add_argument("--images", metavar="DIR", help="folder of the images (default: --data)")
    options.add_argument("--subsets", nargs="+", metavar="NAME", help="only these (default: all in --data)")


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    how = {"seed": args.seed, "show_progress": not args.quiet, "prompt": args.prompt, "prompt_name": args.prompt_name}
    return evaluate_mmeb(encoder, args.data, args.images, subsets=args.subsets, **how)


BENCHMARKS.register(
    Benchmark("mmeb", "MMEB: Precision@1 of its subsets; --data is their folder", _add_arguments, _run)
)
