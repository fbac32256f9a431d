"""Kill every command that writes at many moments, and look at what is there and at what the next run makes of it.

A moment is the n-th system call that changes a file (or, of `push`, that sends something): before it, after it, or, of
a write, halfway through. The calls of an undisturbed run are counted first; then the moments are drawn, one from each
of equal parts of the run, so they cover all the writing evenly, and the same seed draws the same. See `faults.py`.
Each attempt is a forked process, so nothing is imported again. After each:

* a reader must refuse what is there, or see all of the old state or all of the new one;
* the same command again must end with the files of the undisturbed run, no more and no fewer; of a collection, with
  its rows and vectors to the bit, as Lance draws the names of its files.

Besides: the disk is full from a moment on, Ctrl-C at a moment, and a second process that starts at a moment. Linux on
x86-64 only.

    python benchmarks/reliability.py --json runs/reliability.json --write benchmarks/results/reliability.md
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from fault_commands import COMMANDS, SOURCES, Command, Place, hub_state, keep_output, make_inputs, running_hub, set_hub
from fault_tables import KILLS, OTHERS, Attempt, merge, report, table, write_report
from faults import ChildError, Fault, Kind, Traced, in_child, run_traced

_BESIDE_LANCE = {"SHA256SUMS"}
"""What names the files of Lance."""
CLEAR = ("FileNotFoundError", "ValueError", "DamagedError", "OSError")

Learnt = tuple[dict[str, str], dict[str, str], dict[str, str]]
"""What a reader sees before and after a command, and the digests of its files."""


class Bench:
    """The folders, the undisturbed runs, and the attempts.

    Args:
        work: An empty folder.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self.place = Place(work / "inputs", work / "out")
        self.cache, self.saved, self.log = work / "cache", work / "saved", work / "log"
        self.empty_hub = hub_state()
        self.hub_before = self.empty_hub
        self.events: dict[str, int] = {}

    def call(self, words: list[str]) -> Callable[[], int]:
        """A command as a function that returns its exit code."""

        def run() -> int:
            from huggingface_hub.utils import get_session

            from conjoin.cli.main import main
            from conjoin.retrieval import encode

            encode.BATCHES_AT_ONCE, encode._ROWS_PER_COMMIT = 1, 1  # a commit for every batch
            get_session().timeout = 3.0  # a lost request is given up
            return main(words)

        return run

    def learn(self, name: str) -> Learnt:
        """Run a command undisturbed; returns what a reader saw before and after, and the digests of its files."""
        command = COMMANDS[name]
        self.reset(None)
        for words in command.before:
            self.check(self.run(self.call(words(self.place)), None, command))
        shutil.rmtree(self.saved, ignore_errors=True)
        if self.place.out.exists():
            shutil.copytree(self.place.out, self.saved)
        self.hub_before = hub_state()
        before = self.read(command)[1]
        import_modules(in_child(partial(_modules, self.call(command.words(self.place)))))
        self.reset(command)
        whole = self.run(self.call(command.words(self.place)), None, command)
        self.check(whole)
        self.events[name] = len(whole.events)
        state, after, error = self.read(command)
        if state != "read":
            raise RuntimeError(f"{name}: {error}")
        return before, after, files(self.place.out, command)

    def check(self, run: Traced) -> None:
        """Raise an error unless a run succeeded."""
        if run.code != 0:
            raise RuntimeError(f"an undisturbed run failed:\n{run.output}")

    def reset(self, command: Command | None) -> None:
        """Remove what the last attempt left, and bring back what the command finds."""
        for folder in (self.place.out, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.cache / "tmp", self.cache / "hf"):
            folder.mkdir(parents=True)
        if command is not None and self.saved.exists():
            shutil.copytree(self.saved, self.place.out)
        set_hub(self.empty_hub if command is None else self.hub_before)

    def run(self, function: Callable[[], int], fault: Fault | None, command: Command) -> Traced:
        """Run a command, with a fault or without."""
        return run_traced(function, (self.place.out, self.cache), self.log, fault, command.is_push)

    def read(self, command: Command) -> tuple[str, dict[str, str], str]:
        """What a reader finds: `read` and its state, or the kind of its error and the message."""
        try:
            return "read", dict(in_child(partial(command.read, self.place))), ""
        except ChildError as error:
            return error.kind, {}, str(error)

    def attempt(self, name: str, fault: Fault, learnt: Learnt) -> Attempt:
        """Disturb a command, read what it left, run it again, and compare."""
        command, (before, after, reference) = COMMANDS[name], learnt
        found = Attempt(name, fault.kind, fault.number)
        self.reset(command)
        words = command.words(self.place)
        if fault.kind == "hold":

            def second() -> None:
                with tempfile.NamedTemporaryFile() as log:
                    other = run_untraced(self.call(words), Path(log.name))
                found.second = other.code, _last_line(other.output)

            fault = Fault(fault.number, "hold", second)
        run = self.run(self.call(words), fault, command)
        found.code, found.said = run.code, _last_line(run.output)
        if fault.number < len(run.events):
            event = run.events[fault.number]
            found.event = f"{event.call} {event.path.removeprefix(f'{self.work}/')}"
        self._judge_end(found, run)
        kind, state, found.error = self.read(command)
        found.state = _state(kind, state, before, after)
        if found.state not in ("refused", "as before", "complete"):
            found.problems.append(f"a reader found {found.state}: {found.error}")
        again = self.run(self.call(words + command.again(self.place.out)), None, command)
        if again.code != 0:
            found.problems.append(f"the same again failed: {_last_line(again.output)}")
        if self.read(command)[1] != after:
            found.problems.append("after the same again a reader finds something else")
        found.problems += differing(reference, files(self.place.out, command))
        return found

    def _judge_end(self, found: Attempt, run: Traced) -> None:
        expected = {"full": (0, 2), "interrupt": (0, 130), "hold": (0, 2)}.get(found.kind, (0, -9))
        if run.code not in expected or (run.code == 2 and not found.said.startswith("conjoin: ")):
            found.problems.append(f"ended with {run.code}: {run.output[-400:]}")
        if found.second is not None and found.second[0] not in (0, 2):
            found.problems.append(f"the second process ended with {found.second}")


