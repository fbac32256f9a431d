"""`conjoin evaluate`: a model on a benchmark."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.evaluation import Results
    from conjoin.retrieval import ItemEncoder


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "evaluate",
        help="evaluate a model on a benchmark",
        description="Evaluate MODEL on a benchmark; print a table and write results.json, report.html and, for "
        "M-BEIR, run files to --out. Interrupted, the same command keeps what is encoded.",
        epilog="example: conjoin evaluate runs/demo/model --benchmark mbeir --data runs/mini-mbeir --out runs/mbeir",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the model (its own code is run)")
    parser.add_argument(
        "--benchmark",
        required=True,
        choices=tuple(_BENCHMARKS),
        help="mbeir: 16 cells, local and global pools; emoji: the embedded sample; symmetric: triplets of your own",
    )
    parser.add_argument("--data", metavar="PATH", help="the root of M-BEIR, or the file of the triplets")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write, or to go on")
    parser.add_argument("--split", choices=("test", "val"), default="test", help="default: %(default)s")
    mbeir = parser.add_argument_group("M-BEIR")
    mbeir.add_argument("--cells", nargs="+", metavar="NAME", help="e.g. visualnews_task0 cirr_task7 (default: all 16)")
    mbeir.add_argument(
        "--pools", nargs="+", choices=("local", "global"), default=["local", "global"], help="default: both"
    )
    mbeir.add_argument("--no-instructions", action="store_true", help="queries without their instructions")
    mbeir.add_argument(
        "--hubness-penalty",
        type=float,
        default=0.0,
        metavar="W",
        help="subtract W times a candidate's mean score over all queries (transductive; default: %(default)s)",
    )
    mbeir.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="of stored vectors (default: %(default)s)"
    )
    emoji = parser.add_argument_group("emoji sample")
    for role, style in (("query", "openmoji"), ("gallery", "twemoji")):
        emoji.add_argument(
            f"--{role}-style",
            choices=("twemoji", "openmoji", "noto"),
            default=style,
            help="who drew its pictures; noto needs a font and is in no training split (default: %(default)s)",
        )
    symmetric = parser.add_argument_group("symmetric triplets")
    symmetric.add_argument("--distractors", metavar="SOURCE", help="further candidates, as for conjoin encode")
    symmetric.add_argument(
        "--streaming", action="store_true", help="read the distractors while encoding, without loading them first"
    )
    symmetric.add_argument("--instruction", metavar="TEXT", help="given with every item, to models that follow one")
    computing = parser.add_argument_group("how to compute")
    computing.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="items per forward pass (default: %(default)s)"
    )
    computing.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU when there is one)")
    computing.add_argument("--bf16", action="store_true", help="compute in bfloat16: faster, slightly less exact")
    computing.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that decode images ahead (default: %(default)s)"
    )
    computing.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: %(default)s)")
    computing.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.data is None and args.benchmark != "emoji":
        raise ValueError(f"--benchmark {args.benchmark} needs --data")
    if args.data is not None and not Path(args.data).exists():
        raise FileNotFoundError(f"no such file or folder: {args.data!r}")

    import torch

    from conjoin.evaluation import render_report
    from conjoin.retrieval import ItemEncoder

    encoder = ItemEncoder.from_pretrained(
        args.model,
        batch_size=args.batch_size,
        device=args.device,
        dtype=torch.bfloat16 if args.bf16 else None,
        num_workers=args.workers,
    )
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results, table = _BENCHMARKS[args.benchmark](args, encoder, out)
    results.model = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    results.config |= {"batch size": args.batch_size, "bf16": args.bf16}
    results.save(out / "results.json")
    render_report(results, out / "report.html")
    print(table)
    print(f"\n{out / 'results.json'}\n{out / 'report.html'}")


def _mbeir(args: argparse.Namespace, encoder: "ItemEncoder", out: Path) -> tuple["Results", str]:
    from conjoin.evaluation import evaluate_mbeir, format_mbeir, mbeir_results

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
    )
    results = mbeir_results(scores, seed=args.seed)
    results.dataset = {"name": "M-BEIR", "folder": str(args.data), "split": args.split}
    results.config = {"instructions": not args.no_instructions, "hubness penalty": args.hubness_penalty}
    return results, format_mbeir(scores)


def _emoji(args: argparse.Namespace, encoder: "ItemEncoder", out: Path) -> tuple["Results", str]:
    from conjoin.evaluation import Results, format_combinations
    from conjoin.evaluation.emoji_benchmark import evaluate_emoji

    split = {"val": "validation"}.get(args.split, args.split)
    styles = {"query_style": args.query_style, "gallery_style": args.gallery_style}
    found = evaluate_emoji(
        encoder, out / "stores", split=split, **styles, seed=args.seed, show_progress=not args.quiet
    )
    results = Results(
        title="The emoji sample",
        summary="All nine modality combinations, and symmetric triplets, on concepts that no training split holds.",
        seed=args.seed,
        dataset={"name": "emoji sample", "split": split, "concepts": len(found.queries)} | styles,
        combinations=found.combinations,
        symmetric=[found.symmetric],
    )
    return results, format_combinations(found.combinations)


def _symmetric(args: argparse.Namespace, encoder: "ItemEncoder", out: Path) -> tuple["Results", str]:
    from conjoin.data import load_pairs, load_triplets
    from conjoin.evaluation.symmetric_benchmark import evaluate_triplets

    results = evaluate_triplets(
        encoder,
        load_triplets(args.data),
        out,
        None if args.distractors is None else load_pairs(args.distractors, streaming=args.streaming),
        instruction=args.instruction,
        seed=args.seed,
        name=Path(args.data).stem,
        show_progress=not args.quiet,
    )
    (found,) = results.symmetric
    lines = [f"{found.triplets} triplets, {found.pool} candidates each"]
    lines += [f"{name:<14}{100 * metric.value:>6.1f}" for name, metric in found.metrics.items()]
    return results, "\n".join(lines)


_BENCHMARKS = {"mbeir": _mbeir, "emoji": _emoji, "symmetric": _symmetric}
