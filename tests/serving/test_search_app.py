import json
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from conjoin.retrieval import open_collection
from conjoin.serving.app import Asked, PageOptions, SearchPage, make_app
from conjoin.serving.html import columns_html, results_html
from conjoin.serving.snippet import python_code
from tiny_serving import COLOURS, LIMITS, asked, png


def ready(*searchers):
    future = Future()
    future.set_result(list(searchers))
    return future


@pytest.fixture
def page(searcher):
    return SearchPage(ready(searcher), LIMITS)


@pytest.fixture
def upload(tmp_path):
    def write(name, data):
        (tmp_path / name).write_bytes(data)
        return [(str(tmp_path / name), None)]  # as gradio's gallery gives it

    return write


def ids(html):
    return re.findall(r"id-\w+", html)


def test_search_by_text_by_image_and_by_both(page, searcher, upload):
    (html,), code, query = page.search(Asked("a red thing", None, 3, ""))
    expected = [hit.id for hit in searcher.search([{"text": "a red thing"}], 3)[0]]
    assert ids(html) == expected
    assert html.count("data:image/") == 3
    assert "'a red thing'" in code
    assert query.text == "a red thing"
    (html,), _, _ = page.search(Asked(None, upload("blue.png", png("blue")), 2, None))
    assert len(ids(html)) == 2
    (html,), code, _ = page.search(Asked("in green", upload("blue.png", png("blue")), 1, ""))
    assert "{'image'" not in code
    assert "\"image\": 'blue.png', \"text\": 'in green'" in code


def test_filters_are_a_condition_and_choices(page):
    assert page.filters.choices == [("kind", ["<b>warm</b>", "cold"])]
    assert page.filters.number == ("price", 0, 5)
    assert "price" in columns_html(page.filters.columns)
    (html,), code, _ = page.search(Asked("x", None, 5, "price > 0", chosen=[["<b>warm</b>"]]))
    assert ids(html) == ["id-yellow"]
    assert "kind in (" in code
    (html,), _, _ = page.search(Asked("x", None, 5, "price > 100"))
    assert "no row fulfils the filter" in html


def test_sliders_are_a_condition_unless_they_stand_at_their_ends(page, searcher):
    assert len(ids(page.search(Asked("x", k=6, least=0, most=5))[0][0])) == 6
    (html,), code, _ = page.search(Asked("x", k=6, least=2, most=3, where="price != 3"))
    assert ids(html) == ["id-blue"]
    assert "where='price >= 2 and price <= 3 and (price != 3)'" in code


def test_without_a_query_rows_that_fulfil_the_filter_are_shown(page, searcher):
    (html,), code, query = page.search(Asked(k=3))
    assert ids(html) == ["id-red", "id-blue", "id-purple"]  # spread evenly
    assert (code, query) == ("", None) and "data-rank" not in html and html.count("data:image/") == 3
    assert 'cj-number">price 4<' in html and "price:" not in html
    (html,), _, _ = page.search(Asked(" ", k=6, most=3, chosen=[["cold"]]))
    assert ids(html) == ["id-green", "id-blue"]
    assert "no row fulfils the filter" in page.search(Asked(where="price > 100", k=3))[0][0]
    grouped = SearchPage(ready(searcher), LIMITS, PageOptions(group_by="kind"))
    assert ids(grouped.search(Asked(k=6))[0][0]) == ["id-red", "id-green"]


def test_one_result_of_each_group(page, searcher):
    grouped = SearchPage(ready(searcher), LIMITS, PageOptions(group_by="kind"))
    every = [(hit.id, hit.row["kind"]) for hit in searcher.search(["a thing"], 6)[0]]
    best = [next(id_ for id_, kind in every if kind == each) for each in dict.fromkeys(kind for _, kind in every)]
    (html,), code, _ = grouped.search(Asked("a thing", k=6))
    assert ids(html) == best and "group_by='kind'" in code


