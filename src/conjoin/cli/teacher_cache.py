"""`conjoin teacher-cache`: run the teachers of SOLAR's stage 1 over a dataset once."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    COLUMN_OPTIONS,
    add_compute_options,
    add_data_options,
    add_image_options,
    add_options,
    add_revision,
    check_counts,
    load_rows,
)
from conjoin.constants import DTYPES


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "teacher-cache",
        help=COMMANDS["teacher-cache"],
        description="Run a vision and a text teacher over every row of DATA and write their token states to --out, so "
        "that stage 1 reads them in place of running the teachers. The cache is for one patch grid, that of MODEL; it "
        "serves any tokenizer. After an interruption, the same command resumes. It is large: a "
        "row takes about (patches + words) x width x 4 bytes; the size is printed first.",
        epilog="example: conjoin teacher-cache runs/contrastive photos.csv --vision facebook/dinov2-base "
        "--text BAAI/bge-m3 --out runs/teachers",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the student")
    add_revision(parser)
    parser.add_argument("data", metavar="DATA", help="the rows, any source that `conjoin encode` reads")
    parser.add_argument("--vision", required=True, metavar="NAME", help="vision teacher: a folder or Hub name")
    parser.add_argument("--text", required=True, metavar="NAME", help="text teacher: a folder or Hub name")
    parser.add_argument("--global-text", metavar="NAME", help="another model for the global text state, same tokens")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write or to resume")
    parser.add_argument(
        "--max-text-length",
        type=int,
        metavar="N",
        help="cut texts at this many tokens of the teacher (default: its own limit)",
    )
    add_data_options(parser, COLUMN_OPTIONS)
    add_image_options(parser)
    types = {"choices": (*DTYPES, "bfloat16")}
    add_options(parser, "what to write", ("--dtype",), dtype=types)
    add_compute_options(parser, ("--batch-size", "--device", "--workers", "--quiet"))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_counts(args, batch_size=1)

    import torch

    from conjoin.devices import choose_device
    from conjoin.hub import load_config, load_processor, model_type
    from conjoin.methods.solar.teacher_cache import bytes_per_row, cache_teachers
    from conjoin.methods.solar.teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher

    device, kind = choose_device(args.device), model_type(args.model, args.revision)
    if kind != "joint_encoder":
        raise ValueError(f"{args.model!r} is a {kind}; teachers are for a joint encoder")
    config: Any = load_config(args.model, args.revision)
    rows: Any = load_rows(args, args.data)
    teachers = Teachers(
        VisionTeacher.from_pretrained(args.vision),
        TextTeacher.from_pretrained(args.text, args.max_text_length, args.global_text),
    )
    processor: Any = load_processor(args.model, args.revision)
    collator = TeacherCollator(processor, config.vision_config.patch_size, teachers)
    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[args.dtype]
    size = bytes_per_row(teachers, collator, [rows[index] for index in range(min(8, len(rows)))], dtype)
    print(f"about {size * len(rows) / 2**30:.2f} GiB for {len(rows)} rows", flush=True)
    torch.nn.Module.to(teachers.vision.model, device)
    cache = cache_teachers(
        teachers,
        collator,
        rows,
        args.out,
        batch_size=args.batch_size,
        dtype=dtype,
        num_workers=args.num_workers,
        show_progress=not args.quiet,
    )
    print(f"teacher states of {len(cache)} rows in {args.out}")
