"""MERIT as a benchmark of `conjoin evaluate`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from conjoin.evaluation.benchmark import BENCHMARKS, Benchmark
from conjoin.evaluation.results import Results
from conjoin.retrieval import ItemEncoder

from .evaluate import PARTS, evaluate_merit
from .report import merit_results


def _add_arguments(parser: ArgumentParser) -> None:
    options = parser.add_argument_group("options of merit")
    options.add_argument(
        "--split",
        choices=("test", "validation"),
        default="test",
        help="validation is part of a miniature (default: %(default)s)",
    )
    options.add_argument(
        "--subset",
        nargs="+",
        metavar="NAME",
        help="only the queries of these out-of-distribution subsets, e.g. language:th class:drink (default: all)",
    )
    options.add_argument(
        "--exclude-query-products",
        action="store_true",
        help="leave the products that a query shows out of its ranking (as published, they stay)",
    )
    options.add_argument(
        "--without",
        nargs="+",
        choices=PARTS,
        default=[],
        help="ablations, in queries and products: image: captions in place of images; title: no titles",
    )
    options.add_argument(
        "--captions", metavar="FILE", help="JSON lines of idx and caption (default: captions.jsonl of the data)"
    )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of stored vectors (default: %(default)s)",
    )


def _run(encoder: ItemEncoder, args: Namespace, out: Path) -> Results:
    scores = evaluate_merit(
        encoder,
        args.data,
        out,
        split=args.split,
        subsets=args.subset,
        exclude_query_products=args.exclude_query_products,
        without=args.without,
        captions=args.captions,
        dtype=args.dtype,
        show_progress=not args.quiet,
        reranker=args.reranker,
        rerank_top=args.rerank_top,
    )
    results = merit_results(scores, seed=args.seed)
    results.dataset = {"name": "MERIT", "folder": str(args.data), "split": args.split, "products": scores.pool}
    results.config = {
        "subsets": args.subset or "all",
        "without": args.without or "nothing",
        "query products": "left out" if args.exclude_query_products else "in the pool",
    }
    return results


MERIT = BENCHMARKS.register(
    Benchmark(
        "merit",
        "MERIT: queries of several images and texts; also writes run files; --data is its root folder",
        _add_arguments,
        _run,
        reranks=True,
    )
)