def test_weights_of_the_parts_and_a_least_score(page, searcher, upload):
    files = upload("blue.png", png("blue"))
    (html,), code, query = page.search(Asked("a red thing", files, 6, image_weight=1, text_weight=0))
    alone = page.search(Asked(None, files, 6))[2]
    assert [hit.id for hit in query.found[0]] == [hit.id for hit in alone.found[0]]
    assert "weights={'image': 1, 'text': 0}" in code
    assert "Its text has no weight" in page.search(Asked("a red thing", files, 6, image_weight=1))[0][0]
    scores = [hit.score for hit in query.found[0]]
    (html,), _, kept = page.search(Asked(None, files, 6, min_score=scores[2]))
    assert [hit.score for hit in kept.found[0]] == scores[:3] and html.count("data-rank") == 3
    (html,), _, _ = page.search(Asked(None, files, 6, min_score=2))
    assert f"Nothing similar was found: the best score is {scores[0]:.4f}." in html


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("  \n", "price <", "cannot be evaluated"),
        ("a" * 201, "", "201 characters"),
        ("a", "<script>alert(1)</script>", "&lt;script&gt;alert(1)"),
        ("a", "x" * 1001, "The condition has 1,001 characters"),
    ],
)
def test_mistakes_are_messages_on_the_page(page, text, where, problem):
    (html,), code, query = page.search(Asked(text, None, 3, where))
    assert problem in html and 'role="alert"' in html and "<script>" not in html
    assert (code, query) == ("", None)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"hello", "The file &#x27;photo.png&#x27;: this is no image"),
        (bytes(20_001), "20,001 bytes; the limit is 20,000"),
        (png()[:45], "truncated or damaged"),
    ],
)
def test_bad_uploads_are_messages_on_the_page(page, upload, data, problem):
    (html,), _, _ = page.search(Asked("with a text", upload("photo.png", data), 3, ""))
    assert problem in html


def test_values_of_rows_are_escaped_also_for_templates_of_the_browser(page):
    (html,), _, _ = page.search(Asked("x", None, 5, "kind = '<b>warm</b>'"))
    assert "&lt;b&gt;warm&lt;/b&gt;" in html
    assert "<b>warm" not in html
    (html,), _, _ = page.search(Asked("x", None, 5, "{{constructor}} ${alert(1)} `"))
    assert not set("{}$`") & set(html)


def test_two_models_side_by_side(searcher, make_searcher):
    other = make_searcher(seed=1)
    page = SearchPage(ready(searcher, other), LIMITS)
    first, second = page.search(Asked("a red thing", None, 3, ""))[0]
    shared = len(set(ids(first)) & set(ids(second)))
    assert f"{shared} found by both" in first
    assert "<strong>A: " in first
    assert "<strong>B: " in second
    problem, empty = page.search(Asked("a", None, 0))[0]
    assert "K must be an integer" in problem
    assert empty == ""


def test_a_row_without_its_picture_says_so(make_searcher):
    searcher = make_searcher()
    Path(searcher.search(["x"], 1)[0][0].row["image"]).unlink()
    (html,), _, _ = SearchPage(ready(searcher), LIMITS).search(Asked("x", None, 1, ""))
    assert "the picture is not at this path here" in html
    assert 'class="cj-face"' in html


def test_results_have_a_title_and_the_id_once(make_searcher):
    searcher = make_searcher()
    (html,), _, query = SearchPage(ready(searcher), LIMITS, PageOptions(title_column="kind")).search(
        Asked("x", None, 6, "kind = 'cold'")
    )
    titles = re.findall('cj-name">([^<]*)<', html)
    assert titles == ["cold"] * len(query.found[0]) and "kind:" not in html and "text: a " in html
    found = query.found[0][0]
    found = found._replace(row={"image": found.row["image"]})
    alone = results_html("title", [found], 1.0, folders=(str(Path(found.row["image"]).parent),))
    assert f'cj-name">{found.id}<' in alone and alone.count(f">{found.id}<") == 1


def test_the_page_says_how_to_show_pictures_that_are_elsewhere(make_searcher, monkeypatch):
    searcher = make_searcher()
    folder = Path(searcher.search(["x"], 1)[0][0].row["image"]).parent
    shutil.move(folder / "collection", folder.parent / "moved")
    searcher.collection = open_collection(folder.parent / "moved")
    assert "--root" not in SearchPage(ready(searcher), LIMITS).describe()
    monkeypatch.setenv("CONJOIN_ROOTS", "")
    assert f"add --root {folder}<" in SearchPage(ready(searcher), LIMITS).describe()
    lines = SearchPage(ready(searcher), LIMITS, is_local=False).describe()
    assert "--root" not in lines and str(folder) not in lines


