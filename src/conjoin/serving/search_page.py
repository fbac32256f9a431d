"""The results of one search as a self-contained HTML page: pictures, scores and columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conjoin.data.row_images import OutsideError
from conjoin.evaluation.report import write_page
from conjoin.evaluation.results import Shown, picture
from conjoin.retrieval.pictures import has_picture, read_picture
from conjoin.retrieval.results import Hit

_SIDE = 256


def write_search_page(
    query: Any,  # noqa: ANN401 - any item
    hits: Sequence[Hit],
    target: str | Path,
    where: str | None = None,
    folders: tuple[str, ...] = (),
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write a page that shows a query and what it found.

    Args:
        query: The item.
        hits: Its results, best first.
        target: The file to write; missing folders are created.
        where: The condition of the search.
        folders: Where files may be that the rows name as their pictures; see `conjoin.retrieval.pictures`.
        title: The column that names a result; its text, or else its id, if None.
        notes: Lines above the results.

    Raises:
        ValueError: The query cannot be read.
    """
    results = []
    for hit in hits:
        image, note = _picture(hit.row, folders)
        name = str((hit.row.get(title) if title else None) or hit.row.get("text") or hit.id)
        facts = {"id": hit.id, **hit.row}
        facts = {key: value for key, value in facts.items() if key != "picture" and str(value) != name}
        results.append({"score": hit.score, "title": name, "row": facts, "image": image, "note": note})
    shown = Shown.from_item(query, "the query")
    return write_page("serving/search.html.j2", Path(target), query=shown, results=results, where=where, notes=notes)


def _picture(row: Mapping[str, Any], folders: tuple[str, ...]) -> tuple[str | None, str | None]:
    """A thumbnail of the picture of a row as a `data:` URI, or why there is none; both None without a picture."""
    if not has_picture(row):
        return None, None
    try:
        return picture(read_picture(row, folders), _SIDE), None
    except FileNotFoundError:
        return None, "the picture is not at this path here"
    except OutsideError:
        return None, "the picture is outside of the collection: --root FOLDER allows it"
    except ValueError as error:
        return None, str(error)
