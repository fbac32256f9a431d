"""`conjoin explain`: what a joint encoder finds of a text in an image, and the reverse."""

import argparse
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_compute_options, add_revision, add_url_options, check_counts, check_out, load_rows

if TYPE_CHECKING:
    from conjoin.evaluation import Curve


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "explain",
        help=COMMANDS["explain"],
        description="Draw how much each patch of an image is like a text, and each word like the image, by the local "
        "scores of a joint encoder; the segments of the image; and, where thresholds are known, the intersection and "
        "the samples that stage 2 of SOLAR would construct. Thresholds are given, or fitted to pairs (--data), or "
        "those that a log of stage 1 ends with (--log).",
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
    parser.add_argument("--out", required=True, metavar="DIR", help="where explanation.png and explanation.html go")
    parser.add_argument("--image-threshold", type=float, metavar="COSINE", help="patches above it are shared")
    parser.add_argument("--text-threshold", type=float, metavar="COSINE", help="words above it are shared")
    parser.add_argument("--data", metavar="DATA", help="pairs to fit thresholds to, as `conjoin encode` reads them")
    parser.add_argument(
        "--pairs", type=int, default=64, metavar="N", help="how many of them, from the start (default: %(default)s)"
    )
    parser.add_argument("--log", metavar="FILE", help="recipe.json or trainer_state.json of stage 1")
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

    from conjoin.data.row_images import check_placeholders, is_interleaved, plain_text
    from conjoin.devices import choose_device
    from conjoin.hub import load_model
    from conjoin.trainers.solar_explain import explain_pair, render_explanation

    device = choose_device(args.device)
    loaded, processor = load_model(args.model, revision=args.revision)
    model: Any = loaded.to(device)  # type: ignore[arg-type]
    if is_interleaved(args.image, args.text):
        check_placeholders(args.text, len(args.image), "--text")
    explanation = explain_pair(model, processor, args.image, plain_text(args.image, args.text))
    thresholds, curves = _thresholds(args, model, processor)
    page = render_explanation(
        explanation,
        args.out,
        image_threshold=thresholds["image"],
        text_threshold=thresholds["text"],
        curves=curves,
        seed=args.seed,
    )
    print(f"wrote {page} and {page.with_name('explanation.png')}")


def _thresholds(args: argparse.Namespace, model: Any, processor: Any) -> "tuple[dict[str, Any], list[Curve]]":  # noqa: ANN401
    """Thresholds by modality (given, else fitted to pairs, else the last of a log, else None), and charts."""
    from conjoin.data.row_images import row_item
    from conjoin.losses import qda_threshold
    from conjoin.trainers.solar_explain import (
        MODALITIES,
        distribution_curves,
        last_thresholds,
        read_log,
        score_histogram,
        score_populations,
    )

    thresholds: dict[str, Any] = {"image": None, "text": None}
    curves = []
    if args.log is not None:
        log = read_log(args.log)
        thresholds, curves = {**last_thresholds(log)}, distribution_curves(log)
    given = {"image": args.image_threshold, "text": args.text_threshold}
    if args.data is not None:
        rows: Any = load_rows(args, args.data)
        chosen = rows.select(range(min(args.pairs, len(rows))))
        pairs = [row_item({"image": row["image"], "text": row["text"]}) for row in chosen]
        for name, (positive, negative) in score_populations(model, processor, pairs).items():
            moments = [
                moment for scores in (positive, negative) for moment in (scores.mean(), scores.std(correction=0))
            ]
            fitted = float(qda_threshold(*moments).threshold)
            thresholds[name] = fitted if given[name] is None else given[name]
            title = f"{len(pairs)} pairs: {MODALITIES[name]}"
            curves.append(score_histogram(positive.numpy(), negative.numpy(), thresholds[name], title))
    return {name: thresholds[name] if given[name] is None else given[name] for name in thresholds}, curves
