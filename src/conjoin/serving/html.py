"""The HTML of the app, results, messages and the columns of a collection, and of the endpoint's reference."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conjoin.serving.columns import Column
from conjoin.serving.search_page import row_picture, row_title
from conjoin.templates import template

if TYPE_CHECKING:
    from conjoin.retrieval import Hit

_SIDE = 224
_SHOWN = 4
_PARTS = "serving/app.html.j2"
_TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})

NOTHING = "Nothing was found: no row fulfils the filter."

CLICK = """
element.addEventListener('click', event => {
  const card = event.target.closest('button[data-rank]');
  if (card) trigger('select', {rank: Number(card.dataset.rank)});
});
"""
"""Tells the app which result was chosen; a button does so by keyboard too."""


def render(part: str, **values: Any) -> str:  # noqa: ANN401
    """Fill a macro of `app.html.j2`; every text is escaped, also for templates of the browser."""
    return str(getattr(template(_PARTS).module, part)(**values)).translate(_TEMPLATE)


def message(text: str, kind: str = "note") -> str:
    """A message: `"note"`, or `"error"`, which screen readers announce."""
    return render("message", text=text, kind=kind)


def results_html(
    title: str,
    line: str,
    results: "Sequence[Hit]",
    folders: tuple[str, ...] = (),
    title_column: str | None = None,
    number_column: str | None = None,
    nothing: str = NOTHING,
    offset: int = 0,
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
        offset: Results that came before these.
    """
    cards = []
    for rank, hit in enumerate(results, offset + 1):
        name = row_title(hit.row, hit.id, title_column)
        picture, note = row_picture(hit.row, folders, _SIDE)  # pixels, never the file itself
        further = [
            f"{key}: {value}"
            for key, value in hit.row.items()
            if key not in ("image", "picture", number_column) and value not in (None, "") and str(value) != name
        ]
        facts = [*([hit.id] if name != hit.id else []), *further[:_SHOWN], *([note] if note else [])]
        number = hit.row.get(number_column) if number_column else None
        if number is not None:
            number = f"{number_column} {number:{',.2f' if isinstance(number, float) else ','}}"
        score = None if math.isnan(hit.score) else hit.score
        cards.append(
            {"rank": rank, "score": score, "name": name, "picture": picture, "number": number, "facts": facts}
        )
    return render("results", title=title, line=line, cards=cards, nothing=nothing)


def columns_html(columns: Sequence[Column]) -> str:
    """The columns that a condition may name, with examples."""
    return render("columns", columns=columns)
