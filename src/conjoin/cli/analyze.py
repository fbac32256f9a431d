"""`conjoin analyze`: what each layer of an MLLM contributes and costs."""

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
        "analyze",
        help=COMMANDS["analyze"],
        description="Read a multimodal language model at every depth, to see where it can be pruned: how its readout "
        "token spreads its attention over image, text and prompt, how well its state after each layer retrieves, and "
        "how many parameters and operations each number of layers takes. MODEL is an MLLM retriever, or an "
        "image-text MLLM that has not been made one yet (Qwen-VL, LLaVA, InternVL), or a published embedder.",
        epilog="example: conjoin analyze Qwen/Qwen2-VL-2B-Instruct photos.csv --out runs/layers",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the model")
    add_revision(parser)
    parser.add_argument("data", metavar="DATA", help="pairs of image and text, as `conjoin encode` reads them")
    parser.add_argument("--out", required=True, metavar="DIR", help="where analysis.json and analysis.html go")
    parser.add_argument(
        "--pairs", type=int, default=200, metavar="N", help="how many pairs, from the start (default: %(default)s)"
    )
    parser.add_argument(
        "--attention-pairs",
        type=int,
        default=16,
        metavar="N",
        help="how many of them for attention (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.95,
        metavar="X",
        help="name the smallest depth with this share of the whole model's R@k (default: %(default)s)",
    )
    parser.add_argument(
        "--compressed",
        metavar="FILE",
        help="compress.json of `conjoin compress` for this model: also choose among its trained copies",
    )
    add_data_options(parser, ("--split",))
    add_image_options(parser)
    add_compute_options(parser, ("--batch-size", "--device", "--quiet"), batch_size={"default": 8})
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_counts(args, pairs=1, attention_pairs=1, batch_size=1)
    out = check_out(args.out)

    from conjoin.devices import choose_device
    from conjoin.evaluation import Results
    from conjoin.evaluation.report.page import render_report
    from conjoin.trainers.compress import analyse_mllm

    device = choose_device(args.device)
    rows: Any = load_rows(args, args.data)
    rows = rows.select(range(min(args.pairs, len(rows))))
    model, processor = _load(args.model, args.revision)
    model = model.to(device).eval()
    results = analyse_mllm(
        model,
        processor,
        [{"image": row["image"], "text": row["text"]} for row in rows],
        batch_size=args.batch_size,
        attention_pairs=args.attention_pairs,
        share=args.share,
        compressed=None if args.compressed is None else Results.load(args.compressed),
        show_progress=not args.quiet,
    )
    results.model |= {"name": str(args.model)}
    results.dataset |= {"name": str(args.data), "split": args.split}
    out.mkdir(parents=True, exist_ok=True)
    results.save(out / "analysis.json")
    page = render_report(results, out / "analysis.html")
    print(f"{results.summary}\nwrote {out / 'analysis.json'} and {page}")


def _load(name: str, revision: str | None) -> tuple[Any, Any]:
    """An MLLM retriever and its processor, or those of an MLLM with all its layers."""
    from conjoin.hub import is_embedder, load_model, loading, model_type
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.models.mllm_retriever.configuration_mllm_retriever import ARCHITECTURES
    from conjoin.processing import MllmRetrieverProcessor

    if model_type(name, revision) not in ARCHITECTURES or is_embedder(name, revision):
        return load_model(name, revision=revision)
    with loading(name, revision):
        model = MllmRetrieverModel.from_mllm(name, revision=revision)
        return model, MllmRetrieverProcessor.from_mllm(name, revision=revision)
