"""`conjoin verify`: compare all files of a collection or a model with their checksums."""

import argparse
from pathlib import Path
from typing import Any

from conjoin.cli.commands import COMMANDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "verify",
        help=COMMANDS["verify"],
        description="Hash every file that SHA256SUMS lists. Opening a large collection hashes only the files that are "
        "new or changed since they were hashed on this machine.",
        epilog="example: conjoin verify runs/photos",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of a collection or a model")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import Collection
    from conjoin.storage import FOLDER_CHECKSUMS, check_checksums

    folder = Path(args.folder)
    if (folder / "data").is_dir():
        Collection.open(folder).verify()
    elif (folder / FOLDER_CHECKSUMS).is_file():
        check_checksums(folder, "restore it from a copy")
    else:
        raise FileNotFoundError(f"{args.folder!r} has no {FOLDER_CHECKSUMS}: it is no collection and no saved model")
    print(f"{args.folder}: all files are as they were written")
