"""A cache of rows and mined negatives, as tests read and damage them."""

import pyarrow.parquet as pq

from conjoin.retrieval import load_mined
from conjoin.storage import RowCache


class Cache(RowCache):
    kind = "cache"
    remedy = "make it"


def read_mined(folder):
    mined = load_mined(folder)
    return [*mined.items()], pq.read_table(folder / "negatives.parquet").to_pylist()
