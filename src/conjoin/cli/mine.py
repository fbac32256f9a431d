"""`conjoin mine`: hard negatives for every row of a dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conjoin.cli.options import ColumnOptions, ComputeOptions, ImageOptions, PromptOptions, option, pick


@dataclass(kw_only=True)
class Options(ColumnOptions, ImageOptions, PromptOptions, ComputeOptions):
    """Find the candidates that each of several miners ranks as most similar to every row of DATA.

    The row itself and its near-duplicates are left out; the union with its provenance goes to negatives.parquet in
    --out. A miner is a model and the parts (image, text or fused) of the row and of its candidates that it compares.
    After an interruption, the same command resumes.

    Args:
        data: The candidates, any source that `conjoin encode` reads; parts that no miner compares may be missing, and
            rows of one group (--columns group=...) are not negatives of one another.
        out: The folder to write or to resume.
        miner: A miner; may be given several times.
        miners: A file with miners: {name: {model, query, candidate, duplicate_above, relative_margin ...}}.
        anchors: Rows to find negatives for (default: those of DATA).
        k: Negatives per row and miner.
        duplicate_above: Candidates of at least this cosine in every part, image or text, that the miners compare are
            duplicates, not negatives; for the miners given by --miner.
        absolute_margin: A negative scores at least N less than the positive (as sentence-transformers'
            mine_hard_negatives, like the next three; for the miners given by --miner).
        relative_margin: Likewise, N times the positive's score.
        max_score: A negative scores at most N.
        range_min: Skip the first N candidates that are left.
        reranker: A CrossEncoder of sentence-transformers that scores the first candidates and the positives again.
        index: Exact, or an index of FAISS by its factory string, such as "IVF4096,PQ64".
        dtype: Type of the stored numbers.

    Example:
        conjoin mine photos.csv --out runs/mined --miner own runs/demo/model fused fused --miner own-text-image
        runs/demo/model text image
    """

    data: str
    out: str = option(required=True)
    miner: list[Any] = option([], type=str, action="append", nargs=4, metavar=("NAME", "MODEL", "QUERY", "CANDIDATE"))
    miners: str | None = None
    anchors: str | None = None
    k: int = 10
    duplicate_above: float = 0.95
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    range_min: int = 0
    reranker: str | None = None
    index: str = "exact"
    dtype: Literal["float32", "float16"] = "float32"


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.data.arguments import parse_yaml
    from conjoin.devices import choose_device
    from conjoin.retrieval import Miner, load_encoder, load_reranker, mine_hard_negatives, parse_miners
    from conjoin.retrieval.mining import needed_part

    if options.miners is None and not options.miner:
        raise ValueError("nothing to mine by: pass --miner, --miners or both")
    miners = []
    if options.miners is not None:
        content = parse_yaml(Path(options.miners).read_text(encoding="utf-8"), options.miners)
        if not isinstance(content, dict) or set(content) != {"miners"}:
            raise ValueError(f"{options.miners!r}: expected one key, miners, got {content!r:.120}")
        miners = parse_miners(content["miners"])
    limits = ("duplicate_above", "absolute_margin", "relative_margin", "max_score", "range_min", "reranker")
    miners += [Miner(*each, **pick(options, *limits)) for each in options.miner]
    options.device = str(choose_device(options.device))
    queries, candidates = [miner.query for miner in miners], [miner.candidate for miner in miners]
    anchors: Any = None
    if options.anchors is not None:
        anchors = options.load_rows(options.anchors, only=needed_part(queries))
    views = candidates if options.anchors is not None else candidates + queries
    corpus: Any = options.load_rows(options.data, only=needed_part(views))
    mined = mine_hard_negatives(
        corpus,
        miners,
        options.out,
        anchors=anchors,
        load_encoder=lambda model: load_encoder(model, **options.encoder_options()),
        load_reranker=lambda model: load_reranker(model, **pick(options, "trust_remote_code", "batch_size", "device")),
        show_progress=not options.quiet,
        **pick(options, "k", "index", "device", "dtype", "prompt", "prompt_name"),
    )
    print(f"hard negatives of {len(mined)} rows in {Path(options.out) / 'negatives.parquet'}")
