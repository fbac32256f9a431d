"""The `conjoin` program: one thin module per command."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from conjoin import __version__
from conjoin.cli.commands import COMMANDS


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the program.

    Args:
        only: The one command whose module is imported and whose options are added; those of all when None.
    """
    parser = argparse.ArgumentParser(
        prog="conjoin",
        description="Universal multimodal retrieval: text, images and both in one vector space.",
        epilog="conjoin COMMAND --help shows the options of a command and an example.",
    )
    parser.add_argument("--version", action="version", version=f"conjoin {__version__}", help="show the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if only in (None, name):
            import_module(f"conjoin.cli.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a mistake in its input is one line on stderr and exit code 2."""
    try:
        run_command(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError, ImportError) as error:
        print("conjoin:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if error.args:
            print("conjoin:", error, file=sys.stderr)
        return 130
    return 0


def run_command(argv: Sequence[str]) -> None:
    """Run a command; a mistake in its input raises what the library raises.

    Raises:
        SystemExit: An option is unknown or has a wrong value, which argparse has printed.
    """
    parser = make_parser(next((word for word in argv if not word.startswith("-")), ""))
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        if "overrides" not in arguments:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides = rest
    if not sys.stderr.isatty() or ("quiet" in arguments and arguments.quiet):
        _hide_library_bars()
    arguments.func(arguments)


def _hide_library_bars() -> None:
    """Hide the progress bars of the libraries; the package's own become lines where there is no terminal."""
    import datasets
    import huggingface_hub.utils
    import transformers

    huggingface_hub.utils.disable_progress_bars()
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
