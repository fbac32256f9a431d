"""The program as a whole."""

import errno
import subprocess
import sys

import pytest

from conjoin.cli.main import main


def test_version_and_help(capsys):
    for words, expected in ((["--version"], "conjoin 0."), (["--help"], "demo"), (["train", "--help"], "RECIPE")):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


def test_only_the_command_that_is_called_is_imported():
    code = """
import sys
from conjoin.cli.main import main
try:
    main(["search", "--help"])
except SystemExit:
    print([name for name in ("torch", "numpy", "transformers", "datasets", "conjoin.cli.search", "conjoin.cli.train")
           if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "['conjoin.cli.search']"


def test_a_mistake_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["train", str(tmp_path / "absent.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("conjoin: no recipe at")
    assert error.count("\n") == 1


def test_what_the_system_says_is_one_line(capsys, monkeypatch):
    def fail(arguments):
        raise OSError(errno.ENOSPC, "No space left on device\nwhile writing")

    monkeypatch.setattr("conjoin.cli.index.run", fail)
    assert main(["index", "runs/photos"]) == 2
    assert capsys.readouterr().err == "conjoin: [Errno 28] No space left on device while writing\n"


def test_stray_options_are_refused_where_there_are_no_overrides(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["index", "runs/photos", "--colour", "red"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --colour red" in capsys.readouterr().err
