"""GCL against plain contrastive learning on a second data set: 538 pictures of Tux Paint with their captions.

Data and split are those of `stamps.py`, model and rate those of `training_args/gcl/sample.yaml` (200 steps of 128).
Each held-out item is a query as image, text and both; the gallery has all items in these three forms, but the query
itself. Right is the asked form of any item of the query's group; the other forms count as wrong, as in M-BEIR's global
pool.

    python experiments/gcl_stamps.py --seeds 0 1 2
"""

import argparse
from itertools import permutations

import numpy as np
import torch
from common import ROOT, Record
from stamps import TABLE, WORK, Row, split_stamps

from conjoin import load_encoder
from conjoin.evaluation import bootstrap_ci
from conjoin.trainers import load_recipe, train

RUNS = {"untrained": 0, "contrastive": 200, "gcl": 200}
"""Steps by trainer."""
FORMS = ("image", "text", "fused")
PAIRS = [f"{one} → {other}" for one, other in permutations(FORMS, 2)]


def trained(name: str, steps: int, seed: int) -> str:
    """Train a model, unless it is there; returns its folder."""
    folder = WORK / f"gcl-{name}-{seed}"
    flags = ["--trainer", "gcl" if name == "untrained" else name, "--dataset_name", str(TABLE)]
    flags += ["--dataset_test_split", "null", "--eval_strategy", "no", "--features_dir", str(WORK / "features-gcl")]
    flags += ["--per_device_train_batch_size", "128", "--max_steps", str(max(steps, 1)), "--seed", str(seed)]
    flags += [] if steps else ["--learning_rate", "0"]
    if not (folder / "model.safetensors").is_file():
        train(load_recipe(ROOT / "training_args/gcl/sample.yaml", [*flags, "--output_dir", str(folder)]))
    return str(folder)


def measure(folder: str, rows: list[Row], asked: list[int], groups: np.ndarray) -> dict[str, list[int]]:
    """Rank of the first right candidate of each query, by pair of forms; ties fail."""
    encoder = load_encoder(folder, device="cpu")
    items = [{"image": row["image"], "text": row["text"]} for row in rows]
    alone = {"image": [{"image": item["image"]} for item in items], "text": [row["text"] for row in rows]}
    vectors = {form: encoder.encode(alone.get(form, items)) for form in FORMS}
    gallery, ranks = np.concatenate([vectors[form] for form in FORMS]), {}
    for one, other in permutations(FORMS, 2):
        scores = vectors[one][asked] @ gallery.T
        scores[range(len(asked)), np.array(asked) + FORMS.index(one) * len(rows)] = -np.inf  # the query itself
        place = np.repeat(FORMS, len(rows)) == other
        right = (groups[asked, None] == np.tile(groups, len(FORMS))) & place
        best = np.where(right, scores, -np.inf).max(1, keepdims=True)
        ranks[f"{one} → {other}"] = (((scores >= best) & ~right).sum(1) + 1).tolist()
    return ranks


def table(record: Record, k: int = 10) -> str:
    """R@k in % with 95 % intervals over seeds and queries, and the difference of GCL and CL, paired."""
    hits = {
        name: np.array([
            [np.array(run["ranks"][pair]) <= k for pair in PAIRS]
            for run in record.content["runs"] if run["name"] == name
        ], dtype=float).transpose(1, 0, 2)
        for name in RUNS
    }  # fmt: skip
    hits["GCL − CL"] = hits["gcl"] - hits["contrastive"]
    lines = [f"| R@{k}, {len(hits['gcl'][0])} seeds | {' | '.join(hits)} |", "|---" * (len(hits) + 1) + "|"]
    for number, pair in enumerate([*PAIRS, "mean"]):
        cells = []
        for values in hits.values():
            own = values[number] if pair in PAIRS else values.mean(0)
            low, high = bootstrap_ci(torch.from_numpy(100 * own))
            cells.append(f"{100 * own.mean():.1f} [{low:.1f}, {high:.1f}]")
        lines.append(f"| {pair} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what the record lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    rows, groups, asked = split_stamps()
    record = Record(ROOT / "experiments/results/gcl_stamps.json", {"queries": len(asked), "items": len(rows)} | RUNS)
    for name, steps in RUNS.items():
        for seed in args.seeds:
            if not record.has(name, seed):
                record.add(name, seed, ranks=measure(trained(name, steps, seed), rows, asked, groups))
                print(name, seed, flush=True)
    print(table(record))


if __name__ == "__main__":
    main()
