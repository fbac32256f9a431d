"""The HTML that the app shows: results, messages and the columns of a collection. Every text in it is escaped."""

import html
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conjoin.serving.columns import Column

if TYPE_CHECKING:
    from PIL import Image

    from conjoin.serving.searcher import Found

_SIDE = 224
_SHOWN = 4
_LONGEST = 160
_TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})

STYLE = (Path(__file__).parent / "app.css").read_text(encoding="utf-8")

NOTHING = "Nothing was found: no row fulfils the filter."

CLICK = """
element.addEventListener('click', event => {
  const card = event.target.closest('button[data-rank]');
  if (card) trigger('select', {rank: Number(card.dataset.rank)});
});
"""
"""Tells the app which result was chosen; a button does so by keyboard too."""


def escape(text: object) -> str:
    """Return a text for any place in HTML, also in a template of the browser."""
    return html.escape(str(text)).translate(_TEMPLATE)


def message(text: str, kind: str = "note") -> str:
    """A message: `"note"`, or `"error"`, which screen readers announce."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="cj-{kind}" role="{role}">{escape(text)}</div>'


class Face(NamedTuple):
    """What names a row on its card.

    Attributes:
        title: The column of its title; its text, or else its id, if None.
        number: A column of numbers, such as prices, that stands below the title; None without one.
    """

    title: str | None = None
    number: str | None = None


def results_html(
    title: str,
    results: "Sequence[Found]",
    milliseconds: float,
    shared: int | None = None,
    folders: tuple[str, ...] = (),
    face: Face = Face(),  # noqa: B008 - it cannot change
    nothing: str = NOTHING,
) -> str:
    """The results of a query as buttons, best first.

    Args:
        title: Which collection and model.
        results: What was found.
        milliseconds: How long it took.
        shared: How many of them another collection found too.
        folders: Where files may be that rows name as their pictures; see `conjoin.retrieval.pictures`.
        face: What names a result.
        nothing: What to say without results.
    """
    other = "" if shared is None else f" · {shared} found by both"
    head = f'<div class="cj-head"><strong>{escape(title)}</strong><span class="cj-dim">{len(results)} results in '
    head += f"{milliseconds:.0f} ms{other}</span></div>"
    return head + _grid([_result(result, folders, face) for result in results], nothing)


def browse_html(title: str, hint: str, rows: "Sequence[Found]", folders: tuple[str, ...], face: Face) -> str:
    """Rows of a collection as cards, below a hint what to do; further arguments as for `results_html`."""
    head = f'<div class="cj-head"><strong>{escape(title)}</strong><span class="cj-dim">{escape(hint)}</span></div>'
    return head + _grid([f'<div class="cj-card">{_card(row, folders, face)}</div>' for row in rows], NOTHING)


def _grid(cards: Sequence[str], nothing: str) -> str:
    return f'<div class="cj-grid">{"".join(cards)}</div>' if cards else message(nothing)


def columns_html(columns: Sequence[Column]) -> str:
    """The columns that a condition may name, with examples."""
    if not columns:
        return message("There are no columns to filter by.")
    rows = "".join(
        f"<tr><td><code>{escape(column.quoted)}</code></td><td>{escape(column.type)}</td>"
        f"<td>{escape(column.example)}</td></tr>"
        for column in columns
    )
    return f'<table class="cj-columns"><tr><th>column</th><th>type</th><th>example</th></tr>{rows}</table>'


def data_uri(image: "Image.Image", side: int) -> str:
    """A picture of at most `side` x `side` pixels as a `data:` URI."""
    from conjoin.evaluation.results import picture

    return picture(image, side)


def _result(hit: "Found", folders: tuple[str, ...], face: Face) -> str:
    """Return a card with a score, which can be selected."""
    from conjoin.evaluation.report.search_page import row_title

    name = escape(_short(row_title(hit.row, hit.id, face.title)))
    width = 100 * max(0.0, min(1.0, hit.score))
    score = (
        f'<span class="cj-line"><b>{hit.rank}</b><span class="cj-score">{hit.score:.4f}</span></span>'
        f'<span class="cj-bar" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'
    )
    return (
        f'<button type="button" class="cj-card" data-rank="{hit.rank}" '
        f'aria-label="Result {hit.rank}, score {hit.score:.3f}: {name}. Explain it.">'
        f"{_card(hit, folders, face, score)}</button>"
    )


def _card(hit: "Found", folders: tuple[str, ...], face: Face, score: str = "") -> str:
    """The picture of a row, its title, its price or another number, and further facts."""
    from conjoin.evaluation.report.search_page import row_title

    row = hit.row
    name = row_title(row, hit.id, face.title)
    picture, note = _thumbnail(row, folders)
    if picture:
        shown = f'<img src="{picture}" alt="{escape(_short(name))}">'
    else:
        shown = f'<span class="cj-face">{escape(_short(name))}</span>'
    number = None if face.number is None else row.get(face.number)
    amount = "" if number is None else f"{face.number} {number:{',.2f' if isinstance(number, float) else ','}}"
    further = [
        (key, value)
        for key, value in row.items()
        if key not in ("image", "picture", face.number) and value not in (None, "") and str(value) != name
    ]
    facts = "" if name == hit.id else f"<span>{escape(hit.id)}</span>"
    facts += "".join(f"<span>{escape(key)}: {escape(_short(str(value)))}</span>" for key, value in further[:_SHOWN])
    facts += f"<span>{escape(note)}</span>" if note else ""
    return (
        f"{shown}{score}"
        f'<span class="cj-name">{escape(_short(name)) if picture else ""}</span>'
        f'<span class="cj-number">{escape(amount)}</span>'
        f'<span class="cj-facts">{facts}</span>'
    )


def _thumbnail(row: Mapping[str, Any], folders: tuple[str, ...]) -> tuple[str | None, str | None]:
    """A thumbnail of the picture of a row, or why there is none: pixels, never the file itself."""
    from conjoin.evaluation.report.search_page import row_picture

    if "picture" in row:
        return row_picture(row, folders, _SIDE)
    image = row.get("image") or ()
    paths = (image,) if isinstance(image, str) else tuple(image)
    return _read_files(paths, folders, tuple(Path(path).stat().st_mtime_ns for path in paths if Path(path).is_file()))


@lru_cache(maxsize=4096)
def _read_files(
    paths: tuple[str, ...], folders: tuple[str, ...], changed: tuple[int, ...]
) -> tuple[str | None, str | None]:
    from conjoin.evaluation.report.search_page import row_picture

    return row_picture({"image": list(paths)}, folders, _SIDE)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
