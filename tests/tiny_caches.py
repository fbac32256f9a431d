"""Mined negatives, as tests read and damage them."""

import pyarrow.parquet as pq

from conjoin.retrieval import load_mined


def read_mined(folder):
    mined = load_mined(folder)
    return [*mined.items()], pq.read_table(folder / "negatives.parquet").to_pylist()
