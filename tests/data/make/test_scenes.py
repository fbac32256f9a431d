import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from conjoin.cli.main import main
from conjoin.data import load_pairs, load_triplets, make_scenes
from conjoin.data.make.scenes import (
    NEGATIVES,
    PHRASES,
    SAME_UNION,
    SCENE_SIZE,
    Composition,
    Wording,
    draw_composition,
    draw_scene,
    scene_objects,
)
from conjoin.storage import text_digest

NAMES = [f"object{number}" for number in range(30)]
SIZES = {"train": 24, "distractors": 6, "triplets": 12}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes") / "out", **SIZES)


def lines(scenes: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (scenes / f"{name}.jsonl").read_text().splitlines()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(row: dict, role: str) -> tuple[set, set]:
    return tuple({entry["object"] for entry in row[f"{role}_{part}_objects"]} for part in ("image", "text"))


def compositions(split="train", count=300):
    return [draw_composition(NAMES, split, np.random.default_rng(number)) for number in range(count)]


def test_compositions_have_every_edit_and_overlap():
    drawn = compositions()
    kinds = {(bool(one.image_only), bool(one.text_only)) for one in drawn}
    assert kinds == {(True, True), (False, True), (True, False)}
    assert {len(one.shared) for one in drawn} == {1, 2, 3}
    assert all(len({*one.image, *one.text}) == len(one.shared + one.image_only + one.text_only) for one in drawn)


def test_no_set_of_objects_is_in_two_splits():
    sets = {split: {frozenset({*one.image, *one.text}) for one in compositions(split)} for split in ("train", "test")}
    assert not sets["train"] & sets["test"] and len(sets["test"]) > 100
    assert all(one.split == "validation" for one in compositions("validation", 50))


def test_the_positive_shares_exactly_the_intersection():
    for query in compositions():
        positive = query.exchanged()
        assert {*query.image} & {*query.text} == {*positive.image} & {*positive.text} == {*query.shared}
        assert {*query.image} == {*positive.text} and {*query.text} == {*positive.image}


def test_negatives_lack_an_object_except_those_with_the_same_union():
    seen = set()
    for number, query in enumerate(compositions()):
        everything = {*query.image, *query.text}
        for kind in query.negatives():
            negative = query.negative(kind, np.random.default_rng(number))
            seen.add(kind)
            assert {*negative.image, *negative.text} < everything, "a false negative for a reader of the union"
        other = query.negative(SAME_UNION, np.random.default_rng(number))
        assert {*other.image, *other.text} == everything
        assert {*other.shared} != {*query.shared} and len(other.shared) == len(query.shared)
    assert seen == set(NEGATIVES)


def test_objects_and_words_of_training_scenes_are_as_the_card_says():
    objects = {row.concept: row.names for row in scene_objects() if row.split == "train"}
    known = sorted(objects, key=text_digest)
    shown, words = set(), set()
    for number in range(5000):
        generator = np.random.default_rng([0, 0, number])  # of the rows of train.parquet
        one = draw_composition(known, "train", generator)
        shown |= {len(one.image), len(one.text)}
        words.add(len(Wording.draw(["en"], generator).write(one.text, objects)[0].split()))
    assert shown == {1, 2, 3, 4} and (min(words), max(words)) == (8, 22)


def overlap(first: set, second: set) -> float:
    return len(first & second) / (len(first) * len(second)) ** 0.5


def within(a: Composition, b: Composition) -> float:
    """What a reader sees that compares pictures with pictures and texts with texts."""
    return overlap({*a.image}, {*b.image}) + overlap({*a.text}, {*b.text})


def union(a: Composition, b: Composition) -> float:
    return overlap({*a.image, *a.text}, {*b.image, *b.text})


def intersection(a: Composition, b: Composition) -> float:
    return overlap({*a.shared}, {*b.shared})


def added(a: Composition, b: Composition) -> float:
    """The cosine of sums of unit vectors of pictures and texts, in which an object is an axis for both."""
    parts = [({*each.image}, {*each.text}) for each in (a, b)]
    dots = [sum(overlap(first, second) for first in left for second in right)
            for left, right in ((parts[0], parts[1]), (parts[0], parts[0]), (parts[1], parts[1]))]  # fmt: skip
    return dots[0] / (dots[1] * dots[2]) ** 0.5


@pytest.mark.parametrize(
    ("read", "content", "same_union"),
    [
        (added, (1, 1), (1, 1)),
        (within, (0, 0), (0.5, 0.8)),
        (union, (1, 1), (0, 1)),
        (intersection, (0.65, 1), (1, 1)),
    ],
)
def test_ideal_readers_score_what_the_card_says(read, content, same_union):
    """Bounds: ties are failures, ties are successes."""
    found = {False: [], True: []}
    for number, query in enumerate(compositions(count=600)):
        right = read(query, query.exchanged())
        for kind in [*query.negatives(), SAME_UNION]:
            ahead = right - read(query, query.negative(kind, np.random.default_rng(number)))
            found[kind == SAME_UNION].append((ahead > 1e-9, ahead > -1e-9))
    for same, expected in ((False, content), (True, same_union)):
        assert np.mean(found[same], axis=0) == pytest.approx(expected, abs=0.06)


def test_an_added_object_leaves_out_the_negative_with_the_same_content():
    assert "text_content" not in Composition(("a",), (), ("b",)).negatives()
    assert "image_content" not in Composition(("a",), ("b",), ()).negatives()


@pytest.mark.parametrize("language", PHRASES)
def test_texts_name_the_objects_at_the_spans(language):
    names = {name: {language: f"the {name}"} for name in NAMES}
    for phrase in range(len(PHRASES[language])):
        for count in (1, 2, 4):
            text, spans = Wording(language, phrase, 7).write(NAMES[:count], names)
            assert {span["object"]: text[span["start"] : span["end"]] for span in spans} == {
                name: names[name][language] for name in NAMES[:count]
            }


def test_a_wording_depends_on_its_seed_and_others_on_their_phrase():
    generator = np.random.default_rng(0)
    first = Wording.draw(["en"], generator)
    assert all(Wording.draw(["en"], generator, first).phrase != first.phrase for _ in range(30))
    names = {name: {"en": name} for name in NAMES}
    assert len({Wording("en", 0, seed).write(NAMES[:4], names)[0] for seed in range(20)}) > 5


def test_objects_are_where_their_boxes_are(monkeypatch):
    names = [row.concept for row in scene_objects()][:4]
    monkeypatch.setattr(
        "conjoin.data.make.scenes._background", lambda generator: Image.new("RGB", (SCENE_SIZE, SCENE_SIZE), "white")
    )
    picture, boxes = draw_scene(tuple(names), "openmoji", np.random.default_rng(3))
    ink = 255 - np.asarray(Image.open(io.BytesIO(picture)).convert("L"), dtype=float)
    inside = np.zeros(ink.shape, dtype=bool)
    for entry in boxes:
        left, top, right, bottom = (round(edge * SCENE_SIZE) for edge in entry["box"])
        assert not inside[top:bottom, left:right].any(), "objects overlap"
        inside[top:bottom, left:right] = True
        assert (ink[top:bottom, left:right] > 100).mean() > 0.02, "the box is empty"
    assert ink[~inside].max() < 60, "an object leaves its box"  # JPEG blurs an edge by a few pixels
    assert [entry["object"] for entry in boxes] == names


def test_objects_and_compositions_of_the_test_sets_are_unseen(scenes):
    objects = {row.concept: row.split for row in scene_objects()}
    train = load_pairs(scenes / "train.parquet")
    assert len(train) == SIZES["train"]
    for row in pq.read_table(scenes / "train.parquet").to_pylist():
        assert row["alternative_text"] != row["text"]
    shown = {name: [content(row, "query") for row in lines(scenes, f"test_{name}")] for name in ("known", "unseen")}
    assert {objects[one] for parts in shown["unseen"] for part in parts for one in part} == {"test"}
    assert {objects[one] for parts in shown["known"] for part in parts for one in part} == {"train"}
    assert all(8 <= len(text.split()) <= 22 for text in train["text"])


def test_triplets_load_and_hold_what_they_say(scenes):
    rows = lines(scenes, "test_known")
    loaded = load_triplets(scenes / "test_known.jsonl")
    assert len(loaded) == SIZES["triplets"] and set(loaded["kind"]) <= set(NEGATIVES)
    for row in rows:
        image, text = content(row, "query")
        assert content(row, "positive") == (text, image)
        assert row["query_text"] != row["positive_text"]
        assert Image.open(scenes / row["query_image"]).size == (SCENE_SIZE, SCENE_SIZE)
    for row, other in zip(rows, lines(scenes, "test_known_same_union"), strict=True):
        assert other["kind"] == SAME_UNION and set.union(*content(other, "negative")) == set.union(
            *content(row, "query")
        )
        for role in ("query", "positive"):
            assert other[f"{role}_text"] == row[f"{role}_text"]
            assert (scenes / other[f"{role}_image"]).read_bytes() == (scenes / row[f"{role}_image"]).read_bytes()
    variants = [row for row in rows if row.get("variant_text")]
    assert 0 < len(variants) < len(rows)
    for row in variants:
        assert row["variant_image"] == row["query_image"]
        assert {span["object"] for span in row["variant_text_objects"]} == content(row, "query")[1]


def test_a_shorter_call_makes_a_part_and_another_seed_other_scenes(scenes, tmp_path):
    fewer = make_scenes(tmp_path / "fewer", train=5, distractors=2, triplets=2)
    assert load_pairs(fewer / "train.parquet")["text"] == load_pairs(scenes / "train.parquet")["text"][:5]
    other = make_scenes(tmp_path / "other", train=2, distractors=2, triplets=2, seed=1)
    assert (other / "test_unseen.jsonl").read_bytes() != (fewer / "test_unseen.jsonl").read_bytes()


def test_fewer_known_objects(tmp_path):
    few = make_scenes(tmp_path / "few", train=40, distractors=2, triplets=2, objects=6)
    rows = pq.read_table(few / "train.parquet").to_pylist()
    shown = {entry["object"] for row in rows for part in ("image", "text") for entry in row[f"{part}_objects"]}
    assert len(shown) == 6
    known = {one for row in lines(few, "test_known") for part in content(row, "query") for one in part}
    assert known <= shown and not known & {
        one for row in lines(few, "test_unseen") for part in content(row, "query") for one in part
    }


def test_an_interrupted_call_keeps_finished_files_and_the_next_makes_the_same(scenes, tmp_path, monkeypatch):
    from conjoin.data.make import scenes as module

    draw = module.draw_scene
    drawn = []

    def stop(*args):
        drawn.append(args)
        if len(drawn) == SIZES["train"] + 5:
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(module, "draw_scene", stop)
    with pytest.raises(KeyboardInterrupt):
        make_scenes(tmp_path / "out", **SIZES)
    assert not (tmp_path / "out").exists()
    make_scenes(tmp_path / "out", **SIZES)
    per_triplet = 3 * (4 * SIZES["triplets"] + 2 * (SIZES["triplets"] // 2))
    assert len(drawn) == SIZES["train"] + 5 + SIZES["distractors"] + per_triplet
    assert files_of(tmp_path / "out") == files_of(scenes)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 1}, "train=1 must be at least 2"),
        ({"objects": 4}, "objects=4 must be at least 5"),
        ({"languages": ["en", "xx"]}, r"languages=\['en', 'xx'\]; expected some of en, de"),
        ({"languages": []}, "languages="),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_scenes(tmp_path / "out", **(SIZES | options))


def test_another_folder_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not these scenes"):
        make_scenes(tmp_path, **SIZES)


def test_other_languages_and_the_command(tmp_path, capsys):
    main(["data", "make-scenes", str(tmp_path / "out"), "--train", "20", "--distractors", "2", "--triplets", "2",
          "--languages", "de", "id"])  # fmt: skip
    texts = load_pairs(tmp_path / "out/train.parquet")["text"]
    assert any(" und " in text or " sowie " in text for text in texts) and any("gambar" in text for text in texts)
    assert "next: conjoin evaluate MODEL --benchmark scenes" in capsys.readouterr().out
