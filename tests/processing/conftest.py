import logging
from weakref import WeakKeyDictionary

import pytest
from transformers.utils import logging as library_logging


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What the library's logger warns of, as text; no text was cut before."""
    monkeypatch.setattr("conjoin.processing.item_inputs._cut_texts", WeakKeyDictionary())
    library_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield lambda: caplog.text
    library_logging.disable_propagation()
