"""MMEB (VLM2Vec, arXiv 2410.05160) as a benchmark: Precision@1 of each subset over its published rows."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.data.mmeb import IMAGE_INSTRUCTIONS, find_subsets, mmeb_item, read_subset
from conjoin.evaluation.benchmark import Benchmark, flag
from conjoin.evaluation.metrics import tie_tolerance, unit_rows
from conjoin.evaluation.results import Headline, Metric, Results, Table
from conjoin.progress import progress
from conjoin.retrieval import ItemEncoder

COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")
_MODALITY_NOTE = (
    "Mean over subsets. A query that asks about an image has an image and a text. A target whose text only asks for "
    "its representation is an image."
)


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
    its text. A target of several rows is encoded once. What equals the right target of a row is not among the others.

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
    root, how = Path(folder if images is None else images), {"show_progress": show_progress, **prompt}
    rows: list[Any] = []
    by_modality: dict[str, list[list[Any]]] = {}
    with progress(find_subsets(folder, subsets).items(), desc="MMEB", unit="subset", show=show_progress) as named:
        for name, path in named:
            modality, wins, chance = _score(encoder, path, root, how)
            rows.append([name, len(wins), Metric.from_values(wins, chance, seed=seed)])
            by_modality.setdefault(modality, []).append(rows[-1])

    def mean(of: Sequence[Sequence[Any]]) -> Metric:
        return Metric(float(np.mean([metric.value for _, _, metric in of])))

    modalities = [[name, len(of), sum(row[1] for row in of), mean(of)] for name, of in sorted(by_modality.items())]
    return Results(
        title="MMEB",
        summary="Precision@1: the share of queries whose right target is closer than all others of the row. Ties are "
        "failures. The average is over subsets.",
        seed=seed,
        dataset={"subsets": len(rows), "queries": sum(row[1] for row in rows)},
        headline=[Headline("average P@1", mean(rows), f"{len(rows)} subsets")],
        tables=[
            Table("Precision@1", ["subset", "queries", "P@1"], rows),
            Table("By modality", ["query → target", "subsets", "queries", "P@1"], modalities, _MODALITY_NOTE),
        ],
    )


def _score(encoder: ItemEncoder, path: Path, images: Path, how: dict[str, Any]) -> tuple[str, np.ndarray, float]:
    """The modality of a subset, whether each query finds its target `(N,)`, and what a random choice finds."""
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
    targets_vectors = unit_rows(encoder.encode_document(items, show_progress=how["show_progress"]), "targets")
    query_vectors = unit_rows(encoder.encode_query(queries, [where for where, _ in rows], **how), "queries")
    wins = np.zeros(len(rows))
    for index, pool in enumerate(pools):
        similarity = targets_vectors[pool] @ query_vectors[index]
        wins[index] = float(similarity[0] > similarity[1:].max() + tie_tolerance(similarity.dtype))
    sides = [{_modality(item) for item in side} for side in (queries, [items[pool[0]] for pool in pools])]
    modality = " → ".join(side.pop() if len(side) == 1 else "several" for side in sides)
    return modality, wins, float(np.mean([1 / len(pool) for pool in pools]))


def _modality(item: Mapping[str, str]) -> str:
    if "image" in item and item.get("text") in IMAGE_INSTRUCTIONS:
        return "image"
    return "+".join(part for part in ("image", "text") if part in item)


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


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    how = {"seed": args.seed, "show_progress": not args.quiet, "prompt": args.prompt, "prompt_name": args.prompt_name}
    return evaluate_mmeb(encoder, args.data, args.images, subsets=args.subsets, **how)


BENCHMARK = Benchmark(
    "mmeb",
    "MMEB: Precision@1 of its subsets; --data is their folder",
    _run,
    (
        flag("--images", "folder of the images (default: --data)", metavar="DIR"),
        flag("--subsets", "only these (default: all in --data)", nargs="+", metavar="NAME"),
    ),
)
