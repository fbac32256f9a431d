"""The search page: three static files over `/search`, and what they need to know of the collection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse

from conjoin.retrieval import Collection
from conjoin.serving.columns import PRICE
from conjoin.serving.explain import explains
from conjoin.serving.searcher import Searcher

_SHOWN = 2


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        heading: The catalogue's name; the last part of its address if None.
        title_column: The column that names a result; its text, or else its id, if None.
        show: Columns that stand on each card beside title and price; the first two choices if None.
        currency: Of the prices, such as EUR or €.
        group_by: A column, such as a product's id: only the best row of each of its values is shown.
        weights: Of the parts of a query, at first.
        min_score: Results with a lower score are left out, at first.
        k: Results of a page.
        beside: A second collection, which is searched for the same.
    """

    heading: str | None = None
    title_column: str | None = None
    show: Sequence[str] | None = None
    currency: str | None = None
    group_by: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    min_score: float | None = None
    k: int = 24
    beside: Searcher | None = None


def add_page(app: FastAPI, searcher: Searcher, page: Page) -> None:
    """Add the page at `/`, and what it asks first at `/page.json`."""
    sides = [searcher, *([page.beside] if page.beside else [])]

    def settings() -> dict[str, Any]:
        """What the page shows of the collection as it is now."""
        kinds = [each.columns.kinds if each.columns else {} for each in sides]
        schema = getattr(searcher.collection, "schema", None)
        columns = {name: kind for name, kind in kinds[0].items() if all(name in each for each in kinds)}
        columns.pop(page.group_by or "", None)
        numbers = [name for name, kind in columns.items() if kind == "number"]
        choices = [name for name, kind in columns.items() if kind == "choice" and name != page.title_column]
        name = searcher.source.rstrip("/").rpartition("/")[2].replace("_", " ").replace("-", " ")
        return {
            "heading": page.heading or name[:1].upper() + name[1:],
            "title": page.title_column,
            "show": choices[:_SHOWN] if page.show is None else page.show,
            "price": next((name for name in numbers if PRICE.search(name)), None),
            "currency": page.currency,
            "group_by": page.group_by,
            "weights": page.weights,
            "min_score": page.min_score,
            "k": min(page.k, searcher.limits.results),
            "columns": columns,
            "types": {} if schema is None else {each.name: str(each.type) for each in schema},
            "lists": all(isinstance(each.collection, Collection) for each in sides),
            "explains": [explains(each.encoder) for each in sides],
            "sides": [{"model": each.model_name, "rows": len(each.collection or ())} for each in sides],
        }

    app.get("/page.json", include_in_schema=False)(settings)
    for path, name in {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}.items():
        file = Path(__file__).parent / name
        app.get(path, include_in_schema=False)(lambda file=file: FileResponse(file))