def run_untraced(function: Callable[[], int], log: Path) -> Traced:
    """Run a function in a child; returns its exit code and its output."""

    def call() -> int:
        output = os.open(log, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = function()
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    code = in_child(call)
    return Traced(code=code, output=log.read_text(errors="replace"))


def _state(kind: str, state: dict[str, str], before: dict[str, str], after: dict[str, str]) -> str:
    if kind != "read":
        return "refused" if kind in CLEAR else kind
    if state == after:
        return "complete"
    return "as before" if before and state == before else "something else"


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _modules(function: Callable[[], int]) -> list[str]:
    function()
    return sorted(sys.modules)


def import_modules(names: list[str]) -> None:
    """Import what a command imported, so that no attempt needs to."""
    for name in names:
        if name.partition(".")[0] not in ("transformers_modules", "__main__", "__mp_main__"):
            with suppress(ImportError):  # an attempt that needs the module imports it itself
                importlib.import_module(name)


def files(folder: Path, command: Command) -> dict[str, str]:
    """The digest of each file below a folder; of volatile ones only the name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_beside = path.name in _BESIDE_LANCE and (path.parent / "data/train.lance").is_dir()
        if is_beside or "data/train.lance" in name or (path / "train.lance").is_dir():
            continue  # the reader compares what they hold
        if path.is_dir():
            found[f"{name}/"] = ""
        elif path.name in command.volatile:
            found[name] = "volatile"
        else:
            found[name] = hashlib.sha256(_content(path)).hexdigest()
    return found


def _content(path: Path) -> bytes:
    """The bytes of a file; of a tokenizer without how it padded and cut the last batch: each call sets it."""
    content = path.read_bytes()
    if path.name != "tokenizer.json":
        return content
    return json.dumps({**json.loads(content), "padding": None, "truncation": None}).encode()


def differing(reference: dict[str, str], found: dict[str, str]) -> list[str]:
    """Say which files are missing, left over or different."""
    problems = [f"missing: {name}" for name in reference if name not in found]
    problems += [f"left over: {name}" for name in found if name not in reference]
    return problems + [f"differs: {name}" for name in reference if found.get(name, "") != reference[name] != ""]


def moments(name: str, kinds: tuple[Kind, ...], count: int, events: int, seed: int) -> list[Fault]:
    """Draw moments, one from each of `count` equal parts of the run, and the kinds in turn."""
    generator = random.Random(f"{seed} {name} {kinds}")
    places = [int((part + generator.random()) * events / count) for part in range(count)]
    return [Fault(min(place, events - 1), kinds[number % len(kinds)]) for number, place in enumerate(places)]


def measure(args: argparse.Namespace, work: Path) -> tuple[list[Attempt], dict[str, int]]:
    """Run everything."""
    bench, attempts = Bench(work), []
    bench.place.inputs.mkdir()
    in_child(partial(make_inputs, bench.place.inputs))
    wanted = args.commands or list(COMMANDS)
    for name in COMMANDS:
        if name not in wanted and name not in SOURCES:
            continue
        learnt = bench.learn(name)
        print(f"{name}: {bench.events[name]} system calls", flush=True)
        keep_output(name, bench.place)
        if name not in wanted:
            del bench.events[name]
            continue
        faults = moments(name, KILLS, args.kills, bench.events[name], args.seed)
        for kind in OTHERS:
            faults += moments(name, (kind,), args.others, bench.events[name], args.seed)
        for fault in faults:
            start = time.perf_counter()
            attempts.append(bench.attempt(name, fault, learnt))
            print(f"{time.perf_counter() - start:5.1f} s  {_line(attempts[-1])}", flush=True)
    return attempts, bench.events


def _line(one: Attempt) -> str:
    second = "" if one.second is None else f" second {one.second}"
    return f"{one.command}: {one.kind} {one.number} {one.event} -> {one.code} {one.state}{second} {one.problems or ''}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="moments for each command")
    parser.add_argument("--others", type=int, default=5, help="moments of each other kind for each command")
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="results; those of other commands that are there stay")
    parser.add_argument("--no-run", action="store_true", help="only show what --json holds")
    parser.add_argument("--write", type=Path, metavar="MD", help="the file whose table is replaced")
    return parser.parse_args(words)


def set_environment(work: Path, hub: str) -> None:
    """One thread, so that forks are safe and equal work gives equal bits; caches and hub of this bench."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HOME": f"{work}/cache/hf", "TMPDIR": f"{work}/cache/tmp", "HF_ENDPOINT": hub}
    os.environ |= {"HF_TOKEN": "hf_fake", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ["HF_HUB_ETAG_TIMEOUT"] = "3"
    tempfile.tempdir = None


def main() -> None:
    """Print each attempt; write a table and JSON; exit code 1 if anything is wrong."""
    args = parse()
    warnings.filterwarnings("ignore", message="lancedb fork support")
    attempts: list[Attempt] = []
    events: dict[str, int] = {}
    if not args.no_run:
        with tempfile.TemporaryDirectory() as folder, running_hub() as hub:
            set_environment(Path(folder), hub)
            attempts, events = measure(args, Path(folder))
    if args.json:
        attempts, events = merge(args.json, attempts, events)
    if args.write:
        write_report(args.write, report(attempts, events, args.seed))
    print(table(attempts, events))
    if any(one.problems for one in attempts):
        sys.exit(1)


if __name__ == "__main__":
    main()
