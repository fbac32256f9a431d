"""`conjoin verify`: compare the files of collections and models with their checksums."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class Options:
    """Hash every file that a SHA256SUMS lists, in FOLDER and below it.

    Opening a large collection hashes only the files that changed after its publication: run this after a copy.

    Args:
        folder: Folder of a collection or a model, or one that holds some, such as an evaluation.

    Example:
        conjoin verify runs/photos
    """

    folder: str


def run(options: Options) -> None:
    """Run the command."""
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
