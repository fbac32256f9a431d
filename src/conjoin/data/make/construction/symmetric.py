"""From pictures to candidates of a symmetric benchmark (SOLAR Fig. 2): describe, edit, synthesise, assemble, review.

Each step is a function that you pass in; `construction_models` wraps pipelines of transformers and diffusers as such.
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

from conjoin.data.json_files import JsonLines
from conjoin.data.row_checks import repeated_id
from conjoin.processing import load_image
from conjoin.processing.item_error import ItemError
from conjoin.progress import progress
from conjoin.storage import atomic_path, content_digest, write_text

logger = logging.getLogger(__name__)
CANDIDATES_FILE = "candidates.jsonl"
REVIEW_FILE = "review.html"
EDITS = ("replace", "add", "remove")
"""How an edited text differs from the original: in other objects, in more, or in fewer."""
Record = dict[str, Any]
"""What is known of an item: `id`, `original_image`, `original_text`, `edited_text`, its `edit` (of `EDITS`),
`rewritten_text` (None: no variant), `edited_image` (paths relative to the folder); `skipped` says why there is no
more."""
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
    edit: Callable[[str], Edited | str],
    synthesise: Callable[[str], Image.Image],
    rewrite: Callable[[str], str] | None = None,
    assemble: Callable[[Record], list[dict[str, Any]]] | None = None,
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
        edit: T_mod from T_orig: objects replaced, added or removed. A plain string counts as `"replace"`.
        synthesise: I_mod from T_mod.
        rewrite: T_mod in other words: the text of the variant X′, which has X's image. `None`: no variants.
        assemble: The triplets of a finished item; `None` is `assemble_triplets`.
        show_progress: Show progress bars.

    Returns:
        The path of `candidates.jsonl`.

    Raises:
        ValueError: A row without id or image, an id met twice, an unreadable image, a damaged record or one of
            another image, a step that returns something of another type, or not one candidate in the end.
    """
    folder = Path(folder)
    for name in ("items", "images"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    records = _begin(rows, folder)
    steps: list[tuple[str, str, Callable[[Any], Any] | None]] = [
        ("original_text", "original_image", describe),
        ("edited_text", "original_text", edit),
        ("rewritten_text", "edited_text", rewrite),
        ("edited_image", "edited_text", synthesise),
    ]
    for field, source, step in steps:
        if step is None:
            continue
        for record in progress(records, desc=field.replace("_", " "), unit="item", show=show_progress):
            if field not in record and "skipped" not in record:
                _run_step(record, field, step, source, folder)
    finished = [record for record in records if "skipped" not in record]
    candidates = [triplet for record in finished for triplet in (assemble or assemble_triplets)(record)]
    if not candidates:
        raise ValueError(
            f"none of {len(records)} items gave a candidate; the reasons are in {str(folder / 'items')!r}"
        )
    path = folder / CANDIDATES_FILE
    write_text(path, "".join(json.dumps(triplet, ensure_ascii=False) + "\n" for triplet in candidates))
    write_review_sheet(path, folder / REVIEW_FILE)
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


def _begin(rows: Iterable[Mapping[str, Any]], folder: Path) -> list[Record]:
    """The record of every row; new ones get their picture saved."""
    records: dict[str, Record] = {}
    for number, row in enumerate(rows):
        id_ = row.get("id")
        if id_ is None or id_ == "" or row.get("image") is None:
            raise ValueError(f'row {number}: expected an "id" and an "image", got the keys {list(row)}')
        if str(id_) in records:
            raise repeated_id(str(id_), f"row {number}")
        path = _record_path(folder, str(id_))
        picture = load_image(row["image"], f"item {str(id_)!r}")
        if path.exists():
            records[str(id_)] = _read_record(path, picture)
            continue
        record: Record = {"id": str(id_)}
        record["original_image"] = _save_picture(folder, record, "original_image", picture)
        _save(folder, record)
        records[str(id_)] = record
    return list(records.values())


def _read_record(path: Path, picture: Image.Image) -> Record:
    """Read the record of an item, which has this picture."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not {"id", "original_image"} <= set(record):
            raise ValueError("it is not the record of an item")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); remove it to make the item again") from error
    folder, name, original = path.parents[1], f"item {record['id']!r}", record["original_image"]
    if content_digest(load_image(folder / original, name)) != content_digest(picture):
        raise ItemError(
            name,
            f"its image is not {original!r} of the construction in {str(folder)!r}; an id must stay with its "
            "image (row numbers do not, if rows move): give the rows their former ids, or choose another folder",
        )
    return record


def _run_step(record: Record, field: str, step: Callable[[Any], Any], source: str, folder: Path) -> None:
    """Add one field to a record and save it."""
    name = f"item {record['id']!r}, {field.replace('_', ' ')}"
    value = record[source]
    made = step(load_image(folder / value, name) if source == "original_image" else value)
    if isinstance(made, Edited):
        if made.edit not in EDITS:
            raise ItemError(name, f"unknown edit {made.edit!r}; expected one of {EDITS}")
        record["edit"], made = made.edit, made.text
    expected = Image.Image if field == "edited_image" else str
    if not isinstance(made, expected):
        raise ItemError(name, f"the step must return a {expected.__name__}, got {type(made).__name__}")
    if not isinstance(made, str):
        record[field] = _save_picture(folder, record, field, made)
    elif not made.strip() or made.strip() == value:
        reason = f"the {field.replace('_', ' ')} is {'unchanged' if made.strip() else 'empty'}"
        is_variant = field == "rewritten_text"
        logger.warning("item %r %s: %s", record["id"], "has no variant" if is_variant else "is skipped", reason)
        record |= {field: None} if is_variant else {"skipped": reason}
    else:
        record[field] = made.strip()
    _save(folder, record)


def _record_path(folder: Path, id_: str) -> Path:
    """A readable file name that is unique for each id."""
    return folder / "items" / f"{_file_stem(id_)}.json"


def _file_stem(id_: str) -> str:
    return re.sub(r"\W+", "-", id_)[:40] + "-" + hashlib.blake2b(id_.encode(), digest_size=6).hexdigest()


def _save_picture(folder: Path, record: Record, field: str, picture: Image.Image) -> str:
    name = f"images/{_file_stem(record['id'])}-{field.removesuffix('_image')}.png"
    rgb = load_image(picture, f"item {record['id']!r}, {field}")
    with atomic_path(folder / name) as temporary:
        rgb.save(temporary, "PNG")
    return name


def _save(folder: Path, record: Record) -> None:
    write_text(_record_path(folder, record["id"]), json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def write_review_sheet(candidates: str | Path, out: str | Path, *, size: int = 320, title: str | None = None) -> Path:
    """Write a self-contained page with inline pictures, which sends no data.

    Texts can be edited on the page. Decisions survive a reload if the browser keeps local data. The button saves the
    accepted rows with all their fields. Save them into the folder of the candidates' file, because image paths are
    relative to it.

    Args:
        candidates: Triplets in JSON lines, as `load_triplets` reads them.
        out: Path of the page.
        size: Longest side of a picture in pixels.
        title: Title of the page; by default the name of the candidates' file.

    Raises:
        FileNotFoundError: The file or a listed image does not exist.
        ValueError: A line is not a JSON object, or a picture cannot be read.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    candidates = Path(candidates)
    rows = list(JsonLines(candidates))
    pictures: dict[str, str] = {}
    triplets = []
    for number, row in enumerate(rows):
        items = []
        for role, label in _ROLES.items():
            image, text = row.get(f"{role}_image"), row.get(f"{role}_text")
            if image is None and text is None:
                continue
            items.append({"role": role, "label": label, "text": text, "picture": image})
            if image is not None and image not in pictures:
                name = f"line {number + 1}, {role}_image"
                source = image if "://" in image or image.startswith("data:") else candidates.parent / image
                pictures[image] = _thumbnail(load_image(source, name), size)
        triplets.append({"id": str(row.get("id", number)), "items": items})
    environment = Environment(
        loader=PackageLoader("conjoin.data.make.construction", "."), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("review_sheet.html.j2").render(
        title=title if title is not None else candidates.name,
        key=hashlib.sha256(candidates.read_bytes()).hexdigest()[:16],
        triplets=triplets,
        data={"rows": rows, "pictures": pictures},
    )
    out = Path(out)
    out.write_text(page, encoding="utf-8")
    return out


def _thumbnail(image: Image.Image, size: int) -> str:
    """Return a JPEG of at most `size` x `size` pixels as a `data:` URI."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "jpeg", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
