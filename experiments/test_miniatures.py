"""The miniatures: the published layouts, the same bytes every time. M-BEIR's has all cells and goes on after an
interruption; MERIT's has families that never cross splits, and conditions that hold."""

import io
import json
from pathlib import Path

import datasets
import mini_mbeir
import mini_merit
import numpy as np
import pytest
from PIL import Image, ImageDraw

from conjoin.data import (
    MBEIR_CELLS,
    PRODUCT_FEATURES,
    MbeirCandidates,
    MbeirTraining,
    MeritProducts,
    MeritTraining,
    emoji_concepts,
    load_instructions,
    mbeir_queries,
    merit_queries,
)
from conjoin.data.mbeir import pool_file
from conjoin.data.merit import is_held_out, ood_subsets, ood_values, read_captions

SPLITS = ("train", "validation", "test")
QUERIES = {"train_queries": 12, "val_queries": 5, "test_queries": 8}
MERIT_QUERIES = {"train_queries": 200, "validation_queries": 20, "test_queries": 120}


@pytest.fixture(scope="module", autouse=True)
def some_emoji(load_first_emoji):
    """Some of the first concepts of each split."""

    def load(*args, **kwargs):
        rows = load_first_emoji(*args, **kwargs)
        return rows.select(range(0, len(rows), 3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_mbeir, "load_emoji", load_first_emoji)
        patch.setattr(mini_merit, "load_emoji", load)
        yield


def make(out, **options):
    return mini_mbeir.make_mini_mbeir(out, **QUERIES | options)


def make_merit(out, **options):
    return mini_merit.make_mini_merit(out, **MERIT_QUERIES | options)


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    return make(tmp_path_factory.mktemp("mini") / "mbeir")


@pytest.fixture(scope="module")
def merit(tmp_path_factory):
    return make_merit(tmp_path_factory.mktemp("mini") / "merit")


@pytest.fixture(scope="module")
def read(merit):
    """The products and queries of each split of MERIT's miniature."""
    found = {}
    for split in SPLITS:
        products = MeritProducts(merit, split)
        found[split] = products, merit_queries(merit, products)
    return found


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_the_layout_of_mbeir(mini):
    names = {str(path) for path in contents(mini)}
    for cell in MBEIR_CELLS:
        for split in ("val", "test"):
            assert f"query/{split}/mbeir_{cell.name}_{split}.jsonl" in names
            assert f"qrels/{split}/mbeir_{cell.name}_{split}_qrels.txt" in names
            own = f"_{split}" if cell.dataset == "mscoco" else ""
            assert f"cand_pool/local/mbeir_{cell.name}{own}_cand_pool.jsonl" in names
        assert f"query/train/mbeir_{cell.dataset}_train.jsonl" in names
    for split in ("train", "val", "test"):
        assert f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl" in names
    assert len(load_instructions(mini)) == 16
    first = json.loads((mini / "query/test/mbeir_webqa_task2_test.jsonl").read_text().splitlines()[0])
    query = ["qid", "query_txt", "query_img_path", "query_modality", "query_src_content"]
    assert list(first) == [*query, "pos_cand_list", "neg_cand_list"]
    judged = (mini / "qrels/test/mbeir_webqa_task2_test_qrels.txt").read_text().split()
    assert judged[:4] == [first["qid"], "0", first["pos_cand_list"][0], "1"]
    line = (mini / "query/test/mbeir_infoseek_task8_test.jsonl").read_text().splitlines()[0]
    assert {did[:1] for did in json.loads(line)["pos_cand_list"]} >= {"5", "6"}, "equal candidates of other datasets"


@pytest.mark.parametrize("cell", MBEIR_CELLS, ids=lambda cell: cell.name)
def test_every_cell_loads_and_every_image_opens(mini, cell):
    for split, limit in (("val", 5), ("test", 8)):
        queries = mbeir_queries(mini, cell, split)
        assert 0 < len(queries) <= limit
        pool = MbeirCandidates(mini, pool_file(mini, cell, split))
        assert {row["modality"] for row in pool} == {cell.target_modality}
        union = MbeirCandidates(mini, pool_file(mini, None, split))
        assert all(did in union for did in pool.ids)
        for row in [*(query["query"] for query in queries), *pool]:
            if row.get("image") is not None:
                with Image.open(row["image"]) as image:
                    assert image.size == (144, 144)


def test_training_rows_of_mbeir_and_their_negatives(mini):
    rows = MbeirTraining(mini, hard_negatives=2)
    assert set(rows.sources) == {cell.dataset for cell in MBEIR_CELLS}
    for row in map(rows.__getitem__, range(0, len(rows), 7)):
        assert row["positive_id"] not in row["negative_ids"]
        assert row["positive"] not in row["negatives"]
    assert any(row["negatives"] for row in map(rows.__getitem__, range(len(rows))))


def test_mbeir_is_the_same_every_time_and_goes_on_after_an_interruption(mini, tmp_path, monkeypatch):
    out = tmp_path / "again"
    draw = mini_mbeir._draw_pictures

    def interrupted(folder, pictures, cache_dir):
        draw(folder, set(sorted(pictures)[:10]), cache_dir)
        raise KeyboardInterrupt

    monkeypatch.setattr(mini_mbeir, "_draw_pictures", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(out)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again.partial").rglob("*.png")}
    assert len(kept) == 10 and not out.exists()
    monkeypatch.setattr(mini_mbeir, "_draw_pictures", draw)
    assert contents(make(out)) == contents(mini)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.rglob("*.png")}.items()
    monkeypatch.setattr(mini_mbeir, "_draw_pictures", interrupted)
    assert make(out) == out  # nothing to do


def test_it_does_not_overwrite(mini, tmp_path):
    with pytest.raises(FileExistsError, match="exists and is not this miniature of M-BEIR"):
        make(mini, test_queries=7)
    with pytest.raises(ValueError, match="val_queries=0 must be at least 1"):
        make(tmp_path / "new", val_queries=0)


def test_the_layout_of_merit(merit):
    names = {str(path) for path in contents(merit)}
    for split in SPLITS:
        assert {f"data/{split}-00000-of-00001.parquet", f"queries-{split}.json"} <= names
    table = datasets.Dataset.from_parquet(str(merit / "data/test-00000-of-00001.parquet"))
    assert table.features == PRODUCT_FEATURES and table[0]["image"].size == (144, 144)
    row = json.loads((merit / "queries-test.json").read_text().splitlines()[0])
    assert set(row) == {"query", "pos_candidate", "hard_negative", "query instruction"}
    assert all(isinstance(pid, int) for pid in row["pos_candidate"] + row["hard_negative"])
    assert all(pid.isdigit() and len(condition) == 1 for pid, condition in row["query"].items())


def test_families_do_not_cross_splits(merit, read):
    names = {each.concept: each.text for each in emoji_concepts()}
    splits = {names[each.base]: each.split for each in emoji_concepts()}
    captions = read_captions(merit / "captions.jsonl")
    for split, (products, _) in read.items():
        found = {captions[pid].removeprefix("a drawing of ") for pid in products}
        assert {splits[text] for text in found if text in splits} == {split}
    drawings = [products.image(pid)["bytes"] for products, _ in read.values() for pid in products]
    assert len(set(drawings)) == len(drawings) == len(captions)


def test_titles_are_in_five_languages_and_do_not_tell_the_skin_tone(read):
    products = list(read["test"][0].values())
    assert {product.language for product in products} == {"en", "es", "id", "de", "pt"}
    assert {p.title for p in products if p.language == "id"} <= {each.text for each in emoji_concepts("id")}
    assert not any("skin tone" in product.title for product in products)
    named = {name for product in products for name in product.attributes}
    assert {"color", "drawing style", "skin tone", "gender", "subgroup"} <= named


def matches(product, attributes):
    return all(product.attributes.get(name) == value for name, value in attributes.items())


def test_answers_and_hard_negatives_are_what_the_conditions_say(read):
    products, queries = read["test"]
    of_one_language = 0
    for query in queries:
        wanted = {name: value for condition in query.conditions.values() for name, value in condition.items()}
        assert 2 <= len(query.products) <= 4 and len(wanted) == len(query.products)
        for pid, condition in query.conditions.items():
            assert sum(matches(products[pid], {name: value}) for name, value in wanted.items()) == 1
            assert matches(products[pid], condition)
        kind = products[query.positives[0]].kind
        assert f"a product of {kind} " in query.instruction
        language = products[query.positives[0]].language if "with a title in" in query.instruction else None
        of_one_language += language is not None
        fits = [p for p in products.values() if p.kind == kind and (language is None or p.language == language)]
        assert set(query.positives) == {product.id for product in fits if matches(product, wanted)}
        assert len(query.positives) < 0.05 * len(products)
        for pid in query.negatives:
            held = sum(matches(products[pid], {name: value}) for name, value in wanted.items())
            assert held == len(wanted) - 1 and products[pid].kind == kind
        if language is not None:
            assert {products[pid].language for pid in query.touched} == {language}
    assert 0.3 < of_one_language / len(queries) < 0.7
    assert np.mean([len(query.negatives) for query in queries]) > 2


def test_every_out_of_distribution_test_has_queries_and_leaves_some_to_train_on(merit, read):
    products, queries = read["test"]
    values = ood_values(merit)
    found = {name.partition(":")[0] for query in queries for name in ood_subsets(query, products, values)}
    assert found == {"language", "attribute", "class"}
    train, by_id = read["train"][0], {query.id: query for query in read["train"][1]}
    for kind in found:
        rows = MeritTraining(merit, ood=kind)
        touched = [train[pid] for index in range(len(rows)) for pid in by_id[rows.read(index).id].touched]
        assert touched and not any(is_held_out(product, kind, values) for product in touched)
    assert 0 < len(MeritTraining(merit, ood="language")) < len(MeritTraining(merit))


def test_merit_is_the_same_every_time_and_another_with_another_seed(merit, tmp_path):
    assert contents(make_merit(tmp_path / "merit")) == contents(merit)
    other = make_merit(tmp_path / "other", seed=1, train_queries=1, validation_queries=1, test_queries=5)
    first = (merit / "queries-test.json").read_bytes()
    assert not first.startswith((other / "queries-test.json").read_bytes())


def test_dominant_colours():
    drawn = {(220, 40, 50): "red", (60, 140, 230): "blue", (0, 40, 120): "blue", "black": "black", "white": "white"}
    for colour, name in drawn.items():
        image, buffer = Image.new("RGB", (144, 144), "white"), io.BytesIO()
        outline = "white" if name == "white" else "black"
        ImageDraw.Draw(image).ellipse((20, 20, 120, 120), fill=colour, outline=outline, width=6)
        image.save(buffer, "PNG")
        assert mini_merit.dominant_colour(buffer.getvalue()) == name


def test_classes():
    found = {each.text: mini_merit.class_of(each) for each in emoji_concepts()}
    names = {"dog": "animal", "pizza": "food", "tulip": "plant", "bus": "transport", "violin": "instrument"}
    names |= {"keycap 1": "symbol", "grinning face": "face", "woman farmer": "person", "key": "object"}
    assert names.items() <= found.items()
