import json
import logging
import re
import shutil
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
import transformers

from conjoin.data import (
    CompositionSettings,
    MeritProducts,
    MeritTraining,
    VisionModel,
    ask_with,
    compose_queries,
    judge_by_titles,
    judge_with,
    load_templates,
    merit_queries,
    read_catalogue,
)
from conjoin.data.make.composition import compose
from conjoin.data.make.composition.compose import _split
from conjoin.data.make.composition.composer import Composer
from conjoin.data.make.composition.instructions import TEMPLATE_LANGUAGES
from conjoin.processing.item_inputs import parse_item
from tiny_catalogue import products, write_catalogue

SETTINGS = CompositionSettings(
    queries=60, test_queries=12, test_share=0.3, max_positive_share=0.3, languages=TEMPLATE_LANGUAGES
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


UNEQUAL = [("shoes" if row < 250 else "bags", "en" if row % 12 < 8 else "th") for row in range(360)]
SMALL = [(f"class {row // 8}", ("en", "th")[row // 4 % 2]) for row in range(360)]
ALIGNED = [(f"class {row // 10}", "en" if row % 10 < 8 else "th") for row in range(360)]


@pytest.mark.parametrize(("facts", "share"), [(UNEQUAL, 0.25), (SMALL, 0.1), (ALIGNED, 0.1)])
def test_a_stratified_split_takes_its_share_of_each_class_and_language(catalogue, facts, share):
    classes, languages = map(list, zip(*facts, strict=True))
    shop = replace(catalogue, groups=None, classes=classes, languages=languages)
    rows = _split(shop, CompositionSettings(test_share=share, stratify=True))
    assert sorted([*rows["train"], *rows["test"]]) == list(range(360))
    assert len(rows["test"]) == share * 360
    for named, most in ((facts, 1), (languages, 1), (classes, 2)):
        found, sizes = Counter(named[row] for row in rows["test"]), Counter(named)
        assert {name for name in sizes if abs(found[name] - share * sizes[name]) > most} == set()


def test_a_stratified_split_takes_whole_families(catalogue):
    rows = _split(catalogue, CompositionSettings(test_share=0.25, stratify=True))
    groups = {split: {catalogue.groups[row] for row in found} for split, found in rows.items()}
    assert groups["train"].isdisjoint(groups["test"])
    first = Counter(catalogue.classes[catalogue.groups.index(group)] for group in groups["test"])
    assert first == {"shoes": 15, "bags": 15}


def files_of(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_layout_loads(composed, catalogue):
    found = {split: MeritProducts(composed, split) for split in ("train", "test")}
    assert sum(map(len, found.values())) == len(catalogue)
    described = {row["sku"]: row for row in products()}
    families = {split: {described[product.id]["family"] for product in found[split]} for split in found}
    assert families["train"].isdisjoint(families["test"])
    for product in found["test"]:
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
    rows = [json.loads(line) for line in (composed / "queries-train.json").read_text(encoding="utf-8").splitlines()]
    assert {row["language"] for row in rows} == set(TEMPLATE_LANGUAGES)
    assert any("เหมือนกับ" in row["query instruction"] for row in rows if row["language"] == "th")
    assert all(isinstance(pid, int) for row in rows for pid in row["pos_candidate"]), "integers, as published"
    assert not re.search(r"[{}]", "".join(row["query instruction"] for row in rows))


@pytest.mark.parametrize("stop", [1, 7, 65])
def test_an_interrupted_composition_resumes_to_the_same_bytes(catalogue, composed, tmp_path, monkeypatch, stop):
    calls = []
    outcome = Composer.outcome

    def counted(self, number):
        calls.append(number)
        if len(calls) == 2 + stop:  # the check of both splits draws once each
            raise KeyboardInterrupt
        return outcome(self, number)

    monkeypatch.setattr(Composer, "outcome", counted)
    out = tmp_path / "shop"
    with pytest.raises(KeyboardInterrupt):
        compose_queries(catalogue, out, SETTINGS)
    journals = sorted((tmp_path / "shop.partial").glob("*.journal"))
    journals[-1].open("ab").write(b'{"sampler": "conv')  # a write that the end of the process cut
    compose_queries(catalogue, out, SETTINGS)
    assert files_of(out) == files_of(composed)
    assert len(calls) < 60 + 12 + 40, "what was made is not made again"
    assert compose_queries(catalogue, out, SETTINGS) == out
    with pytest.raises(FileExistsError, match="is not this composition: it was made with seed 0, not 1; remove"):
        compose_queries(catalogue, out, CompositionSettings(**vars(SETTINGS) | {"seed": 1}))


def test_what_models_judged_is_not_thrown_away(catalogue, composed, tmp_path):
    other = CompositionSettings(**vars(SETTINGS) | {"seed": 1})

    asked = []

    def stop(case):
        asked.append(case)
        if len(asked) in (1, 40):
            raise KeyboardInterrupt
        return True

    judge = judge_with(VisionModel("vlm", stop), "accuracy")._replace(accepts=stop)
    with pytest.raises(KeyboardInterrupt):
        compose_queries(catalogue, tmp_path / "judged", other, judges=[judge])  # it judged nothing
    with pytest.raises(KeyboardInterrupt):
        compose_queries(catalogue, tmp_path / "judged", SETTINGS, judges=[judge])
    with pytest.raises(ValueError, match=r"cannot resume .*judged.partial': it was made with seed 0, not 1, judges"):
        compose_queries(catalogue, tmp_path / "judged", other)
    partial = tmp_path / "plain.partial"
    shutil.copytree(tmp_path / "judged.partial", partial)
    marker = json.loads((partial / "composition.json").read_text()) | {"judges": []}
    (partial / "composition.json").write_text(json.dumps(marker))
    (partial / "train.journal").write_text("stale\n")
    plain = compose_queries(catalogue, tmp_path / "plain", other)
    assert files_of(plain) == files_of(compose_queries(catalogue, tmp_path / "fresh", other))
    assert (plain / "queries-train.json").read_bytes() != (composed / "queries-train.json").read_bytes()


def test_string_ids_and_one_split(path, tmp_path):
    rows = [row | {"sku": f"p-{row['sku']}"} for row in products(60)]
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), columns={"group": "family"})
    settings = CompositionSettings(queries=5, test_share=0.0, max_positive_share=0.5)
    out = compose_queries(catalogue, tmp_path / "out", settings)
    assert sorted(file.name for file in out.iterdir()) == [
        "composition.json", "data", "distribution.json", "queries-train.json",
    ]  # fmt: skip
    assert all(query.positives[0].startswith("p-") for query in merit_queries(out, MeritProducts(out, "train")))


COARSE = [row | {"color": f"c {n % 2}", "material": f"m {n % 2}"} for n, row in enumerate(products(12))]


@pytest.mark.parametrize(
    ("rows", "test_share", "message"),
    [
        (COARSE, 0.0, r"no query is possible among the 12 products of train; .*\(\d+\)"),
        (products(12), 0.0, r"less than 0.05 of them is no product: raise max_positive_share above 1/12"),
        (products(6), 0.001, "the split 'test' has none of 6 products"),
    ],
)
def test_why_no_query_is_possible(tmp_path, monkeypatch, rows, test_share, message):
    monkeypatch.setattr(compose, "GIVE_UP", 40)
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), attributes=["color", "material"])
    with pytest.raises(ValueError, match=message):
        compose_queries(catalogue, tmp_path / "out", CompositionSettings(queries=3, test_share=test_share))


def test_fewer_queries_than_wanted_is_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(compose, "GIVE_UP", 40)
    catalogue = read_catalogue(write_catalogue(tmp_path, products(12, seed=1)), attributes=["color", "material"])
    settings = CompositionSettings(queries=10000, test_share=0.0, max_positive_share=1.0, conditions={2: 1.0})
    with caplog.at_level(logging.WARNING):
        out = compose_queries(catalogue, tmp_path / "out", settings)
    counts = json.loads((out / "distribution.json").read_text())["train"]
    assert f"{counts['kept']} of 10000 queries" in caplog.text
    lines = (out / "queries-train.json").read_text().splitlines()
    asked = [json.dumps(json.loads(line)["query"], sort_keys=True) for line in lines]
    assert len(set(asked)) == len(asked) == counts["kept"]
    assert counts["duplicates"] > 0


def test_an_image_that_is_a_url_is_named(catalogue, tmp_path):
    def fetched(row):
        return {"image": {"bytes": None, "path": "https://example.org/a.png"}}

    remote = replace(catalogue, rows=catalogue.rows.map(fetched, features=catalogue.rows.features))
    with pytest.raises(ValueError, match=r"row 0 .*expected a file; download the images first"):
        compose_queries(remote, tmp_path / "out", CompositionSettings(queries=2, test_share=0.0))


def test_vectors_must_fit(catalogue, tmp_path):
    with pytest.raises(ValueError, match=r"vectors have shape \(3, 4\); expected"):
        compose_queries(catalogue, tmp_path / "out", SETTINGS, vectors=np.ones((3, 4), dtype=np.float32))


# judges and cold start


def test_titles_are_judged_by_rule(tmp_path):
    rows = [row | {"title": f"thing {row['sku']} in {row['material'] or 'no material'}"} for row in products()]
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), attributes=["color", "material", "style"])
    judges = [judge_by_titles(principle, ["color"]) for principle in ("non_omission", "vision_centric")]
    settings = CompositionSettings(queries=10, test_share=0.0, max_positive_share=0.3)
    out = compose_queries(catalogue, tmp_path / "out", settings, judges=judges)
    rows = [json.loads(line) for line in (out / "queries-train.json").read_text().splitlines()]
    asked = {name for row in rows for condition in row["query"].values() for name in condition}
    assert asked == {"color", "material"}, (
        "the title says the material, the picture shows the colour, nothing the style"
    )
    counts = json.loads((out / "distribution.json").read_text())["train"]
    assert counts["rejected"]["judge non_omission (titles)"] > 0
    assert counts["attributes"]["drawn"]["style"] > 0
    assert "style" not in counts["attributes"]["kept"]
    with pytest.raises(ValueError, match="titles cannot be judged for 'accuracy'"):
        judge_by_titles("accuracy", ["color"])


