"""`conjoin teacher-cache`: run the teachers of SOLAR's stage 1 over a dataset once."""

import argparse
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "teacher-cache",
        help="compute once what frozen teachers say of a dataset",
        description="Run a vision and a text teacher over every row of DATA and write their token states to --out, so "
        "that stage 1 reads them in place of running the teachers. The cache is for one patch grid, that of MODEL; it "
        "serves any tokenizer. Interrupted at any point, the same command goes on where it stopped. It is large: a "
        "row takes about (patches + words) x width x 4 bytes; the size is printed first.",
        epilog="example: conjoin teacher-cache runs/contrastive photos.csv --vision facebook/dinov2-base "
        "--text BAAI/bge-m3 --out runs/teachers",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the student (its own code is run)")
    parser.add_argument("data", metavar="DATA", help="the rows, any source that `conjoin encode` reads")
    parser.add_argument("--vision", required=True, metavar="NAME", help="vision teacher: a folder or Hub name")
    parser.add_argument("--text", required=True, metavar="NAME", help="text teacher: a folder or Hub name")
    parser.add_argument("--global-text", metavar="NAME", help="another model for the global text state, same tokens")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write or to go on with")
    parser.add_argument("--vision-layer", type=int, metavar="N", help="hidden layer to read (default: the output)")
    parser.add_argument("--max-text-length", type=int, metavar="N", help="longest text in the teacher's tokens")
    reading = parser.add_argument_group("what to read")
    reading.add_argument("--image-column", metavar="NAME", help="column of the images, when it cannot be guessed")
    reading.add_argument("--text-column", metavar="NAME", help="column of the texts, when it cannot be guessed")
    reading.add_argument("--id-column", metavar="NAME", help="column of the ids, when it cannot be guessed")
    reading.add_argument(
        "--split", default="train", metavar="NAME", help="split of a dataset that has several (default: %(default)s)"
    )
    computing = parser.add_argument_group("how to compute")
    computing.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="type of the stored numbers; the others halve the space and round (default: %(default)s)",
    )
    computing.add_argument(
        "--shard-size", type=int, default=1024, metavar="ROWS", help="rows per file (default: %(default)s)"
    )
    computing.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="rows per forward pass (default: %(default)s)"
    )
    computing.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU when there is one)")
    computing.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that decode images ahead (default: %(default)s)"
    )
    computing.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    import torch
    from transformers import AutoConfig, AutoProcessor

    from conjoin.data import load_pairs
    from conjoin.ops import choose_device
    from conjoin.retrieval.encoder import loading
    from conjoin.training.teacher_cache import bytes_per_row, cache_teachers
    from conjoin.training.teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher

    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    device = choose_device(args.device)
    with loading(args.model):
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=True)
    if config.model_type != "joint_encoder":
        raise ValueError(f"{args.model!r} is a {config.model_type}; teachers are for a joint encoder")
    columns = {name: vars(args)[name] for name in ("image_column", "text_column", "id_column", "split")}
    rows = load_pairs(args.data, **columns)
    teachers = Teachers(
        VisionTeacher.from_pretrained(args.vision, args.vision_layer),
        TextTeacher.from_pretrained(args.text, args.max_text_length, args.global_text),
    )
    with loading(args.model):
        processor = AutoProcessor.from_pretrained(args.model, trust_remote_code=True)
    collator = TeacherCollator(processor, config.vision_config.patch_size, teachers)
    dtype = getattr(torch, args.dtype)
    size = bytes_per_row(teachers, collator, [rows[index] for index in range(min(8, len(rows)))], dtype)
    print(f"about {size * len(rows) / 2**30:.2f} GiB for {len(rows)} rows", flush=True)
    cache = cache_teachers(
        teachers,
        collator,
        rows,
        args.out,
        batch_size=args.batch_size,
        shard_size=args.shard_size,
        dtype=dtype,
        device=device,
        num_workers=args.workers,
        show_progress=not args.quiet,
    )
    print(f"teacher states of {len(cache)} rows in {args.out}")
