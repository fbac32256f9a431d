"""The results of one search as a self-contained HTML page: pictures, scores and columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.evaluation.report.page import write_page
from conjoin.evaluation.results import Shown, picture
from conjoin.processing.input_types import concatenate_images
from conjoin.processing.item_images import load_image

_SIDE = 256


def write_search_page(
    query: Any,  # noqa: ANN401 - any item
    results: Sequence[Mapping[str, Any]],
    target: str | Path,
    where: str | None = None,
) -> Path:
    """Write a page that shows a query and what it found.

    Args:
        query: The item.
        results: Best first: `"rank"`, `"score"`, `"id"` and `"row"`, the columns that `rows_of` gives.
        target: The file to write; missing folders are created.
        where: The condition of the search.

    Raises:
        ValueError: The query cannot be read.
    """
    found = []
    for result in results:
        image, note = row_picture(result["row"].get("image"))
        found.append({**result, "image": image, "note": note})
    shown = Shown.from_item(query, "the query")
    return write_page(
        "conjoin.evaluation.report", "search.html.j2", Path(target), (), query=shown, results=found, where=where
    )


def row_picture(path: Any, side: int = _SIDE) -> tuple[str | None, str | None]:  # noqa: ANN401
    """A thumbnail of the picture of a row as a `data:` URI, or why there is none; both None without a path.

    Several pictures (`kept_values` joins their paths by a comma) are shown as one, as input type `cat` makes it.
    """
    if path is None:
        return None, None
    paths = [str(path)] if Path(str(path)).is_file() else str(path).split(", ")
    if not all(Path(one).is_file() for one in paths):
        return None, "the picture is not at this path here"
    try:
        pictures = [load_image(one) for one in paths]
        return picture(concatenate_images(pictures) if len(pictures) > 1 else pictures[0], side), None
    except ValueError as error:
        return None, str(error)
