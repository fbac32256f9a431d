"""How much of the package four journeys pass through: modules imported, files with a function that ran, seconds.

Each command is a process of its own, on a few pictures of the embedded sample.

    python benchmarks/journeys.py --json journeys.json
"""

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SMALL = "--image_size 56 --dataset_name {data} --dataset_test_split null --feature_copies 0".split()
STEP = "--max_steps 1 --per_device_train_batch_size 4 --eval_strategy no".split()
TRAIN = ["train", "training_args/sample/demo.yaml", *SMALL, *STEP, "--logging_steps", "1"]
JOURNEYS = {
    "help": ["search", "--help"],
    "train": [*TRAIN, "--output_dir", "{out}/model"],
    "encode": ["encode", "{out}/model", "{data}", "--out", "{out}/collection"],
    "search": ["search", "{out}/collection", "--text", "red", "--where", "text = 'red'"],
    "evaluate": "evaluate {out}/model --benchmark mbeir --data {out}/mbeir --out {out}/scores".split(),
}
"""The arguments of `conjoin` by journey, in the order to run: later ones read what earlier ones wrote."""


def measure(argv: Sequence[str]) -> dict[str, Any]:
    """Run `conjoin` with these arguments in this process; names of the files, and seconds."""
    started = time.perf_counter()
    from conjoin.cli.main import main

    package = Path(sys.modules["conjoin"].__file__ or "").parent
    ran: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        code = main(argv)
    except SystemExit as end:  # of --help
        code = int(end.code or 0)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    functions = {code for code in ran if code.co_flags & inspect.CO_OPTIMIZED}  # not the body of a module or a class
    paths = {Path(code.co_filename) for code in functions}
    return {
        "code": code,
        "files": sorted(str(path.relative_to(package)) for path in paths if path.is_relative_to(package)),
        "modules": sum(name.split(".")[0] == "conjoin" for name in sys.modules),
        "seconds": time.perf_counter() - started,
    }


def run(argv: Sequence[str]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", *argv]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["code"]:
        raise RuntimeError(f"conjoin {' '.join(argv)} failed")
    return found


def make_data(out: Path) -> Path:
    """A table of eight pictures with their colours, and a miniature of M-BEIR."""
    from PIL import Image

    sys.path.append(str(Path(__file__).parents[1] / "experiments"))
    from mini_mbeir import make_mini_mbeir

    colours = ("red", "blue", "green", "white", "black", "yellow", "purple", "orange")
    for colour in colours:
        Image.new("RGB", (64, 64), colour).save(out / f"{colour}.png")
    table = out / "data.csv"
    table.write_text("image,text\n" + "".join(f"{colour}.png,{colour}\n" for colour in colours))
    make_mini_mbeir(out / "mbeir", train_queries=1, val_queries=1, test_queries=2)
    return table


def main() -> None:
    """Print a row for each journey."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers, with the names of the files")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        print(f"{'journey':<10}{'files':>8}{'modules':>9}{'seconds':>9}")
        for name, argv in JOURNEYS.items():
            rows[name] = row = run([word.format(data=data, out=folder) for word in argv])
            print(f"{name:<10}{len(row['files']):>8}{row['modules']:>9}{row['seconds']:>9.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2:])))
    else:
        main()
