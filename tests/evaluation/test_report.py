import base64
import dataclasses
import io
import json
import math
import os
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

import conjoin
from conjoin.evaluation import (
    Curve,
    Example,
    Headline,
    Metric,
    Results,
    Score,
    Shown,
    ShownHit,
    Table,
    format_results,
    format_table,
    picture,
    score_table,
)

EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/a.png onerror=alert(1)> {{ 7 * 7 }}"
SCORE = Metric(0.4512, 0.4012, 0.5012, 0.0271)


@pytest.fixture
def results():
    red = picture(Image.new("RGB", (200, 100), "red"))
    hits = [ShownHit(Shown(EVIL, red), 0.87, False), ShownHit(Shown("a red apple"), 0.65, True)]
    misses = [ShownHit(Shown(None, red), 0.5, False)]
    return Results(
        title=f"Title {EVIL}",
        summary=f"Summary {EVIL}",
        seed=3,
        model={EVIL: EVIL, "parameters": 38_400_000},
        dataset={"name": "sample"},
        config={"loss": {"name": "gcl", "temperature": 0.05}, "empty": None},
        headline=[Headline(f"text → image {EVIL}", SCORE, EVIL)],
        scores=[Score("text → image", 385, 385, {"hit_rate@10": SCORE}, {"kind": EVIL})],
        tables=[Table(EVIL, ["group", EVIL], [["people", SCORE], ["objects", None]], EVIL)],
        curves=[Curve(EVIL, {f"training {EVIL}": [[0, 4.0], [10, 2.5], [20, 2.0]], "none": []}, EVIL)],
        examples=[
            Example(Shown(EVIL, red), hits, 2, 385, EVIL),
            Example(Shown("cat"), misses, 37, 385, "text → image"),
        ],
        examples_note=EVIL,
        usage=f'model = AutoModel.from_pretrained("x")\n{EVIL}',
        created="2026-01-01",
    )


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def render(results, tmp_path):
    return results.save(tmp_path / "deep").read_text()


def test_json_round_trip(results, tmp_path):
    results.save(tmp_path)
    loaded = Results.load(tmp_path / "results.json")
    assert loaded == results and {*os.listdir(tmp_path)} == {"report.html", "results.json", "SHA256SUMS"}
    assert loaded.metrics("text → image")["hit_rate@10"].value == 0.4512
    with pytest.raises(KeyError, match="x"):
        loaded.metrics("x")
    versions = json.loads((tmp_path / "results.json").read_text())["versions"]
    assert versions["conjoin"] == conjoin.__version__ and {"torch", "transformers", "python"} <= versions.keys()


def test_nothing_is_loaded_and_nothing_runs(results, tmp_path):
    text = render(results, tmp_path)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href", "srcset", "xlink:href", "data", "action"):
            assert attributes.get(name, "data:image/").startswith("data:image/")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    shown = "".join(page.text)
    assert "<img src=http" not in text and shown.count("{{ 7 * 7 }}") >= 10 and "alert('x')" in shown


def test_what_a_reader_finds(results, tmp_path):
    page = Page(render(results, tmp_path))
    shown = " ".join("".join(page.text).split())
    for wanted in (
        *("45.1", "40.1–50.1", "chance 2.7", "found at rank 2", "first correct at rank 37 of 385", "people"),
        *("38,400,000", "temperature", "0.05", "from_pretrained", "prefers-color-scheme: dark"),
    ):
        assert wanted in shown
    assert sum("correct" in (a.get("class") or "").split() for t, a in page.tags if t == "figure") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"titel": "x"},
            r"results.json: not the results of an evaluation: (?s:.)*titel\n  Unexpected keyword argument",
        ),
        (
            {"headline": [{"label": "x", "metric": {"value": None}}]},
            "headline.0.metric.value\n  Input should be a valid",
        ),
    ],
)
def test_malformed_results(results, tmp_path, change, message):
    (tmp_path / "results.json").write_text(json.dumps(dataclasses.asdict(results) | change))
    with pytest.raises(ValueError, match=message):
        Results.load(tmp_path / "results.json")


def test_nan_is_not_written(results, tmp_path):
    results.save(tmp_path)
    before = (tmp_path / "results.json").read_text()
    results.headline = [Headline("x", Metric(0.5, math.nan))]
    with pytest.raises(ValueError, match="not JSON compliant: nan"):
        results.save(tmp_path)
    assert (tmp_path / "results.json").read_text() == before


def test_picture_is_a_small_thumbnail_on_white():
    uri = picture(Image.new("RGBA", (300, 150), (0, 0, 0, 0)), size=48)
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert image.size == (48, 24) and image.convert("RGB").getpixel((20, 10)) == (255, 255, 255)


