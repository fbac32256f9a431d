"""A cache of rows and mined negatives, as tests read and damage them."""

from conjoin.retrieval import load_mined
from conjoin.storage import RowCache


class Cache(RowCache):
    kind = "cache"
    remedy = "make it"


def read_mined(folder):
    mined = load_mined(folder)
    return [(anchor, mined[anchor], mined.findings(anchor)) for anchor in mined]
