"""What objects look like in a notebook: a line of their facts as text, and a table as HTML."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import escape

from conjoin.retrieval.pictures import has_picture, make_thumbnail, read_picture

_MOST_CHARACTERS, _SIDE = 200, 96


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as HTML. Every value is escaped and long ones are cut; bytes are shown as a JPEG."""

    def cell(value: Any) -> str:  # noqa: ANN401
        if isinstance(value, bytes):
            return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(value).decode()}">'
        text = "" if value is None or value != value else f"{value:.4g}" if isinstance(value, float) else str(value)
        return escape(text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " …")

    lines = [("th", columns), *(("td", row) for row in rows)]
    shown = ("".join(f"<{tag}>{cell(value)}</{tag}>" for value in values) for tag, values in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in shown)}</table>"


def table_with_pictures(rows: Sequence[Mapping[str, Any]], folders: tuple[str, ...]) -> str:
    """Rows of a collection as an HTML table, with their thumbnails or the pictures that they name.

    Args:
        rows: As `Collection.rows` gives them.
        folders: As for `read_picture`; in place of a picture that cannot be read stands why.
    """

    def shown(row: Mapping[str, Any]) -> bytes | str:
        try:
            return make_thumbnail(read_picture(row, folders), _SIDE, "picture") if has_picture(row) else ""
        except (FileNotFoundError, ValueError) as error:
            return str(error)

    columns = [
        name for name in dict.fromkeys(name for row in rows for name in row) if name not in ("image", "picture")
    ]
    return html_table(["", *columns], [[shown(row), *map(row.get, columns)] for row in rows])


class Described(ABC):
    """What prints as its class with some facts."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The facts by their names, each found without work."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.facts().items())})"

    def _repr_html_(self) -> str:
        return html_table([type(self).__name__, ""], [*self.facts().items()])
