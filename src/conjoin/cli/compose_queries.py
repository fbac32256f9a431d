"""`conjoin data compose-queries`: queries of several conditions from a catalogue of products with attributes."""

import argparse
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import COLUMN_OPTIONS, add_compute_options, add_data_options, add_image_options

if TYPE_CHECKING:
    import numpy as np

    from conjoin.data import Catalogue, Judge, VisionModel

SAMPLERS = ("conventional", "attribute_uniform", "high_similarity", "cold_start")
FILTERS = ("non_omission", "vision_centric", "accuracy")


def add_parser(kinds: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to `conjoin data`."""
    parser = kinds.add_parser(
        "compose-queries",
        help="queries of several conditions from a catalogue of products with attributes",
        description="Compose queries such as 'the same colour as product 1 and the same material as product 2' from "
        "CATALOGUE, and write them with the products to --out in the layout of MERIT, with report.html on how they "
        "are distributed. After an interruption, the same command resumes.",
        epilog="example: conjoin data compose-queries shop.csv --attributes color material --out runs/shop",
    )
    parser.add_argument(
        "catalogue",
        metavar="CATALOGUE",
        help="a CSV, TSV, JSONL or Parquet file with an image, a title and attributes of each product, or any other "
        "source of pairs",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make or to resume")
    _add_reading(parser)
    _add_composing(parser)
    _add_filtering(parser)
    parser.set_defaults(func=run)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = add_data_options(parser, (*COLUMN_OPTIONS, "--group-column"))
    group.add_argument(
        "--attributes",
        nargs="+",
        metavar="NAME",
        help="columns of the attributes (default: all others that can be a condition)",
    )
    for fact, what in (("class", "class"), ("country", "country"), ("language", "language of the title")):
        group.add_argument(f"--{fact}-column", metavar="NAME", help=f"column of the {what}, when it cannot be guessed")
    group.add_argument(
        "--language",
        default="en",
        metavar="CODE",
        help="language of the titles, if no column holds it (default: %(default)s)",
    )
    add_image_options(parser)


def _add_composing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to compose")
    for name, kind, default, what in (
        ("queries", int, 10000, "training queries"),
        ("test-queries", int, 1000, "test queries"),
        ("test-share", float, 0.1, "share of the products in the test split; 0 for no test split"),
        ("damping", float, 0.5, "an attribute that n products have is drawn with weight n ** -N"),
        ("max-positive-share", float, 0.05, "queries that this share of the products answers, or more, are dropped"),
        ("hard-negatives", int, 8, "hard negatives of each query, at most"),
        ("seed", int, 0, "random seed"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{what} (default: {default:g})")
    group.add_argument(
        "--stratify", action="store_true", help="the test split takes its share of each class and language"
    )
    group.add_argument(
        "--exclude-most-frequent",
        action="store_true",
        help="the most frequent value of each attribute is no condition ('all ages')",
    )
    group.add_argument(
        "--samplers",
        nargs="+",
        type=_sampler,
        metavar="NAME=WEIGHT",
        help=f"weights of the samplers {', '.join(SAMPLERS)} (default: conventional=0.3 attribute_uniform=0.2 "
        "high_similarity=0.5)",
    )
    group.add_argument(
        "--conditions",
        nargs="+",
        type=_conditions,
        metavar="NUMBER=WEIGHT",
        help="weights of the numbers of conditions, before filtering (default: 2=0.75 3=0.1 4=0.15)",
    )
    group.add_argument(
        "--languages",
        nargs="+",
        default=["en"],
        metavar="LANGUAGE",
        help="languages of the instructions: en, ms, id, vi, th, or of --templates (default: en)",
    )
    group.add_argument("--templates", nargs="+", default=[], metavar="JSON", help="templates of further languages")
    group.add_argument(
        "--collection", metavar="FOLDER", help="vectors of the catalogue by any model, which `conjoin encode` wrote"
    )
    add_compute_options(parser, ("--device", "--quiet"))


def _add_filtering(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to filter")
    group.add_argument(
        "--filters",
        nargs="+",
        default=[],
        choices=FILTERS,
        metavar="NAME",
        help=f"principles that a query must satisfy: {', '.join(FILTERS)}",
    )
    group.add_argument(
        "--visual",
        nargs="+",
        metavar="NAME",
        help="attributes that a picture shows: non_omission and vision_centric are then judged by the titles",
    )
    group.add_argument("--vlm", metavar="MODEL", help="vision-language model, as judge and for the sampler cold_start")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.data import CompositionSettings, compose_queries, read_catalogue
    from conjoin.evaluation.report.composition import write_distribution_report

    names = ["queries", "test_queries", "test_share", "damping", "max_positive_share", "hard_negatives", "seed"]
    names += ["stratify", "exclude_most_frequent"]
    chosen: dict[str, Any] = {name: vars(args)[name] for name in names}
    chosen |= {name: dict(vars(args)[name]) for name in ("samplers", "conditions") if vars(args)[name]}
    settings = CompositionSettings(languages=tuple(args.languages), **chosen)
    model = _vision_model(args)
    roles = ("image", "text", "id", "group", "class", "country", "language")
    catalogue = read_catalogue(
        args.catalogue,
        attributes=args.attributes,
        columns={role: vars(args)[f"{role}_column"] for role in roles},
        language=args.language,
        split=args.split,
    )
    out = compose_queries(
        catalogue,
        args.out,
        settings,
        vectors=None if args.collection is None else _read_vectors(args.collection, catalogue),
        judges=_judges(args, model, catalogue),
        cold_start=model if settings.samplers.get("cold_start") else None,
        template_files=args.templates,
        show_progress=not args.quiet,
    )
    report = write_distribution_report(out)
    print(f"queries and products in {out}")
    print(f"how they are distributed: {report}")


def _vision_model(args: argparse.Namespace) -> "VisionModel | None":
    if args.vlm is None:
        return None
    from conjoin.data import ask_with
    from conjoin.hub import check_model

    check_model(args.vlm)
    return ask_with(args.vlm, **({} if args.device is None else {"device": args.device}))


def _judges(args: argparse.Namespace, model: "VisionModel | None", catalogue: "Catalogue") -> "list[Judge]":
    """The judge of each filter: by titles if the visual attributes are named, else the model."""
    from conjoin.data import judge_by_titles, judge_with

    unknown = [name for name in args.visual or () if name not in catalogue.attributes]
    if unknown:
        raise ValueError(f"--visual {unknown[0]}: no such attribute; there are {', '.join(catalogue.attributes)}")
    judges = []
    for principle in args.filters:
        if args.visual is not None and principle != "accuracy":
            judges.append(judge_by_titles(principle, args.visual))
        elif model is None:
            instead = "; titles alone cannot tell" if principle == "accuracy" else ", or --visual for titles only"
            raise ValueError(f"the filter {principle} needs a vision-language model (--vlm){instead}")
        else:
            judges.append(judge_with(model, principle))
    return judges


def _read_vectors(folder: str, catalogue: "Catalogue") -> "np.ndarray":
    """The vectors of a collection in the order of the catalogue.

    Raises:
        ValueError: A product has none.
    """
    from conjoin.retrieval import Collection

    collection = Collection.open(folder)
    absent = sorted({*catalogue.ids} - {*collection.ids})
    if absent:
        raise ValueError(
            f"the collection {folder!r} has no vector of {len(absent)} of {len(catalogue)} products, such as "
            f"{absent[0]!r}; encode the same catalogue with the same --id-column"
        )
    return collection.vectors(catalogue.ids)


def _sampler(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    if name not in SAMPLERS:
        raise argparse.ArgumentTypeError(f"unknown sampler {name!r}; expected one of {', '.join(SAMPLERS)}")
    return name, _weight(text, weight)


def _conditions(text: str) -> tuple[int, float]:
    number, _, weight = text.partition("=")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"expected NUMBER=WEIGHT, such as 2=0.75, got {text!r}")
    return int(number), _weight(text, weight)


def _weight(text: str, weight: str) -> float:
    try:
        return float(weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a weight after =, got {text!r}") from error
