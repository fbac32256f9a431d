"""A digest of a row changes exactly where its content does."""

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, strategies as st

from conjoin.storage import item_digest, row_digest

DATA = st.binary(min_size=1, max_size=6)
PATHS = st.sampled_from(["a.png", "b/a.png", "https://example.org/a.png"])
ONE_IMAGE = DATA | PATHS | st.builds(lambda data: {"bytes": data, "path": None}, DATA)
WORDS = st.text(st.sampled_from("ab'\"\\\n\0 é\udc80"), max_size=4)
ROWS = st.fixed_dictionaries(
    {}, optional={"text": WORDS, "image": ONE_IMAGE | st.lists(ONE_IMAGE, max_size=3), "metadata": st.integers(0, 2)}
)


def content(row):
    """What a row holds, however it is written."""
    images = row.get("image", [])
    images = images if isinstance(images, list) else [images]
    bytes_or_path = [image["bytes"] if isinstance(image, dict) else image for image in images]
    return row.get("text"), row.get("metadata"), bytes_or_path


@given(ROWS, ROWS)
def test_of_items(first, second):
    assert (item_digest(first) == item_digest(second)) == (content(first) == content(second))
    assert item_digest(dict(reversed(first.items()))) == item_digest(first) > 0


@given(ROWS, ROWS)
def test_of_rows(first, second):
    same = content(first) == content(second)
    assert (
        not same
        or isinstance(first.get("image"), list) != isinstance(second.get("image"), list)
        or (row_digest(first) == row_digest(second))
    )
    assert same or row_digest(first) != row_digest(second)
