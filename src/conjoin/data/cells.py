"""Cells of tables: which are no value, and what the others are as ids, images, numbers and texts; what a row has."""

import ast
import html
import io
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image
from price_parser import Price

from conjoin.processing.item_error import ItemError
from conjoin.processing.item_images import DATA_URIS, decode_base64, is_url
from conjoin.processing.item_inputs import PICTURE_SUFFIXES

NO_VALUES = frozenset(("", "n/a", "na", "#n/a", "<na>", "-", "--", "–", "—", "null", "none", "nan", "nat"))
"""Texts that say that there is no value, in any case."""
_DASHES = dict.fromkeys(map(ord, "−–—‒－﹣"), "-") | dict.fromkeys(map(ord, "'’٬"), "") | {ord("٫"): "."}
"""Signs as a minus; the Swiss and the Arabic marks of thousands, which go; the Arabic decimal mark."""
_AFTER_WHOLE = (".", ".-", ",-", ":-", "/-")
"""Behind an amount without hundredths: `12.-`, `12,–`, `12/-`."""
_AMOUNT = re.compile(r"(\D*?)([.,]?\d(?:[\d., ]*\d)?)(\D*)", re.DOTALL)
"""What is before an amount, its digits with their marks, and what is behind it."""
_WORDS_OF_PRICE = re.compile(r"(?:[^\W\d_]|[\s.:*]|\([^\W\d_]+\))*")
"""What may stand before a price, and behind its currency: `from $9`, `12,50 € inkl. MwSt.`, `1,299円(税込)`."""
_MORE_CURRENCIES = re.compile(r"Euro|S/|KSh|元|บาท|тг|د\.إ|ر\.س")
"""What shops write and price_parser does not know."""
_LONGEST_PRICE, _LOOKED_AT = 40, 1000
_LOCATIONS = ("src", "url", "path")
_DATA_URI, _REMOTE = re.compile(r"[|;,\s]+(?=data:)"), re.compile(r"(?i)[|;,\s]+(?=data:|(?:https?:)?//)")
"""What stands before the next of several pictures that are no files."""
_SHORTEST_BASE64 = 40
_WORDS = "a abbr b big cite code del em font i ins mark q s small span strong sub sup u"
_BLOCKS = (
    "article blockquote br center dd div dl dt figure footer h1 h2 h3 h4 h5 h6 header hr iframe img li ol p pre "
    "script section style table tbody td tfoot th thead tr ul video"
)
_TAGS = dict.fromkeys(_WORDS.split(), "") | dict.fromkeys(_BLOCKS.split(), " ")
"""What stands in a text for each tag of HTML; others, such as `<image>`, are no tags."""
_TAG = re.compile(rf"""</?({"|".join(_TAGS)})\b(?:"[^"<]*"|'[^'<]*'|[^<>"'])*+>""", re.IGNORECASE)
_HIDDEN = re.compile(
    r"<(script|style)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)|<!\w[^>]*(?:>|\Z)", re.IGNORECASE | re.DOTALL
)
"""What a browser shows nothing of, to the end of the text where it is not closed: so no text takes quadratic time."""


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: None, NaN, blanks, a word of `NO_VALUES`, or an empty list."""
    if isinstance(value, str):
        return value.strip().lower() in NO_VALUES
    if isinstance(value, bytes | list | tuple | dict):
        return not value
    return value is None or pd.isna(value) is True


def row_kind(row: Mapping[str, Any]) -> Literal["image", "text", "both"] | None:
    """Return which parts a row has: `"image"`, `"text"` or `"both"`; None if it has neither."""
    image, text = (not is_missing(row.get(part)) for part in ("image", "text"))
    return "both" if image and text else "image" if image else "text" if text else None


def as_id(value: Any) -> str | None:
    """Return an id as a text without outer spaces: the number 1001.0 as `1001`, bytes decoded; None for no value.

    Raises:
        ValueError: It is no text and no number, or a float that cannot hold all digits; or bytes are not UTF-8.
    """
    value = value.decode() if isinstance(value, bytes) else value
    if is_missing(value):
        return None
    if isinstance(value, list | tuple | dict):
        raise ValueError(f"{value!r:.80}; expected texts or numbers")
    if isinstance(value, float) and value.is_integer():
        if abs(value) >= 2**53:
            raise ValueError(f"{value}, a 64-bit float that lost digits; write texts")
        value = int(value)
    return str(value).strip()


def as_ids(values: Iterable[Any], column: str) -> list[str | None]:
    """Return the ids or groups of a column, each as `as_id`.

    Raises:
        ValueError: They are no texts or numbers.
    """
    try:
        return [*map(as_id, values)]
    except ValueError as error:
        raise ValueError(f"the column {column!r} holds {error}") from error


def read_images(cell: Any) -> Any:
    """Return the image of a cell as a path, a URL, a data URI or what holds its bytes; of several, a list.

    Args:
        cell: One of these, `//host/a.jpg`, base64, `{"src": ...}`, `{"url": ...}` or `{"path": ...}`; a list of them,
            also as JSON; or several paths or URLs with `|`, `;`, a comma or white space between them.

    Returns:
        None for no value.
    """
    if is_missing(cell):
        return None
    if isinstance(cell, Mapping) and cell.get("bytes") is None:
        others = [value for name, value in cell.items() if name not in _LOCATIONS and _may_be_image(value)]
        found = map(read_images, [*map(cell.get, _LOCATIONS), *others])
        return next((image for image in found if image is not None), None)
    if isinstance(cell, str):
        return _image_or_images(cell.strip())
    if isinstance(cell, list | tuple):
        read = [image for each in cell if (image := read_images(each)) is not None]
        return [one for image in read for one in (image if isinstance(image, list) else [image])] or None
    return cell


def _may_be_image(value: Any) -> bool:
    """Whether a value of an object, such as its `href` or `image`, is the place of a picture, or may hold one."""
    if isinstance(value, str):
        return _is_remote(value) or _is_picture_file(value)
    return isinstance(value, Mapping) or (isinstance(value, list) and value != [] and all(map(_may_be_image, value)))


def parsed(text: str) -> Any:
    """Return the value that a text is in JSON or in Python; the text itself if it is none."""
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(text)
        text = re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text)  # as NumPy prints an array
    return text


def _image_or_images(cell: str) -> Any:
    with suppress(RecursionError):
        if cell[0] in "[{" and isinstance(value := parsed(cell), dict | list):
            return read_images(value)
    if written := re.fullmatch(r"b(['\"])(.*)\1", cell):  # bytes as Python prints them
        cell = written[2]
    if kind := _base64_kind(cell):
        return f"data:{kind};base64,{cell}"
    parts = (_DATA_URI if cell.startswith(DATA_URIS) else _REMOTE).split(cell)  # a URL may hold commas itself
    for separator in ("|", ";", ",", "\n") if len(parts) == 1 else ():
        split = [part for each in cell.split(separator) if (part := each.strip())]
        if len(split) > 1 and (all(map(_base64_kind, split)) or all(map(_is_picture_file, split))):
            parts = split
    if len(parts) > 1:
        return read_images(parts)
    cell = cell.strip("|;, ")
    is_host = cell.startswith("//") and "." in cell[2:].partition("/")[0]
    return f"https:{cell}" if is_host else cell or None


def _is_remote(text: str) -> bool:
    return is_url(text) or text.startswith(("//", *DATA_URIS)) or _base64_kind(text) is not None


def _is_picture_file(text: str) -> bool:
    return text.lower().endswith(PICTURE_SUFFIXES) and not _is_remote(text)


def _base64_kind(text: str) -> str | None:
    """Return the media type of a picture in base64 that Pillow knows; None for other texts."""
    if len(text) < _SHORTEST_BASE64 or "." in text or text.startswith(DATA_URIS):
        return None
    with suppress(OSError, ValueError, Image.DecompressionBombError):
        return Image.open(io.BytesIO(decode_base64(text, ""))).get_format_mimetype()
    return None


def read_number(value: Any, name: str, column: str, mark: str | None = None) -> float | None:
    """Return a cell as a number; None for no value.

    Args:
        value: A number, or a text such as `9.5`, `1e3`, `US$ 1,299.00`, `1.299,00 €`, `Rs. 1,29,900` or `−5`.
        name: The row.
        column: Its column.
        mark: The decimal mark of the column, for texts such as `1.299`, which do not tell; see `decimal_mark`. By
            default they have groups of thousands.

    Raises:
        ItemError: It is no finite number.
    """
    if is_missing(value):
        return None
    number = math.nan
    if isinstance(value, str) and (amount := _amount(value)):
        sign, digits = amount
        number = _as_float(sign, digits, _mark_of(digits) or mark or (".", ",")["." in digits])
    if not math.isfinite(number):
        with suppress(TypeError, ValueError):
            number = math.nan if isinstance(value, bool) else float(value)
    if not math.isfinite(number):
        raise ItemError(name, f"{column} is {value!r:.80}; expected a number, such as 9.5 or US$ 1,299.00")
    return number


def decimal_mark(values: Iterable[Any]) -> str | None:
    """Return the decimal mark, `"."` or `","`, that most of a column's first cells have; None if none tells."""
    marks: Counter[str] = Counter()
    for value in islice(values, _LOOKED_AT):
        if isinstance(value, str) and (amount := _amount(value)):
            mark = _mark_of(amount[1])
            marks.update([mark] if mark and math.isfinite(_as_float(*amount, mark)) else [])
    return marks.most_common(1)[0][0] if marks else None


