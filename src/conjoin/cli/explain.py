"""`conjoin explain`: what a joint encoder finds of a text in an image, and the reverse."""

import argparse
from typing import Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_compute_options, add_revision, add_url_options, check_counts, check_out, load_rows


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "explain",
        help=COMMANDS["explain"],
        description="Draw how much each patch of an image is like a text, and each word like the image, by the local "
        "scores of a joint encoder; the segments of the image; and, where thresholds are known, the intersection and "
        "the samples that stage 2 of SOLAR would construct. Thresholds are given, or fitted to pairs (--data).",
        epilog='example: conjoin explain runs/demo/model --image photo.jpg --text "a dog on the beach" '
        "--data photos.csv --out runs/explained",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a joint encoder")
    add_revision(parser)
    parser.add_argument(
        "--image",
        required=True,
        action="append",
        metavar="FILE",
        help="path or URL of the image; several are shown as the one picture that input type cat makes of them",
    )
    parser.add_argument("--text", required=True, metavar="TEXT", help="the text")
    parser.add_argument("--out", required=True, metavar="DIR", help="where explanation.html goes")
    parser.add_argument("--image-threshold", type=float, metavar="COSINE", help="patches above it are shared")
    parser.add_argument("--text-threshold", type=float, metavar="COSINE", help="words above it are shared")
    parser.add_argument("--data", metavar="DATA", help="pairs to fit thresholds to, as `conjoin encode` reads them")
    parser.add_argument(
        "--pairs", type=int, default=64, metavar="N", help="how many of them, from the start (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of the samples (default: %(default)s)"
    )
    add_url_options(parser)
    add_compute_options(parser, ("--device",))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_counts(args, pairs=2)
    check_out(args.out)

    from conjoin.data.row_images import check_placeholders, is_interleaved, plain_text, row_item
    from conjoin.devices import choose_device
    from conjoin.hub import load_model
    from conjoin.trainers.solar_explain import explain_pair, fit_thresholds, render_explanation

    device = choose_device(args.device)
    loaded, processor = load_model(args.model, revision=args.revision)
    model: Any = loaded.to(device)  # type: ignore[arg-type]
    if is_interleaved(args.image, args.text):
        check_placeholders(args.text, len(args.image), "--text")
    explanation = explain_pair(model, processor, args.image, plain_text(args.image, args.text))
    thresholds: dict[str, float] = {}
    if args.data is not None:
        rows: Any = load_rows(args, args.data)
        chosen = rows.select(range(min(args.pairs, len(rows))))
        pairs = [row_item({"image": row["image"], "text": row["text"]}) for row in chosen]
        thresholds = fit_thresholds(model, processor, pairs)
    given = {"image": args.image_threshold, "text": args.text_threshold}
    thresholds |= {name: value for name, value in given.items() if value is not None}
    taus = {f"{name}_threshold": value for name, value in thresholds.items()}
    print(f"wrote {render_explanation(explanation, args.out, seed=args.seed, **taus)}")
