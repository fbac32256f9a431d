"""`conjoin data compose-queries`: queries of several conditions from a catalogue of products with attributes."""

from dataclasses import dataclass, field, fields
from typing import Literal

from conjoin.cli.options import ColumnOptions, ImageOptions, name_equals_number, option, pick


@dataclass(kw_only=True)
class Options(ColumnOptions, ImageOptions):
    """Compose queries such as 'the same colour as product 1 and the same material as product 2' from CATALOGUE.

    They are written with the products to --out in the layout of MERIT. The same seed writes the same queries.

    Args:
        catalogue: A CSV, TSV, JSONL or Parquet file with an image, a title and attributes of each product, or any
            other source of pairs.
        out: The folder to make.
        attributes: Columns of the attributes (default: all others that can be a condition).
        queries: Training queries.
        test_queries: Test queries.
        test_share: Share of the products in the test split; 0 for no test split.
        max_positive_share: Queries that this share of the products answers, or more, are dropped.
        hard_negatives: Hard negatives of each query, at most.
        seed: Random seed.
        samplers: Weights of the samplers conventional, attribute_uniform, high_similarity and cold_start (default:
            conventional=0.3 attribute_uniform=0.2 high_similarity=0.5).
        conditions: Weights of the numbers of conditions, before filtering (default: 2=0.75 3=0.1 4=0.15).
        languages: Languages of the instructions: en, ms, id, vi, th, or of --templates (default: en).
        templates: JSON files with the templates of further languages.
        collection: Vectors of the catalogue by any model, which `conjoin encode` wrote.
        filters: Principles that the titles of a query must satisfy, by --visual.
        visual: Attributes that a picture shows.
        vlm: Vision-language model of the sampler cold_start.
        quiet: No progress bars.

    Example:
        conjoin data compose-queries shop.csv --attributes color material --out runs/shop
    """

    catalogue: str
    out: str = option(required=True)
    attributes: list[str] | None = None
    queries: int = option(10000, least=1)
    test_queries: int = 1000
    test_share: float = 0.1
    max_positive_share: float = 0.05
    hard_negatives: int = 8
    seed: int = 0
    samplers: list[tuple[str, float]] = option([], type=name_equals_number, metavar="NAME=W")
    conditions: list[tuple[str, float]] = option([], type=name_equals_number, metavar="N=W")
    languages: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)
    collection: str | None = None
    filters: list[Literal["non_omission", "vision_centric"]] = field(default_factory=list)
    visual: list[str] = field(default_factory=list)
    vlm: str | None = None
    quiet: bool = False


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.data import CompositionSettings, ask_with, compose_queries, judge_by_titles, read_catalogue
    from conjoin.retrieval import Collection

    chosen = pick(options, *(each.name for each in fields(CompositionSettings)))
    chosen["languages"] = tuple(options.languages)
    chosen["samplers"] = dict(options.samplers)
    chosen["conditions"] = {int(number): weight for number, weight in options.conditions}
    settings = CompositionSettings(**{name: value for name, value in chosen.items() if value not in ((), {})})
    catalogue = read_catalogue(options.catalogue, **pick(options, "attributes", "columns", "split"))
    for name in options.visual:
        if name not in catalogue.attributes:
            raise ValueError(f"--visual {name}: no such attribute; there are {', '.join(catalogue.attributes)}")
    vectors = None
    if options.collection is not None:
        vectors = Collection(options.collection).vectors(list(catalogue.products["idx"]))
    out = compose_queries(
        catalogue,
        options.out,
        settings,
        vectors=vectors,
        judges=[judge_by_titles(principle, options.visual) for principle in options.filters],
        cold_start=None if options.vlm is None else ask_with(options.vlm),
        show_progress=not options.quiet,
    )
    print(f"queries and products in {out}")
