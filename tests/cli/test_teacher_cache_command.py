"""`conjoin teacher-cache` from the command line."""

import pytest
import torch
from transformers import AutoProcessor

from conjoin.cli.main import main
from conjoin.data import RowsWithTeacher, load_pairs
from conjoin.hub import export
from conjoin.methods.solar.teacher_cache import TeacherCache
from conjoin.methods.solar.teachers import TeacherCollator, Teachers, TextTeacher, VisionTeacher
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.processing import ImageTextProcessor


@pytest.fixture
def arguments(tiny_checkpoints, pictures, tmp_path):
    clip = tiny_checkpoints["clip"]
    model = JointEncoderModel.from_backbones(clip, clip, hidden_size=24, num_attention_heads=2)
    export(model, ImageTextProcessor.from_backbones(clip, clip), tmp_path / "model")
    (tmp_path / "data").mkdir()
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"data/p{number}.png")
        (tmp_path / f"data/p{number}.txt").write_text(f"a picture number {number}")
    teachers = ["--vision", tiny_checkpoints["dinov2"], "--text", tiny_checkpoints["xlm_roberta"]]
    return ["teacher-cache", str(tmp_path / "model"), str(tmp_path / "data"), *teachers]


def test_writes_what_the_teachers_say(arguments, tiny_checkpoints, tmp_path, capsys):
    out = tmp_path / "cache"
    settings = ["--out", str(out), "--quiet", "--device", "cpu"]
    assert main([*arguments, *settings]) == 0
    assert "teacher states of 4 rows" in capsys.readouterr().out
    rows = load_pairs(str(tmp_path / "data"))
    teachers = Teachers(
        VisionTeacher.from_pretrained(tiny_checkpoints["dinov2"]),
        TextTeacher.from_pretrained(tiny_checkpoints["xlm_roberta"]),
    )
    processor = AutoProcessor.from_pretrained(str(tmp_path / "model"), trust_remote_code=True)
    collator = TeacherCollator(processor, 8, teachers)
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
    clip = tiny_checkpoints["clip"]
    collator = TeacherCollator(ImageTextProcessor.from_backbones(clip, clip), 8, teachers)
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
        (["--vision-layer", "9"], "hidden_layer=9; expected 0 to 3"),
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
