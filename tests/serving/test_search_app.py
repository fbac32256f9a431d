import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conjoin.serving.app import SearchPage, make_app
from conjoin.serving.html import columns_html, results_html
from conjoin.serving.snippet import python_code
from tiny_serving import COLOURS, LIMITS, asked, png, sent


@pytest.fixture
def page(searcher):
    return SearchPage([searcher], LIMITS)


@pytest.fixture
def upload(tmp_path):
    def write(name, data):
        (tmp_path / name).write_bytes(data)
        return [str(tmp_path / name)]  # as gradio's text box gives it

    return write


def ids(html):
    return re.findall(r"id-\w+", html)


def test_search_by_text_by_image_and_by_both(page, searcher, upload):
    (html,), code, query = page.search(asked("a red thing"))
    assert ids(html) == [hit.id for hit in searcher.search(["a red thing"], 3)[0]]
    assert html.count("data:image/") == 3
    assert "ranking" not in code and "{'text': 'a red thing'}" in code
    assert query.text == "a red thing"
    (html,), code, _ = page.search(asked("a red thing", ranking="vectors"))
    assert ids(html) == [hit.id for hit in searcher.search(["a red thing"], 3, ranking="vectors")[0]]
    assert "ranking='vectors'" in code
    (html,), _, _ = page.search(asked(None, upload("blue.png", png("blue")), 2))
    assert len(ids(html)) == 2
    (html,), code, _ = page.search(asked("in green", upload("blue.png", png("blue")), 1))
    assert "{'image': 'blue.png', 'text': 'in green'}" in code


def test_results_and_rows_come_in_pages(page):
    for query in ("a thing", ""):
        pages = [ids(page.search(asked(query, k=4), offset)[0][0]) for offset in (0, 4, 8)]
        assert [len(each) for each in pages] == [4, 2, 0] and len({*pages[0], *pages[1]}) == 6
    html, code, query = page.search(asked("a thing", k=4), 4)
    assert 'data-rank="5"' in html[0] and "k=8" in code
    assert "Only a joint encoder" in page.why(query, 0, 5)
    assert "Search first" in page.why(query, 0, 4), "of the page before"
    assert "at most 10,000" in page.search(asked("a", k=10), 10_000)[0][0]


def test_filters_are_conditions_on_lists_numbers_and_what_was_written(page):
    assert page.choices == [("kind", ["<b>warm</b>", "cold"])]
    assert page.number == ("price", 0, 5)
    assert "price" in columns_html(page.columns)
    (html,), code, _ = page.search(asked("x", k=5, where="price > 0", chosen=[["<b>warm</b>"]]))
    assert ids(html) == ["id-yellow"]
    assert "where=\"`kind` in ('<b>warm</b>') and (price > 0)\"" in code
    injected = page.search(asked("x", least="' || repeat(text, 300) is null -- "))[0][0]
    assert "could not convert string to float" in injected.lower()
    (html,), code, _ = page.search(asked("x", k=6, least=2, most=3, where="price != 3"))
    assert ids(html) == ["id-blue"]
    assert "where='`price` >= 2 and `price` <= 3 and (price != 3)'" in code
    (html,), _, _ = page.search(asked("x", k=5, where="price > 100"))
    assert "no row fulfils the filter" in html


def test_without_a_query_rows_that_fulfil_the_filter_are_shown(page):
    (html,), code, query = page.search(asked())
    assert ids(html) == ["id-red", "id-green", "id-blue"]
    assert (code, query) == ("", None) and "data-rank" not in html and html.count("data:image/") == 3
    assert 'cj-number">price 2<' in html and "price:" not in html
    (html,), _, _ = page.search(asked(" ", k=6, most=3, chosen=[["cold"]]))
    assert ids(html) == ["id-green", "id-blue"]
    assert "no row fulfils the filter" in page.search(asked(where="price > 100"))[0][0]


def test_one_result_of_each_group(searcher):
    grouped = SearchPage([searcher], LIMITS, group_by="kind")
    every = [(hit.id, hit.row["kind"]) for hit in searcher.search(["a thing"], 6)[0]]
    best = [next(id_ for id_, kind in every if kind == each) for each in dict.fromkeys(kind for _, kind in every)]
    (html,), code, _ = grouped.search(asked("a thing", k=6))
    assert ids(html) == best and "group_by='kind'" in code
    assert ids(grouped.search(asked(k=6))[0][0]) == ["id-red", "id-green"]


