"""Image-text pairs as a benchmark: text → image and image → text, as on Flickr30k and COCO (PUMA Tables 4 and 10)."""

from argparse import ArgumentParser, Namespace
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor

from conjoin.data import load_pairs
from conjoin.data.pairs import undecoded
from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark
from conjoin.evaluation.metrics import chance_hit_rate, chance_mrr
from conjoin.evaluation.ranking import ranks_of_pairs
from conjoin.evaluation.report.examples import search_examples
from conjoin.evaluation.results import Cell, Example, Headline, Metric, Results, Shown
from conjoin.retrieval import ItemEncoder, encode_collection
from conjoin.storage.fingerprints import row_digest, text_digest

KS = (1, 5, 10)
MRR_DEPTH = 10
DIRECTIONS = (("text", "image"), ("image", "text"))
_EXAMPLES = 3
_PROTOCOL = (
    "Each text searches all images, and each image searches all texts; any of its partners is right. Wrong candidates "
    "that tie with the best right one count as better."
)


class _Items(NamedTuple):
    """The different images or texts of the pairs."""

    rows: datasets.Dataset
    of_pair: Tensor
    """`(P,)` the item of each pair."""


def evaluate_pairs(
    encoder: ItemEncoder,
    pairs: datasets.Dataset,
    folder: str | Path,
    *,
    text_instruction: str | None = None,
    image_instruction: str | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    seed: int = 0,
    name: str = "pairs",
    show_progress: bool = False,
) -> Results:
    """Search the images for each text and the texts for each image; R@1, R@5, R@10 and MRR@10.

    An image (its file, or its bytes) or a text that occurs in several pairs is one item, and each of its partners is
    right. So an image may have several captions. Wrong candidates that tie with the best right one count as better.

    Args:
        encoder: The model.
        pairs: Columns `id`, `image` and `text`, as `load_pairs` returns them.
        folder: Folder of the embeddings; an interrupted evaluation resumes with them.
        text_instruction: For texts that search for images.
        image_instruction: For images that search for texts.
        dtype: Of the stored vectors, as for `encode_collection`.
        seed: Of the bootstrap.
        name: Of the benchmark in the results.
        show_progress: Show progress bars.

    Raises:
        ValueError: There are no pairs, or an item cannot be read (it is named).
    """
    if not len(pairs):
        raise ValueError("there are no pairs to evaluate")
    items = {part: _different(pairs, part) for part in ("image", "text")}
    instructions = {"text": text_instruction, "image": image_instruction}
    encode = partial(_encode, encoder, Path(folder), dtype, show_progress)
    gallery = {part: encode(items[part].rows, part) for part in items}
    queries = {
        part: gallery[part] if told is None else encode(items[part].rows, part, told)
        for part, told in instructions.items()
    }
    cells, examples = [], []
    for asked, found in DIRECTIONS:
        right = torch.stack([items[asked].of_pair, items[found].of_pair], dim=1).unique(dim=0)
        metrics = _score(queries[asked], gallery[found], right, seed)
        cells.append(Cell("local", asked, found, len(queries[asked]), len(gallery[found]), metrics))
        examples += _examples(items, asked, found, queries[asked], gallery[found], right)
    counts = {"pairs": len(pairs), "images": len(gallery["image"]), "texts": len(gallery["text"])}
    return Results(
        title=name,
        summary=f"{counts['pairs']} pairs of {counts['images']} images and {counts['texts']} texts. {_PROTOCOL}",
        seed=seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset=dict(counts),
        config={f"{part} instruction": told for part, told in instructions.items()},
        headline=[
            Headline(f"{cell.query} → {cell.candidates}, R@5", cell.metrics["hit_rate@5"], f"{cell.queries:,} queries")
            for cell in cells
        ],
        combinations=cells,
        examples=examples,
        examples_note="The queries are evenly spaced in the data.",
    )


