"""Coral's premise: does the first result satisfy one condition of a query, or both? And decoders that are alive.

Data, model and settings are those of `coral.py` (miniature MERIT, first layers of SmolLM2-135M, `--full`). Queries of
two conditions are counted: how often the first result has the first value, the second value, both, and the class that
the query asks for. The products that a query shows are left out of its ranking: each satisfies its own condition.
"a random product" draws the first result from the pool, or from the class that the query asks for.

    python experiments/coral_conditions.py --seeds 0 1 2
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, Record
from coral import Bench, Run, parse, prepare
from transformers.utils import logging

from conjoin import MllmRetrieverModel
from conjoin.data import MeritProducts, merit_queries
from conjoin.evaluation import bootstrap_ci, evaluate_cells
from conjoin.evaluation.tasks.merit import MeritOptions, merit_cells
from conjoin.retrieval import ItemEncoder

SETTINGS = (
    "--depth 4 --kept 4 --full --train-queries 6000 --validation-queries 300 --test-queries 600 --batch-size 64 "
    "--temperature 0.02 --weight-decay 5e-4 --readout last --rates 5e-3 --parts methods --steps 100"
)
"""Those of the log's entry on four layers at the paper's temperature, negatives and readout."""
ALIVE = {"decoder_rate": 1e-3, "normalize_targets": True}
RUNS: dict[str, dict[str, Any]] = {
    "zero-shot": {},
    "contrastive": {},
    "+ both, λ 0.1": {"weight": 0.1, **ALIVE},
    "+ both, λ 1": {"weight": 1.0, **ALIVE},
    "+ both, λ 0.1, Eq. 5 as printed": {
        "weight": 0.1,
        "kind": "squared_norm",
        "decoder_rate": 5e-3,
        "normalize_targets": False,
    },
}
"""Options of `coral.py` by run."""
CHANCE = ("a random product", "a random product of the class")
COLUMNS = ("first", "second", "both", "neither", "class", "right")


def flags(data: Path, ranked: dict[str, str], split: str = "test") -> np.ndarray:
    """`(Q, 6)` of the queries of two conditions: whether the first result has what `COLUMNS` says."""
    products, rows = MeritProducts(data, split), []
    for query in merit_queries(data, products):
        if len(query.conditions) == 2 and query.id in ranked:
            found = products[ranked[query.id]]
            one, two = (
                all(found.attributes.get(name) == value for name, value in wanted.items())
                for wanted in query.conditions.values()
            )
            kind = products[query.positives[0]].kind == found.kind
            rows.append([one, two, one and two, not (one or two), kind, found.id in query.positives])
    return np.array(rows, dtype=float)


def first_results(model: MllmRetrieverModel, bench: Bench) -> dict[str, str]:
    """The first product of each test query."""
    encoder = ItemEncoder(model.eval(), bench.processor, batch_size=64, input_type="seq")
    with tempfile.TemporaryDirectory() as out:
        evaluate_cells(encoder, merit_cells(MeritOptions(data=str(bench.data), exclude_query_products=True)), out)
        lines = next(Path(out).rglob("runs/*.txt")).read_text().splitlines()
    return {line.split()[0]: line.split()[2] for line in reversed(lines)}


def main() -> None:
    """Run what the record lacks, and print the tables."""
    sys.argv[1:1] = [*SETTINGS.split(), "--out", str(ROOT / "experiments/results/coral_conditions.json")]
    args = parse()
    logging.set_verbosity_error()
    names = ("steps", "batch_size", "rates", "temperature", "weight_decay", "depth")
    record = Record(args.out, {name: vars(args)[name] for name in names})
    missing = [
        (name, seed)
        for name, options in RUNS.items()
        for seed in (args.seeds if options or name == "contrastive" else args.seeds[:1])
        if not record.has(name, seed) and (not args.only or name in args.only)
    ]
    if missing:
        bench, _ = prepare(args)
    for name in CHANCE if missing else ():
        products, draw = MeritProducts(bench.data, "test"), np.random.default_rng(0)
        queries = merit_queries(bench.data, products)
        if not record.has(name, 0):
            draws = []
            for _ in range(20):
                ranked = {}
                for query in queries:
                    kind = products[query.positives[0]].kind if name == CHANCE[1] else None
                    ranked[query.id] = str(draw.choice([p.id for p in products.values() if kind in (None, p.kind)]))
                draws.append(flags(bench.data, ranked))
            record.add(name, 0, flags=np.mean(draws, 0).round(4).tolist())
    for name, seed in missing:
        vars(args).update(RUNS[name])
        begin, terms, run = time.process_time(), {}, Run(name.partition(",")[0], args.depth, full=True)
        if name == "zero-shot":
            model = bench.start(run, seed)
        else:
            model, terms = bench.train(run, args.rates[0] / 10, seed)
        found = flags(bench.data, first_results(model, bench))
        record.add(name, seed, flags=found.tolist(), terms=terms, cpu_seconds=round(time.process_time() - begin))
        shares = dict(zip(COLUMNS, found.mean(0).round(3).tolist(), strict=True))
        print(time.strftime("%H:%M"), name, seed, shares, terms, flush=True)
    print(table(record))


def table(record: Record) -> str:
    """Shares in % with 95 % intervals over seeds and queries, then the same minus a random product of the class."""
    named: dict[str, list[Any]] = {}
    for run in record.content["runs"]:
        named.setdefault(run["name"], []).append(run["flags"])
    lines = []
    for title, base in (
        ("first result of", 0.0),
        ("minus a random product of the class", np.array(named[CHANCE[1]][0])),
    ):
        lines += ["", f"| {title} | seeds | {' | '.join(COLUMNS)} |", "|---" * 8 + "|"]
        for name, runs in named.items():
            values = 100 * (np.array(runs) - base)
            intervals = [bootstrap_ci(values[..., column]) for column in range(len(COLUMNS))]
            means = values.mean((0, 1))
            cells = [f"{mean:.1f} [{low:.1f}, {high:.1f}]" for mean, (low, high) in zip(means, intervals, strict=True)]
            lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