def test_thumbnails_that_the_collection_keeps_are_shown(make_searcher):
    searcher = make_searcher(keep_pictures=4)
    for colour in COLOURS:
        Path(searcher.collection.rows([f"id-{colour}"])[0]["image"]).unlink()
    (html,), _, query = SearchPage(ready(searcher), LIMITS).search(Asked("x", None, 6, ""))
    assert html.count("data:image/") == 6 and "picture:" not in html
    assert {hit.row["picture"][:2] for hit in query.found[0]} == {b"\xff\xd8"}


def test_only_a_joint_encoder_is_explained(page, monkeypatch):
    _, _, query = page.search(Asked("a red thing", None, 3, ""))
    assert "Only a joint encoder" in page.why(query, 0, 1)
    with monkeypatch.context() as patch:  # as an ONNX export of one
        patch.setitem(page.searchers[0].encoder.model.config.values, "model_type", "joint_encoder")
        assert "Only a joint encoder" in page.why(query, 0, 1)
    for rank in (None, 0, 4, "1", -1):
        assert "Search first" in page.why(query, 0, rank)
    assert "Search first" in page.why(None, 0, 1)


def test_the_code_searches(searcher, upload, monkeypatch, tmp_path, capsys):
    import conjoin

    monkeypatch.setattr(conjoin, "load_encoder", lambda model: searcher.encoder, raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png"):
        upload(name, png("blue"))
    for text, images in (
        ('it\'s "red"', []),
        (None, ["a.png"]),
        ("both", ["a.png"]),
        ("<image> <image>", ["a.png"] * 2),
    ):
        if len(images) < 2:  # the tiny model takes one image
            exec(compile(python_code(searcher.source, "model", text, images, 2, "price > 1"), "code", "exec"), {})
            assert len(capsys.readouterr().out.splitlines()) == 2
        else:
            compile(
                python_code(searcher.source, "model", text, images, 2, None, {"input_type": "avg"}), "code", "exec"
            )


def test_loading_may_fail_or_take_long():
    failed = Future()
    failed.set_exception(ValueError("the collection is damaged"))
    with pytest.raises(ValueError, match="the collection is damaged"):
        SearchPage(failed, LIMITS).describe()
    with pytest.raises(ValueError, match="one collection, or two side by side, got 3"):
        make_app(Future(), 3)


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

        with TestClient(make_app(ready(searcher), limits=LIMITS), base_url="http://127.0.0.1") as client:
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

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("path", ["ROW", "/etc/passwd", "https://example.org/a.png", "file:///etc/passwd"])
    def test_a_file_that_was_not_uploaded_is_not_read(self, client, searcher, path, place):
        """A browser sends the path of its upload, in the place of the images; any other path must be refused there
        and in the place of the text, before the file is copied.
        """
        target = _search_event(client)
        path = searcher.search(["x"], 1)[0][0].row["image"] if path == "ROW" else path
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        data = asked("x")
        data[place] = [{"image": file, "caption": None}] if place else file
        before = set(Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*"))
        completed = _send(client, target, data)
        assert not completed["success"], completed
        assert "id-" not in json.dumps(completed)
        assert set(Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*")) == before

    def test_an_upload_is_searched(self, client):
        path = client.post("/gradio_api/upload", files={"files": ("a.png", png(), "image/png")}).json()[0]
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        completed = _send(client, _search_event(client), asked("", [{"image": file, "caption": None}]))
        assert completed["success"]
        assert len(ids(completed["output"]["data"][0])) == 3

    def test_uploads_are_limited(self, client):
        small = client.post("/gradio_api/upload", files={"files": ("a.png", png(), "image/png")})
        assert small.status_code == 200
        large = client.post("/gradio_api/upload", files={"files": ("a.png", bytes(20_001), "image/png")})
        assert large.status_code == 413
        unbounded = client.post("/gradio_api/upload", content=b"", headers={"content-length": str(2**40)})
        assert unbounded.status_code == 413
