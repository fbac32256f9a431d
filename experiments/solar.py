"""Does SOLAR earn its place? Its test, its two stages, their ablations and the baselines, on scenes.

A query is a picture of objects and a text that names other objects in part; its positive shares exactly what picture
and text of the query share (experiments/scenes.md). Every row is trained by the package's own trainers on cached
features of frozen towers. `--rows` takes names of rows and groups: baselines, solar, ablations (of stage 2, as in
the paper), mixed-ablations, gcl-ablations, grouped. A row that starts from another trains that first. Each finished
row and seed is a file in `--out`, so an interrupted call resumes, and calls with other `--rows` may run at the same
time. `results.json` holds the outcome of each seed and triplet beside the means.

Negatives lack an object of the query; Precision on those with the same objects in all is a column of its own.

The readout of a row is the one with the best Avg on validation, of known and of unseen objects by itself: fused
embedding, sum of the views' scores, sum of the three. Rows "+ intersection" and "+ random parts", of stored results,
were also read with views of shared or of random parts, which gained nothing; the last commit that runs them is
28f18ad. Rows "equal time" get the steps that take the CPU seconds of `--time-of`, so they need that row first; or,
because other programs change these, `--time-ratio` times the steps, as `solar_step_cost.py` measures it step by step.

    python experiments/solar.py --out runs/claims/solar --rows baselines solar
    python experiments/solar.py --out runs/claims/solar --compare Mixed GCL
    python experiments/solar.py --out experiments/results/solar_scenes_union.json --compare GCL "stage 1"
    python experiments/solar.py --out runs/claims/solar --brief
"""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from filelock import FileLock, Timeout
from solar_report import Finished, brief, compare, record_path, summary, tables, unfinished
from solar_rows import GROUPS, ROWS, Row, chosen, steps_of

import conjoin
from conjoin.storage import write_text

COSTS = ("steps", "samples", "seconds", "cpu_seconds", "mining_seconds", "mining_cpu_seconds")
NOT_SETTINGS = (
    "rows",
    "seeds",
    "out",
    "data",
    "threads",
    "compare",
    "readout",
    "other",
    "brief",
    "time_of",
    "time_ratio",
    "keep_models",
)


class WaitingError(Exception):
    """A row cannot be run yet."""


def run(row: Row, seed: int, scenes: Any, args: argparse.Namespace) -> None:  # noqa: ANN401
    """Run a row and seed and the rows it starts from, unless they are finished.

    Raises:
        WaitingError: Another process runs it, or it needs a row that is not finished.
    """
    from solar_training import Laboratory

    path = record_path(args.out, row.name, seed)
    if path.is_file():
        return
    if row.start is not None:
        run(ROWS[row.start], seed, scenes, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_start = any(other.start == row.name for other in ROWS.values())
    lock = FileLock(path.with_suffix(".lock"), blocking=is_start)  # what starts from it waits for it
    try:
        lock.acquire()
    except Timeout as error:
        raise WaitingError(f"{row.name}, seed {seed}: another process runs it") from error
    try:
        if not path.is_file():
            _finish(row, seed, Laboratory(scenes, args, seed), is_start or args.keep_models)
    finally:
        lock.release()


def _finish(row: Row, seed: int, laboratory: Any, keep: bool) -> None:  # noqa: ANN401
    """Train, measure and write the record."""
    from solar_measure import measure_model, measure_towers

    args, scenes = laboratory.args, laboratory.scenes
    record: dict[str, Any] = {"row": row.name, "seed": seed, "settings": _settings(args), "versions": _versions()}
    cost, log = dict.fromkeys(COSTS, 0.0), []
    if row.method is None:
        sets = measure_towers(scenes, row.name != "towers")
    else:
        trained = laboratory.train(row, _equal_time(row, seed, args) if row.budget == "time" else steps_of(row, args))
        if keep:
            laboratory.save(row.name, trained)
        sets = measure_model(trained, scenes)
        cost = {name: trained.record[name] for name in COSTS}
        log = trained.record["log"]
    before = _read(ROWS[row.start], seed, args)["cost"] if row.start is not None else {}
    cost |= {f"total_{name}": cost[name] + before.get(f"total_{name}", 0.0) for name in COSTS}
    content = record | {"definition": asdict(row), "cost": cost, "log": log, "sets": sets}
    write_text(record_path(args.out, row.name, seed), json.dumps(content) + "\n")
    print(f"{row.name}, seed {seed}: {cost['steps']:.0f} steps in {cost['seconds']:.0f} s", flush=True)


def _equal_time(row: Row, seed: int, args: argparse.Namespace) -> int:
    """The steps that take the compute time of the row `--time-of`, with all it starts from and its mining."""
    if args.time_ratio is not None:
        return round(args.time_ratio * steps_of(ROWS[args.time_of], args))
    plain = ROWS[row.name.removesuffix(", equal time")]
    for other in (ROWS[args.time_of], plain):
        if not record_path(args.out, other.name, seed).is_file():
            raise WaitingError(f"{row.name}, seed {seed}: needs {other.name!r} first")
    cost = _read(plain, seed, args)["cost"]
    reference = _read(ROWS[args.time_of], seed, args)["cost"]
    seconds = reference["total_cpu_seconds"] + reference["total_mining_cpu_seconds"]
    return max(1, round(seconds / (cost["cpu_seconds"] / cost["steps"])))


def _read(row: Row, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    return json.loads(record_path(args.out, row.name, seed).read_text(encoding="utf-8"))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}


def _versions() -> dict[str, str]:
    versions = {"conjoin": conjoin.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"python": platform.python_version(), "device": "cpu"}


def check_settings(args: argparse.Namespace) -> None:
    """Keep rows of one folder comparable.

    Raises:
        ValueError: The folder has rows with other settings.
    """
    path, asked = args.out / "settings.json", json.loads(json.dumps(_settings(args)))
    if not path.is_file():
        args.out.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asked, indent=1) + "\n")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    other = {name: value for name, value in found.items() if asked.get(name) != value}
    if other:
        raise ValueError(f"the rows in {str(args.out)!r} have the settings {other}; choose another --out")


