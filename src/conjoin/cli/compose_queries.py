"""`conjoin data compose-queries`: queries of several conditions from a catalogue of products with attributes."""

import argparse
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import COLUMN_OPTIONS, add_compute_options, add_data_options, add_image_options

if TYPE_CHECKING:
    import numpy as np

    from conjoin.data import Catalogue

SAMPLERS = ("conventional", "attribute_uniform", "high_similarity", "cold_start")
FILTERS = ("non_omission", "vision_centric")


def add_parser(kinds: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to `conjoin data`."""
    parser = kinds.add_parser(
        "compose-queries",
        help="queries of several conditions from a catalogue of products with attributes",
        description="Compose queries such as 'the same colour as product 1 and the same material as product 2' from "
        "CATALOGUE, and write them with the products to --out in the layout of MERIT. The same seed writes the same "
        "queries.",
        epilog="example: conjoin data compose-queries shop.csv --attributes color material --out runs/shop",
    )
    parser.add_argument(
        "catalogue",
        metavar="CATALOGUE",
        help="a CSV, TSV, JSONL or Parquet file with an image, a title and attributes of each product, or any other "
        "source of pairs",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
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
        help=f"principles that the titles of a query must satisfy, by --visual: {', '.join(FILTERS)}",
    )
    group.add_argument("--visual", nargs="+", default=[], metavar="NAME", help="attributes that a picture shows")
    group.add_argument("--vlm", metavar="MODEL", help="vision-language model of the sampler cold_start")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from conjoin.data import CompositionSettings, ask_with, compose_queries, judge_by_titles, read_catalogue
    from conjoin.hub import check_model

    names = ["queries", "test_queries", "test_share", "damping", "max_positive_share", "hard_negatives", "seed"]
    names += ["stratify", "exclude_most_frequent"]
    chosen: dict[str, Any] = {name: vars(args)[name] for name in names}
    chosen |= {name: dict(vars(args)[name]) for name in ("samplers", "conditions") if vars(args)[name]}
    settings = CompositionSettings(languages=tuple(args.languages), **chosen)
    if args.vlm is not None:
        check_model(args.vlm)
    options = {} if args.device is None else {"device": args.device}
    roles = ("image", "text", "id", "group", "class", "country", "language")
    catalogue = read_catalogue(
        args.catalogue,
        attributes=args.attributes,
        columns={role: vars(args)[f"{role}_column"] for role in roles},
        language=args.language,
        split=args.split,
    )
    unknown = [name for name in args.visual if name not in catalogue.attributes]
    if unknown or (args.filters and not args.visual):
        problem = f"--visual {unknown[0]}: no such attribute" if unknown else "--filters needs --visual"
        raise ValueError(f"{problem}; there are {', '.join(catalogue.attributes)}")
    out = compose_queries(
        catalogue,
        args.out,
        settings,
        vectors=None if args.collection is None else _read_vectors(args.collection, catalogue),
        judges=[judge_by_titles(principle, args.visual) for principle in args.filters],
        cold_start=None if args.vlm is None else ask_with(args.vlm, **options),
        template_files=args.templates,
        show_progress=not args.quiet,
    )
    print(f"queries and products in {out}")


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
