"""`conjoin analyze`: what each layer of an MLLM contributes and costs."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "analyze",
        help="show what each layer of an MLLM contributes and costs",
        description="Read a multimodal language model at every depth, to see where it can be pruned: how its readout "
        "token spreads its attention over image, text and prompt, how well its state after each layer retrieves, and "
        "how many parameters and operations each number of layers takes. MODEL is an MLLM retriever, or an "
        "image-text MLLM that has not been made one yet (Qwen-VL, LLaVA, InternVL).",
        epilog="example: conjoin analyze Qwen/Qwen2-VL-2B-Instruct photos.csv --out runs/layers",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name (a retriever's own code is run)")
    parser.add_argument("data", metavar="DATA", help="pairs of image and text, as `conjoin encode` reads them")
    parser.add_argument("--out", required=True, metavar="DIR", help="where analysis.json and analysis.html go")
    parser.add_argument(
        "--split", default="train", metavar="NAME", help="split of a dataset that has several (default: %(default)s)"
    )
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
        "--batch-size", type=int, default=8, metavar="N", help="items per forward pass (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU when there is one)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    counts = {"pairs": args.pairs, "attention-pairs": args.attention_pairs, "batch-size": args.batch_size}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"--{name} must be at least 1, got {count}")

    from conjoin.data import load_pairs
    from conjoin.evaluation.mllm_analysis import analyse_mllm
    from conjoin.evaluation.report import render_report
    from conjoin.ops import choose_device

    device = choose_device(args.device)
    rows = load_pairs(args.data, split=args.split)
    rows = rows.select(range(min(args.pairs, len(rows))))
    model, processor = _load(args.model)
    model = model.to(device).eval()
    results = analyse_mllm(
        model,
        processor,
        [{"image": row["image"], "text": row["text"]} for row in rows],
        batch_size=args.batch_size,
        attention_pairs=args.attention_pairs,
        seed=args.seed,
        show_progress=not args.quiet,
    )
    results.model |= {"name": str(args.model)}
    results.dataset |= {"name": str(args.data), "split": args.split}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results.save(out / "analysis.json")
    page = render_report(results, out / "analysis.html")
    print(f"wrote {out / 'analysis.json'} and {page}")


def _load(name: str) -> tuple[Any, Any]:
    """An MLLM retriever and its processor, or those of an MLLM with all its layers."""
    from transformers import AutoConfig, AutoModel, AutoProcessor

    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.models.mllm_retriever.configuration_mllm_retriever import ARCHITECTURES
    from conjoin.processing import MllmRetrieverProcessor
    from conjoin.retrieval.encoder import loading

    with loading(name):
        architecture = AutoConfig.from_pretrained(name, trust_remote_code=True).model_type
        if architecture not in ARCHITECTURES:
            processor = AutoProcessor.from_pretrained(name, trust_remote_code=True)
            return AutoModel.from_pretrained(name, trust_remote_code=True), processor
    return MllmRetrieverModel.from_mllm(name), MllmRetrieverProcessor.from_mllm(name)
