"""The `conjoin` program: one module per command, with its options and a function that runs it."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from conjoin import __version__
from conjoin.cli.options import ImageOptions, parse, remedy

COMMANDS = {
    "start": "make a table of products searchable, and open the search app",
    "demo": "train, encode, search and evaluate on the embedded sample",
    "train": "train a model by a recipe",
    "encode": "encode a dataset into a collection that can be searched",
    "index": "make searches of a large collection faster",
    "copy": "copy a collection to another folder, an object store or Milvus",
    "search": "search a collection by a text, an image, or both",
    "app": "search a collection in the browser",
    "serve": "serve embeddings and search over HTTP",
    "mine": "find hard negatives of every row of a dataset",
    "export": "write a model as a folder that other programs load",
    "push": "push a model, a collection, a dataset, a metric or a search app to the Hub",
    "verify": "compare files with their checksums, or an endpoint with the model that it serves",
    "evaluate": "evaluate a model on a benchmark, or a collection on queries",
    "mteb": "evaluate a model on tasks of MTEB",
    "data compose-queries": "compose queries of several conditions from a catalogue of products",
    "explain": "show which patches and words an image and a text share",
    "analyze": "show what each layer of an MLLM contributes and costs",
    "compress": "train the first layers of an MLLM or embedder to embed as the whole",
}
"""What each command does, known without importing its module."""
HELP = f"""usage: conjoin COMMAND ...

Universal multimodal retrieval: text, images and both in one vector space.

{chr(10).join(f"  {name:<22}{summary}" for name, summary in COMMANDS.items())}

conjoin COMMAND --help shows the options of a command and an example. conjoin --version shows the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; what goes wrong is one line on stderr and exit code 2."""
    try:
        run_command(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:  # also a worker's death
        print("conjoin:", " ".join(str(error).split()) or "out of memory", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if error.args:
            print("conjoin:", error, file=sys.stderr)
        return 130
    return 0


def run_command(argv: Sequence[str]) -> None:
    """Run a command; a mistake in its input raises what the library raises."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
    elif argv[0] == "--version":
        print(f"conjoin {__version__}")
    else:
        command, options = read_command(argv)
        if not sys.stderr.isatty() or getattr(options, "quiet", False):
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read by transformers too, at its import
            os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        if isinstance(options, ImageOptions):
            options.allow()
        command.run(options)


def read_command(argv: Sequence[str]) -> tuple[Any, Any]:
    """The module of the command that the words begin with, and its options.

    Raises:
        ValueError: There is no such command or option, or a value is wrong or missing.
        SystemExit: The help was asked for, and printed.
    """
    name = next((name for name in (argv[0], " ".join(argv[:2])) if name in COMMANDS), None)
    if name is None:
        raise ValueError(f"unknown command {argv[0]!r}; {remedy(argv[0], COMMANDS, 'conjoin')}")
    module = import_module("conjoin.cli." + name.rpartition(" ")[2].replace("-", "_"))
    words = argv[name.count(" ") + 1 :]
    kind = module.options_of(words) if name == "evaluate" else module.Options
    return module, parse(kind, words, f"conjoin {name}")
