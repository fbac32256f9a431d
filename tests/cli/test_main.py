"""The program as a whole."""

import errno
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from conjoin.cli.main import main


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("conjoin 0.")


def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["train", str(tmp_path / "absent.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("conjoin: no recipe at")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left\nwhile writing"), "[Errno 28] No space left while writing"),
        (RuntimeError("DataLoader worker (pid 7) is killed"), "DataLoader worker (pid 7) is killed"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), "CUDA out of memory. Tried 2 GiB"),
        (BrokenProcessPool("a process was terminated abruptly"), "a process was terminated abruptly"),
        (MemoryError(), "out of memory"),
    ],
)
def test_what_stops_a_command_is_one_line(error, line, capsys, monkeypatch):
    def fail(options):
        raise error

    monkeypatch.setattr("conjoin.cli.index.run", fail)
    assert main(["index", "runs/photos"]) == 2
    assert capsys.readouterr().err == f"conjoin: {line}\n"
