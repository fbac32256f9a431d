"""`conjoin compress`: fewer layers at nearly the quality, with the model as its own teacher."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    add_compute_options,
    add_data_options,
    add_image_options,
    add_revision,
    check_counts,
    check_out,
    load_rows,
)


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "compress",
        help=COMMANDS["compress"],
        description="Keep the first layers of a published embedder or of an MLLM retriever, and train them to embed "
        "as the whole model: stage 1 of PUMA with the model as its own teacher, on texts, images and both. For each "
        "depth of --layers, --out gets a model of the same kind (layers-N); compress.json and compress.html compare "
        "them with the whole model on held-out pairs: retrieval, agreement of vectors and rankings, operations, "
        "bytes, seconds.",
        epilog="example: conjoin compress Qwen/Qwen3-VL-Embedding-2B --layers 14 20 --data pairs.csv --out runs/half",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the model")
    add_revision(parser)
    parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="N", help="numbers of layers to keep")
    parser.add_argument("--data", required=True, help="pairs of image and text, as `conjoin encode` reads them")
    parser.add_argument("--out", required=True, metavar="DIR", help="where models and report go")
    parser.add_argument(
        "--preset", metavar="NAME", help="how an embedder embeds whose files do not say it, such as gme_qwen2_vl"
    )
    _add_training(parser)
    add_data_options(parser, ("--split",))
    add_image_options(parser)
    add_compute_options(parser, ("--batch-size", "--device", "--bf16", "--quiet"))
    parser.set_defaults(func=run)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to train")
    numbers = {
        "--steps": (1000, "steps of distillation for each depth"),
        "--chunk-size": (0, "rows with their graph in memory at once; the result does not depend on it; 0: all"),
        "--lora-rank": (64, "rank of the adapters on the kept layers; 0 trains these layers themselves"),
        "--tune-steps": (500, "steps of tuning on --tune"),
        "--held-out": (200, "last pairs that measure instead of train"),
        "--seed": (0, "random seed"),
    }
    for name, (default, text) in numbers.items():
        group.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    group.add_argument(
        "--learning-rate", type=float, default=1e-4, metavar="X", help="peak learning rate (default: 1e-4)"
    )
    group.add_argument(
        "--instruction", metavar="TEXT", help="instruction of queries with a text (default: the model's prompt)"
    )
    group.add_argument(
        "--tune",
        metavar="QUERIES",
        help="then tune on queries with the MAC loss, as stage 2 of PUMA (JSONL or Parquet)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_counts(args, batch_size=2, steps=2, held_out=2, chunk_size=0, lora_rank=0, tune_steps=1)
    out = check_out(args.out)

    from conjoin.evaluation.report.page import render_report
    from conjoin.evaluation.report.table import format_results
    from conjoin.hub import load_embedder, load_model
    from conjoin.methods.puma import CompressOptions, compress
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.ops import choose_device

    device = choose_device(args.device)
    rows: Any = load_rows(args, args.data)
    if args.preset is not None:
        loaded: tuple[Any, Any] = load_embedder(args.model, preset=args.preset, revision=args.revision)
    else:
        loaded = load_model(args.model, revision=args.revision)
    model, processor = loaded
    if not isinstance(model, MllmRetrieverModel):
        raise ValueError(f"{args.model!r} has no layers of an MLLM; expected an embedder or an MLLM retriever")
    names = ("steps", "chunk_size", "lora_rank", "tune_steps", "held_out", "seed", "learning_rate", "instruction")
    chosen = {name: vars(args)[name] for name in (*names, "batch_size", "bf16")}
    options = CompressOptions(tuple(args.layers), tune_source=args.tune, device=device, **chosen)
    results = compress(model, processor, rows, out, options)
    results.model |= {"name": str(args.model)}
    results.dataset |= {"name": str(args.data), "split": args.split}
    out.mkdir(parents=True, exist_ok=True)
    results.save(out / "compress.json")
    page = render_report(results, out / "compress.html")
    print(f"{format_results(results)}\n\n{results.summary}\nwrote {out / 'compress.json'} and {page}")
