"""MMEB (VLM2Vec, arXiv 2410.05160): its subsets, its items, and its training rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.data.query_rows import Candidate, QueryDataset, QueryRow, open_rows
from conjoin.data.row_images import path_inside
from conjoin.processing.item_error import ItemError
from conjoin.processing.item_inputs import check_parts, check_unicode
from conjoin.storage import text_digest

IMAGE_TOKEN = "<|image_1|>"
"""Marks the one image of an item in its text."""
IMAGE_INSTRUCTIONS = (
    "Represent the given image.",
    "Represent the given image",
    "Represent the given cropped image of the object",
)
"""What the published rows have as the text of a candidate that is an image alone."""
TRAINING_COLUMNS = ("qry", "qry_image_path", "pos_text", "pos_image_path")


def find_subsets(folder: str | Path, names: Sequence[str] | None = None, split: str = "test") -> dict[str, Path]:
    """Return the file of each subset: `NAME/SPLIT*.parquet` or `.jsonl`; for `test` also `NAME.parquet` or `.jsonl`.

    Raises:
        FileNotFoundError: The folder has no subset.
        ValueError: There is no subset of one of `names`, or a subset has several files.
    """
    folder = Path(folder)
    files: dict[str, Path] = {}
    for path in sorted([*folder.glob(f"*/{split}*"), *(folder.glob("*.*") if split == "test" else ())]):
        if path.suffix not in (".parquet", ".jsonl"):
            continue
        name = path.stem if path.parent == folder else path.parent.name
        if name in files:
            raise ValueError(f"the subset {name!r} has several files: {str(files[name])!r} and {str(path)!r}")
        files[name] = path
    if not files:
        raise FileNotFoundError(f"{str(folder)!r} has no subset: expected NAME/{split}-*.parquet")
    for name in names or ():
        if name not in files:
            raise ValueError(f"no subset {name!r} in {str(folder)!r}; there are {sorted(files)}")
    return {name: files[name] for name in (names or sorted(files))}


def mmeb_item(text: str | None, image: str | None, images: Path, where: str) -> dict[str, str]:
    """The text without the image's mark, the path of the image inside the folder `images`, or both.

    Raises:
        ItemError: Neither a text nor an image, or a path that leaves the folder.
    """
    words = check_unicode(text or "", where).replace(IMAGE_TOKEN, "").strip()
    item = {"text": words} if words else {}
    if image:
        item["image"] = str(path_inside(images, image, where))
    return check_parts(item, where)


class MmebTraining(QueryDataset):
    """Training queries of MMEB, see `QueryDataset`.

    A row of the published files has a query, its instruction included, one positive and at most one negative, each a
    text, an image or both. Rows stay on disk until they are used. Candidates of equal content are one. A candidate
    whose text is one of `IMAGE_INSTRUCTIONS` keeps it, as in the evaluation; its modality is image.

    Args:
        folder: The root: `NAME/original-*.parquet` for each subset, and the images under the paths of the rows.
        hard_negatives: 1 adds the negative of a row, if it has one.
        split: `"train"` is the published `"original"`; `"diverse_instruction"` has other instructions.
        datasets: The subsets; all when empty.

    Raises:
        FileNotFoundError: The folder has no subset.
        ValueError: A malformed row (it is named), a negative `hard_negatives`, or an unknown subset.
    """

    def __init__(
        self, folder: str | Path, *, hard_negatives: int = 0, split: str = "train", datasets: Sequence[str] = ()
    ) -> None:
        super().__init__(hard_negatives)
        self.folder = Path(folder)
        self._rows: list[tuple[Any, int]] = []
        for name, path in find_subsets(folder, datasets or None, "original" if split == "train" else split).items():
            rows, _ = open_rows(path)
            for index, row in enumerate(rows):
                missing = [column for column in TRAINING_COLUMNS if column not in row]
                if missing:
                    expected = f"expected {', '.join(TRAINING_COLUMNS)}"
                    raise ItemError(f"{name}, row {index}", f"lacks {', '.join(missing)}; {expected}")
                self.positives.append((_candidate_id(row, "pos"),))
                self.sources.append(name)
                self._rows.append((rows, index))

    def read(self, index: int) -> QueryRow:
        """Read and check a row; a negative only if rows have some."""
        rows, number = self._rows[index]
        row, where = rows[number], f"{self.sources[index]}, row {number}"
        has_negative = self.hard_negatives and (row.get("neg_text") or row.get("neg_image_path"))
        candidates = []
        for role in ("pos", "neg") if has_negative else ("pos",):
            item = mmeb_item(row[f"{role}_text"], row[f"{role}_image_path"], self.folder, f"{where}, {role}")
            candidates.append(Candidate(_candidate_id(row, role), item, mmeb_modality(item)))
        query = mmeb_item(row["qry"], row["qry_image_path"], self.folder, f"{where}, query")
        return QueryRow(f"{self.sources[index]}/{number}", query, candidates[:1], candidates[1:])


def mmeb_modality(item: Mapping[str, str]) -> str:
    """Return `text`, `image` or `image,text`; an image whose text is one of `IMAGE_INSTRUCTIONS` is an image."""
    if "image" in item and item.get("text") in IMAGE_INSTRUCTIONS:
        return "image"
    return ",".join(part for part in ("image", "text") if part in item)


def _candidate_id(row: Mapping[str, Any], role: str) -> str:
    return text_digest(f"{row[f'{role}_image_path'] or ''}\n{row[f'{role}_text'] or ''}")
