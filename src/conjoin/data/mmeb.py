"""MMEB (VLM2Vec, arXiv 2410.05160): its subsets, and its items."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from conjoin.data.row_images import path_inside
from conjoin.processing.item_inputs import check_parts, check_unicode

IMAGE_TOKEN = "<|image_1|>"
"""Marks the one image of an item in its text."""
IMAGE_INSTRUCTIONS = (
    "Represent the given image.",
    "Represent the given image",
    "Represent the given cropped image of the object",
)
"""What the published rows have as the text of a candidate that is an image alone."""
TRAINING_COLUMNS = {"query_text": "qry", "query_image": "qry_image_path"} | {
    f"{role}_{part}": f"{role[:3]}_{name}"
    for role in ("positive", "negative")
    for part, name in (("text", "text"), ("image", "image_path"))
}
"""The columns of the training rows, by their roles."""


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


def mmeb_modality(item: Mapping[str, str]) -> str:
    """Return `text`, `image` or `image,text`; an image whose text is one of `IMAGE_INSTRUCTIONS` is an image."""
    if "image" in item and item.get("text") in IMAGE_INSTRUCTIONS:
        return "image"
    return ",".join(part for part in ("image", "text") if part in item)
