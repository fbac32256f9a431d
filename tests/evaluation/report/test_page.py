import base64
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

import conjoin
from conjoin.evaluation import (
    MODALITIES,
    Cell,
    Curve,
    Embedded,
    Example,
    Headline,
    Hit,
    Metric,
    Results,
    Shown,
    Symmetric,
    Table,
    evaluate_combinations,
    format_combinations,
    format_results,
    format_table,
    picture,
    render_report,
)
from conjoin.evaluation.report.page import line_chart

EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/a.png onerror=alert(1)> {{ 7 * 7 }}"
SCORE = Metric(0.4512, 0.4012, 0.5012, 0.0271)


@pytest.fixture
def results():
    red = picture(Image.new("RGB", (200, 100), "red"))
    hits = [Hit(Shown(EVIL, red), 0.87, False), Hit(Shown("a red apple"), 0.65, True)]
    misses = [Hit(Shown(None, red), 0.5, False)]
    return Results(
        title=f"Title {EVIL}",
        summary=f"Summary {EVIL}",
        seed=3,
        model={EVIL: EVIL, "parameters": 38_400_000},
        dataset={"name": "sample"},
        config={"loss": {"name": "gcl", "temperature": 0.05}, "empty": None},
        headline=[Headline(f"text → image {EVIL}", SCORE, EVIL)],
        combinations=[
            Cell("local", "text", "image", 385, 385, {"hit_rate@10": SCORE, "mrr@10": SCORE}),
            Cell("local", "text", "text", 0, 385, {}),
            Cell("global", "image,text", "image", 385, 1155, {"hit_rate@10": SCORE}),
        ],
        symmetric=[Symmetric(EVIL, 214, 3000, {"precision": SCORE, "average": SCORE})],
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
    return render_report(results, tmp_path / "deep" / "report.html").read_text()


def test_json_round_trip(results, tmp_path):
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results
    assert Results.from_dict(dataclasses.asdict(results)) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["schema_version"] == 1
    assert data["versions"]["conjoin"] == conjoin.__version__
    assert {"torch", "transformers", "python"} <= data["versions"].keys()
    assert render(results, tmp_path) == render(str(tmp_path / "results.json"), tmp_path)


def test_nothing_is_loaded_and_nothing_runs(results, tmp_path):
    page = Page(render(results, tmp_path))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href", "srcset", "xlink:href", "data", "action"):
            assert attributes.get(name, "data:image/").startswith("data:image/")
    styles = re.findall(r"<style>(.*?)</style>", render(results, tmp_path), re.DOTALL)
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy


def test_all_text_is_escaped(results, tmp_path):
    text = render(results, tmp_path)
    assert "<script" not in text
    assert "<img src=http" not in text
    shown = "".join(Page(text).text)
    assert shown.count("{{ 7 * 7 }}") >= 10
    assert "alert('x')" in shown


def test_what_a_reader_finds(results, tmp_path):
    page = Page(render(results, tmp_path))
    shown = " ".join("".join(page.text).split())
    for wanted in ("45.1", "40.1–50.1", "chance 2.7", "found at rank 2", "first correct at rank 37 of 385"):
        assert wanted in shown
    for wanted in ("image+text → image", "MRR@10", "Precision", "Avg", "38,400,000", "loss.temperature", "0.05"):
        assert wanted in shown
    assert "from_pretrained" in shown
    assert "correct" in shown
    assert sum("correct" in (a.get("class") or "").split() for t, a in page.tags if t == "figure") == 1
    assert any(tag == "polyline" for tag, _ in page.tags)
    assert "prefers-color-scheme: dark" in "".join(page.text)


def test_a_report_of_the_bare_minimum(tmp_path):
    text = render(Results(title="t", summary="s", seed=0), tmp_path)
    assert "<h2>Searches" not in text
    assert "<h2>Symmetric" not in text
    assert "What produced these numbers" in text


@pytest.mark.parametrize(
    "uri", ["http://example.org/a.png", "data:text/html;base64,AAAA", 'data:image/png;base64,A"b']
)
def test_pictures_must_be_inline(results, tmp_path, uri):
    results.examples = [Example(Shown("x", uri), [], 1, 1)]
    with pytest.raises(ValueError, match=r"a picture must be an inline data:image"):
        render(results, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "results: titel: Unexpected keyword argument"),
        ({"schema_version": 2}, "schema version 2, this version of conjoin reads 1"),
        ({"headline": {}}, "results: headline: Input should be a valid list"),
        ({"headline": [{"label": "x"}]}, "results: headline.0.metric: Field required"),
        (
            {"headline": [{"label": "x", "metric": {"value": None}}]},
            "results: headline.0.metric.value: Input should be a valid number",
        ),
        ({"headline": [{"label": "x", "metric": 0.5}]}, "results: headline.0.metric: Input should be a dictionary"),
        ({"config": []}, "results: config: Input should be a valid dictionary"),
        ({"tables": [{"title": "t", "columns": ["a"], "rows": [[1, 2]]}]}, "has 1 columns, but a row of 2"),
    ],
)
def test_malformed_results(results, change, message):
    with pytest.raises(ValueError, match=message):
        Results.from_dict({**dataclasses.asdict(results), **change})


