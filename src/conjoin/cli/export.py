"""`conjoin export`: a saved model in a form that other programs load."""

import argparse
import shutil
from typing import Any

from conjoin.cli.train import usage

FORMATS = ("code", "stock")


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "export",
        help="write a model as a folder that other programs load",
        description="Write MODEL to --out. Format code: a folder with its own Python code, as training saves it. "
        "Format stock: an MLLM retriever as an ordinary checkpoint of its architecture, without code, for "
        "sentence-transformers, transformers and serving engines such as vLLM.",
        epilog="example: conjoin export runs/puma --format stock --out runs/puma-stock "
        '--query-prompt "Find an image that matches the caption."',
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a model of this package")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="code",
        help="code: with its Python code; stock: an ordinary checkpoint (default: %(default)s)",
    )
    for name in ("query", "document"):
        parser.add_argument(
            f"--{name}-prompt",
            metavar="TEXT",
            help=f"instruction that encode_{name} of sentence-transformers gives (default: the model's)",
        )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Load, write and print how to use it."""
    from pathlib import Path

    if Path(args.out).exists():
        raise FileExistsError(f"{args.out!r} exists; choose another folder")

    from conjoin.hub import export, export_stock, load_model
    from conjoin.processing.sentence_files import SentenceFilesMixin

    model, processor = load_model(args.model)
    given = {"query": args.query_prompt, "document": args.document_prompt}
    prompts = {name: text for name, text in given.items() if text is not None}
    if prompts and isinstance(processor, SentenceFilesMixin):
        processor.set_prompts((processor.prompts or {}) | prompts)
    if args.format == "stock":
        export_stock(model, processor, args.out)
    else:
        export(model, processor, args.out)
    recipe = Path(args.model) / "recipe.json"
    if recipe.is_file():
        shutil.copy(recipe, args.out)  # for the card of `conjoin push`
    print(f"Saved to {args.out}. Load it anywhere:\n\n{usage(args.out, code=args.format == 'code')}")
