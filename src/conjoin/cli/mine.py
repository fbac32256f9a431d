"""`conjoin mine`: hard negatives for every row of a dataset."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import (
    COLUMN_OPTIONS,
    add_compute_options,
    add_data_options,
    add_image_options,
    add_options,
    add_prompt_options,
    check_out,
    encoder_loader,
    load_rows,
    read_options,
)
from conjoin.retrieval.options import MiningOptions

if TYPE_CHECKING:
    from conjoin.retrieval import Miner


_LIMITS: dict[str, dict[str, Any]] = {
    "--absolute-margin": {
        "type": float,
        "metavar": "M",
        "help": "a negative scores at least M less than the positive (as sentence-transformers' mine_hard_negatives, "
        "like the next three; for the miners given by --miner)",
    },
    "--relative-margin": {"type": float, "metavar": "M", "help": "likewise, M times the positive's score"},
    "--max-score": {"type": float, "metavar": "S", "help": "a negative scores at most S"},
    "--range-min": {"type": int, "default": 0, "metavar": "N", "help": "skip the first N candidates that are left"},
    "--reranker": {
        "metavar": "MODEL",
        "help": "a CrossEncoder of sentence-transformers that scores the first candidates and the positives again",
    },
}


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "mine",
        help=COMMANDS["mine"],
        description="Find the candidates that each of several miners ranks as most similar to every row of DATA, "
        "without the row itself and its near-duplicates, and write the union with its provenance to negatives.parquet "
        "in --out. A miner is a model and the parts (image, text or fused) of the row and of its candidates that it "
        "compares. After an interruption, the same command resumes.",
        epilog="example: conjoin mine photos.csv --out runs/mined --miner own runs/demo/model fused fused "
        "--miner own-text-image runs/demo/model text image",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="the candidates, any source that `conjoin encode` reads; parts that no miner compares may be missing",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write or to resume")
    parser.add_argument(
        "--miner",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "MODEL", "QUERY", "CANDIDATE"),
        help="a miner; may be given several times",
    )
    parser.add_argument(
        "--miners",
        metavar="YAML",
        help="a file with miners: {name: {model, query, candidate, duplicate_above, relative_margin ...}}",
    )
    parser.add_argument(
        "--duplicate-above",
        type=float,
        default=0.95,
        metavar="COSINE",
        help="candidates this similar in every part, image or text, that the miners compare are duplicates, not "
        "negatives; for the miners given by --miner (default: %(default)s)",
    )
    for option, settings in _LIMITS.items():
        parser.add_argument(option, **settings)
    reading = add_data_options(parser, (*COLUMN_OPTIONS, "--group-column"))
    reading.add_argument("--anchors", metavar="DATA", help="rows to find negatives for (default: those of DATA)")
    add_image_options(parser)
    add_options(parser, "how to mine", ("-k", "--index", "--dtype"))
    add_prompt_options(parser)
    add_compute_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_out(args.out)
    from conjoin.devices import choose_device
    from conjoin.retrieval import load_reranker, mine_hard_negatives
    from conjoin.retrieval.mining.mine import check_miners, needed_parts

    miners, device = _miners(args), choose_device(args.device)
    check_miners(miners, args.k)
    parts = needed_parts(miners, args.anchors is not None)

    def reranker(model: str) -> Any:  # noqa: ANN401 - a reranker
        options = {"trust_remote_code": args.trust_remote_code, "batch_size": args.batch_size, "device": device}
        return load_reranker(model, **options)

    corpus: Any = load_rows(args, args.data, only=parts["corpus"])
    settings: dict[str, Any] = {
        "anchors": None if args.anchors is None else load_rows(args, args.anchors, only=parts["anchors"]),
        "load_encoder": encoder_loader(args, device),
        "device": str(device),
    }
    settings |= {"load_reranker": reranker, **read_options(MiningOptions, args)}
    settings |= {"prompt": args.prompt, "prompt_name": args.prompt_name}
    mined = mine_hard_negatives(corpus, miners, args.out, show_progress=not args.quiet, **settings)
    print(f"hard negatives of {len(mined)} rows in {Path(args.out) / 'negatives.parquet'}")


def _miners(args: argparse.Namespace) -> "list[Miner]":
    """The miners of the file, then those of the command line."""
    from conjoin.retrieval import Miner, parse_miners

    if args.miners is None and not args.miner:
        raise ValueError("nothing to mine by: pass --miner, --miners or both")
    miners = [] if args.miners is None else parse_miners(_read_file(args.miners))
    limits = {name: vars(args)[name] for name in (option.strip("-").replace("-", "_") for option in _LIMITS)}
    for name, model, query, candidate in args.miner:
        miners.append(Miner(name, model, query, candidate, args.duplicate_above, **limits))
    return miners


def _read_file(path: str) -> Any:  # noqa: ANN401 - any YAML
    """What stands under `miners` in a file."""
    from conjoin.trainers.recipe import parse_yaml

    content = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    if isinstance(content, dict) and "metrics" in content:
        raise ValueError(f"{path!r}: the key metrics is now miners")
    if not isinstance(content, dict) or set(content) != {"miners"}:
        raise ValueError(f"{path!r}: expected one key, miners, got {content!r:.120}")
    return content["miners"]
