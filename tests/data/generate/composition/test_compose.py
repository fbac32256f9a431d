import json
import logging
import re

import datasets
import numpy as np
import pytest

from conjoin.data import (
    CompositionSettings,
    MeritProducts,
    MeritTraining,
    compose_queries,
    judge_by_titles,
    load_templates,
    merit_queries,
    read_catalogue,
)
from conjoin.processing import parse_item
from tiny_catalogue import products, write_catalogue

LANGUAGES = ("en", "ms", "id", "vi", "th")
SETTINGS = CompositionSettings(
    queries=60, test_queries=12, test_share=0.3, max_positive_share=0.3, languages=LANGUAGES
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_catalogue(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def catalogue(path):
    return read_catalogue(path, columns={"group": "family"})


@pytest.fixture(scope="module")
def composed(catalogue, tmp_path_factory):
    return compose_queries(catalogue, tmp_path_factory.mktemp("out") / "shop", SETTINGS)


def read(folder, split="train"):
    return [json.loads(line) for line in (folder / f"queries-{split}.json").read_text(encoding="utf-8").splitlines()]


def test_the_layout_loads(composed, catalogue):
    found = {split: MeritProducts(composed, split) for split in ("train", "test")}
    assert sum(map(len, found.values())) == len(catalogue.products)
    described = {row["sku"]: row for row in products()}
    families = {split: {described[pid]["family"] for pid in found[split]} for split in found}
    assert families["train"].isdisjoint(families["test"])
    for product in found["test"].values():
        row = described[product.id]
        assert (product.title, product.kind, product.language) == (row["title"], row["class"], row["language"])
        assert all(row[name] == value for name, value in product.attributes.items())
    queries = {split: merit_queries(composed, found[split]) for split in found}
    assert {split: len(some) for split, some in queries.items()} == {"train": 60, "test": 12}
    for query in queries["train"]:
        places = [query.instruction.index(f"<image>\n{described[pid]['title']} </Product") for pid in query.products]
        assert places == sorted(places)
        assert all(all(described[pid][n] == v for n, v in query.conditions[pid].items()) for pid in query.products)
    rows = MeritTraining(composed, hard_negatives=1)
    assert len(rows) == 60
    assert len(parse_item(rows[0]["query"], "query").images) == len(queries["train"][0].products)
    assert rows[0]["positive"]["image"]["bytes"].startswith(b"\x89PNG")
    opened = datasets.load_dataset(str(composed / "data"), split="test", cache_dir=str(composed.parent / "cache"))
    assert opened[0]["image"].size == (8, 8)


def test_every_language_asks(composed):
    rows = read(composed)
    assert {row["language"] for row in rows} == set(LANGUAGES)
    assert any("เหมือนกับ" in row["query instruction"] for row in rows if row["language"] == "th")
    assert all(isinstance(pid, int) for row in rows for pid in row["pos_candidate"]), "integers, as published"
    assert not re.search(r"[{}]", "".join(row["query instruction"] for row in rows))


def test_it_appears_whole_or_not_at_all_and_another_folder_is_kept(catalogue, composed, tmp_path):
    calls = []

    def stop(case):
        calls.append(case)
        if len(calls) == 65:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        compose_queries(catalogue, tmp_path / "shop", SETTINGS, judges=[stop])
    assert not (tmp_path / "shop").exists()
    out = compose_queries(catalogue, tmp_path / "shop", SETTINGS)
    for split in ("train", "test"):
        assert read(out, split) == read(composed, split)
    with pytest.raises(FileExistsError, match=r"shop' exists; remove it or choose another folder"):
        compose_queries(catalogue, out, SETTINGS)


def test_string_ids_and_one_split(tmp_path):
    rows = [row | {"sku": f"p-{row['sku']}"} if place % 2 else row for place, row in enumerate(products(60))]
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), columns={"group": "family"})
    settings = CompositionSettings(queries=5, test_share=0.0, max_positive_share=0.5)
    out = compose_queries(catalogue, tmp_path / "out", settings)
    assert {file.name for file in out.iterdir()} == {"composition.json", "data", "queries-train.json"}
    assert len(merit_queries(out, MeritProducts(out, "train"))) == 5
    ids = [pid for query in read(out) for pid in query["pos_candidate"]]
    assert {type(pid) for pid in ids} == {str}  # also those that are numbers: Arrow reads lists of one type
    assert {pid.startswith("p-") for pid in ids} == {True, False}


