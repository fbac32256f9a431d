"""The miniature: the published layout, families that never cross splits, conditions that hold, the same every time."""

import io
import json
from pathlib import Path

import datasets
import mini_merit
import numpy as np
import pytest
from mini_merit import class_of, dominant_colour
from PIL import Image, ImageDraw

from conjoin.data import PRODUCT_FEATURES, MeritProducts, MeritTraining, emoji_concepts, merit_queries
from conjoin.data.merit import is_held_out, ood_subsets, ood_values, read_captions

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def make(load_first_emoji):
    """`make_mini_merit` over some of the first concepts of each split."""

    def load(*args, **kwargs):
        rows = load_first_emoji(*args, **kwargs)
        return rows.select(range(0, len(rows), 3))

    patch = pytest.MonkeyPatch()
    patch.setattr(mini_merit, "load_emoji", load)

    def run(out, **options):
        return mini_merit.make_mini_merit(
            out, **{"train_queries": 200, "validation_queries": 20, "test_queries": 120} | options
        )

    yield run
    patch.undo()


@pytest.fixture(scope="module")
def mini(make, tmp_path_factory):
    return make(tmp_path_factory.mktemp("mini") / "merit")


@pytest.fixture(scope="module")
def read(mini):
    """The products and queries of each split."""
    found = {}
    for split in SPLITS:
        products = MeritProducts(mini, split)
        found[split] = products, merit_queries(mini, products)
    return found


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_the_layout_is_the_published_one(mini):
    names = {str(path) for path in contents(mini)}
    for split in SPLITS:
        assert {f"data/{split}-00000-of-00001.parquet", f"queries-{split}.json"} <= names
    table = datasets.Dataset.from_parquet(str(mini / "data/test-00000-of-00001.parquet"))
    assert table.features == PRODUCT_FEATURES and table[0]["image"].size == (144, 144)
    row = json.loads((mini / "queries-test.json").read_text().splitlines()[0])
    assert set(row) == {"query", "pos_candidate", "hard_negative", "query instruction"}
    assert all(isinstance(pid, int) for pid in row["pos_candidate"] + row["hard_negative"])
    assert all(pid.isdigit() and len(condition) == 1 for pid, condition in row["query"].items())


def test_families_do_not_cross_splits(mini, read):
    names = {each.concept: each.text for each in emoji_concepts()}
    splits = {names[each.base]: each.split for each in emoji_concepts()}
    captions = read_captions(mini / "captions.jsonl")
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


def test_every_out_of_distribution_test_has_queries_and_leaves_some_to_train_on(mini, read):
    products, queries = read["test"]
    values = ood_values(mini)
    found = {name.partition(":")[0] for query in queries for name in ood_subsets(query, products, values)}
    assert found == {"language", "attribute", "class"}
    train = read["train"][0]
    for kind in found:
        rows = MeritTraining(mini, ood=kind)
        touched = [train[pid] for query in rows.queries for pid in query.touched]
        assert touched and not any(is_held_out(product, kind, values) for product in touched)
    assert 0 < len(MeritTraining(mini, ood="language")) < len(MeritTraining(mini))


def test_it_is_the_same_every_time_and_another_with_another_seed(make, mini, tmp_path):
    assert contents(make(tmp_path / "merit")) == contents(mini)
    other = make(tmp_path / "other", seed=1, train_queries=1, validation_queries=1, test_queries=5)
    first = (mini / "queries-test.json").read_bytes()
    assert not first.startswith((other / "queries-test.json").read_bytes())


@pytest.mark.parametrize(
    ("colour", "outline", "name"),
    [
        ((220, 40, 50), "black", "red"),
        ((60, 140, 230), "black", "blue"),
        ((0, 40, 120), "black", "blue"),
        ("black", "black", "black"),
        ("white", "white", "white"),
    ],
)
def test_dominant_colours(colour, outline, name):
    image, buffer = Image.new("RGB", (144, 144), "white"), io.BytesIO()
    ImageDraw.Draw(image).ellipse((20, 20, 120, 120), fill=colour, outline=outline, width=6)
    image.save(buffer, "PNG")
    assert dominant_colour(buffer.getvalue()) == name


def test_classes():
    found = {each.text: class_of(each) for each in emoji_concepts()}
    names = {"dog": "animal", "pizza": "food", "tulip": "plant", "bus": "transport", "violin": "instrument"}
    names |= {"keycap 1": "symbol", "grinning face": "face", "woman farmer": "person", "key": "object"}
    assert names.items() <= found.items()