def test_weights_of_the_parts_and_a_least_score(page, upload):
    files = upload("blue.png", png("blue"))
    (html,), code, query = page.search(asked("a red thing", files, 6, image_weight=1, text_weight=0))
    alone = page.search(asked(None, files, 6))[2]
    assert [hit.id for hit in query.found[0]] == [hit.id for hit in alone.found[0]]
    assert "weights={'image': 1, 'text': 0}" in code
    assert "Its text has no weight" in page.search(asked("a red thing", files, 6, image_weight=1))[0][0]
    scores = [hit.score for hit in query.found[0]]
    (html,), _, kept = page.search(asked(None, files, 6, min_score=scores[2]))
    assert [hit.score for hit in kept.found[0]] == scores[:3] and html.count("data-rank") == 3
    (html,), _, _ = page.search(asked(None, files, 6, min_score=2))
    assert "Nothing similar was found: no score reaches 2." in html


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("  \n", "price <", "cannot be evaluated"),
        ("a" * 201, "", "201 characters"),
        ("a", "price = '<script>", "&#39;"),
        ("a", "x" * 1001, "The condition has 1,001 characters"),
    ],
)
def test_mistakes_are_messages_on_the_page(page, text, where, problem):
    (html,), code, query = page.search(asked(text, where=where))
    assert problem in html and 'role="alert"' in html and "<script>" not in html
    assert (code, query) == ("", None)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"hello", "The file &#39;photo.png&#39;: this is no image"),
        (bytes(20_001), "20,001 bytes; the limit is 20,000"),
        (png()[:45], "cannot read the image"),
    ],
)
def test_bad_uploads_are_messages_on_the_page(page, upload, data, problem):
    (html,), _, _ = page.search(asked("with a text", upload("photo.png", data)))
    assert problem in html


def test_values_of_rows_are_escaped_also_for_templates_of_the_browser(page):
    (html,), _, _ = page.search(asked("x", k=5, where="kind = '<b>warm</b>'"))
    assert "&lt;b&gt;warm&lt;/b&gt;" in html
    assert "<b>warm" not in html
    (html,), _, _ = page.search(asked("x", k=5, where="{{constructor}} ${alert(1)} `"))
    assert not set("{}$`") & set(html)


def test_two_models_side_by_side(searcher, make_searcher):
    other = make_searcher(seed=1)
    page = SearchPage([searcher, other], LIMITS)
    first, second = page.search(asked("a red thing"))[0]
    shared = len(set(ids(first)) & set(ids(second)))
    assert f"{shared} found by both" in first
    assert "<strong>A: " in first
    assert "<strong>B: " in second
    problem, empty = page.search(asked("a", k=0))[0]
    assert "K must be an integer from 1 to 10" in problem
    assert empty == ""


def test_a_row_without_its_picture_says_so(make_searcher):
    searcher = make_searcher()
    Path(searcher.search(["x"], 1)[0][0].row["image"]).unlink()
    (html,), _, _ = SearchPage([searcher], LIMITS).search(asked("x", k=1))
    assert "the picture is not at this path here" in html
    assert 'class="cj-face"' in html


def test_results_have_a_title_and_the_id_once(make_searcher):
    searcher = make_searcher()
    (html,), _, query = SearchPage([searcher], LIMITS, title_column="kind").search(
        asked("x", k=6, where="kind = 'cold'")
    )
    titles = re.findall('cj-name">([^<]*)<', html)
    assert titles == ["cold"] * len(query.found[0]) and "kind:" not in html and "text: a " in html
    found = query.found[0][0]
    found = replace(found, row={"image": found.row["image"]})
    alone = results_html("title", "1 result", [found], (str(Path(found.row["image"]).parent),))
    assert f'cj-name">{found.id}<' in alone and alone.count(f">{found.id}<") == 1


def test_thumbnails_that_the_collection_keeps_are_shown(make_searcher):
    searcher = make_searcher(keep_pictures=4)
    for colour in COLOURS:
        Path(searcher.collection.rows([f"id-{colour}"])[0]["image"]).unlink()
    (html,), _, query = SearchPage([searcher], LIMITS).search(asked("x", k=6))
    assert html.count("data:image/") == 6 and "picture:" not in html
    assert {hit.row["picture"][:2] for hit in query.found[0]} == {b"\xff\xd8"}


def test_only_a_joint_encoder_is_explained(page, monkeypatch):
    _, _, query = page.search(asked("a red thing"))
    assert "Only a joint encoder" in page.why(query, 0, 1)
    with monkeypatch.context() as patch:  # as an ONNX export of one
        patch.setitem(page.searchers[0].encoder.model.config.values, "model_type", "joint_encoder")
        assert "Only a joint encoder" in page.why(query, 0, 1)
    for rank in (None, 0, 4, "1", -1):
        assert "Search first" in page.why(query, 0, rank)
    assert "Search first" in page.why(None, 0, 1)