def test_results_without_a_title():
    with pytest.raises(ValueError, match="results: title: Field required; summary: Field required; seed: "):
        Results.from_dict({})


def test_unreadable_file(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json: not a JSON file of results"):
        Results.load(tmp_path / "results.json")


def test_nan_is_refused_everywhere(results, tmp_path):
    with pytest.raises(ValueError, match="metric low must be a finite number, got nan"):
        Metric(0.5, math.nan)
    with pytest.raises(ValueError, match=r"series 'a': expected finite \[x, y\] points, got \[1, nan\]"):
        Curve("loss", {"a": [[0, 1.0], [1, math.nan]]})
    results.save(tmp_path / "results.json")
    before = (tmp_path / "results.json").read_text()
    results.config = {"x": math.inf}
    with pytest.raises(ValueError, match="cannot write the results as JSON"):
        results.save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_text() == before


def test_cell_lookup(results):
    assert results.cell("text", "image").metrics["hit_rate@10"].value == 0.4512
    with pytest.raises(ValueError, match="no cell"):
        results.cell("image", "image")


def test_picture_is_a_small_thumbnail_on_white():
    clear = Image.new("RGBA", (300, 150), (0, 0, 0, 0))
    uri = picture(clear, size=48)
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert image.size == (48, 24)
    assert image.convert("RGB").getpixel((20, 10)) == (255, 255, 255)
    assert clear.size == (300, 150)


def test_a_curve_without_points_is_left_out(results, tmp_path):
    results.curves = [Curve("Measured", {"a": [[0, 1.0]], "b": []}), Curve("Never measured", {"a": [], "b": []})]
    page = render_report(results, tmp_path / "report.html").read_text()
    assert ">Measured<" in page and "Never measured" not in page


def test_all_images_of_an_item_are_shown(results, tmp_path):
    red, blue = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")
    content = [{"type": "text", "text": "like"}, {"type": "image", "image": red}, {"type": "text", "text": "but"}]
    query = Shown.from_item([{"role": "user", "content": [*content, {"type": "image", "image": blue}]}])
    assert (query.text, query.image, query.images) == ("like [1] but [2]", None, [picture(red), picture(blue)])
    assert Shown.from_item({"image": [red, blue]}) == Shown(images=query.images)
    assert Shown.from_item({"image": red, "text": "a"}) == Shown("a", picture(red)) and Shown.from_item("a") == Shown(
        "a"
    )
    results.examples = [Example(query, [Hit(Shown.from_item(blue), 0.5, True)], 1, 2, "title")]
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json").examples == results.examples
    text = render_report(results, tmp_path / "page.html").read_text()
    shown = text[text.index('class="shown query"') : text.index("</figure>")]
    assert [shown.count(image) for image in query.images] == [1, 1] and "like [1] but [2]" in shown


def test_the_title_names_benchmark_and_model(tmp_path):
    def title(**values):
        page = render_report(Results("Captions", "", 0, **values), tmp_path / "page.html").read_text()
        found = re.search(r"<title>(.*)</title>", page)[1]
        assert f"<h1>{found}</h1>" in page
        return found

    assert title() == "Captions"
    assert title(model={"name": "/home/runs/demo/model"}, benchmark="pairs") == "pairs · Captions · demo/model"
    assert title(model={"name": "owner/name"}, benchmark="captions") == "Captions · owner/name"


def cells(concepts=24):
    generator = torch.Generator().manual_seed(0)
    names = [f"c{number}" for number in range(concepts)]
    sets = {name: Embedded(torch.randn(concepts, 8, generator=generator), names) for name in MODALITIES}
    keep = {("image", "image"): [False] * concepts}
    return evaluate_combinations(sets, sets, settings=("local", "global"), keep=keep, resamples=10)


def test_combinations_are_aligned_and_narrow():
    text = format_combinations(cells())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if " → " in line and "–" in line]
    assert len(rows) == 18 and any(row.startswith("image+text → image+text") for row in rows)
    headers = [line for line in lines if line.startswith("query")]
    assert all("R@1 " in line and "chance" in line for line in headers)
    assert {len(line) for line in rows[:9]} == {len(headers[0])} and {len(line) for line in rows[9:]} == {
        len(headers[1])
    }
    assert "(24 candidates)" in text and "(72 candidates)" in text