COARSE = [row | {"color": f"c {n % 2}", "material": f"m {n % 2}"} for n, row in enumerate(products(12))]


@pytest.mark.parametrize(
    ("rows", "test_share", "message"),
    [
        (COARSE, 0.0, r"no query is possible among the 12 products of train: .*\(\d+\)"),
        (products(12), 0.0, r"as many positives .*; raise max_positive_share above 1/12"),
        (products(60), 1e-6, "the split 'test' has none of 60 products; test_share is 1e-06, and 0 makes a training"),
    ],
)
def test_why_no_query_is_possible(tmp_path, rows, test_share, message):
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), attributes=["color", "material"])
    with pytest.raises(ValueError, match=message):
        compose_queries(catalogue, tmp_path / "out", CompositionSettings(queries=3, test_share=test_share))


def test_fewer_queries_than_wanted_is_a_warning(tmp_path, caplog):
    catalogue = read_catalogue(write_catalogue(tmp_path, products(12, seed=1)), attributes=["color", "material"])
    settings = CompositionSettings(queries=10000, test_share=0.0, max_positive_share=1.0, conditions={2: 1.0})
    with caplog.at_level(logging.WARNING):
        out = compose_queries(catalogue, tmp_path / "out", settings)
    asked = [json.dumps(query["query"], sort_keys=True) for query in read(out)]
    assert re.search(rf"train: {len(asked)} of 10000 queries; draws failed by: .*drawn before \(", caplog.text)
    assert len(set(asked)) == len(asked) > 0


def test_vectors_must_fit(catalogue, tmp_path):
    with pytest.raises(ValueError, match=r"vectors have shape \(3, 4\); expected"):
        compose_queries(catalogue, tmp_path / "out", SETTINGS, vectors=np.ones((3, 4), dtype=np.float32))


# judges and cold start


def test_titles_are_judged_by_rule(tmp_path):
    rows = [row | {"title": f"thing {row['sku']} in {row['material'] or 'no material'}"} for row in products()]
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), attributes=["color", "material", "style"])
    judges = [judge_by_titles(principle, ["color"]) for principle in ("non_omission", "vision_centric")]
    settings = CompositionSettings(queries=10, test_share=0.0, max_positive_share=0.3)
    rows = read(compose_queries(catalogue, tmp_path / "out", settings, judges=judges))
    asked = {name for row in rows for condition in row["query"].values() for name in condition}
    assert asked == {"color", "material"}, "the title says the material, the picture the colour, nothing the style"
    with pytest.raises(KeyError, match="accuracy"):
        judge_by_titles("accuracy", ["color"])


def test_a_judge_is_any_function_of_a_query(catalogue, tmp_path):
    titles = dict(zip(catalogue.products["idx"], catalogue.products["title"], strict=True))
    cases = []

    def judge(case):
        cases.append(case)
        return "color" in dict(case.conditions)

    settings = CompositionSettings(queries=15, test_share=0.0, max_positive_share=0.3)
    rows = read(compose_queries(catalogue, tmp_path / "out", settings, judges=[judge]))
    assert len(rows) == 15 < len(cases)
    assert all(any("color" in condition for condition in row["query"].values()) for row in rows)
    for case in cases:
        assert [*case.titles] == [titles[pid] for pid in case.ids]
        assert len(case.conditions) == len(case.ids) == case.instruction.count("<image>")


