"""From pictures to candidates of a symmetric benchmark (SOLAR Fig. 2): describe, edit, synthesise, assemble, review.

Each step is a function that you pass in; `construction.models` wraps pipelines of transformers and diffusers as such.
A step is run over all items before the next one begins, so that one large model at a time need be in memory.
"""

import base64
import hashlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from conjoin.data.row_checks import repeated_id
from conjoin.processing import load_image
from conjoin.processing.item_error import ItemError
from conjoin.progress import progress
from conjoin.storage import content_digest, read_json, write_text
from conjoin.templates import template

logger = logging.getLogger(__name__)
EDITS = ("replace", "add", "remove")
"""How an edited text differs from the original: in other objects, in more, or in fewer."""
Record = dict[str, Any]
"""What is known of an item: `id`, `original_image`, `original_text`, `edited_text`, its `edit` (of `EDITS`),
`rewritten_text` (None: no variant), `edited_image` (paths relative to the folder); `skipped` says why there is no
more."""
_SHEET = "data/generate/construction/review_sheet.html.j2"
_ROLES = {"query": "query X", "positive": "positive X⁺", "negative": "negative X⁻", "variant": "variant X′"}


class Edited(NamedTuple):
    """An edited description, and how it differs: one of `EDITS`."""

    text: str
    edit: str = "replace"


def construct_symmetric(
    rows: Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    describe: Callable[[Image.Image], str],
    edit: Callable[[str], Edited],
    synthesise: Callable[[str], Image.Image],
    rewrite: Callable[[str], str] | None = None,
    show_progress: bool = False,
) -> Path:
    """Make candidate triplets and a sheet on which a human accepts or rejects them.

    The result of each step is saved as soon as it is made: after an interruption the same call resumes, and a finished
    item needs no model. An item whose description is empty, or whose edited text is empty or unchanged, is left out,
    with a warning and with the reason in its record; remove the file in `folder/items` to try it again. If the
    rewritten text is empty or unchanged, the item has no variant.

    Args:
        rows: Mappings with a unique `id` and an `image`, for example what `load_pairs` gives.
        folder: For `items/`, `images/`, `candidates.jsonl` (as `load_triplets` reads it) and `review.html`.
        describe: T_orig from I_orig.
        edit: T_mod from T_orig: objects replaced, added or removed.
        synthesise: I_mod from T_mod.
        rewrite: T_mod in other words: the text of the variant X′, which has X's image. `None`: no variants.
        show_progress: Show progress bars.

    Returns:
        The path of `candidates.jsonl`.

    Raises:
        KeyError: A row without id or image.
        ValueError: An id met twice, an unreadable image, a record of another image, or not one candidate in the end.
    """
    folder = Path(folder)
    records = _records(rows, folder)
    steps: list[tuple[str, str, Callable[[Any], Any] | None]] = [
        ("original_text", "original_image", describe),
        ("edited_text", "original_text", edit),
        ("rewritten_text", "edited_text", rewrite),
        ("edited_image", "edited_text", synthesise),
    ]
    for field, source, step in steps:
        if step is not None:
            todo = [record for record in records if field not in record and "skipped" not in record]
            for record in progress(todo, desc=field.replace("_", " "), unit="item", show=show_progress):
                value = load_image(folder / record[source]) if source == "original_image" else record[source]
                _add(record, field, step(value), value, folder)
                _save(folder, record)
    candidates = [each for record in records if "skipped" not in record for each in assemble_triplets(record)]
    if not candidates:
        raise ValueError(f"none of {len(records)} items gave a candidate; why, is in {str(folder / 'items')!r}")
    path = folder / "candidates.jsonl"
    write_text(path, "".join(json.dumps(triplet, ensure_ascii=False) + "\n" for triplet in candidates))
    _write_review_sheet(path, candidates)
    return path