def _amount(text: str) -> tuple[str, str] | None:
    """Return the sign and the digits, with their marks, of a number or price; None if anything else is in the text."""
    plain = " ".join(unicodedata.normalize("NFKC", text).translate(_DASHES).split())
    found = _AMOUNT.fullmatch(plain) if len(plain) <= _LONGEST_PRICE else None
    if found is None:
        return None
    before, digits, after = found.groups()
    if digits[0] in ".," and before.strip().isalpha():  # Rs.75, but not .75
        before, digits = before + digits[0], digits[1:]
    sign, behind = _no_currency(before), _no_currency(after)
    if (sign, behind) != (before.strip(), after.strip()):  # there is a currency
        sign = sign if sign in ("-", "+") or not _WORDS_OF_PRICE.fullmatch(sign) else ""
        is_last = not after.strip().startswith(behind)  # not so the k of $1.2k, and Mio. of 1,2 Mio. €
        behind = "" if is_last and _WORDS_OF_PRICE.fullmatch(behind) else behind
    return (sign, digits) if sign in ("", "-", "+") and behind in ("", *_AFTER_WHOLE) else None


@lru_cache(4096)
def _no_currency(text: str) -> str:
    """Return what stands before or behind an amount without its currencies."""
    text = _MORE_CURRENCIES.sub("€", text)
    while currency := Price.fromstring(text).currency:
        before, _, after = text.partition(currency)
        text = f"{before.strip()} {after.removeprefix('.').strip()}"
    return text.strip()


