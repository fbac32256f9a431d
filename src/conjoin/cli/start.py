"""`conjoin start`: from a table of products to the search app."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_compute_options, add_data_options, add_image_options


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "start",
        help=COMMANDS["start"],
        description="Look at TABLE (which columns are the pictures, the titles, the ids, the prices, the categories), "
        "encode it into a collection, and open the search app. Each step is a command of its own, printed as such. "
        "Run it again after a change of TABLE: only what is new is encoded.",
        epilog="example: conjoin start catalogue.csv --no-app",
    )
    parser.add_argument("table", metavar="TABLE", help="a CSV, TSV, JSONL or Parquet file, a row for each product")
    parser.add_argument(
        "--model",
        help="folder or Hub name of a model (default: that of --out if it is there, else a CLIP model from the Hub, "
        'else "sample", the towers of the embedded sample)',
    )
    parser.add_argument("--out", metavar="DIR", help="the collection (default: runs/NAME of TABLE)")
    parser.add_argument("--no-app", action="store_true", help="stop before the app")
    add_data_options(parser, ("--image-column", "--text-column", "--id-column"))
    add_image_options(parser)
    add_compute_options(parser, ("--pooling", "--preset"))
    parser.set_defaults(func=run, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.cli.main import run_command
    from conjoin.demo.products import find_products
    from conjoin.demo.start import ABOUT, choose_model, command_line, default_out, describe, has_app, start_commands

    products = find_products(args.table, args.image_column, args.text_column, args.id_column)
    print(f"{args.table}: " + "\n".join(describe(products)))
    out = args.out or default_out(args.table)
    model, reason = choose_model(out, args.model)
    print(f"Model: {model}, {reason}.", ABOUT.get(model, ""))
    steps = start_commands(args.table, products, out, model, {"--pooling": args.pooling, "--preset": args.preset})
    opens = not args.no_app and has_app()
    for number, words in enumerate(steps, 1):
        is_last = number == len(steps)
        if is_last and not opens:
            needs = "" if has_app() else ', which needs pip install "conjoin[app]"'
            print(f"\nThe app{needs}:\n{command_line(words)}")
            return
        print(f"\n{number}/{len(steps)}  {command_line(words)}", flush=True)
        run_command(words)
