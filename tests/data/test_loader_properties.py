"""Random tables are read as they were written, and every row is used once, also by a run that resumes."""

import csv
import gzip
import json

import datasets
import pandas as pd
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings, strategies as st

from conjoin.data import EpochRows, RetrievalBatchSampler, load_pairs
from conjoin.data.cells import clean_text, is_missing

LETTERS = st.characters(exclude_categories=["Cs", "Cc"], include_characters="\r\0\x0b\x1b\x85\n\t,\"'\\<>{}")
TEXTS = st.text(LETTERS, min_size=1, max_size=12).filter(lambda text: not is_missing(clean_text(text)))
ROWS = st.lists(TEXTS, min_size=1, max_size=5).map(
    lambda texts: [{"id": f"{place:03d}", "text": text, "n": place} for place, text in enumerate(texts)]
)


def write(path, rows):
    opener = gzip.open if path.suffix == ".gz" else open
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
        return
    with opener(path, "wt", newline="", encoding="utf-8") as file:
        if ".jsonl" in path.name:
            file.writelines(json.dumps(row, ensure_ascii=bool(len(rows) % 2)) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.jsonl", "a.parquet"])
@given(rows=ROWS, streaming=st.booleans())
@settings(max_examples=8)
def test_tables_are_read_as_they_were_written(name, tmp_path, rows, streaming):
    number = len(list(tmp_path.iterdir()))
    folder = tmp_path / str(number)
    folder.mkdir()
    write(folder / name, rows)
    found = list(load_pairs(folder / name, only="text", streaming=streaming, keep=["n"]))
    assert [(row["id"], row["text"], int(row["metadata"]["n"])) for row in found] == [
        (row["id"], clean_text(row["text"]), row["n"]) for row in rows
    ]


POSITIVES = st.lists(st.integers(0, 6) | st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=40)


@given(POSITIVES, st.integers(1, 4), st.integers(1, 2), st.booleans(), st.integers(0, 3))
def test_batches_share_no_positive_and_a_resumed_run_has_the_rest(positives, batch_size, processes, mixed, epoch):
    sources = None if mixed else [place % 2 for place in range(len(positives))]

    def sampler():
        made = RetrievalBatchSampler(positives, batch_size, sources, processes, seed=5)
        made.set_epoch(epoch)
        return made

    try:
        batches = list(sampler())
    except ValueError as error:
        assert "do not fill a step" in str(error)
        return
    rows = [row for batch in batches for row in batch]
    first = RetrievalBatchSampler(positives, batch_size, sources, processes, seed=5)
    assert len(batches) == len(sampler()) == len(list(first))
    assert (epoch or len(rows) == len(set(rows))) and set(rows) <= set(range(len(positives)))
    for start in range(0, len(batches), processes):
        step = [row for batch in batches[start : start + processes] for row in batch]
        assert len(step) == batch_size * processes
        ids = [
            key
            for row in step
            for key in set(positives[row] if isinstance(positives[row], tuple) else [positives[row]])
        ]
        assert len(ids) == len(set(ids))
        assert sources is None or len({sources[row] for row in step}) == 1
    place = len(batches) // 2  # a resumed run skips what was done
    assert batches[:place] + list(sampler())[place:] == batches


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_choices_of_a_row_do_not_depend_on_the_order(count, seed, epoch, random):
    def choices(order):
        rows = EpochRows([{"n": place} for place in range(count)], seed)
        rows.epoch = epoch
        return {place: (float(rows.numpy_random(place).random()), rows[place]["n"]) for place in order}

    expected = choices(range(count))
    assert choices(random.sample(range(count), count)) == expected
    assert len({value for value, _ in expected.values()}) == count