class Model:
    """A stand-in for a vision-language model: answers by a function of the prompt."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def __call__(self, images, prompt):
        self.calls.append((len(images), prompt))
        return self.answer(prompt)


def test_cold_start_asks_what_differs(tmp_path):
    rows = products(120, family=5)
    for number, row in enumerate(rows[:30]):
        known = ("", "", "color 1", "color 2", "")[number % 5]
        row |= dict.fromkeys(("material", "style", "shape"), "") | {"color": known}
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), columns={"group": "family"})
    model = Model(lambda prompt: ' "Color" ' if "Which one attribute" in prompt else "color 1.")
    settings = CompositionSettings(queries=20, test_share=0.0, samplers={"cold_start": 1.0})
    out = compose_queries(catalogue, tmp_path / "out", settings, cold_start=model)
    families = {row["sku"]: row["family"] for row in rows}
    colours = {row["sku"]: row["color"] for row in rows}
    queries = merit_queries(out, MeritProducts(out, "train"))
    assert len(queries) == 20
    answered = set()
    for query in queries:
        first, second = query.products
        assert int(first) < 1030
        assert query.conditions == {first: {"product style": "as product image"}, second: {"color": "color 1"}}
        assert colours[second] == "color 1"
        assert [families[pid] for pid in query.positives] == [families[first]]
        assert first not in query.positives
        family = [pid for pid in families if families[pid] == families[first]]
        assert [*query.negatives] == [pid for pid in family if colours[pid] == "color 2"], "others may be answers"
        answered.add(colours[query.positives[0]])
    assert answered == {"", "color 1"}, "never what has another value"
    assert all(shown == 2 for shown, _ in model.calls)
    refused = Model(lambda prompt: "no idea")
    with pytest.raises(ValueError, match=r"no query is possible.*the model named none of the choices \(3000\)"):
        compose_queries(catalogue, tmp_path / "refused", settings, cold_start=refused)
    with pytest.raises(ValueError, match="needs a vision-language model"):
        compose_queries(catalogue, tmp_path / "none", settings)


def test_the_answer_of_a_cold_start_is_the_most_similar_product_and_is_not_shown(tmp_path):
    rows = [row | {"color": row["color"] or "color 0"} for row in products(40)]
    rows[0] |= {"color": "", "material": ""}
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), attributes=["color", "material"])
    model = Model(lambda prompt: "color" if "Which one attribute" in prompt else rows[1]["color"])
    others = {row["sku"] for row in rows[2:] if row["color"] == rows[1]["color"]}
    settings = CompositionSettings(queries=len(others), test_share=0.0, samplers={"cold_start": 1.0})
    vectors = np.eye(40, dtype=np.float32)[[1, *range(1, 40)]]
    found = read(compose_queries(catalogue, tmp_path / "out", settings, vectors=vectors, cold_start=model))
    assert {tuple(row["pos_candidate"]) for row in found} == {(1001,)}
    assert {[*row["query"]][1] for row in found} == others


def test_cold_start_needs_products_and_similarity(path, tmp_path):
    settings = CompositionSettings(queries=5, samplers={"cold_start": 1.0})
    cases = {
        "class": "needs a vision-language model and products without attributes",
        "shape": "no family and no vectors to find a similar product by",
    }
    for attribute, message in cases.items():
        with pytest.raises(ValueError, match=message):
            catalogue = read_catalogue(path, attributes=["color", attribute])
            compose_queries(catalogue, tmp_path / "a", settings, cold_start=str)


# templates


def template(**change):
    return {
        "language": "xx", "name": "X", "requests": ["{class}: {conditions}"],
        "requests_of_any_class": ["{conditions}"], "condition": "{attribute}={product}", "comma": "; ", "last": " & ",
    } | change  # fmt: skip


def test_a_template_of_ones_own(tmp_path):
    (tmp_path / "xx.json").write_text(json.dumps(template(attributes={"color": "C"})))
    rows = [row | {"title": "a {b}"} for row in products(60)]
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), columns={"group": "family"})
    templates = {"languages": ("xx",), "templates": (str(tmp_path / "xx.json"),)}
    settings = CompositionSettings(queries=5, test_share=0.0, max_positive_share=1.0, conditions={3: 1.0}, **templates)
    for row in read(compose_queries(catalogue, tmp_path / "out", settings)):
        names = ["C" if name == "color" else name for condition in row["query"].values() for name in condition]
        parts = [f"{name}=<Product {n}> <image>\na {{b}} </Product {n}>" for n, name in enumerate(names, start=1)]
        conditions = f"{parts[0]}; {parts[1]} & {parts[2]}"
        assert row["query instruction"] in (conditions, f"shoes: {conditions}", f"bags: {conditions}")


@pytest.mark.parametrize(
    ("content", "reason"), [(template(requests=[]), "high <= 0"), ({"language": "xx"}, "KeyError")]
)
def test_a_malformed_template_is_named(tmp_path, content, reason):
    (tmp_path / "xx.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"xx.json' cannot be read: .*{reason}.*expected a template"):
        load_templates(["en"], [tmp_path / "xx.json"])
    with pytest.raises(FileNotFoundError, match=r"yy.json"):
        load_templates(["en"], [tmp_path / "yy.json"])


def test_unknown_languages_are_named():
    with pytest.raises(ValueError, match=r"there are templates of en, id, ms, th, vi"):
        load_templates(["fr"])
