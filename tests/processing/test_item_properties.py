"""Every value is an item or an error that names it."""

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("hypothesis")

from hypothesis import given, strategies as st

from conjoin.processing import parse_item
from conjoin.processing.input_types import apply_input_type

PICTURE = Image.new("RGB", (3, 2), "red")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["a.png", "../a.png", "file:///etc/passwd", "http://localhost/a.png", "data:image/png;base64,x"])
    | st.sampled_from([PICTURE, np.zeros((2, 2)), np.zeros(3), np.array("a"), object(), {1, 2}, float]),
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
