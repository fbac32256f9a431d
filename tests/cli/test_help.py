"""The help of every command reads alike."""

import argparse

import pytest

from conjoin.cli import evaluate
from conjoin.cli.main import make_parser
from conjoin.evaluation import find_task
from conjoin.evaluation.tasks import TASKS


def parsers(parser):
    """The parser of every command that takes arguments, by its name."""
    found = {}
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for kind in kinds:
        for name, command in kind.choices.items():
            found |= parsers(command) or {f"{parser.prog} {name}": command}
    return found


def of_benchmark(name):
    """The options of `conjoin evaluate --benchmark NAME`."""
    return evaluate._parser("", find_task(name))


EVALUATE = {f"conjoin evaluate --benchmark {name}": of_benchmark(name) for name in TASKS}
ALL = {name: parser for name, parser in parsers(make_parser()).items() if name != "conjoin evaluate"} | EVALUATE


@pytest.mark.parametrize("name", ALL)
def test_help_says_what_it_does_and_shows_an_example(name):
    parser = ALL[name]
    assert parser.description.endswith("."), "what it does, in sentences"
    if name not in EVALUATE:  # its example stands below the list of benchmarks
        assert parser.epilog.startswith(("example: conjoin ", "examples: conjoin "))
    usage = parser.format_usage()
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            label = action.option_strings or action.dest
            assert len(action.help or "") > 5 and not action.help.startswith(("of ", "default")), label
            assert not action.option_strings or action.option_strings[0] in usage, label


def test_commands_with_overrides_say_so():
    for name, parser in ALL.items():
        if "overrides" in parser._defaults:
            assert "--key value" in parser.format_help().lower(), name
    assert "(default: 32)" in ALL["conjoin encode"].format_help()
