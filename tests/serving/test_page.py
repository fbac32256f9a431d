"""What the search page asks: rows listed, sorted, filtered and counted; rows alike; the page's own files."""

import datetime
import io
import re
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from conjoin.retrieval import Collection, encode_collection, open_collection
from conjoin.serving.searcher import Searcher
from tiny_encoder import tiny_encoder
from tiny_serving import COLOURS, LIMITS, png, uri

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from conjoin.serving.endpoint import make_endpoint
from conjoin.serving.page import Page


def client_of(searcher, **page):
    app = make_endpoint(searcher, page=Page(**page))
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(searcher):
    return client_of(searcher)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Twelve lamps and chairs in two pictures each, six of them without a date or a price."""
    rows = []
    for number in range(12):
        kept = {"product": f"p{number // 2}", "brand": f"b{number % 3}", "in_stock": number != 5, "stars": number}
        kept |= {"price": 1.5 * number, "added": f"2026-01-{number + 1:02d}"} if number < 6 else {}
        name = "lamp" if number < 8 else "chair"
        rows.append({"id": f"r{number}", "text": f"a {name} {number}", "metadata": kept})
    encoder, folder = tiny_encoder(), tmp_path_factory.mktemp("shop") / "garden_shop"
    return Searcher(encoder, encode_collection(rows, encoder, folder), LIMITS)


def ask(client, **body):
    answer = client.post("/search", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(answer):
    return [hit["id"] for hit in answer["results"][0]]


def test_rows_are_listed_sorted_and_in_pages(shop):
    client = client_of(shop)
    listed = ask(client, k=10)
    assert len(ids(listed)) == 10 and {hit["score"] for hit in listed["results"][0]} == {None}
    assert ids(listed) + ids(ask(client, k=10, offset=10)) == [f"r{n}" for n in range(12)]
    assert ids(ask(client, k=3, sort="-price")) == ["r5", "r4", "r3"]
    assert ids(ask(client, k=7, sort="price"))[:6] == [f"r{n}" for n in range(6)], "rows without a value come last"
    assert ids(ask(client, k=2, sort="-added")) == ["r5", "r4"]
    assert ids(ask(client, k=9, group_by="product")) == [f"r{n}" for n in range(0, 12, 2)]
    assert ids(ask(client, k=9, group_by="product", sort="-price"))[:3] == ["r5", "r3", "r1"], "the first of each"


def test_a_column_sorts_the_best_results_of_a_query(shop):
    client = client_of(shop)
    found = ask(client, items="a lamp", k=10, sort="-price", min_score=-1, facets=[])
    assert ids(found)[:6] == [f"r{n}" for n in range(5, -1, -1)] and found["results"][0][0]["score"] is not None
    assert ids(ask(client, items="a lamp", k=4, offset=4, sort="-price"))[:2] == ["r1", "r0"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"filters": {"brand": ["b0", "b1"]}}, {0, 1, 3, 4, 6, 7, 9, 10}),
        ({"filters": {"price": {"least": 1.5, "most": 4.5}}}, {1, 2, 3}),
        ({"filters": {"price": {"most": 3}, "brand": ["b0"]}}, {0}),
        ({"filters": {"stars": {"least": 1.5, "most": 3}}}, {2, 3}),
        ({"filters": {"stars": [2, 4.0]}}, {2, 4}),
        ({"filters": {"in_stock": [False]}}, {5}),
        ({"filters": {"added": {"least": "2026-01-05"}}}, {4, 5}),
        ({"filters": {"brand": ["b0' or 1 = 1 --"]}}, set()),
        ({"where": "price > 3 and brand = 'b0'"}, {3}),
        ({"where": "price > 3", "filters": {"brand": ["b0", "b1"]}}, {3, 4}),
        ({"kind": "text"}, {*range(12)}),
        ({"kind": "both"}, set()),
        ({"items": {"text": "a lamp"}, "filters": {"in_stock": [False]}}, {5}),
    ],
)
def test_filters(shop, body, found):
    answer = ask(client_of(shop), k=10, facets=[], **body)
    rest = ids(ask(client_of(shop), k=10, offset=10, **body))
    assert {*ids(answer), *rest} == {f"r{number}" for number in found} and answer["total"] == len(found)


def test_values_are_counted_without_their_own_filter(shop):
    client = client_of(shop)
    facets = ask(client, filters={"brand": ["b0"]}, facets=["brand", "in_stock", "price", "added"])["facets"]
    assert facets["brand"] == {"values": [["b0", 4], ["b1", 4], ["b2", 4]], "rows": 12}
    assert facets["in_stock"] == {"values": [[True, 4]], "rows": 4}
    assert facets["price"] == {"least": 0, "most": 4.5, "rows": 4}
    grouped = ask(client, group_by="product", facets=["brand"])
    assert grouped["total"] == 6 and grouped["facets"]["brand"]["values"] == [["b0", 4], ["b1", 4], ["b2", 4]]
    assert ask(client, filters={"brand": ["b0"]}, kind="text", facets=[])["kinds"] == {"text": 4}


def test_with_a_least_score_the_rows_that_reach_it_are_counted(shop):
    client = client_of(shop)
    scores = {hit["id"]: hit["score"] for hit in ask(client, items="chair 9", k=10)["results"][0]}
    least = sorted(scores.values())[-3]
    found = {id_ for id_, score in scores.items() if score >= least}
    how = {"items": "chair 9", "min_score": least, "k": 10, "facets": ["brand"]}
    answer = ask(client, **how)
    assert {*ids(answer)} == found and answer["total"] == len(found)
    assert sum(count for _, count in answer["facets"]["brand"]["values"]) == len(found)
    narrow = ask(client, filters={"brand": ["b0"]}, **how)
    assert narrow["total"] == len(ids(narrow)) == dict(answer["facets"]["brand"]["values"]).get("b0", 0)
    assert ask(client, items="chair", min_score=3, facets=[])["total"] == 0


def test_rows_like_a_row(client, searcher):
    alike = ask(client, items={"id": "id-blue"}, k=10, facets=[])
    assert "id-blue" not in ids(alike) and alike["total"] == len(COLOURS) - 1
    text = ask(client, items={"id": "id-blue", "part": "text"}, k=10)
    assert ids(text) == [id_ for id_ in ids(ask(client, items="a blue thing", k=10)) if id_ != "id-blue"]
    data = client.get("/pictures/id-blue").content
    image = ask(client, items={"id": "id-blue", "part": "image"}, k=10)
    assert ids(image) == [id_ for id_ in ids(ask(client, items={"image": uri(data)}, k=10)) if id_ != "id-blue"]
    grouped = ask(client, items={"id": "id-blue"}, group_by="kind")
    assert [hit["row"]["kind"] for hit in grouped["results"][0]] == ["<b>warm</b>"], "no other row of its group"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"sort": "colour"}, "no column 'colour'"),
        ({"sort": "image"}, "the column 'image' holds list"),
        ({"facets": ["image"]}, "the column 'image' holds list"),
        ({"items": "a", "sort": "-image"}, "the column 'image' holds list"),
        ({"facets": ["colour"]}, "no column 'colour'"),
        ({"filters": {"colour": ["a"]}}, "no column 'colour'"),
        ({"filters": {"kind": []}}, "the filter of 'kind' has no values"),
        ({"filters": {"price": {}}}, "the filter of 'price' has no values"),
        ({"filters": {"price": {"over": 1}}}, "filters.price"),
        ({"items": ["a", "b"], "facets": []}, "facets count the rows for one query"),
        ({"items": {"id": "gone"}}, "item 0: the collection has no row 'gone'"),
        ({"items": {"id": "id-blue", "text": "a"}}, "expected an id, with or without its part"),
        ({"items": {"text": "a", "part": "text"}}, "expected an id, with or without its part"),
        ({"where": "price <"}, "cannot be evaluated"),
        ({"where": "repeat(text, 300) = 'a'"}, "the condition calls 'repeat'"),
    ],
)
def test_bad_fields_of_a_search_are_named(client, body, problem):
    answer = client.post("/search", json=body)
    assert answer.status_code == 422 and problem in answer.json()["error"]["message"]


def test_what_the_page_shows(shop, searcher):
    page = client_of(shop, currency="EUR", group_by="product").get("/page.json").json()
    assert (page["heading"], page["price"], page["currency"]) == ("Garden shop", "price", "EUR")
    kinds = {"price": "number", "stars": "number", "added": "date", "brand": "choice", "in_stock": "choice"}
    assert page["columns"] == kinds
    assert (page["show"], page["sides"][0]["rows"], page["explains"]) == (["brand", "in_stock"], 12, [False])
    named = client_of(searcher, heading="Colours", show=["price"], beside=searcher)
    both = named.get("/page.json").json()
    assert (both["heading"], both["show"], len(both["sides"])) == ("Colours", ["price"], 2)
    body = {"items": "a red thing", "k": 3}
    assert named.post("/beside/search", json=body).json() == named.post("/search", json=body).json()


def test_the_page_is_static_and_loads_nothing_from_elsewhere(client):
    for path, kind in {"/": "text/html", "/page.js": "javascript", "/page.css": "text/css"}.items():
        answer = client.get(path)
        assert answer.status_code == 200 and kind in answer.headers["content-type"]
        assert (
            not re.search("https?:|url\\(|@import", answer.text)
            and "default-src 'none'" in answer.headers["content-security-policy"]
        )
        assert "unsafe" not in answer.headers["content-security-policy"]
    for path in ("/page.py", "/../pyproject.toml", "/page.html", "/pictures/..%2f..%2fetc%2fpasswd"):
        assert client.get(path).status_code == 404, path


def test_a_published_state_is_shown_without_a_restart(tmp_path):
    encoder = tiny_encoder()
    rows = [{"id": f"r{n}", "text": f"row {n}", "metadata": {"kind": "ab"[n % 2]}} for n in range(4)]
    one = Searcher(encoder, encode_collection(rows[:3], encoder, tmp_path / "c"), LIMITS)
    client = client_of(one)
    assert client.get("/page.json").json()["columns"] == {"kind": "choice"}
    rows = [row | {"metadata": row["metadata"] | {"day": datetime.date(2026, 1, 1)}} for row in rows]
    encode_collection(rows, encoder, tmp_path / "c")
    assert ask(client, facets=[])["total"] == 3 and one.refresh()
    assert ask(client, facets=[])["total"] == 4
    assert client.get("/page.json").json()["columns"] == {"kind": "choice", "day": "date"}


def test_pictures_that_the_collection_keeps_are_named(tmp_path):
    encoder = tiny_encoder()
    rows = Dataset.from_dict({"id": ["a", "b"], "image": [Image.new("RGB", (9, 9), "red"), None], "text": ["x", "y"]})
    encode_collection(rows, encoder, tmp_path / "c", keep_pictures=4)
    client = client_of(Searcher(encoder, open_collection(tmp_path / "c"), LIMITS))
    assert {hit["id"]: hit["row"].get("image") for hit in ask(client)["results"][0]} == {"a": "/pictures/a", "b": None}
    assert Image.open(io.BytesIO(client.get("/pictures/a").content)).size == (4, 4)


def test_a_column_of_many_values_is_a_choice_where_they_repeat(tmp_path):
    encoder = tiny_encoder()
    kept = [{"brand": f"brand {n % 50}", "sku": f"sku {n}", "note": "x" * 61, "one": "a"} for n in range(100)]
    rows = [{"id": str(n), "text": f"row {n}", "metadata": each} for n, each in enumerate(kept)]
    searcher = Searcher(encoder, encode_collection(rows, encoder, tmp_path / "c"), LIMITS)
    assert searcher.columns.kinds == {"brand": "choice", "one": "choice"}
    brands = ask(client_of(searcher), facets=["brand"])["facets"]["brand"]["values"]
    assert len(brands) == 50 and brands[0] == ["brand 0", 2]
    assert Collection(tmp_path / "c").version == searcher.collection.version


def test_a_picture_that_is_gone(make_searcher):
    searcher = make_searcher()
    client = client_of(searcher)
    Path(searcher.collection.rows(["id-red"])[0]["image"]).unlink()
    assert client.get("/pictures/id-red").status_code == 404
    gone = client.post("/search", json={"items": {"id": "id-red", "part": "image"}})
    assert gone.status_code == 422 and "item 0" in gone.json()["error"]["message"]
    assert client.post("/search", json={"items": {"image": uri(png("red"))}}).status_code == 200
