"""A flipped bit or a cut in a file that the package writes: loading names the file, or reads the same content.

Collections are in `retrieval/test_collection_damage.py`, mined negatives in `retrieval/mining/test_mining.py`.
"""

import shutil

import pytest

from conjoin import load_encoder
from conjoin.evaluation import Headline, Metric, Results
from conjoin.hub import load_model
from conjoin.hub.card import read_results
from conjoin.storage import model_fingerprint, write_checksums
from damage import wrong_after_damage
from tiny_trainers import joint

FLIPS = 6
"""Bits flipped in each file."""


def read_model(folder):
    model, processor = load_model(folder)
    return [tensor.sum().item() for tensor in model.state_dict().values()], model.config.to_dict(), repr(processor)


def make_stock(folder):
    """A checkpoint of an ordinary architecture, with checksums as `conjoin export --stock` writes them."""
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    write_checksums(folder, sorted(path.name for path in folder.iterdir()))


def make_results(folder):
    folder.mkdir()
    Results("title", "summary", 0, headline=[Headline("R@5", Metric(0.15))]).save(folder)


KINDS = {
    "a model": (None, read_model),
    "a stock model": (make_stock, lambda folder: load_encoder(folder, pooling="cls").fingerprint),
    "results": (make_results, lambda folder: [read(folder / "results.json") for read in (Results.load, read_results)]),
}


def ends(content):
    return 0, 1, len(content) // 2, len(content) - 1


def checked_files(folder):
    """The files that `folder` is loaded from, less code and pages for people."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    sums = folder / "SHA256SUMS"
    listed = sums.read_text() if sums.is_file() else ""
    return [
        path for path in files if not listed or path == sums or f"  {path.relative_to(folder).as_posix()}\n" in listed
    ]


def damage_all(folder, read):
    """Damage each file that `folder` is read from, and return what was wrong; at least 8 of 10 damages are errors."""
    whole, wrong, noticed = read(folder), [], 0
    files = checked_files(folder)
    for path in files:
        found, count, _ = wrong_after_damage(
            path, lambda: read(folder), whole, path.name.partition("-")[0], FLIPS, ends, path.name
        )
        wrong, noticed = wrong + found, noticed + count
    assert read(folder) == whole
    assert noticed >= 8 * len(files)
    return "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_or_harmless(kind, tmp_path, own_export):
    make, read = KINDS[kind]
    folder = tmp_path / "made"
    shutil.copytree(own_export[0], folder) if make is None else make(folder)
    assert not damage_all(folder, read)


def test_a_damaged_or_unfinished_checkpoint_is_not_resumed(tiny_checkpoints, tmp_path):
    """Nothing is restored, so the model keeps its weights."""
    joint(tiny_checkpoints, tmp_path, "gcl", save_strategy="steps", save_steps=1).train()
    trainer = joint(tiny_checkpoints, tmp_path, "gcl")

    def resumed(folder):
        trainer.train(resume_from_checkpoint=str(folder))
        return model_fingerprint(trainer.encoder)

    assert not damage_all(tmp_path / "checkpoint-1", resumed)
    (tmp_path / "checkpoint-2/SHA256SUMS").unlink()
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*checkpoint-2': it has no SHA256SUMS"):
        resumed(tmp_path / "checkpoint-2")
    assert resumed("true") == resumed(tmp_path / "checkpoint-1")


def test_an_old_checkpoint_stays_until_the_new_one_is_complete(tiny_checkpoints, tmp_path, monkeypatch):
    def fail_at_the_second(folder, names):
        if folder.name == "checkpoint-2":
            raise OSError("No space left on device")
        write_checksums(folder, names)

    monkeypatch.setattr("conjoin.trainers.base.write_checksums", fail_at_the_second)
    trainer = joint(tiny_checkpoints, tmp_path, "gcl", save_strategy="steps", save_steps=1, save_total_limit=1)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    monkeypatch.undo()
    assert trainer.args.save_total_limit == 1
    trainer.train(resume_from_checkpoint="true")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_what_a_killed_process_left_of_an_old_checkpoint_goes_when_a_run_resumes(tiny_checkpoints, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    joint(tiny_checkpoints, tmp_path, "gcl", **settings, max_steps=2).train()
    (tmp_path / "checkpoint-1/optimizer.pt").unlink()  # killed while it removed them
    joint(tiny_checkpoints, tmp_path, "gcl", **settings, max_steps=3).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
