"""Checkpoints of training: one is complete once it has its `SHA256SUMS`, which is compared before a run resumes."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback

from conjoin.storage import FOLDER_CHECKSUMS, check_checksums, write_checksums


class Checksums(TrainerCallback):
    """Writes the checksums of a checkpoint once all processes have written their files.

    Args:
        accelerator: Of the trainer.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write them on the process that wrote the weights."""
        self.accelerator.wait_for_everyone()
        if args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            write_checksums(folder, {*files} - {FOLDER_CHECKSUMS})


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
