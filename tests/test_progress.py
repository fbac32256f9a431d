"""Progress is a bar in a terminal, and seldom shown elsewhere."""

import sys
import time

import pytest

from conjoin import progress as module
from conjoin.progress import progress


def run(seconds=0.0, show=True):
    with progress(total=4, desc="working", unit="row", show=show) as bar:
        for _ in range(4):
            time.sleep(seconds)
            bar.update(1)
    assert list(progress(range(3), "counting", show=show)) == [0, 1, 2]


def test_short_work_prints_nothing_into_a_pipe(capfd):
    run()
    assert capfd.readouterr() == ("", "")


def test_long_work_prints_now_and_then_into_a_pipe(capfd, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_IN_LOGS", 0.05)
    run(seconds=0.04)
    shown = capfd.readouterr().err.split("\r")[1:]
    assert "4/4" in shown[-1] and 1 < len(shown) <= 3 and all(each.startswith("working: ") for each in shown)


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_shown_when_not_asked_for(terminal, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    run(show=False)
    assert capfd.readouterr().err == ""


def test_a_terminal_has_a_bar(capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run()
    shown = capfd.readouterr().err
    assert "4/4" in shown and "100%" in shown
