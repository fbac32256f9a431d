"""The formats of an item say the same, and every value is an item or an error that names it."""

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("hypothesis")

from hypothesis import given, strategies as st

from conjoin.processing.input_types import apply_input_type
from conjoin.processing.item_inputs import parse_item

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
PICTURES = [Image.new("RGB", (3, 2), colour) for colour in ("red", "green", "blue")]
PARTS = st.lists(WORDS | st.sampled_from(PICTURES), min_size=1, max_size=5)


def chat(parts, style):
    """A message, as `style` writes its parts."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append(part if style == "bare" else {"type": "text", "text": part})
        elif style == "url":
            content.append({"type": "image_url", "image_url": {"url": part}})
        else:
            content.append({"type": "image", "image": part})
    return {"role": "user", "content": content}


@given(PARTS)
def test_formats_are_read_alike(parts):
    expected = tuple(parts)
    styles = [chat(parts, style) for style in ("bare", "url", "typed")]
    several = [chat([part], "typed") for part in parts]
    for item in (*styles, *([style] for style in styles), several, tuple(several)):
        assert parse_item(item).parts == expected
    texts, images = ([part for part in parts if isinstance(part, str) == is_text] for is_text in (True, False))
    if texts + images == parts:
        assert parse_item({"text": texts, "image": images}).parts == expected
    if images + texts == parts:
        assert parse_item({"image": images, "text": texts}).parts == expected
    if len(parts) == 1 and isinstance(parts[0], str):
        assert parse_item({"text": parts[0]}).parts == expected


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["a.png", "../a.png", "file:///etc/passwd", "http://localhost/a.png", "data:image/png;base64,x"])
    | st.sampled_from([PICTURES[0], np.zeros((2, 2)), np.zeros(3), np.array("a"), object(), {1, 2}, float]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "image", "role", "content", "type", "image_url", "url", "path", "bytes", "video"])
            | st.integers(0, 1),
            values,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(VALUES)
def test_every_value_is_an_item_or_an_error_that_names_it(value):
    for function in (parse_item, lambda item, name: apply_input_type(item, "cat", name)):
        try:
            function(value, "item 7")
        except (ValueError, FileNotFoundError) as error:
            assert str(error).startswith("item 7")
