"""`conjoin mine`: hard negatives for every row of a dataset."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.retrieval import MiningMetric


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "mine",
        help="find the hard negatives of every row of a dataset",
        description="Find for every row of DATA what each of several metrics takes for most similar, without the row "
        "itself and its near-duplicates, and write the union with its provenance to negatives.parquet in --out. A "
        "metric is a model and what it looks at (image, text or fused) of the row and of its candidates. The time is "
        "estimated first; interrupted at any point, the same command goes on where it stopped.",
        epilog="example: conjoin mine photos.csv --out runs/mined --metric own runs/demo/model fused fused "
        "--metric own-text-image runs/demo/model text image",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="the candidates, any source that `conjoin encode` reads; what no metric looks at may be missing",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write or to go on with")
    parser.add_argument(
        "--metric",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "MODEL", "QUERY", "CANDIDATE"),
        help="a metric; may be given several times",
    )
    parser.add_argument(
        "--metrics", metavar="YAML", help="a file with metrics: {name: {model, query, candidate, duplicate_above}}"
    )
    parser.add_argument("-k", type=int, default=10, help="negatives per metric (default: %(default)s)")
    parser.add_argument(
        "--duplicate-above",
        type=float,
        default=0.95,
        metavar="COSINE",
        help="candidates this similar in any metric are duplicates, not negatives; for the metrics given by --metric "
        "(default: %(default)s)",
    )
    reading = parser.add_argument_group("what to read")
    reading.add_argument("--anchors", metavar="DATA", help="rows to find negatives for (default: those of DATA)")
    reading.add_argument("--image-column", metavar="NAME", help="column of the images, when it cannot be guessed")
    reading.add_argument("--text-column", metavar="NAME", help="column of the texts, when it cannot be guessed")
    reading.add_argument("--id-column", metavar="NAME", help="column of the ids, when it cannot be guessed")
    reading.add_argument(
        "--split", default="train", metavar="NAME", help="split of a dataset that has several (default: %(default)s)"
    )
    computing = parser.add_argument_group("how to compute")
    computing.add_argument(
        "--index",
        choices=("exact", "flat", "hnsw", "ivfpq"),
        default="exact",
        help="as for `conjoin index` (default: %(default)s)",
    )
    computing.add_argument(
        "--shard-size",
        type=int,
        default=4096,
        metavar="ROWS",
        help="rows per file, and rows searched at once (default: %(default)s)",
    )
    computing.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of the stored numbers; float16 halves the space (default: %(default)s)",
    )
    computing.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="items per forward pass (default: %(default)s)"
    )
    computing.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU when there is one)")
    computing.add_argument("--bf16", action="store_true", help="compute in bfloat16: faster, slightly less exact")
    computing.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that decode images ahead (default: %(default)s)"
    )
    computing.add_argument("--estimate", action="store_true", help="print the estimate and stop")
    computing.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    import torch

    from conjoin.data import load_pairs
    from conjoin.ops import choose_device
    from conjoin.retrieval import ItemEncoder, load_encoder, mine_hard_negatives, plan_mining
    from conjoin.retrieval.mining_metrics import check_metrics, needed_parts

    metrics, device = _metrics(args), choose_device(args.device)
    check_metrics(metrics, args.k)
    columns = {name: vars(args)[name] for name in ("image_column", "text_column", "id_column", "split")}
    parts = needed_parts(metrics, args.anchors is not None)
    corpus = load_pairs(args.data, **columns, only=parts["corpus"])
    anchors = None if args.anchors is None else load_pairs(args.anchors, **columns, only=parts["anchors"])

    def load(model: str) -> ItemEncoder:
        return load_encoder(
            model,
            batch_size=args.batch_size,
            device=device,
            dtype=torch.bfloat16 if args.bf16 else None,
            num_workers=args.workers,
        )

    settings: dict[str, Any] = {
        "anchors": anchors,
        "load_encoder": load,
        "index_options": {"device": str(device)} if args.index == "exact" else {},
        "shard_size": args.shard_size,
    }
    print(plan_mining(corpus, metrics, args.out, **settings), flush=True)
    if args.estimate:
        return
    mined = mine_hard_negatives(
        corpus,
        metrics,
        args.out,
        k=args.k,
        index_kind=args.index,
        dtype=args.dtype,
        show_progress=not args.quiet,
        **settings,
    )
    print(f"hard negatives of {len(mined)} rows in {mined.path}")


def _metrics(args: argparse.Namespace) -> "list[MiningMetric]":
    """The metrics of the file, then those of the command line."""
    from conjoin.retrieval import MiningMetric, parse_metrics

    metrics = []
    if args.metrics is not None:
        import yaml

        try:
            content = yaml.safe_load(Path(args.metrics).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{args.metrics!r} is not YAML: {error}") from error
        if not isinstance(content, dict) or set(content) != {"metrics"}:
            raise ValueError(f"{args.metrics!r}: expected one key, metrics, got {content!r:.120}")
        metrics += parse_metrics(content["metrics"])
    if not metrics and not args.metric:
        raise ValueError("nothing to mine by: pass --metric, --metrics or both")
    for name, model, query, candidate in args.metric:
        metrics.append(MiningMetric(name, model, query, candidate, args.duplicate_above))
    return metrics
