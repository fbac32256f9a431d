"""The output folder of a run: a checkpoint is whole or not there, and writing that fails leaves the last one."""

import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import TrainerState

from conjoin.processing import ImageTextProcessor
from conjoin.storage import lock_folder
from conjoin.training import run_folder
from conjoin.training.run_folder import INCOMPLETE, check_checkpoint, checkpoints, open_run_folder, remove_old
from tiny_training import make_encoder, make_rows, make_trainer, move_to_second_machine

WRITERS = (
    (torch, "save"),
    (safetensors.torch, "save_file"),
    (TrainerState, "save_to_json"),
    (ImageTextProcessor, "save_pretrained"),
    (os, "fsync"),
    (Path, "unlink"),
)


class Killed(BaseException):
    """No clean-up handles it, as none handles SIGKILL."""


@pytest.fixture
def trainer(tiny_checkpoints, tmp_path):
    """A trainer with the checkpoints 1 and 2 of a run."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    made = make_trainer("gcl", *make_encoder(tiny_checkpoints), tmp_path / "out", make_rows(8), **settings)
    made.train()
    return made


def found(args, resume=True, overwrite=False):
    with open_run_folder(args, resume, overwrite) as checkpoint:
        return checkpoint


def test_the_limit_holds_after_a_kill_between_the_last_checkpoint_and_the_removal_of_the_one_before(trainer):
    folder = Path(trainer.args.output_dir)
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-1")
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"]


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_a_checkpoint_that_loads(trainer, monkeypatch):
    """Whatever call is the last one, an intact checkpoint is found; the limit of one removes none too early."""
    folder = Path(trainer.args.output_dir)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"]
    points, step = [], 2
    for point in range(100):
        calls = []

        def dying(original, name, calls=calls, point=point):
            def call(*arguments, **options):
                calls.append(name)
                if len(calls) <= point:
                    return original(*arguments, **options)
                if name not in ("fsync", "unlink"):
                    original(*arguments, **options)
                    newest = max(folder.rglob("*.*"), key=lambda path: path.stat().st_mtime_ns)
                    os.truncate(newest, newest.stat().st_size // 2)
                raise Killed

            return call

        trainer.state.global_step = step + 1
        with monkeypatch.context() as patch:
            for owner, name in WRITERS:
                patch.setattr(owner, name, dying(getattr(owner, name), name))
            try:
                trainer._save_checkpoint(trainer.model, None)
                break
            except Killed:
                points.append(calls[-1])
        checkpoint = found(trainer.args)
        assert checkpoint in (folder / f"checkpoint-{step}", folder / f"checkpoint-{step + 1}"), points
        check_checkpoint(checkpoint)
        torch.load(checkpoint / "optimizer.pt")
        assert not list(folder.rglob(INCOMPLETE)) and not list(folder.glob("damaged-*"))
        step = int(checkpoint.name.partition("-")[2])
    assert {name for _, name in WRITERS} == set(points) and len(points) > 15
    assert [path.name for path in checkpoints(folder)] == [f"checkpoint-{step + 1}"]


def test_what_a_kill_left_while_the_model_was_saved_is_removed(trainer):
    folder = Path(trainer.args.output_dir)
    killed = folder / "export.0123456789abcdef.conjoin-tmp"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    (folder / "recipe.json.0123456789abcdef.conjoin-tmp").write_bytes(b"{")
    assert found(trainer.args).name == "checkpoint-2"
    assert {path.name for path in folder.iterdir()} == {".lock", "checkpoint-2"}


def test_a_damaged_checkpoint_is_set_aside(trainer, tmp_path, caplog):
    trainer.args.save_total_limit = 9
    for step in (3, 4, 5):
        trainer.state.global_step = step
        trainer._save_checkpoint(trainer.model, None)
    folder = Path(trainer.args.output_dir)
    content = bytearray((folder / "checkpoint-5/optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "checkpoint-5/optimizer.pt").write_bytes(content)
    (folder / "checkpoint-4/trainer_state.json").unlink()
    (folder / "checkpoint-7").mkdir()
    assert found(trainer.args) == folder / "checkpoint-3"
    assert sorted(path.name for path in folder.glob("damaged-*")) == [f"damaged-checkpoint-{n}" for n in (4, 5, 7)]
    assert (
        "optimizer.pt' is missing, truncated or damaged" in caplog.text
        and "trainer_state.json' is missing" in caplog.text
    )
    for step in (2, 3):
        (folder / f"checkpoint-{step}/SHA256SUMS").unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from in"):
        found(trainer.args)


def test_a_full_disk_is_one_line_and_leaves_no_part(trainer):
    resource = pytest.importorskip("resource")
    trainer.state.global_step, before = 3, resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = (Path(trainer.args.output_dir) / "checkpoint-2/model.safetensors").stat().st_size
    for limit in (1_000, weights + 1_000):  # the weights do not fit, or the optimizer's state does not
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match=r"^cannot save checkpoint-3 to '.*checkpoint-2' is safe: make room"):
                trainer._save_checkpoint(trainer.model, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        folder = Path(trainer.args.output_dir)
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2"]
    trainer._save_checkpoint(trainer.model, None)
    assert found(trainer.args).name == "checkpoint-3"


def test_a_folder_is_not_replaced_unasked(trainer, tmp_path):
    folder = Path(trainer.args.output_dir)
    with pytest.raises(ValueError, match="holds checkpoint-2 of an unfinished run; resume it with --resume"):
        found(trainer.args, resume=False)
    assert found(trainer.args, resume=False, overwrite=True) is None
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds a model \(config.json\).*--overwrite"):
        found(trainer.args, resume=False)
    (folder / "cache.json").write_text("{}")
    for resume, overwrite in ((False, False), (True, False), (False, True)):
        with pytest.raises(ValueError, match="holds no training run"):
            found(trainer.args, resume, overwrite)


def test_a_second_run_is_refused(trainer):
    with open_run_folder(trainer.args, True, False):
        with pytest.raises(ValueError, match="another process is writing into"):
            found(trainer.args)
    assert found(trainer.args).name == "checkpoint-2"
    lock_folder(Path(trainer.args.output_dir)).release()


def test_a_second_machine_waits_for_the_first(trainer, monkeypatch):
    events = move_to_second_machine(trainer.args, monkeypatch)
    monkeypatch.setattr(run_folder, "checkpoints", lambda folder: events.append("open") or [folder])
    found(trainer.args)
    assert events == ["wait", "open"]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(None, 2, [10, 9, 2, 1]), (1, None, [10]), (1, 2, [10, 2]), (2, 1, [10, 1]), (3, 9, [10, 9, 2])],
)
def test_old_checkpoints_are_removed(tmp_path, limit, best, kept):
    for step in (1, 2, 9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    remove_old(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert [path.name for path in run_folder.checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]
