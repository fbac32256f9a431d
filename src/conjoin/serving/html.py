"""The HTML that the app shows: results, messages and the columns of a collection. Every text in it is escaped."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conjoin.serving.columns import Column

if TYPE_CHECKING:
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


def results_html(
    title: str,
    line: str,
    results: "Sequence[Found]",
    folders: tuple[str, ...] = (),
    title_column: str | None = None,
    number_column: str | None = None,
    nothing: str = NOTHING,
) -> str:
    """Results as cards: as buttons, best first, or rows without a score.

    Args:
        title: Which collection and model.
        line: What to say of them.
        results: What was found.
        folders: Where files may be that rows name as their pictures; see `conjoin.retrieval.pictures`.
        title_column: The column that names a row; its text, or else its id, if None.
        number_column: A column of numbers, such as prices, that stands below the title.
        nothing: What to say without results.
    """
    cards = "".join(_card(hit, folders, title_column, number_column) for hit in results)
    head = f'<div class="cj-head"><strong>{escape(title)}</strong><span class="cj-dim">{escape(line)}</span></div>'
    return head + (f'<div class="cj-grid">{cards}</div>' if cards else message(nothing))


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


def _card(hit: "Found", folders: tuple[str, ...], title_column: str | None, number_column: str | None) -> str:
    """The picture of a row, its rank and score, its title, its price or another number, and further facts."""
    from conjoin.evaluation.report.search_page import row_picture, row_title

    row, title = hit.row, row_title(hit.row, hit.id, title_column)
    name = escape(_short(title))
    picture, note = row_picture(row, folders, _SIDE)  # pixels, never the file itself
    number = row.get(number_column) if number_column else None
    further = [
        f"{key}: {_short(str(value))}"
        for key, value in row.items()
        if key not in ("image", "picture", number_column) and value not in (None, "") and str(value) != title
    ]
    facts = [*([hit.id] if title != hit.id else []), *further[:_SHOWN], *([note] if note else [])]
    parts = [f'<img src="{picture}" alt="{name}">' if picture else f'<span class="cj-face">{name}</span>']
    if not math.isnan(hit.score):
        parts.append(f'<span class="cj-line"><b>{hit.rank}</b><span class="cj-score">{hit.score:.4f}</span></span>')
    parts += [f'<span class="cj-name">{name}</span>'] if picture else []
    if number is not None:
        amount = f"{number_column} {number:{',.2f' if isinstance(number, float) else ','}}"
        parts.append(f'<span class="cj-number">{escape(amount)}</span>')
    parts.append('<span class="cj-facts">' + "".join(f"<span>{escape(fact)}</span>" for fact in facts) + "</span>")
    if math.isnan(hit.score):
        return f'<div class="cj-card">{"".join(parts)}</div>'
    label = f"Result {hit.rank}, score {hit.score:.3f}: {name}. Explain it."
    return (
        f'<button type="button" class="cj-card" data-rank="{hit.rank}" aria-label="{label}">{"".join(parts)}</button>'
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