@pytest.mark.parametrize(
    ("text", "images"),
    [('it\'s "red"', []), (None, ["a.png"]), ("both", ["a.png"]), ("<image> <image>", ["a.png", "a.png"])],
)
def test_the_code_searches(searcher, upload, monkeypatch, tmp_path, capsys, text, images):
    monkeypatch.setattr("conjoin.load_encoder", lambda model: searcher.encoder, raising=False)
    monkeypatch.chdir(tmp_path)
    upload("a.png", png("blue"))
    code = compile(
        python_code(searcher, text, images, {"k": 2, "where": "price > 1", "ranking": "default"}), "code", "exec"
    )
    if len(images) < 2:  # the tiny model takes one image
        exec(code, {})
        assert len(capsys.readouterr().out.splitlines()) == 2


def _search_event(client):
    return next(event["id"] for event in client.get("/config").json()["dependencies"] if len(event["inputs"]) > 4)


def _send(client, target, data):
    """Trigger an event as a browser does; returns how it ended."""
    body = {"data": data, "fn_index": target, "session_hash": "abc"}
    assert client.post("/gradio_api/queue/join", json=body).status_code == 200
    with client.stream("GET", "/gradio_api/queue/data?session_hash=abc") as events:
        return json.loads(next(line for line in events.iter_lines() if "process_completed" in line)[6:])


class TestGradio:
    """The app as a web application, with Gradio's routes."""

    @pytest.fixture(scope="class")
    def client(self, searcher):
        pytest.importorskip("gradio", minversion="6")
        from fastapi.testclient import TestClient

        with TestClient(make_app([searcher], limits=LIMITS), base_url="http://127.0.0.1") as client:
            uploads = Path(os.environ["GRADIO_TEMP_DIR"])
            assert uploads.is_dir()
            yield client
        assert not uploads.exists()

    def test_the_page_loads_nothing_from_elsewhere(self, client):
        answer = client.get("/")
        assert answer.status_code == 200
        loaded = re.findall(r"""(?:src|href)=["'](?:https?:)?//([^"'/]+)""", answer.text)
        assert set(loaded) <= {"127.0.0.1"}, loaded
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        assert "fonts.googleapis" not in client.get("/theme.css").text + answer.text

    @pytest.mark.parametrize("prefix", ["/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/"])
    @pytest.mark.parametrize(
        "path",
        [
            "/etc/passwd",
            "../../../../../../etc/passwd",
            "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            "..%2f..%2f..%2fetc/passwd",
            "pyproject.toml",
            "ROW",
            "MANIFEST",
        ],
    )
    def test_no_file_is_served(self, client, searcher, prefix, path):
        row = searcher.search(["x"], 1)[0][0].row["image"]
        path = {"ROW": row, "MANIFEST": f"{searcher.source}/SHA256SUMS"}.get(path, path)
        answer = client.get(prefix + path)
        assert answer.status_code in (403, 404, 405), answer.text[:200]
        assert "root:" not in answer.text

    @pytest.mark.parametrize("place", [0, 4])
    @pytest.mark.parametrize("path", ["ROW", "/etc/passwd", "https://example.org/a.png", "file:///etc/passwd"])
    def test_a_file_that_was_not_uploaded_is_not_read(self, client, searcher, path, place):
        """A browser sends the path of its upload, in the place of the query; any other path must be refused there
        and in the place of the condition, before the file is copied.
        """
        target = _search_event(client)
        path = searcher.search(["x"], 1)[0][0].row["image"] if path == "ROW" else path
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        data = sent("x", [file] if place == 0 else [])
        if place != 0:
            data[place] = file
        before = set(Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*"))
        completed = _send(client, target, data)
        assert not completed["success"], completed
        assert "id-" not in json.dumps(completed)
        assert set(Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*")) == before

    def test_an_upload_is_searched(self, client):
        path = client.post("/gradio_api/upload", files={"files": ("a.png", png(), "image/png")}).json()[0]
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        completed = _send(client, _search_event(client), sent("", [file]))
        assert completed["success"]
        assert len(ids(completed["output"]["data"][0])) == 3

    def test_uploads_are_limited(self, client):
        small = client.post("/gradio_api/upload", files={"files": ("a.png", png(), "image/png")})
        assert small.status_code == 200
        large = client.post("/gradio_api/upload", files={"files": ("a.png", bytes(20_001), "image/png")})
        assert large.status_code == 413
        unbounded = client.post("/gradio_api/upload", content=b"", headers={"content-length": str(2**40)})
        assert unbounded.status_code == 413
