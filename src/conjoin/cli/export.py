"""`conjoin export`: a saved model in a form that other programs load."""

import argparse
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_revision
from conjoin.cli.train import usage
from conjoin.constants import READOUTS

_ONNX_USAGE = """\
from conjoin import load_encoder
vectors = load_encoder("{}").encode(["a red apple", "photo.jpg", {{"image": "photo.jpg", "text": "but green"}}])
"""
FORMATS = ("code", "stock", "onnx")


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "export",
        help=COMMANDS["export"],
        description="Write MODEL to --out. Format code: a folder with its own Python code, as training saves it. "
        "Format stock: an MLLM retriever, or score fusion over CLIP, as an ordinary checkpoint of its architecture, "
        "without code, for sentence-transformers, transformers and serving engines such as vLLM. Format onnx: a joint "
        "encoder, score fusion or token fusion as ONNX graphs, for onnxruntime and OpenVINO. --readout changes how a "
        "joint encoder embeds items of image and text.",
        epilog="example: conjoin export runs/model --format stock --out runs/stock "
        '--query-prompt "Find an image that matches the caption."',
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a model of this package")
    add_revision(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; it must not exist")
    parser.add_argument("--format", choices=FORMATS, default="code", help="see above (default: %(default)s)")
    parser.add_argument("--int8", action="store_true", help="with --format onnx: weights in 8 bits")
    parser.add_argument(
        "--readout",
        choices=READOUTS,
        help="how a joint encoder embeds image and text: fused, all tokens together; sum, the vectors of both added",
    )
    for name in ("query", "document"):
        parser.add_argument(
            f"--{name}-prompt",
            metavar="TEXT",
            help=f"instruction that encode_{name} of sentence-transformers gives (default: the model's)",
        )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Check the options, claim the folder, and write."""
    given = {"query": args.query_prompt, "document": args.document_prompt}
    prompts = {name: text for name, text in given.items() if text is not None}
    if args.int8 and args.format != "onnx":
        raise ValueError(f"--int8 is for --format onnx, not for {args.format}")
    if prompts and args.format == "onnx":
        raise ValueError(
            "--query-prompt and --document-prompt are for sentence-transformers, which reads no such export"
        )
    try:
        Path(args.out).mkdir(parents=True)  # only one of several that run at once can
    except FileExistsError as error:
        raise FileExistsError(f"{args.out!r} exists; choose another folder") from error
    try:
        _write(args, prompts)
    except BaseException:
        with suppress(OSError):
            Path(args.out).rmdir()
        raise


def _write(args: argparse.Namespace, prompts: dict[str, str]) -> None:
    """Load, write and print how to use it."""
    from conjoin.hub import export, export_onnx, export_stock, load_model
    from conjoin.hub.local_paths import is_local
    from conjoin.models.joint_encoder import JointEncoderModel
    from conjoin.processing.sentence_files import SentenceFilesMixin, write_json_file

    model, processor = load_model(args.model, revision=args.revision)
    if prompts and isinstance(processor, SentenceFilesMixin):
        processor.set_prompts((processor.prompts or {}) | prompts)
    if args.readout is not None:
        if not isinstance(model, JointEncoderModel):
            raise ValueError(f"--readout is for a joint encoder, not for {type(model).__name__}")
        model.config.readout = args.readout
    if args.format == "onnx":
        export_onnx(model, processor, args.out, "int8" if args.int8 else "float32")
        print(f"Saved to {args.out}. Load it with onnxruntime:\n\n{_ONNX_USAGE.format(args.out)}")
        return
    if args.format == "stock":
        export_stock(model, processor, args.out)
    else:
        export(model, processor, args.out)
    recipe = Path(args.model) / "recipe.json"
    if recipe.is_file():
        shutil.copy(recipe, args.out)  # for the card of `conjoin push`
    elif not is_local(args.model):
        write_json_file(Path(args.out) / recipe.name, {"model_name_or_path": args.model})
    print(f"Saved to {args.out}. Load it anywhere:\n\n{usage(args.out)}")
