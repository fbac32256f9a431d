"""One of several launched processes: encodes rows into collections, step by step.

    torchrun --nproc-per-node 2 tests/tiny_ranks.py FOLDER STEP [STEP ...]

A step is `NAME:KEY=VALUE,...`: it encodes `rows_of(...)` into `FOLDER/NAME`; the last process writes what it returned.
"""

import json
import sys
import time
from pathlib import Path

import torch

from conjoin.retrieval import encode, encode_collection, launched_processes
from tiny_encoder import tiny_encoder, tiny_rows

CHUNK = 2
"""Batches of a chunk; the reference must use the same for equal bits."""


def rows_of(count=23, changed=0, gone=0, bad=0, twice=0, price=0, delay=0):
    """Rows: every `changed`-th has another text, every `gone`-th is missing, every `bad`-th cannot be used.

    Args:
        count: How many.
        changed: As said; 0 for none.
        gone: As said.
        bad: As said.
        twice: The place of a row whose id is that of the first row.
        price: Keep a column from this row on, of which the others know nothing.
        delay: Milliseconds before each row.
    """
    for number, row in enumerate(tiny_rows(count)):
        time.sleep(delay / 1000)
        if gone and number % gone == 1:
            continue
        if changed and number % changed == 2:
            row["text"] = f"{row['text']} changed"
        if bad and number % bad == 3:
            row["problem"] = "broken"
        if twice and number == twice:
            row["id"] = "row/0"
        if price:
            row["metadata"] = {"price": number, **({"late": f"word {number}"} if number >= price else {})}
        yield row


def main(folder, *steps):
    torch.set_num_threads(1)
    encode.BATCHES_AT_ONCE = CHUNK
    encode._ROWS_PER_COMMIT = 1
    processes = launched_processes()
    for step in steps:
        name, _, given = step.partition(":")
        options = {key: int(value) for key, value in (pair.split("=") for pair in given.split(",") if pair)}
        settings = {"sync": bool(options.pop("sync", 0)), "on_error": "skip" if options.pop("skip", 0) else "raise"}
        collection = encode_collection(
            rows_of(**options), tiny_encoder(), Path(folder) / name, processes=processes, **settings
        )
        if processes is None or processes.is_main_process:
            found = {"processes": processes.num_processes, "changes": collection.changes._asdict()}
            (Path(folder) / f"{name}.jsonl").open("a").write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
