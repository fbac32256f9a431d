"""Commands called in this process, and their data."""

import json

from conjoin.cli.main import make_parser

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange")


def conjoin(*words):
    """Run a command; its errors are raised, where `main` prints them."""
    args = make_parser().parse_args([str(word) for word in words])
    args.func(args)


def write_rows(path, rows):
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