def _encode(
    encoder: ItemEncoder,
    folder: Path,
    dtype: Literal["float32", "float16"],
    show_progress: bool,
    rows: datasets.Dataset,
    part: str,
    instruction: str | None = None,
) -> Tensor:
    """Return the vectors `(N, D)` of images or texts, through a collection."""
    collection = encode_collection(
        rows,
        encoder,
        folder / (part if instruction is None else f"{part}-{text_digest(instruction)[:8]}"),
        sync=True,
        instruction=instruction,
        dtype=dtype,
        show_progress=show_progress,
    )
    return torch.from_numpy(collection.vectors(rows["id"][:])).float()


def _different(pairs: datasets.Dataset, part: str) -> _Items:
    """Return the different images or texts, each under the id of its first pair."""
    numbers: dict[Hashable, int] = {}
    first, of_pair = [], []
    pairs = undecoded(pairs.select_columns(["id", part]))
    for place, row in enumerate(pairs):
        key = row_digest({"image": row["image"]}) if part == "image" else row["text"]
        if key not in numbers:
            numbers[key] = len(numbers)
            first.append(place)
        of_pair.append(numbers[key])
    return _Items(pairs.select(first), torch.tensor(of_pair))


def _score(queries: Tensor, gallery: Tensor, right: Tensor, seed: int) -> dict[str, Metric]:
    """Return hit rates and MRR with intervals and chance; `right` is `(P, 2)`, see `ranks_of_pairs`."""
    ranks = ranks_of_pairs(queries, gallery, right).numpy()
    counts, size = torch.bincount(right[:, 0]).numpy(), len(gallery)
    metrics = {
        f"hit_rate@{k}": Metric.from_values((ranks <= k).astype(float), chance_hit_rate(counts, size, k), seed=seed)
        for k in KS
    }
    reciprocal = np.where(ranks <= MRR_DEPTH, 1 / ranks, 0.0)
    metrics[f"mrr@{MRR_DEPTH}"] = Metric.from_values(reciprocal, chance_mrr(counts, size, MRR_DEPTH), seed=seed)
    return metrics


class _Gallery(Sequence[Shown]):
    """Items as the report shows them; a picture is read when it is shown."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as a list
        row = self.rows[index]
        return Shown(row["text"]) if "text" in row else Shown.from_item({"image": row["image"]}, row["id"])


def _examples(
    items: dict[str, _Items], asked: str, found: str, queries: Tensor, gallery: Tensor, right: Tensor
) -> list[Example]:
    """Return a few searches of one direction."""
    count = min(_EXAMPLES, len(queries))
    chosen = [place * len(queries) // count for place in range(count)]
    relevant = [set(right[right[:, 0] == place, 1].tolist()) for place in chosen]
    shown, candidates = (_Gallery(items[part].rows) for part in (asked, found))
    return search_examples(
        [shown[place] for place in chosen], queries[chosen], candidates, gallery, relevant, title=f"{asked} → {found}"
    )


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of pairs")
    for part in ("image", "text", "id"):
        options.add_argument(
            f"--{part}-column", metavar="NAME", help=f"column of the {part}s, when it cannot be guessed"
        )
    options.add_argument("--split", default="train", metavar="NAME", help="split of the data (default: %(default)s)")
    for part, target in DIRECTIONS:
        options.add_argument(
            f"--{part}-instruction", metavar="TEXT", help=f"instruction for {part}s that search for {target}s"
        )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of stored vectors (default: %(default)s)",
    )


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    columns = {f"{part}_column": vars(args)[f"{part}_column"] for part in ("image", "text", "id")}
    results = evaluate_pairs(
        encoder,
        load_pairs(args.data, split=args.split, **columns),
        out / "collections",
        text_instruction=args.text_instruction,
        image_instruction=args.image_instruction,
        dtype=args.dtype,
        seed=args.seed,
        name=Path(args.data).stem,
        show_progress=not args.quiet,
    )
    results.dataset |= {"source": args.data, "split": args.split}
    return results


PAIRS = BENCHMARKS.register(
    Benchmark(
        "pairs",
        "text → image and image → text on pairs of your own, or Flickr30k and COCO; --data is any source of pairs",
        _add_arguments,
        _run,
        reads_data="source",
    )
)
