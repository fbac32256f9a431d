"""A cached teacher says bit by bit what the live one says, and a cache is never taken for another."""

import pickle

import datasets
import pytest
import torch
from PIL import Image
from test_teachers import TEXTS, make_teachers, pair_rows, student

from conjoin.data import RowsWithTeacher
from conjoin.methods.solar import SolarStage1Config, SolarStage1Trainer, teacher_cache
from conjoin.methods.solar.stage1 import split_teacher
from conjoin.methods.solar.teacher_cache import TeacherCache, bytes_per_row, cache_teachers
from conjoin.methods.solar.teachers import TeacherCollator
from conjoin.storage import cache as row_cache, rows_digest
from tiny_training import SETTINGS, make_rows


@pytest.fixture(autouse=True)
def short_shards(monkeypatch):
    monkeypatch.setattr(teacher_cache, "SHARD_SIZE", 4)


def make_cache(checkpoints, folder, rows=None, teachers=None, **kwargs):
    teachers = teachers or make_teachers(checkpoints)
    model, processor = student(checkpoints)
    collator = TeacherCollator(processor, 8, teachers)
    rows = pair_rows() if rows is None else rows
    settings = {"batch_size": 2, "show_progress": False} | kwargs
    return rows, cache_teachers(teachers, collator, rows, folder, **settings), teachers, collator, model


def targets(teachers, model, batch):
    inputs, taught = split_teacher(batch["pairs"])
    return teachers(taught, model(**inputs, output_tokens=True))


def test_cached_is_live_bit_by_bit(tiny_checkpoints, tmp_path):
    rows, cache, teachers, collator, model = make_cache(tiny_checkpoints, tmp_path)
    taught = RowsWithTeacher(rows, pickle.loads(pickle.dumps(cache)))
    assert len(taught) == len(cache) == 6
    for start in range(0, 6, 2):
        live = collator(rows[start : start + 2])
        cached = collator([taught[index] for index in range(start, start + 2)])
        taught_live, taught_cached = live["pairs"]["teacher"], cached["pairs"]["teacher"]
        assert not {"pixel_values", "input_ids"} & taught_cached.keys()
        assert all(len(value) == 2 for value in taught_cached.values())
        said = teachers.states(taught_live)
        for name, value in said.items():
            assert torch.equal(taught_cached[name], value), name
        for a, b in zip(targets(teachers, model, live), targets(teachers, model, cached), strict=True):
            assert torch.equal(a, b)


def test_any_order_and_any_batch(tiny_checkpoints, tmp_path):
    rows, cache, teachers, collator, model = make_cache(tiny_checkpoints, tmp_path)
    order = [5, 0, 3, 2]
    live = targets(teachers, model, collator([rows[index] for index in order]))
    taught = RowsWithTeacher(rows, cache)
    cached = targets(teachers, model, collator([taught[index] for index in order]))
    for a, b in zip(live, cached, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-5)


def test_an_interrupted_run_goes_on_with_its_shard_size(tiny_checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache, "SHARD_SIZE", 2)
    make_cache(tiny_checkpoints, tmp_path / "whole")
    calls = []

    def fail_at_second(tensors, save=row_cache.save):
        calls.append(tensors)
        if len(calls) == 2:
            raise OSError("disk full")
        return save(tensors)

    with monkeypatch.context() as patch:
        patch.setattr(row_cache, "save", fail_at_second)
        with pytest.raises(OSError, match="disk full while writing"):
            make_cache(tiny_checkpoints, tmp_path / "part")
    monkeypatch.setattr(teacher_cache, "SHARD_SIZE", 3)
    make_cache(tiny_checkpoints, tmp_path / "part")
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "part" / path.name).read_bytes() == path.read_bytes()


def test_another_teacher_grid_or_data_is_refused(tiny_checkpoints, tmp_path):
    make_cache(tiny_checkpoints, tmp_path)
    others = {
        "vision teacher": {"teachers": make_teachers(tiny_checkpoints, vision="vit")},
        "text teacher": {"teachers": make_teachers(tiny_checkpoints, max_length=7)},
        "data": {"rows": pair_rows(TEXTS[::-1])},
        "dtype": {"dtype": torch.float16},
    }
    for name, changed in others.items():
        with pytest.raises(ValueError, match=rf"it was made with .*{name} .*, not "):
            make_cache(tiny_checkpoints, tmp_path, **changed)
    teachers = make_teachers(tiny_checkpoints)
    processor = student(tiny_checkpoints)[1]
    processor.image_processor.size = {"shortest_edge": 32}
    with pytest.raises(ValueError, match="it was made with grid "):
        cache_teachers(teachers, TeacherCollator(processor, 8, teachers), pair_rows(), tmp_path)