def _mark_of(digits: str) -> str | None:
    """Return the decimal mark of an amount; None if it has none, or one mark that may be of thousands: `1.299`."""
    marks = re.findall("[.,]", digits)
    if not marks:
        return None
    whole, _, fraction = digits.rpartition(marks[-1])
    if len({*marks}) == 1 and len(fraction) == 3 and len(whole) <= 3 and whole.lstrip("0") == whole != "":
        return None
    return marks[-1] if marks.count(marks[-1]) == 1 else {".": ",", ",": "."}[marks[-1]]


def _as_float(sign: str, digits: str, mark: str) -> float:
    """Return an amount with this decimal mark; NaN if what is before it are no groups of thousands."""
    whole, _, fraction = digits.partition(mark)
    first, *groups = re.split(r"\D", whole)
    is_grouped = not groups or (len(groups[-1]) == 3 and 1 <= len(first) <= 3 and {*map(len, groups)} <= {2, 3})
    if not is_grouped or not (fraction or "0").isdecimal():
        return math.nan
    return float(f"{sign}{first or 0}{''.join(groups)}.{fraction or 0}")


def clean_text(text: str) -> str:
    """Return a text without outer spaces, tags of HTML and its entities: `A &amp; B<br>` is `A & B`."""
    if "<" not in text and "&" not in text:
        return text.strip()
    plain = html.unescape(_TAG.sub(lambda tag: _TAGS[tag[1].lower()], _HIDDEN.sub(" ", text)))
    return text.strip() if plain == text else " ".join(plain.split())


def texts_of(cell: Any) -> list[str]:
    """Return the texts of a cell, or of its list, each as `clean_text`, without those that are no value."""
    cells = cell if isinstance(cell, list) else [] if cell is None else [cell]
    texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in cells]
    return [text for each in texts if not is_missing(text := clean_text(each))]


def clean_texts(cells: pa.Array) -> pa.Array:
    """Return a column of texts, each as `clean_text`; null for no value."""
    texts = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    if pc.any(pc.match_substring_regex(texts, "[<&]")).as_py():
        texts = pa.array([text and clean_text(text) for text in texts.to_pylist()], pa.string())
    return pc.if_else(pc.is_in(pc.utf8_lower(texts), pa.array([*NO_VALUES])), None, texts)
