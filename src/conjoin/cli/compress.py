"""`conjoin compress`: fewer layers at nearly the quality, with the model as its own teacher."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    add_compute_options,
    add_data_options,
    add_image_options,
    add_revision,
    check_out,
    load_rows,
)

if TYPE_CHECKING:
    from conjoin.trainers.compress import CompressOptions


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    from transformers import HfArgumentParser

    from conjoin.trainers.compress import CompressOptions

    kind: Any = CompressOptions
    parser = subparsers.add_parser(
        "compress",
        help=COMMANDS["compress"],
        parents=[HfArgumentParser(kind, add_help=False)],
        description="Keep the first layers of a published embedder or of an MLLM retriever, and train them to embed "
        "as the whole model: stage 1 of PUMA with the model as its own teacher, on texts, images and both. For each "
        "depth of --layers, --out gets a model of the same kind (layers-N); compress.json and compress.html compare "
        "them with the whole model on held-out pairs: retrieval, agreement of vectors and rankings, operations, "
        "bytes, seconds.",
        epilog="example: conjoin compress Qwen/Qwen3-VL-Embedding-2B --layers 14 20 --data pairs.csv --out runs/half",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the model")
    add_revision(parser)
    parser.add_argument("--data", required=True, help="pairs of image and text, as `conjoin encode` reads them")
    parser.add_argument("--out", required=True, metavar="DIR", help="where models and report go")
    parser.add_argument(
        "--preset", metavar="NAME", help="how an embedder embeds whose files do not say it, such as gme_qwen2_vl"
    )
    add_data_options(parser, ("--split",))
    add_image_options(parser)
    add_compute_options(parser, ("--quiet",))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    out = check_out(args.out)

    from conjoin.evaluation import format_results, render_report
    from conjoin.hub import load_embedder, load_model
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.processing.sentence_files import write_json_file
    from conjoin.trainers.compress import CompressOptions, compress

    options = CompressOptions(**{each.name: vars(args)[each.name] for each in fields(CompressOptions)})
    rows: Any = load_rows(args, args.data)
    if args.preset is not None:
        loaded: tuple[Any, Any] = load_embedder(args.model, preset=args.preset, revision=args.revision)
    else:
        loaded = load_model(args.model, revision=args.revision)
    model, processor = loaded
    if not isinstance(model, MllmRetrieverModel):
        raise ValueError(f"{args.model!r} has no layers of an MLLM; expected an embedder or an MLLM retriever")
    results = compress(model, processor, rows, out, options)
    results.model |= {"name": str(args.model)}
    results.dataset |= {"name": str(args.data), "split": args.split}
    for kept in options.layers:
        write_json_file(out / f"layers-{kept}" / "recipe.json", _record(args, options))
    results.save(out / "compress.json")
    page = render_report(results, out / "compress.html")
    print(f"{format_results(results)}\n\n{results.summary}\nwrote {out / 'compress.json'} and {page}")


def _record(args: argparse.Namespace, options: "CompressOptions") -> dict[str, Any]:
    """What a recipe records of its training, for the card of `conjoin push`."""
    return {
        "trainer": "compress",
        "model_name_or_path": args.model,
        "preset": args.preset,
        "dataset_name": args.data,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
    }
