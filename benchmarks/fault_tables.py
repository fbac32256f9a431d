"""What came out when commands were stopped: the record of an attempt, and the tables in Markdown."""

import datetime
import importlib
import json
import os
import platform
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fault_commands import COMMANDS
from faults import Kind

KILLS: tuple[Kind, ...] = ("before", "after", "halfway")
OTHERS: tuple[Kind, ...] = ("full", "interrupt", "hold")
BEGIN, END = "<!-- made by benchmarks/reliability.py -->\n", "<!-- end -->\n"


@dataclass
class Attempt:
    """What was tried and what came out.

    Attributes:
        command: Its name in `COMMANDS`.
        kind: Of the fault.
        number: Of the event.
        event: The system call and its file.
        code: The exit code; negative: the signal.
        state: What a reader found: refused, as before, complete.
        error: What the reader said.
        said: The last line that the command printed.
        second: The exit code of a second process and the last line that it printed.
        problems: What is wrong; empty if all is well.
    """

    command: str
    kind: str
    number: int
    event: str = ""
    code: int = 0
    state: str = ""
    error: str = ""
    said: str = ""
    second: tuple[int, str] | None = None
    problems: list[str] = field(default_factory=list)


def table(attempts: list[Attempt], events: dict[str, int]) -> str:
    """The results in Markdown."""
    lines = [
        "| command | system calls | kills | ended before | refused | as before | complete | same again equal | "
        "left over |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, count in events.items():
        kills = [one for one in attempts if one.command == name and one.kind in KILLS]
        lines.append(_row(name, count, kills))
    lines += [
        "",
        "| command | disk full: tried | said so, or no harm | same again equal | "
        "Ctrl-C: tried | stopped, or ended whole | same again equal | "
        "second process: tried | one refused | ended equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in events:
        cells = []
        for kind in OTHERS:
            some = [one for one in attempts if one.command == name and one.kind == kind]
            code = {"full": 2, "interrupt": 130}.get(kind)
            ended = (code, 0)  # 0: a flush that failed, a request that was sent again, a signal behind the last step
            stopped = [one for one in some if (one.code in ended if code else _is_refused(one)) and not one.problems]
            cells += [len(some), len(stopped), sum(not one.problems for one in some)]
        lines.append(f"| `{name}` | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _is_refused(one: Attempt) -> bool:
    """Whether the first or the second process was refused."""
    return one.code == 2 or (one.second is not None and one.second[0] == 2)


def _row(name: str, count: int, kills: list[Attempt]) -> str:
    states = Counter(one.state for one in kills)
    equal = [one for one in kills if not [problem for problem in one.problems if not problem.startswith("left over")]]
    left = [one for one in kills if any(problem.startswith("left over") for problem in one.problems)]
    cells = [count, len(kills), sum(one.code == 0 for one in kills), *(states[s] for s in ("refused", "as before"))]
    cells += [states["complete"], len(equal), len(left)]
    return f"| `{name}` | " + " | ".join(map(str, cells)) + " |"


def circumstances(seed: int) -> str:
    """When, with what and where."""
    names = ("torch", "transformers", "datasets", "safetensors", "huggingface_hub", "lancedb", "faiss", "filelock")
    found = ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in names)
    return (
        f"{datetime.date.today()}; seed {seed}; Python {platform.python_version()}, {found}; {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, {_file_system()}.\n"
    )


def _file_system() -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    here = tempfile.gettempdir()
    return max((len(words[1]), words[2]) for words in mounts if here.startswith(words[1]))[1]


def report(attempts: list[Attempt], events: dict[str, int], seed: int) -> str:
    """The results in Markdown, with every problem."""
    wrong = [one for one in attempts if one.problems]
    lines = [f"* `{one.command}`, {one.kind} {one.number} ({one.event}): {'; '.join(one.problems)}" for one in wrong]
    problems = "\n".join(lines) or f"No problem in {len(attempts)} attempts."
    return f"{circumstances(seed)}\n{table(attempts, events)}\n{problems}\n"


def write_report(path: Path, text: str) -> None:
    """Replace what stands between the marks of a file."""
    content = path.read_text(encoding="utf-8")
    head, found, rest = content.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{str(path)!r} needs the lines {BEGIN!r} and {END!r}")
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def merge(path: Path, attempts: list[Attempt], events: dict[str, int]) -> tuple[list[Attempt], dict[str, int]]:
    """Add the results to a file, and return all; those of the same commands are replaced."""
    found = json.loads(path.read_text()) if path.exists() else {"events": {}, "attempts": []}
    kept = [Attempt(**one) for one in found["attempts"] if one["command"] not in events]
    counts = found["events"] | events
    every, ordered = [*kept, *attempts], {name: counts[name] for name in COMMANDS if name in counts}
    content = {"events": ordered, "attempts": [asdict(one) for one in every]}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return every, ordered
