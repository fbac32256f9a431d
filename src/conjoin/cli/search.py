"""`conjoin search`: one query against an index."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import add_compute_options, add_url_options, make_encoder

if TYPE_CHECKING:
    from conjoin.retrieval import Index


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "search",
        help="search an index for a text, an image, or both",
        description="Find what is most similar in INDEX to a text, an image, or an image with a text.",
        epilog='example: conjoin search runs/photos-index --image chair.jpg --text "the same in red" -k 5',
    )
    parser.add_argument("index", metavar="INDEX", help="folder that `conjoin index` wrote")
    parser.add_argument("--text", help="the text of the query")
    parser.add_argument("--image", metavar="PATH", help="the image of the query")
    parser.add_argument("-k", type=int, default=10, help="number of results (default: %(default)s)")
    parser.add_argument(
        "--model",
        help="folder or Hub name of the model that made the index (default: the folder that the index records, if it "
        "holds a model of this package)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_url_options(parser)
    add_compute_options(parser, ("--device", "--trust-remote-code"))
    parser.set_defaults(func=run, quiet=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    query = {key: value for key, value in (("image", args.image), ("text", args.text)) if value is not None}
    if not query:
        raise ValueError("nothing to search for: pass --text, --image or both")

    from conjoin.retrieval import load_index, search_items

    index = load_index(args.index)
    found = search_items(index, make_encoder(args, args.model or _recorded_model(index)), [query], args.k)
    hits = list(zip(found.ids[0], found.scores[0].tolist(), strict=False))
    if args.json:
        import json

        results = [{"rank": rank, "score": score, "id": id_} for rank, (id_, score) in enumerate(hits, start=1)]
        print(json.dumps({"query": query, "results": results}, ensure_ascii=False, indent=2))
        return
    print("rank   score  id")
    for rank, (id_, score) in enumerate(hits, start=1):
        print(f"{rank:4d}  {score:6.4f}  {id_}")


def _recorded_model(index: "Index") -> str:
    """The local folder that an index records, if it holds a model of this package.

    An index may come from anywhere, so nothing else is loaded on its word.

    Raises:
        FileNotFoundError: The folder is gone.
        ValueError: No model is recorded, or another one than that.
    """
    from conjoin.hub import is_own_model

    if index.model is None:
        raise ValueError("the index does not say which model made it: pass --model")
    name = index.model.name
    local = Path(name).is_absolute()
    if local and not Path(name).is_dir():
        raise FileNotFoundError(f"the model that made the index is no longer at {name!r}: pass --model")
    if not local or not (Path(name) / "config.json").is_file() or not is_own_model(name):
        raise ValueError(
            f"the index was built with {name!r}, which is not a local model of this package: pass --model {name} to "
            "load it"
        )
    return name
