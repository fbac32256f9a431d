"""M-BEIR as a benchmark of `conjoin evaluate`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark
from conjoin.evaluation.results import Results
from conjoin.retrieval import ItemEncoder

from .evaluate import evaluate_mbeir
from .report import MBEIR_SETTINGS, mbeir_results


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of mbeir")
    options.add_argument(
        "--split", choices=("test", "val"), default="test", help="queries to evaluate on (default: %(default)s)"
    )
    options.add_argument(
        "--cells",
        nargs="+",
        metavar="NAME",
        help="only these cells, e.g. visualnews_task0 cirr_task7 (default: all 16)",
    )
    options.add_argument(
        "--pools",
        nargs="+",
        choices=MBEIR_SETTINGS,
        default=list(MBEIR_SETTINGS),
        help="candidate pools (default: both)",
    )
    options.add_argument("--no-instructions", action="store_true", help="queries without their instructions")
    options.add_argument(
        "--hubness-penalty",
        type=float,
        default=0.0,
        metavar="W",
        help="subtract W times a candidate's mean score over all queries (transductive; default: %(default)s)",
    )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of stored vectors (default: %(default)s)",
    )


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    scores = evaluate_mbeir(
        encoder,
        args.data,
        out,
        cells=args.cells,
        settings=args.pools,
        split=args.split,
        instructions=not args.no_instructions,
        hubness_penalty=args.hubness_penalty,
        dtype=args.dtype,
        seed=args.seed,
        show_progress=not args.quiet,
        reranker=args.reranker,
        rerank_top=args.rerank_top,
    )
    results = mbeir_results(scores, seed=args.seed)
    results.dataset = {"name": "M-BEIR", "folder": str(args.data), "split": args.split}
    results.config = {"instructions": not args.no_instructions, "hubness penalty": args.hubness_penalty}
    return results


MBEIR = BENCHMARKS.register(
    Benchmark(
        "mbeir",
        "M-BEIR: 16 cells, local and global pools; also writes run files; --data is its root folder",
        _add_arguments,
        _run,
        reranks=True,
    )
)
