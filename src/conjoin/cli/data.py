"""`conjoin data`: make data sets."""

import argparse
from typing import Any

from conjoin.cli import compose_queries
from conjoin.cli.commands import COMMANDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser("data", help=COMMANDS["data"], description="Make a data set.")
    kinds = parser.add_subparsers(title="data sets", metavar="KIND", required=True)
    compose_queries.add_parser(kinds)