def report(args: argparse.Namespace) -> str:
    """Write results.json and table.md of the finished rows; returns the tables and what is missing."""
    finished = [Finished.read(row, args.out, args.seeds) for row in ROWS.values()]
    rows = summary([each for each in finished if each.runs])
    missing = unfinished(chosen(args.rows), args.out, args.seeds)
    shown = tables(rows) if rows else ""
    shown += "\n### Missing\n\n" + "\n".join(f"* {line}" for line in missing) + "\n" if missing else ""
    content = {"settings": _settings(args), "versions": _versions(), "rows": rows, "missing": missing}
    write_text(args.out / "results.json", json.dumps(content, indent=1) + "\n")
    write_text(args.out / "table.md", shown)
    return shown


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", default=list(GROUPS), metavar="NAME", help="names of rows or groups (default: all)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--out", type=Path, default=Path("runs/claims/solar"), help="folder of the results; for --compare also a file")
    add("--data", type=Path, help="folder of scenes and features, which results of any settings share")
    add("--compare", nargs=2, action="append", metavar="ROW", help="print paired differences; runs nothing")
    add("--readout", nargs=2, metavar="NAME", help="of the two rows of --compare; by default those validation chose")
    add("--other", type=Path, help="folder or file of the second row of --compare, of the same scenes")
    add("--brief", action="store_true", help="print one short table a group; runs nothing")
    add("--time-of", default="Mixed", metavar="ROW", help='whose time the rows "equal time" get')
    add("--time-ratio", type=float, metavar="R", help="time of a step of `--time-of` over one of the baseline")
    add("--keep-models", action="store_true", help="keep all models, not only those that other rows start from")
    add("--threads", type=int, default=torch.get_num_threads())
    scenes = parser.add_argument_group("scenes")
    for name, value in (("objects", 100), ("train", 20000), ("distractors", 4000), ("triplets", 600)):
        scenes.add_argument(f"--{name}", type=int, default=value)
    model = parser.add_argument_group("model")
    model.add_argument("--image-size", type=int, default=112, help="side of the pictures in pixels")
    model.add_argument("--width", type=int, default=384)
    training = parser.add_argument_group("training")
    integers = {
        "steps": None, "stage1-steps": 120, "stage2-steps": 60, "batch-size": 96, "stage2-batch-size": 64, "mined": 2,
        "mined-per-miner": 10,
    }  # fmt: skip
    for name, count in integers.items():
        training.add_argument(f"--{name}", type=int, default=count)
    numbers = {
        "lr": 1e-3, "stage1-lr": 1e-3, "stage2-lr": 1e-3, "continued-lr": 1e-3, "temperature": 0.07, "warmup": 0.1,
        "weight-decay": 0.05, "adam-beta2": 0.98, "min-separation": 0.0,
    }  # fmt: skip
    for name, number in numbers.items():
        training.add_argument(f"--{name}", type=float, default=number)
    training.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="PART.FIELD=VALUE",
        help="fields of the configuration of a method (solar_stage2.segments=false) or the model",
    )
    training.add_argument("--learn-temperature", action="store_true")
    training.add_argument("--no-bf16", dest="bf16", action="store_false", help="compute in float32")
    args = parser.parse_args(arguments)
    args.set = _parts(args.set)
    args.data = args.data or args.out / "data"
    if args.time_of not in ROWS:
        parser.error(f"--time-of: no row {args.time_of!r}")
    return args


def _parts(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `PART.FIELD=VALUE` into the fields of each part.

    Raises:
        ValueError: A setting has another form, or its part is neither a method of the rows nor the model.
    """
    known = {"model", *(row.method for row in ROWS.values() if row.method is not None)}
    parts: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        part, dot, field = name.partition(".")
        if not equals or not dot or part not in known:
            raise ValueError(f"--set {setting}: expected PART.FIELD=VALUE with a part of {', '.join(sorted(known))}")
        parts.setdefault(part, {})[field] = yaml.safe_load(value)
    return parts


def _is_timed(row: Row) -> bool:
    """Whether the row, or one that it starts from, waits for the time of another."""
    return row.budget == "time" or (row.start is not None and _is_timed(ROWS[row.start]))


def main() -> None:
    """Run the missing rows and print the tables."""
    args = parse()
    rows = chosen(args.rows)
    if args.compare:
        other = args.other or args.out
        shown = (compare(a, b, args.out, other, args.seeds, args.readout) for a, b in args.compare)
        print("\n".join(shown))
        return
    if args.brief:
        print(brief(rows, args.out, args.seeds))
        return
    check_settings(args)
    torch.set_num_threads(args.threads)
    left = [
        (row, seed) for seed in args.seeds for row in sorted(rows, key=_is_timed)
        if not record_path(args.out, row.name, seed).is_file()
    ]  # fmt: skip
    scenes = None
    for row, seed in left:
        if scenes is None:
            from solar_scenes import Scenes

            scenes = Scenes(args)
        try:
            run(row, seed, scenes, args)
        except WaitingError as reason:
            print(reason, flush=True)
    print(report(args))


if __name__ == "__main__":
    main()
