"""The help of every command reads alike, and the completion scripts know every command."""

import argparse
import subprocess

import pytest

from conjoin.cli import completion
from conjoin.cli.evaluate import parser_of_all
from conjoin.cli.main import make_parser
from conjoin.constants import INDEX_KINDS


def parsers(parser):
    """The parser of every command that takes arguments, by its name."""
    found = {}
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for kind in kinds:
        for name, command in kind.choices.items():
            found |= parsers(command) or {f"{parser.prog} {name}": command}
    return found


ALL = parsers(make_parser()) | {"conjoin evaluate": parser_of_all()}


@pytest.mark.parametrize("name", ALL)
def test_help_says_what_it_does_and_shows_an_example(name):
    parser = ALL[name]
    assert parser.description.endswith("."), "what it does, in sentences"
    if name != "conjoin evaluate":  # its example stands below the list of benchmarks
        assert parser.epilog.startswith(("example: conjoin ", "examples: conjoin "))
    usage = parser.format_usage()
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            label = action.option_strings or action.dest
            assert len(action.help or "") > 5 and not action.help.startswith(("of ", "default")), label
            assert not action.option_strings or action.option_strings[0] in usage, label


def test_commands_with_overrides_say_so():
    for name, parser in ALL.items():
        if "overrides" in parser._defaults and name != "conjoin evaluate":
            assert "--section.key" in parser.format_help().lower(), name
    assert "(default: 32)" in ALL["conjoin encode"].format_help()


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "conjoin.bash"
    path.write_text(completion.script("bash"))
    return path


def complete(script, folder, *words):
    """What bash offers after `words`."""
    code = f"""
source {script}
COMP_WORDS=(conjoin "$@"); COMP_CWORD=$#
_shtab_conjoin conjoin "${{@: -1}}" "${{COMP_WORDS[$#-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    run = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, cwd=folder, check=True)
    return run.stdout.split()


def test_bash_completes_commands_options_values_and_files(bash, tmp_path):
    (tmp_path / "recipe.yaml").touch()
    assert complete(bash, tmp_path, "tea") == ["teacher-cache"]
    assert complete(bash, tmp_path, "data", "make-mini-me") == ["make-mini-merit"]
    assert complete(bash, tmp_path, "index", "--kind", "") == ["none", *INDEX_KINDS]
    assert complete(bash, tmp_path, "train", "rec") == ["recipe.yaml"]
    assert "symmetric" in complete(bash, tmp_path, "evaluate", "m", "--benchmark", "sy")
    assert complete(bash, tmp_path, "evaluate", "m", "--exclude") == ["--exclude-query-products"]


@pytest.mark.parametrize("shell", completion.SHELLS[1:])
def test_every_shell_has_a_script_with_every_command(shell):
    pytest.importorskip("shtab")
    text = completion.script(shell)
    assert all(name.split()[-1] in text for name in ALL)
