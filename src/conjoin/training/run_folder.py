"""The output folder of a run: who may write into it, its checkpoints, and what to say when writing fails."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from conjoin.storage import (
    CACHE_FILE,
    FOLDER_CHECKSUMS,
    TEMPORARY,
    check_checksums,
    flush,
    flush_tree,
    lock_folder,
    make_folder,
    remove_temporary,
    write_checksums,
)

from .config import RetrievalConfig

logger = logging.getLogger(__name__)

MODEL_FILES = ("config.json", "modules.json", "model.safetensors", "model.safetensors.index.json")
INCOMPLETE = f"incomplete{TEMPORARY}"
"""A file in a checkpoint that is being written."""
_OTHERS = (CACHE_FILE, "data/train.lance")
"""What a cache or a collection has."""


@contextmanager
def open_run_folder(args: RetrievalConfig, resume: bool, overwrite: bool) -> Iterator[Path | None]:
    """Lock the output folder of a run and yield the checkpoint to resume from, or None.

    Args:
        args: The arguments of the run.
        resume: Resume from the last intact checkpoint.
        overwrite: Accept a folder with a model or checkpoints.

    Raises:
        FileNotFoundError: There is no checkpoint to resume from.
        ValueError: Another process trains into the folder, or it holds something that this run would replace.
    """
    folder = Path(str(args.output_dir))
    lock = None
    try:
        with args.main_process_first(local=False, desc="opening the output folder"):
            if args.should_save:
                make_folder(folder)
                lock = lock_folder(folder)
                remove_temporary(folder)
                remove_incomplete(folder)
                _prepare(folder, resume, overwrite)
            existing = checkpoints(folder)
        yield existing[0] if resume and existing else None
    finally:
        if lock is not None:
            lock.release()


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, less one that is being written, the last first."""
    named = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")}
    steps = {path: int(match[1]) for path, match in named.items() if match and path.is_dir()}
    return sorted((path for path in steps if not (path / INCOMPLETE).exists()), key=steps.__getitem__, reverse=True)


def last_checkpoint(folder: Path) -> Path:
    """Return the last checkpoint in a folder.

    Raises:
        FileNotFoundError: There is none.
    """
    if not checkpoints(folder):
        raise FileNotFoundError(f"no checkpoint to resume from in {str(folder)!r}")
    return checkpoints(folder)[0]


def begin_checkpoint(checkpoint: Path) -> None:
    """Make the folder of a checkpoint and mark it as incomplete."""
    shutil.rmtree(checkpoint, ignore_errors=True)  # of a run that was interrupted and resumed from an earlier step
    checkpoint.mkdir(parents=True)
    (checkpoint / INCOMPLETE).touch()


def complete_checkpoint(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint, flush it to the disk and remove the mark of `begin_checkpoint`."""
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    write_checksums(checkpoint, sorted(files - {INCOMPLETE, FOLDER_CHECKSUMS}))  # FSDP has sub-folders
    flush_tree(checkpoint)
    flush(checkpoint.parent)  # older checkpoints are removed next
    (checkpoint / INCOMPLETE).unlink()
    flush(checkpoint)


def check_checkpoint(path: Path) -> None:
    """Compare the files of a checkpoint with its checksums.

    Raises:
        FileNotFoundError: It has no checksums: it is not complete.
        ValueError: A file is missing, truncated or changed; the message names it.
    """
    if not (path / FOLDER_CHECKSUMS).is_file():
        raise FileNotFoundError(f"{str(path)!r} has no {FOLDER_CHECKSUMS}: it is not a complete checkpoint")
    check_checksums(path, "remove the checkpoint")


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of an earlier run."""
    for path in checkpoints(folder):
        shutil.rmtree(path)


def remove_old(folder: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints until `limit` are left; the last and the best one stay."""
    existing = checkpoints(folder)
    if not existing:
        return
    kept = {existing[0].resolve(), Path(best or existing[0]).resolve()}
    old = [path for path in reversed(existing) if path.resolve() not in kept]
    for path in old[: max(0, len(existing) - max(limit, len(kept)))] if limit else []:
        shutil.rmtree(path, ignore_errors=True)


def remove_incomplete(folder: Path) -> None:
    """Remove the checkpoint that a killed process or a failure left incomplete."""
    for path in folder.glob(f"checkpoint-*/{INCOMPLETE}"):
        shutil.rmtree(path.parent)


@contextmanager
def explain_failed_save(what: str, folder: Path) -> Iterator[None]:
    """Turn a failure of writing into one line that says what is safe.

    Raises:
        OSError: The disk is full or fails.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, RuntimeError):
            if "inline_container" not in reason:  # how torch.save reports a file that it could not write in full
                raise
            reason = "a file could not be written in full"
        remove_incomplete(folder)
        kept = checkpoints(folder)
        safe = f"{str(kept[0])!r} is safe: make room and resume with --resume" if kept else "no checkpoint was saved"
        free = shutil.disk_usage(folder).free / 2**20
        raise OSError(f"cannot save {what} to {str(folder)!r}: {reason} ({free:,.0f} MiB are free); {safe}") from error


def _prepare(folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse what the run would replace, unless the caller asked for it."""
    for name in _OTHERS:
        if (folder / name).exists():
            raise ValueError(f"{str(folder)!r} holds no training run (it has a {name}); choose another output_dir")
    if resume:
        _set_damaged_aside(folder)
        return
    existing, finished = checkpoints(folder), [name for name in MODEL_FILES if (folder / name).exists()]
    if finished and not overwrite:
        raise ValueError(
            f"{str(folder)!r} holds a model ({finished[0]}); choose another training.output_dir, or replace the model "
            "with --overwrite"
        )
    if existing and not overwrite:
        raise ValueError(
            f"{str(folder)!r} holds {existing[0].name} of an unfinished run; resume it with --resume, choose another "
            "training.output_dir, or start again with --overwrite"
        )


def _set_damaged_aside(folder: Path) -> None:
    """Rename damaged checkpoints after the last intact one, so that nothing takes them for the newest."""
    for path in checkpoints(folder):
        try:
            check_checkpoint(path)
            return
        except (FileNotFoundError, ValueError) as error:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
            logger.warning("%s; renamed to %s, resuming from an earlier checkpoint", error, aside.name)
    raise FileNotFoundError(f"no checkpoint to resume from in {str(folder)!r}; train without --resume")