def test_a_table_shows_intervals_and_chance_only_where_scores_have_them():
    rows = [["a", SCORE, Metric(0.5), 1234, 0.25], ["b", None, None, "", None]]
    lines = format_table(Table("Title", ["name", "full", "bare", "count", "rate"], rows, "A note.")).splitlines()
    assert lines[0] == "Title" and lines[-1] == "A note."
    assert lines[1].split() == "name full 95 % CI chance bare count rate".split()
    assert lines[2].split() == "a 45.1 40–50 2.7 50.0 1,234 0.25".split()
    assert lines[3].split() == "b – – –".split()
    assert len({len(line) for line in lines[1:4]}) == 1
    assert format_table(Table("Empty", ["a", "b"], [])).splitlines() == ["Empty", "a  b"]


def test_all_parts_of_results_are_printed():
    results = Results(
        title="A benchmark",
        summary="s",
        seed=0,
        headline=[Headline("main score", SCORE, "on 3 items"), Headline("other", Metric(0.1))],
        combinations=cells(),
        symmetric=[Symmetric("runs", 1214, 3000, {"precision": SCORE, "recall@5": Metric(0.2)})],
        tables=[Table("Shown", ["a"], [[1]]), Table("For the page", ["a"], [[1]], report_only=True)],
    )
    text = format_results(results)
    parts = ["A benchmark", "main score (on 3 items)", "Local:", "Symmetric triplets", "Shown"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert "For the page" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["triplets", "1,214"] in lines and ["candidates", "of", "each", "3,000"] in lines
    assert ["Precision", "45.1", "40–50", "2.7"] in lines and ["R@5", "20.0"] in lines
    assert format_results(Results(title="t", summary="s", seed=0)) == ""


def corners(svg):
    return [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(r'points="([^"]+)"', svg)
    ]


def test_points_are_placed_in_order_and_inside():
    (line,) = corners(line_chart({"loss": [[0, 4.0], [5, 1.0], [10, 2.0]]}, "step", "Loss"))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 < x1 < x2
    assert y0 < y2 < y1  # up is smaller in SVG
    assert all(0 <= x <= 520 and 0 <= y <= 260 for x, y in line)
    assert len(corners(line_chart({"a": [[1, 0.5]], "b": [[1, 0.5]]}, "step", "t"))) == 2
    assert len(corners(line_chart({"a": [[0, 3.0], [1, 3.0]]}, "step", "t"))) == 1
    assert "no values" in line_chart({"a": []}, "step", "t")
    (thinned,) = corners(line_chart({"a": [[step, step % 7] for step in range(10_000)]}, "step", "t"))
    assert len(thinned) == 300


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e7])
def test_ticks_are_few_and_round(scale):
    svg = line_chart({"a": [[0, 0.13 * scale], [977, 0.94 * scale]]}, "step", "t")
    labels = re.findall(r'text-anchor="end">([^<]+)<', svg)
    assert 3 <= len(labels) <= 7
    values = [float(label) for label in labels]
    assert values == sorted(set(values))
