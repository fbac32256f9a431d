"""`conjoin verify`: compare all files of collections, models and evaluations with their checksums."""

import argparse
from pathlib import Path
from typing import Any

from conjoin.cli.commands import COMMANDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "verify",
        help=COMMANDS["verify"],
        description="Hash every file that a SHA256SUMS lists, in FOLDER and below it. Opening a large collection "
        "hashes only the files that are new or changed since they were hashed on this machine.",
        epilog="example: conjoin verify runs/photos",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="folder of a collection, a model or an evaluation, or one that holds some"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.retrieval import Collection
    from conjoin.storage import FOLDER_CHECKSUMS, check_checksums

    sums = sorted(Path(args.folder).rglob(FOLDER_CHECKSUMS))
    if not sums:
        raise FileNotFoundError(
            f"there is no {FOLDER_CHECKSUMS} in {args.folder!r}: it is no collection, no saved model and no evaluation"
        )
    for folder in (path.parent for path in sums):
        if (folder / "data" / "train.lance").is_dir():
            Collection.open(folder).verify()
        else:
            check_checksums(folder, "restore it from a copy")
    print(f"{args.folder}: all files are as they were written")
