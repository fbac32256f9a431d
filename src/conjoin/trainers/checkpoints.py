"""Checkpoints of training: one is complete once it has its `SHA256SUMS`, which is compared before a run resumes."""

import shutil
from pathlib import Path

from conjoin.storage import FOLDER_CHECKSUMS, check_checksums, read_checksums


def last_checkpoint(folder: str | Path) -> Path:
    """Return the last complete checkpoint in a folder.

    Raises:
        FileNotFoundError: There is none.
    """
    complete = [path.parent for path in Path(folder).glob(f"checkpoint-*/{FOLDER_CHECKSUMS}")]
    steps = {int(path.name[11:]): path for path in complete if path.name[11:].isdigit()}
    if not steps:
        raise FileNotFoundError(f"no checkpoint to resume from in {str(folder)!r}; train without --resume")
    return steps[max(steps)]


def check_checkpoint(folder: str | Path) -> None:
    """Compare the files of a checkpoint with their checksums.

    Raises:
        DamagedError: One is missing, truncated or changed; the message names it.
        FileNotFoundError: The checkpoint has no checksums, so it is not complete.
    """
    if not Path(folder, FOLDER_CHECKSUMS).is_file():
        raise FileNotFoundError(f"no complete checkpoint in {str(folder)!r}: it has no {FOLDER_CHECKSUMS}")
    check_checksums(Path(folder), "resume from an older checkpoint, --resume FOLDER/checkpoint-N, or train again")


def remove_partial(folder: str | Path) -> None:
    """Remove the checkpoints of a folder that a killed process had begun to remove: some of their files are gone."""
    for listed in Path(folder).glob(f"checkpoint-*/{FOLDER_CHECKSUMS}"):
        if not all((listed.parent / name).is_file() for name in read_checksums(listed.parent)):
            shutil.rmtree(listed.parent)
