"""`conjoin teacher-cache` from the command line."""

import pytest
import torch

from conjoin.cli.main import main
from conjoin.data import RowsWithTeacher, load_pairs
from conjoin.methods.solar.teacher_cache import TeacherCache
from conjoin.methods.solar.teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher
from conjoin.processing import ImageTextProcessor
from tiny_training import write_pairs


@pytest.fixture
def arguments(own_export, tiny_checkpoints, tmp_path):
    write_pairs(tmp_path / "data", 4)
    teachers = ["--vision", tiny_checkpoints["dinov2"], "--text", tiny_checkpoints["xlm_roberta"]]
    return ["teacher-cache", str(own_export[0]), str(tmp_path / "data"), *teachers]


def test_writes_what_the_teachers_say(arguments, own_export, tiny_checkpoints, tmp_path, capsys):
    out = tmp_path / "cache"
    settings = ["--out", str(out), "--quiet", "--device", "cpu"]
    assert main([*arguments, *settings]) == 0
    assert "teacher states of 4 rows" in capsys.readouterr().out
    rows = load_pairs(str(tmp_path / "data"))
    teachers = Teachers(
        VisionTeacher.from_pretrained(tiny_checkpoints["dinov2"]),
        TextTeacher.from_pretrained(tiny_checkpoints["xlm_roberta"]),
    )
    collator = TeacherCollator(own_export[2], 8, teachers)
    said = teachers.states(collator([rows[i] for i in range(4)])["pairs"]["teacher"])
    taught = RowsWithTeacher(rows, TeacherCache(out))
    cached = collator([taught[i] for i in range(4)])["pairs"]["teacher"]
    assert all(torch.equal(cached[name], value) for name, value in said.items())
    assert main([*arguments, *settings, "--dtype", "float16"]) == 2
    assert "it was made with dtype 'torch.float32', not 'torch.float16'" in capsys.readouterr().err


def test_a_recipe_that_composes_the_student_anew_takes_the_cache(arguments, tiny_checkpoints, tmp_path):
    settings = ["--max-text-length", "9", "--out", str(tmp_path / "cache"), "--quiet", "--device", "cpu"]
    assert main([*arguments, *settings]) == 0
    teachers = Teachers(
        VisionTeacher.from_pretrained(tiny_checkpoints["dinov2"]),
        TextTeacher.from_pretrained(tiny_checkpoints["xlm_roberta"], max_length=9),
    )
    student = ImageTextProcessor.from_backbones(tiny_checkpoints["dinov2"], tiny_checkpoints["bert"])
    collator = TeacherCollator(student, 8, teachers)
    TeacherCache(tmp_path / "cache").check(teachers, collator)


def test_a_model_without_patches_and_words_is_refused(arguments, tiny_checkpoints, tmp_path, capsys):
    arguments[1] = tiny_checkpoints["bert"]
    assert main([*arguments, "--out", str(tmp_path / "cache")]) == 2
    assert "is a bert; teachers are for a joint encoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--vision", "no/teacher"], "cannot load the model 'no/teacher'"),
        (["--text", "dinov2"], "cannot load the model"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(
    arguments, tiny_checkpoints, tmp_path, capsys, change, message, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    change = [tiny_checkpoints.get(word, word) for word in change]
    assert main([*arguments, *change, "--out", str(tmp_path / "cache"), "--quiet", "--device", "cpu"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # before it stand the bars of loading
    assert message in error and error.startswith("conjoin: ") and not (tmp_path / "cache").exists()
