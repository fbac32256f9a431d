"""Which model should the demo train? The same towers and data, other parts trained, over seeds, on unseen concepts.

Each row is trained for each seed by its recipe, and finds the pictures and names of 386 unseen concepts among those of
another artist (`conjoin evaluate --benchmark emoji` has the same galleries). The record has the rank of every query:
intervals resample seeds and queries together, and differences are paired. What is finished is not run again.

    python experiments/demo.py --seeds 0 1 2 3 4
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
from common import ROOT, Record
from scene_features import embed_features
from torch import Tensor

from conjoin.data import load_emoji
from conjoin.evaluation import best_ranks, bootstrap_ci
from conjoin.hub import load_model
from conjoin.trainers import CachedFeatures, load_recipe, train

WORK = ROOT / "runs/claims-demo"
ARGS = ROOT / "training_args"
FIXED, BOTH, JOINT, TOWERS = "text fixed (the demo)", "both adapters", "joint encoder", "frozen towers"
ROWS = {
    FIXED: ("sample/demo.yaml", []),
    BOTH: ("sample/demo.yaml", ["--freeze", "null"]),
    JOINT: ("gcl/sample.yaml", []),
}
VIEWS = ("image", "text", "fused")
CASES = [("text", "image", 10), *((query, target, 1) for query, target in itertools.product(VIEWS, VIEWS))]


class Gallery:
    """Concepts that two artists drew: queries by one, candidates by the other, as features of the frozen towers."""

    def __init__(self) -> None:
        drawn = load_emoji("test", styles=("openmoji", "twemoji"))
        drawn_by = zip(drawn["style"], drawn["concept"], strict=True)
        index = {(style, concept): row for row, (style, concept) in enumerate(drawn_by)}
        shared = [concept for style, concept in index if style == "openmoji" and ("twemoji", concept) in index]
        queries, gallery = (drawn.select([index[style, each] for each in shared]) for style in ("openmoji", "twemoji"))
        names = [other or text for other, text in zip(gallery["alternative_text"], gallery["text"], strict=True)]
        self.has_two_names = torch.tensor([other is not None for other in gallery["alternative_text"]])
        self.labels = torch.arange(len(shared))
        model, processor = load_recipe(ARGS / "sample/demo.yaml").model.load()
        rows = {"queries": queries, "gallery": gallery.remove_columns("text").add_column("text", names)}
        self.features = [
            CachedFeatures(model, processor, some, WORK / "test" / part, first_only=True)
            for part, some in rows.items()
        ]

    @torch.inference_mode()
    def ranks(self, model: torch.nn.Module) -> dict[str, list[int]]:
        """The rank of the right candidate for each query; where both sides have text, of concepts with two names."""
        asked, found = (embed_features(model, features, torch.float32) for features in self.features)
        ranks: dict[str, list[int]] = {}
        for query, target in itertools.product(VIEWS, VIEWS):
            labels = self.labels if "image" in (query, target) else self.labels[self.has_two_names]
            ranks[f"{query} → {target}"] = best_ranks(
                asked[query][labels], found[target], labels, self.labels
            ).tolist()
        return ranks


def trained(row: str, seed: int) -> torch.nn.Module:
    """The model of a row and seed; trained unless it is there."""
    recipe, flags = ROWS[row]
    folder = WORK / f"{row.split(' (')[0].replace(' ', '-')}-{seed}"
    if not (folder / "model.safetensors").is_file():
        fixed = ["--output_dir", str(folder), "--features_dir", str(WORK / "features"), "--seed", str(seed)]
        train(load_recipe(ARGS / recipe, [*flags, *fixed, "--eval_strategy", "no", "--overwrite"]))
    return load_model(folder)[0]


def hits(runs: list[dict[str, list[int]]], case: tuple[str, str, int]) -> Tensor:
    """Of each seed and query, `(S, Q)`; `(Q,)` of what has no seeds."""
    query, target, k = case
    outcomes = torch.stack([(torch.tensor(run[f"{query} → {target}"]) <= k).double() for run in runs])
    return outcomes if len(runs) > 1 else outcomes[0]


def cell(outcomes: Tensor, sign: str = "") -> str:
    """Mean and interval in %."""
    low, high = bootstrap_ci(outcomes)
    return f"{100 * outcomes.mean():{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def report(record: Record) -> str:
    """The table; differences are of the seeds that both rows have."""
    rows: dict[str, dict[int, dict[str, list[int]]]] = {}
    for run in record.content["runs"]:
        rows.setdefault(run["name"], {})[run["seed"]] = run["ranks"]
    others = [row for row in (BOTH, JOINT) if row in rows and FIXED in rows]
    header = ["query → candidates", *(f"{row}, {len(seeds)}" for row, seeds in rows.items())]
    header += [f"− {row}" for row in others]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for case in CASES:
        cells = [cell(hits(list(seeds.values()), case)) for seeds in rows.values()]
        for row in others:
            seeds = [seed for seed in rows[FIXED] if seed in rows[row]]
            ours, theirs = (hits([rows[name][seed] for seed in seeds], case) for name in (FIXED, row))
            cells.append(cell(ours - theirs, "+"))
        lines.append(f"| {case[0]} → {case[1]}, R@{case[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what the record does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/demo.json")
    args = parser.parse_args()
    record = Record(args.out, {})
    runs = [(row, seed) for row in args.rows for seed in args.seeds if not record.has(row, seed)]
    if runs or not record.has(TOWERS, 0):
        gallery = Gallery()
    if not record.has(TOWERS, 0):
        towers = load_recipe(ARGS / "sample/demo.yaml").model.load()[0]  # the adapters begin as the identity
        record.add(TOWERS, 0, ranks=gallery.ranks(towers))
    for row, seed in runs:
        record.add(row, seed, ranks=gallery.ranks(trained(row, seed)))
        print(time.strftime("%H:%M"), row, seed, flush=True)
    print(report(record))


if __name__ == "__main__":
    main()
