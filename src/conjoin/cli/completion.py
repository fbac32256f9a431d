"""`conjoin completion`: a script that completes commands and options in a shell."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
_PATHS = {"CATALOGUE", "DATA", "DIR", "FILE", "FOLDER", "INDEX", "JSON", "MODEL", "OUT", "PATH", "RECIPE", "SOURCE"}
_PATHS |= {"COLLECTION", "TABLE", "YAML"}
"""Names of values in the help that may be files."""


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "completion",
        help=COMMANDS["completion"],
        description="Print a script that completes commands, options, their values and files in SHELL. Needs pip "
        'install "conjoin[completion]". The script is for this version of conjoin; write it again after an update.',
        epilog="example: conjoin completion bash > ~/.local/share/bash-completion/completions/conjoin",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    print(script(args.shell))


def script(shell: str) -> str:
    """The completion script of a shell.

    Raises:
        ImportError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ImportError('completion needs shtab: pip install "conjoin[completion]"') from error
    from conjoin.cli.evaluate import parser_of_all
    from conjoin.cli.main import make_parser

    parser = make_parser()
    commands: Any = _subparsers(parser)[0].choices
    commands["evaluate"] = parser_of_all()  # its own parser has no options: they depend on the benchmark
    _complete_files(parser, shtab.FILE)
    return shtab.complete(parser, shell)


def _subparsers(parser: argparse.ArgumentParser) -> "list[argparse._SubParsersAction[Any]]":
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:  # noqa: ANN401 - as shtab has it
    """Complete file names where an argument of the parser or of its commands may be one."""
    for action in parser._actions:
        if action.metavar in _PATHS:
            vars(action)["complete"] = files
    for commands in _subparsers(parser):
        for command in commands.choices.values():
            _complete_files(command, files)
