"""`conjoin push`: a model, a collection, a dataset, a metric or a search app to the Hub."""

import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from conjoin.cli.options import ImageOptions, option, pick


@dataclass(kw_only=True)
class Options(ImageOptions):
    """Push SOURCE to OWNER/NAME with a card, in one commit that is made whole or not at all.

    A new repository is private. Log in with `hf auth login` or set HF_TOKEN; HF_ENDPOINT selects another hub.

    Args:
        source: What to push: a folder or file, or the name of a metric; see --type.
        repo_id: Repository; made if it does not exist.
        type: Model: what `conjoin train` or `conjoin export` wrote; dataset: a collection, a folder in the layout of
            MERIT, or a file of triplets; metric: hit_rate_at_k, recall_at_k or mrr_at_k; space: a collection with its
            model, small pictures and `conjoin app` (default: dataset for a collection, else model).
        dry_run: List the files, print the card, and push nothing.
        public: Everybody may see it (default: private).
        replace: Replace another model, dataset, metric or search app that is there.
        revision: Branch to push to; made if needed (default: main).
        message: Commit message.
        license: Licence, such as apache-2.0 (default: none).
        language: Languages, such as en de.
        results: Of a model: results.json files, or the folder that conjoin mteb wrote, for the card.
        dataset: Of a model: training data (default: the recipe's).
        base_model: Of a model: trained from (default: the recipe's).
        model: Of a collection: its model on the Hub (default: what it records, of a folder the name); of a Space: its
            folder.
        keep_pictures: Of a collection: make thumbnails of at most N pixels, if it has none.

    Example:
        conjoin push runs/model me/model --dry-run; conjoin push runs/photos me/photos --model me/model; conjoin push
        runs/mini-merit me/mini-merit --type dataset; conjoin push mrr_at_k me/mrr_at_k --type metric
    """

    source: str
    repo_id: str = option(MISSING, metavar="OWNER/NAME")
    type: Literal["model", "dataset", "metric", "space"] | None = None
    dry_run: bool = False
    public: bool = False
    replace: bool = False
    revision: str | None = None
    message: str | None = None
    license: str | None = None
    language: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    dataset: list[str] = field(default_factory=list)
    base_model: list[str] = field(default_factory=list)
    model: str | None = None
    keep_pictures: int | None = option(least=1)


_KINDS = {
    "results": ("model",),
    "dataset": ("model",),
    "base_model": ("model",),
    "language": ("model", "collection", "dataset"),
    "model": ("collection", "space"),
    "keep_pictures": ("collection",),
}
"""What each option is for; the others are for all."""


def run(options: Options) -> None:
    """Collect the files, say what is pushed, and push."""
    from huggingface_hub.utils import validate_repo_id

    from conjoin.push import collection_upload, dataset_upload, metric_upload, model_upload, push, space_upload

    source, repo_id, model = options.source, options.repo_id, options.model
    validate_repo_id(repo_id)
    is_collection = (Path(source) / "data" / "train.lance").is_dir()
    kind: str = options.type or ("dataset" if is_collection else "model")
    kind = "collection" if kind == "dataset" and is_collection else kind
    for name, kinds in _KINDS.items():
        if vars(options)[name] and kind not in kinds:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for a {' or a '.join(kinds)}; {source!r} is pushed as a {kind}")
    of_all: dict[str, Any] = {"license": options.license, "languages": options.language}
    with TemporaryDirectory() as work:
        if kind == "model":
            of_model: dict[str, Any] = {"datasets": options.dataset, "base_models": options.base_model}
            upload = model_upload(source, repo_id, results=options.results, **of_model, **of_all)
        elif kind == "metric":
            upload = metric_upload(source, repo_id, options.license or "apache-2.0")
        elif kind == "space":
            upload = space_upload(source, repo_id, work, model=model, license=options.license)
        elif kind == "collection":
            upload = collection_upload(source, repo_id, work, model=model, side=options.keep_pictures, **of_all)
        else:
            upload = dataset_upload(source, repo_id, work, **of_all)
        sizes = upload.sizes()
        for name, size in sizes.items():
            print(f"{size:>15,}  {name}", file=sys.stderr)
        print(
            f"{len(sizes)} files, {sum(sizes.values()):,} bytes, to the {upload.kind} repository {repo_id}\n"
            f"left out: {', '.join(upload.left_out) or 'nothing'}",
            file=sys.stderr,
        )
        if options.dry_run:
            print(upload.card)
        else:
            print(f"pushed to {push(upload, **pick(options, 'public', 'replace', 'revision', 'message'))}")
