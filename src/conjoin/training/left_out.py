"""The list of rows that a run left out (`data.on_error: skip`)."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

LEFT_OUT_FILE = "left_out.jsonl"


class LeftOutFile:
    """The file `left_out.jsonl` of an output folder: `source`, `id` and `reason` of each row, each row once.

    Args:
        folder: The output folder.
        main: Whether this is the main process; the others write `left_out-RANK.jsonl`.
        rank: Of this process.
    """

    def __init__(self, folder: str | Path, main: bool = True, rank: int = 0) -> None:
        self.path = Path(folder) / (LEFT_OUT_FILE if main else f"left_out-{rank}.jsonl")
        self.rows: set[str] = set()

    def add(self, rows: Iterable[dict[str, str]]) -> None:
        """Append rows that are not listed yet, and log their number."""
        if not self.rows and self.path.is_file():
            self.rows = set(self.path.read_text(encoding="utf-8").splitlines())
        new = [line for line in map(json.dumps, rows) if line not in self.rows]
        if not new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in new)
        self.rows.update(new)
        logger.warning("left out %d rows that cannot be used, %d in all; see %s", len(new), len(self.rows), self.path)


def remove_left_out(folder: Path) -> None:
    """Remove the lists of an earlier run."""
    for path in folder.glob("left_out*.jsonl"):
        path.unlink()
