"""Processes that write a collection are killed at random moments: readers see whole states, the same again resumes."""

import shutil

import numpy as np
import pytest

import killed
from conjoin.retrieval import Collection
from conjoin.retrieval.collection_table import open_table
from tiny_collections import check, state

pytestmark = pytest.mark.slow
KILLS = 8
"""Of each kind of writer."""


@pytest.fixture(scope="module")
def writers():
    running = killed.Writers()
    yield running
    running.close()


@pytest.fixture(scope="module")
def begun(writers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    writers.run(killed.first, folder)
    return folder


def is_readable(folder, states):
    """Whether there is a collection, which is in one of some states."""
    try:
        found = state(folder)
    except (FileNotFoundError, ValueError) as error:
        assert "there is no collection" in str(error) or "is unfinished" in str(error)
        return False
    assert found in states
    return True


def test_a_first_run(writers, tmp_path):
    writers.run(killed.first, tmp_path / "whole")
    seconds, whole = writers.run(killed.first, tmp_path / "timed"), state(tmp_path / "whole")
    assert state(tmp_path / "timed") == whole
    stopped = 0
    for number, moment in enumerate(killed.moments(KILLS, seconds)):
        folder = tmp_path / str(number)
        stopped += writers.run(killed.first, folder, kill_after=moment) is None
        is_readable(folder, [whole])
        stopped += writers.run(killed.first, folder, kill_after=moment / 2) is None  # and again
        is_readable(folder, [whole])
        writers.run(killed.first, folder)
        assert state(folder) == whole
        table = open_table(folder)
        assert table.count_rows() == len(whole)
    assert stopped > KILLS / 2


def test_an_update(writers, begun, tmp_path):
    before = state(begun)
    shutil.copytree(begun, tmp_path / "whole")
    seconds = writers.run(killed.update, tmp_path / "whole")
    whole, stopped = state(tmp_path / "whole"), 0
    assert len(whole) == 49 and whole != before
    for number, moment in enumerate(killed.moments(KILLS, seconds)):
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        stopped += writers.run(killed.update, folder, kill_after=moment) is None
        assert is_readable(folder, [before, whole])
        stopped += writers.run(killed.update, folder, kill_after=moment / 2) is None
        assert is_readable(folder, [before, whole])
        writers.run(killed.update, folder)
        assert state(folder) == whole
        Collection.open(folder).verify()
    assert stopped > KILLS / 2


def test_an_index(writers, begun, tmp_path):
    before = state(begun)
    shutil.copytree(begun, tmp_path / "whole")
    seconds, stopped = writers.run(killed.index, tmp_path / "whole"), 0
    ids, vectors = list(before), np.stack([np.frombuffer(vector, np.float32) for vector, _ in before.values()])
    for number, moment in enumerate(killed.moments(KILLS, seconds)):
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        stopped += writers.run(killed.index, folder, kill_after=moment) is None
        assert is_readable(folder, [before])
        check(Collection.open(folder), vectors, vectors[:5], ids=ids)
        writers.run(killed.first, folder)  # publishes what was begun
        writers.run(killed.index, folder)
        collection = Collection.open(folder)
        assert state(folder) == before and collection.metadata["index"]["recall@10"] == 1
        check(collection, vectors, vectors[:5], ids=ids)
    assert stopped > KILLS / 3
