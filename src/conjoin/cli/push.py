"""`conjoin push`: a model, a collection, a dataset, a metric or a search app to the Hub."""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from conjoin.cli.commands import COMMANDS
from conjoin.cli.options import add_image_options, check_counts

if TYPE_CHECKING:
    from conjoin.hub import Upload

KINDS = ("model", "dataset", "metric", "space")


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "push",
        help=COMMANDS["push"],
        description="Push SOURCE to OWNER/NAME with a card, in one commit that is made whole or not at all. A new "
        "repository is private. Log in with `hf auth login` or set HF_TOKEN; HF_ENDPOINT selects another hub.",
        epilog="examples: conjoin push runs/model me/model --dry-run; "
        "conjoin push runs/photos me/photos --model me/model; conjoin push runs/mini-merit me/mini-merit --type "
        "dataset; conjoin push mrr_at_k me/mrr_at_k --type metric",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="what to push: a folder or file, or the name of a metric; see --type"
    )
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="repository; made if it does not exist")
    parser.add_argument(
        "--type",
        choices=KINDS,
        help="model: what `conjoin train` or `conjoin export` wrote; dataset: a collection, a folder in the layout "
        "of MERIT, or a file of triplets; metric: hit_rate_at_k, recall_at_k or mrr_at_k; space: a "
        "collection with its model, small pictures and `conjoin app` (default: dataset for a collection, else model)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the files, print the card, and push nothing")
    parser.add_argument("--public", action="store_true", help="everybody may see it (default: private)")
    parser.add_argument(
        "--replace", action="store_true", help="replace another model, dataset, metric or search app that is there"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to; made if needed (default: main)")
    parser.add_argument("--message", help="commit message")
    parser.add_argument("--license", metavar="ID", help="licence, such as apache-2.0 (default: none)")
    parser.add_argument("--language", nargs="+", default=[], metavar="CODE", help="languages, such as en de")
    model = parser.add_argument_group("for a model")
    model.add_argument("--results", nargs="+", default=[], metavar="JSON", help="results.json files for the card")
    model.add_argument("--dataset", nargs="+", default=[], metavar="ID", help="training data (default: the recipe's)")
    model.add_argument(
        "--base-model", nargs="+", default=[], metavar="ID", help="trained from (default: the recipe's)"
    )
    collection = parser.add_argument_group("for a collection")
    collection.add_argument(
        "--model", metavar="NAME", help="its model on the Hub (default: what it records, of a folder the name)"
    )
    collection.add_argument(
        "--keep-pictures", type=int, metavar="PX", help="make thumbnails of at most PX pixels, if it has none"
    )
    add_image_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    """Collect the files, say what is pushed, and push."""
    from huggingface_hub.utils import validate_repo_id

    from conjoin.hub import push

    validate_repo_id(args.repo_id)
    is_collection = (Path(args.source) / "data" / "train.lance").is_dir()
    args.type = args.type or ("dataset" if is_collection else "model")
    if not (is_collection and args.type == "dataset") and (args.model or args.keep_pictures):
        raise ValueError("--model and --keep-pictures are for a collection that is pushed as a dataset")
    if args.keep_pictures is not None:
        check_counts(args, keep_pictures=1)
    if args.type != "model" and (args.results or args.dataset or args.base_model):
        raise ValueError(f"--results, --dataset and --base-model are for a model, not for a {args.type}")
    with TemporaryDirectory() as work:
        upload = _collect(args, work, is_collection)
        print(listing(upload), file=sys.stderr)
        if args.dry_run:
            print(upload.card)
            return
        options = {"public": args.public, "replace": args.replace, "revision": args.revision}
        print(f"pushed to {push(upload, message=args.message, **options)}")


def _collect(args: argparse.Namespace, work: str, is_collection: bool) -> "Upload":
    if is_collection and args.type == "dataset":
        from conjoin.retrieval.collection_copy import collection_upload

        options = {"model": args.model, "side": args.keep_pictures, "languages": args.language}
        return collection_upload(args.source, args.repo_id, work, license=args.license, **options)
    if args.type == "dataset":
        from conjoin.hub.dataset_upload import dataset_upload

        return dataset_upload(args.source, args.repo_id, work, license=args.license, languages=args.language)
    if args.type == "metric":
        from conjoin.evaluation.hf_metrics.space import metric_upload

        return metric_upload(args.source, args.repo_id, **({} if args.license is None else {"license": args.license}))
    if args.type == "space":
        from conjoin.serving.space import space_upload

        return space_upload(args.source, args.repo_id, work, license=args.license)

    from conjoin.hub import model_upload

    return model_upload(
        args.source,
        args.repo_id,
        license=args.license,
        results=args.results,
        languages=args.language,
        datasets=args.dataset,
        base_models=args.base_model,
    )


def listing(upload: "Upload") -> str:
    """Say what is pushed, with sizes, and what is left out."""
    sizes = upload.sizes()
    lines = [f"{size:>15,}  {name}" for name, size in sizes.items()]
    total = f"{len(sizes)} files, {sum(sizes.values()):,} bytes, to the {upload.kind} repository {upload.repo_id}"
    return "\n".join([*lines, total, f"left out: {', '.join(upload.left_out) or 'nothing'}"])