def test_a_cache_of_other_teachers_is_not_trained_on(tiny_checkpoints, tmp_path):
    """Their tokens would be taken for those of the recipe's teacher."""
    make_cache(tiny_checkpoints, tmp_path)
    processor = student(tiny_checkpoints)[1]
    same, other = make_teachers(tiny_checkpoints), make_teachers(tiny_checkpoints, text="bert")
    TeacherCache(tmp_path).check(same, TeacherCollator(processor, 8, same))
    with pytest.raises(ValueError, match=r"not of the teachers of the recipe: it was made with text teacher .*, not"):
        TeacherCache(tmp_path).check(other, TeacherCollator(processor, 8, other))


def test_rows_that_are_not_the_cached_ones_are_noticed(tiny_checkpoints, tmp_path):
    rows, cache, *_ = make_cache(tiny_checkpoints, tmp_path)
    with pytest.raises(ValueError, match="5 rows, but the teacher cache"):
        RowsWithTeacher(rows[:5], cache)
    with pytest.raises(ValueError, match=r"row 0 \(id 'row5'\) is not the one in the teacher cache"):
        RowsWithTeacher(rows[::-1], cache)[0]


def test_the_digest_of_rows_sees_what_a_teacher_sees(tmp_path):
    rows = make_rows(3)
    plain = [dict(row) for row in rows]
    changed = [[dict(row) for row in plain] for _ in range(3)]
    changed[0][1]["text"] = "other"
    changed[1][1]["image"] = Image.new("RGB", (16, 16), "white")
    changed[2][1]["id"] = "other"
    assert len({rows_digest(each) for each in (plain, plain[::-1], *changed)}) == 5
    plain[0]["image"].save(tmp_path / "a.png")
    filed = [{"id": "a", "text": "t", "image": {"path": str(tmp_path / "a.png"), "bytes": None}}]
    before = rows_digest(filed)
    plain[1]["image"].resize((20, 20)).save(tmp_path / "a.png")
    assert rows_digest(filed) != before
    assert rows_digest(rows) == rows_digest(make_rows(3))
    with pytest.raises(ValueError, match="have a transform"):
        rows_digest(rows.with_transform(lambda batch: batch))
    with pytest.raises(ValueError, match="a length and an order to cache, got IterableDataset"):
        rows_digest(rows.to_iterable_dataset())


def test_half_precision_takes_half_the_space(tiny_checkpoints, tmp_path):
    rows, cache, teachers, collator, model = make_cache(tiny_checkpoints, tmp_path / "half", dtype=torch.float16)
    make_cache(tiny_checkpoints, tmp_path / "full")
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")) for name in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]
    expected = bytes_per_row(teachers, collator, rows, torch.float32) * 6
    assert expected < sizes[1] < 1.2 * expected
    found = targets(teachers, model, collator([RowsWithTeacher(rows, cache)[0]]))
    live = targets(teachers, model, collator(rows[:1]))
    assert torch.allclose(found.image_tokens, live.image_tokens, atol=1e-2)


def test_training_on_the_cache_is_training_on_the_teachers(tiny_checkpoints, tmp_path):
    texts = [TEXTS[i % 6] for i in range(8)]
    rows = make_rows(8).remove_columns("text").add_column("text", texts)
    teachers = make_teachers(tiny_checkpoints)
    cache = make_cache(tiny_checkpoints, tmp_path / "cache", rows, teachers)[1]
    weights = []
    for data in (rows, RowsWithTeacher(rows, cache)):
        model, processor = student(tiny_checkpoints)
        config = SolarStage1Config(output_dir=str(tmp_path), optim="sgd", **SETTINGS)
        collator = TeacherCollator(processor, 8, teachers)
        SolarStage1Trainer(model, config, teachers, train_dataset=data, data_collator=collator).train()
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-5), name


def test_rows_may_be_a_dataset_with_undecoded_images(tiny_checkpoints, tmp_path):
    rows = make_rows(4)
    undecoded = rows.cast_column("image", datasets.Image(decode=False))
    _, cache, *_ = make_cache(tiny_checkpoints, tmp_path, undecoded)
    make_cache(tiny_checkpoints, tmp_path, rows)  # the same data
    assert len(RowsWithTeacher(rows, cache)[3]["teacher"]) == 4