def assemble_triplets(record: Record) -> list[dict[str, Any]]:
    """The positive pair (I_orig, T_mod) ~ (I_mod, T_orig) with either of the other combinations as the negative.

    After an `"add"` the edited pair has the same objects in all as the query, after a `"remove"` the original pair has
    them: it would be a false negative and is left out.
    """
    query = {"query_image": record["original_image"], "query_text": record["edited_text"]}
    positive = {"positive_image": record["edited_image"], "positive_text": record["original_text"]}
    variant = {}
    if record.get("rewritten_text") is not None:
        variant = {"variant_image": record["original_image"], "variant_text": record["rewritten_text"]}
    kinds = {"add": ("original",), "remove": ("edited",)}.get(record.get("edit", "replace"), ("original", "edited"))
    return [
        {"id": f"{record['id']}/{kind}", **query, **positive}
        | {"negative_image": record[f"{kind}_image"], "negative_text": record[f"{kind}_text"]}
        | variant
        for kind in kinds
    ]


def _records(rows: Iterable[Mapping[str, Any]], folder: Path) -> list[Record]:
    """The record of every row; new ones get their picture saved."""
    records: dict[str, Record] = {}
    for number, row in enumerate(rows):
        id_, name = str(row["id"]), f"item {str(row['id'])!r}"
        if id_ in records:
            raise repeated_id(id_, f"row {number}")
        picture = load_image(row["image"], name)
        record = records[id_] = {"id": id_, "original_image": f"images/{_stem(id_)}-original.png"}
        path = folder / f"items/{_stem(id_)}.json"
        if path.exists():
            record |= read_json(path)
            if content_digest(load_image(folder / record["original_image"], name)) != content_digest(picture):
                raise ItemError(name, f"it has another image than in {str(path)!r}; an id must stay with its image")
        else:
            _save_picture(folder / record["original_image"], picture)
            _save(folder, record)
    return list(records.values())


def _add(record: Record, field: str, made: Any, value: Any, folder: Path) -> None:
    """Add what a step made of a value to a record."""
    if isinstance(made, Edited):
        made, record["edit"] = made
    if isinstance(made, Image.Image):
        record[field] = f"images/{_stem(record['id'])}-edited.png"
        _save_picture(folder / record[field], made)
    elif made.strip() and made.strip() != value:
        record[field] = made.strip()
    else:
        reason = f"the {field.replace('_', ' ')} is {'unchanged' if made.strip() else 'empty'}"
        record |= {field: None} if field == "rewritten_text" else {"skipped": reason}
        logger.warning(
            "item %r %s: %s", record["id"], "is skipped" if "skipped" in record else "has no variant", reason
        )


def _stem(id_: str) -> str:
    """A readable file name that is unique for each id."""
    return re.sub(r"\W+", "-", id_)[:40] + "-" + hashlib.blake2b(id_.encode(), digest_size=6).hexdigest()


def _save(folder: Path, record: Record) -> None:
    path = folder / f"items/{_stem(record['id'])}.json"
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def _save_picture(path: Path, picture: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    load_image(picture).save(path)  # its record follows


def _write_review_sheet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a self-contained page with inline pictures, which sends no data, beside the file of the candidates.

    Texts can be edited on the page. Decisions survive a reload if the browser keeps local data. The button saves the
    accepted rows with all their fields. Save them into the same folder, because image paths are relative to it.
    """
    pictures = {}
    for row in rows:
        for name in (row[f"{role}_image"] for role in _ROLES if f"{role}_image" in row):
            small = load_image(path.parent / name, f"item {row['id']!r}").copy()
            small.thumbnail((320, 320), Image.Resampling.LANCZOS)
            small.save(buffer := io.BytesIO(), "jpeg", quality=85)
            pictures[name] = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    key, data = hashlib.sha256(path.read_bytes()).hexdigest()[:16], {"rows": rows, "pictures": pictures}
    page = template(_SHEET).render(title=path.name, key=key, roles=_ROLES, data=data)
    write_text(path.with_name("review.html"), page)