def test_all_images_of_an_item_are_shown(results, tmp_path):
    red, blue = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")
    content = [{"type": "text", "text": "like"}, {"type": "image", "image": red}, {"type": "text", "text": "but"}]
    query = Shown.from_item([{"role": "user", "content": [*content, {"type": "image", "image": blue}]}])
    assert (query.text, query.image, query.images) == ("like [1] but [2]", None, [picture(red), picture(blue)])
    assert Shown.from_item({"image": [red, blue]}) == Shown(images=query.images)
    assert Shown.from_item({"image": red, "text": "a"}) == Shown("a", picture(red))
    assert Shown.from_item("a") == Shown("a")
    results.examples = [Example(query, [ShownHit(Shown.from_item(blue), 0.5, True)], 1, 2, "title")]
    text = render(results, tmp_path)
    shown = text[text.index('class="shown query"') : text.index("</figure>")]
    assert [shown.count(image) for image in query.images] == [1, 1] and "like [1] but [2]" in shown


@pytest.mark.parametrize(("name", "shown"), [("/home/runs/demo/model", "demo/model"), ("owner/name", "owner/name")])
def test_the_title_names_the_model(tmp_path, name, shown):
    page = render(Results("Captions", "", 0, model={"name": name}), tmp_path)
    assert f"<title>Captions · {shown}</title>" in page and f"<h1>Captions · {shown}</h1>" in page
    assert "<h1>Captions</h1>" in render(Results("Captions", "", 0), tmp_path)


def test_a_table_of_scores_has_averages_and_chance():
    scores = [
        Score(name, 10, 50, {"hit_rate@1": Metric(value, 0.0, 1.0, 0.1)}, {"group": group})
        for name, value, group in (("a", 0.1, "x"), ("b", 0.3, "x"), ("c", 0.8, "y"))
    ]
    table = score_table("Title", [*scores, Score("none", 0, 50, {}, {"group": "y"})], "group", averages=True)
    assert table.columns == ["", "group", "n", "candidates", "R@1"]
    values = [(row[0], row[2], row[4] and pytest.approx(row[4].value)) for row in table.rows]
    expected = [("a", 10, 0.1), ("b", 10, 0.3), ("average, x", 20, 0.2), ("c", 10, 0.8), ("none", 0, None)]
    assert values == [*expected, ("average", 30, 0.4), ("random order", 30, 0.1)]


@pytest.mark.parametrize(("columns", "details"), [(1, 2), (4, 1), (8, 0)])
def test_a_table_that_is_too_wide_shows_less(columns, details):
    scores = [Score("image+text → text", 385, 385, {f"hit_rate@{k}": SCORE for k in range(columns)})]
    lines = format_table(score_table("Title", scores)).splitlines()
    assert max(map(len, lines)) <= 100 and "45.1" in lines[2]
    assert ("95 % CI" in lines[1], "chance" in lines[1]) == (details > 0, details > 1)


def test_a_table_shows_intervals_and_chance_only_where_scores_have_them():
    rows = [["a", SCORE, Metric(0.5), 1234, 0.25], ["b", None, None, "", None]]
    lines = format_table(Table("Title", ["name", "full", "bare", "count", "rate"], rows, "A note.")).splitlines()
    assert lines[0] == "Title" and lines[-1] == "A note."
    assert lines[1].split() == "name full 95 % CI chance bare count rate".split()
    assert lines[2].split() == "a 45.1 40–50 2.7 50.0 1,234 0.25".split()
    assert lines[3].split() == "b – – –".split()
    assert lines[1].index("bare") == lines[2].index("50.0")
    assert format_table(Table("Empty", ["a", "b"], [])).splitlines() == ["Empty", "a  b"]


def test_all_parts_of_results_are_printed():
    results = Results("A benchmark", "s", 0)
    assert format_results(results) == ""
    results.headline = [Headline("main score", SCORE, "on 3 items"), Headline("other", Metric(0.1))]
    results.tables = [Table("Shown", ["a"], [[1]]), Table("For the page", ["a"], [[1]], report_only=True)]
    text = format_results(results)
    places = [text.index(part) for part in ("A benchmark", "main score (on 3 items)", "Shown")]
    assert places == sorted(places) and "For the page" not in text


def draw(tmp_path, series):
    """The corners of the lines of a chart, and the labels of its vertical axis."""
    curves = [Curve("Loss", series), Curve("Never measured", {"a": []})]
    page = render(Results(title="t", summary="s", seed=0, curves=curves), tmp_path)
    assert ">Loss<" in page and "Never measured" not in page
    lines = [
        [tuple(map(float, pair.split(","))) for pair in line.split()] for line in re.findall(' points="(.*?)"', page)
    ]
    return lines, [float(label) for label in re.findall(r'text-anchor="end">([^<]+)<', page)]


def test_points_are_placed_in_order_and_inside(tmp_path):
    ((line,), _) = draw(tmp_path, {"loss": [[0, 4.0], [5, 1.0], [10, 2.0]]})
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 < x1 < x2 and y0 < y2 < y1  # up is smaller in SVG
    assert all(0 <= x <= 520 and 0 <= y <= 250 for x, y in line)
    assert len(draw(tmp_path, {"a": [[1, 0.5]], "b": [[1, 0.5]], "none": []})[0]) == 2
    assert len(draw(tmp_path, {"a": [[0, 3.0], [1, 3.0]]})[0]) == 1


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e7])
def test_ticks_are_few_and_round(tmp_path, scale):
    _, values = draw(tmp_path, {"a": [[0, 0.13 * scale], [977, 0.94 * scale]]})
    assert 3 <= len(values) <= 7 and values == sorted(set(values))
