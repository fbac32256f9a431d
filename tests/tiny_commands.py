"""Commands called in this process, and their data."""

import json
import shlex

from conjoin.cli.main import run_command

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange")


def conjoin(*words):
    """Run a command; its errors are raised, where `main` prints them."""
    run_command([str(word) for word in words])


def write_rows(path, rows):
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def variants(path):
    """The variants of a recipe: the commands in its header."""
    header = "".join(line for line in path.read_text(encoding="utf-8").splitlines(True) if line.startswith("#"))
    lines = header.replace("\\\n#", "").splitlines()
    return [shlex.split(line.removeprefix("#")) for line in lines if line.startswith("#   conjoin")]
