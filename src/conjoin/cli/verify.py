"""`conjoin verify`: compare files with their checksums, or a running endpoint with the checkpoint that it serves."""

from dataclasses import dataclass, fields
from pathlib import Path

from conjoin.cli.options import EncoderOptions, option


@dataclass(kw_only=True)
class Options(EncoderOptions):
    """Hash every file that a SHA256SUMS lists, in FOLDER and below it; or compare the vectors of an endpoint.

    Opening a large collection hashes only the files that changed after its publication: run this after a copy.

    Args:
        folder: Folder of a collection or a model, or one that holds some, such as an evaluation; with --against, a
            model, as for `conjoin encode`.
        against: Address of an endpoint that serves the model: http://HOST:PORT/v1 in OpenAI's form (vLLM, llama.cpp),
            or http://HOST:PORT/embed of Text Embeddings Inference or `conjoin serve`. Twenty items of each kind are
            embedded there and here.
        api_key_file: With --against: a file whose first line is sent as the bearer token.

    Example:
        conjoin verify runs/photos; conjoin verify runs/puma-stock --against http://localhost:8000/v1
    """

    folder: str
    against: str | None = None
    api_key_file: str | None = option(metavar="FILE")


def run(options: Options) -> None:
    """Run the command."""
    if options.against is not None:
        _compare(options, options.against)
        return
    unused = [each.name for each in fields(options) if vars(options)[each.name] != each.default]
    if unused := [name for name in unused if name not in ("folder", "quiet")]:
        raise ValueError(f"--{unused[0].replace('_', '-')} is for --against; without it, files are compared")
    from conjoin.retrieval import Collection
    from conjoin.storage import FOLDER_CHECKSUMS, check_checksums

    sums = sorted(Path(options.folder).rglob(FOLDER_CHECKSUMS))
    if not sums:
        raise FileNotFoundError(f"no collection or saved model in {options.folder!r} ({FOLDER_CHECKSUMS})")
    for folder in (path.parent for path in sums):
        if (folder / "data" / "train.lance").is_dir():
            Collection(folder).verify()
        else:
            check_checksums(folder, "restore it from a copy")
    print(f"{options.folder}: all files are as they were written")


def _compare(options: Options, url: str) -> None:
    """Print how an endpoint compares.

    Raises:
        ValueError: A kind of items has other vectors there.
    """
    from conjoin.retrieval import load_encoder
    from conjoin.serving.verify import check_endpoint

    key = Path(options.api_key_file).read_text(encoding="utf-8").split() if options.api_key_file else []
    checks = check_endpoint(load_encoder(options.folder, **options.encoder_options()), url, *key[:1])
    for check in checks:
        cosine = "" if check.cosine is None else f"{check.cosine:.4f}"
        print(f"{check.kind:<18}{cosine:>8}  {check.finding}")
    if differing := [check.kind for check in checks if check.differs]:
        raise ValueError(f"the vectors of {url} differ for {', '.join(differing)}")
