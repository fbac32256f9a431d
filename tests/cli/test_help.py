"""The help of every command reads alike, and comes at once."""

import re
import subprocess
import sys
import time
from dataclasses import fields
from importlib import import_module

import pytest

from conjoin.cli.main import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command(command, capsys, monkeypatch):
    """It says what the command does and what each option does, and shows an example."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    usage, what, *_, example = [part.strip() for part in text.split("\n\n")]
    assert stopped.value.code == 0 and len(what) > 50 and what.endswith(".") and "Literal[" not in text
    assert usage.startswith(f"usage: conjoin {command} ") and example.startswith(f"example: conjoin {command}")
    lines = re.sub(r"\n {10,}", "  ", text)
    said = dict(re.findall(r"^  -{0,2}([A-Za-z][\w/-]*).*?  +(\w.{5,})$", lines, re.MULTILINE))
    module = import_module("conjoin.cli." + command.split()[-1].replace("-", "_"))
    absent = {each.name for each in fields(module.Options)} - {name.lower().replace("-", "_") for name in said}
    assert absent <= {"overrides", "quiet", "collections", "repo_id"}, absent


def test_what_the_help_of_the_program_lists():
    printed = subprocess.run([sys.executable, "-m", "conjoin"], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("command", ["compress", "evaluate", "search"])
def test_help_imports_no_heavy_library(command):
    code = f"""
import sys
from conjoin.cli.main import main
try:
    main(["{command}", "--help"])
except SystemExit:
    print([name for name in ("torch", "numpy", "transformers", "datasets") if name in sys.modules])
"""
    started = time.perf_counter()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]" and time.perf_counter() - started < 10