class Model:
    """A stand-in for a vision-language model: answers by a function of the prompt."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def __call__(self, images, prompt):
        self.calls.append((len(images), prompt))
        return self.answer(prompt)


def test_a_model_judges_queries_and_positives(catalogue, tmp_path):
    model = Model(lambda prompt: "No." if "'thing 1" in prompt else " Yes, it has")
    judges = [judge_with(VisionModel("vlm", model), name) for name in ("vision_centric", "accuracy")]
    settings = CompositionSettings(queries=15, test_share=0.0, max_positive_share=0.3)
    out = compose_queries(catalogue, tmp_path / "out", settings, judges=judges)
    plain = compose_queries(catalogue, tmp_path / "plain", settings)
    rows, before = ([json.loads(line) for line in (folder / "queries-train.json").read_text().splitlines()]
                    for folder in (out, plain))  # fmt: skip
    titles = dict(zip(map(int, catalogue.ids), catalogue.titles, strict=True))
    kept = {json.dumps(row["query"]): row["pos_candidate"] for row in rows}
    compared = 0
    for row in before:
        accepted = [pid for pid in row["pos_candidate"] if not titles[pid].startswith("thing 1")]
        if json.dumps(row["query"]) in kept:
            assert kept[json.dumps(row["query"])] == accepted
            compared += 1
    assert compared > 5
    assert {shown for shown, prompt in model.calls if "The last picture" in prompt} >= {3}
    with pytest.raises(ValueError, match="unknown principle 'beauty'"):
        judge_with(VisionModel("vlm", model), "beauty")


def test_cold_start_asks_what_differs(tmp_path):
    rows = products(120, family=5)
    for number, row in enumerate(rows[:30]):
        known = ("", "", "color 1", "color 2", "")[number % 5]
        row |= dict.fromkeys(("material", "style", "shape"), "") | {"color": known}
    catalogue = read_catalogue(write_catalogue(tmp_path, rows), columns={"group": "family"})
    model = Model(lambda prompt: ' "Color" ' if "Which one attribute" in prompt else "color 1.")
    settings = CompositionSettings(queries=20, test_share=0.0, samplers={"cold_start": 1.0})
    out = compose_queries(catalogue, tmp_path / "out", settings, cold_start=VisionModel("vlm", model))
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
    shutil.rmtree(out)
    refused = VisionModel("vlm", Model(lambda prompt: "no idea"))
    with pytest.raises(ValueError, match=r"no query is possible.*the model named no attribute \(\d+\)"):
        compose_queries(catalogue, out, settings, cold_start=refused)
    with pytest.raises(ValueError, match="needs a vision-language model"):
        compose_queries(catalogue, tmp_path / "none", settings)


def test_cold_start_needs_products_and_similarity(catalogue, path, tmp_path):
    settings = CompositionSettings(queries=5, samplers={"cold_start": 1.0})
    model = VisionModel("vlm", Model(str))
    with pytest.raises(ValueError, match="every product has some"):
        compose_queries(read_catalogue(path, attributes=["color", "class"], columns={"class": "family",
                                       "group": "family"}), tmp_path / "a", settings, cold_start=model)  # fmt: skip
    with pytest.raises(ValueError, match="needs families of products, or vectors"):
        compose_queries(read_catalogue(path), tmp_path / "b", settings, cold_start=model)


def test_ask_with_wraps_a_pipeline(monkeypatch):
    made = []

    def pipeline(task, model, **options):
        made.append((task, model, options))

        def answer(text, **settings):
            content = text[0]["content"]
            assert [part["type"] for part in content] == ["image", "image", "text"]
            assert settings["do_sample"] is False
            return [{"generated_text": content[-1]["text"].upper()}]

        return answer

    monkeypatch.setattr(transformers, "pipeline", pipeline)
    model = ask_with("some/model", device="cpu")
    assert not made
    assert model.name == "some/model"
    assert [model.ask([None, None], text) for text in ("a", "b")] == ["A", "B"]
    assert made == [("image-text-to-text", "some/model", {"device": "cpu"})]


# templates


def template(**change):
    return {
        "language": "xx", "name": "X", "requests": ["{class}: {conditions}"],
        "requests_of_any_class": ["{conditions}"], "condition": "{attribute}={product}", "comma": "; ", "last": " & ",
    } | change  # fmt: skip


def test_a_template_of_ones_own(tmp_path):
    (tmp_path / "xx.json").write_text(json.dumps(template(attributes={"color": "C"})))
    found = load_templates(["xx"], [tmp_path / "xx.json"])["xx"]
    generator = np.random.default_rng(0)
    text = found.write(["color", "style", "size"], ["a {b}", "b", "c"], "bags", generator)
    assert text == (
        "bags: C=<Product 1> <image>\na {b} </Product 1>; style=<Product 2> <image>\nb </Product 2>"
        " & size=<Product 3> <image>\nc </Product 3>"
    )
    assert found.write(["color"], ["a"], None, generator) == "C=<Product 1> <image>\na </Product 1>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (template(condition="{attribute}"), r"condition '{attribute}' must hold {attribute} and {product} once each"),
        (template(requests=["{klass} {conditions}"]), "requests .* has a wrong field"),
        (template(requests=[]), "requests is empty"),
        (template(colour=1), "colour"),
        ([], "expected an object, got list"),
        ('{"language": "xx",\n"name": "É"}'.encode("latin-1"), r"line 2: not valid UTF-8 \(byte 0xc9"),
    ],
)
def test_a_malformed_template_is_named(tmp_path, content, message):
    (tmp_path / "xx.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_templates(["en"], [tmp_path / "xx.json"])
    assert "xx.json" in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"no such file: .*yy.json"):
        load_templates(["en"], [tmp_path / "yy.json"])


def test_unknown_languages_are_named():
    with pytest.raises(ValueError, match=r"there are templates of en, ms, id, vi, th"):
        load_templates(["fr"])
    with pytest.raises(ValueError, match="one is named twice"):
        load_templates(["en", "en"])


def test_both_splits_are_checked_before_any_work(tmp_path):
    catalogue = read_catalogue(write_catalogue(tmp_path, products(60)), columns={"group": "family"})
    settings = CompositionSettings(queries=5, test_queries=5, test_share=0.2, max_positive_share=0.08)
    calls = []
    judge = judge_with(VisionModel("vlm", lambda case: True), "accuracy")._replace(accepts=calls.append)
    with pytest.raises(ValueError, match=r"no query is possible among the \d+ products of test"):
        compose_queries(catalogue, tmp_path / "out", settings, judges=[judge])
    assert not calls and not (tmp_path / "out.partial").exists()
