import asyncio
import datetime
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from PIL import Image

from conjoin.retrieval import Collection, encode_collection, open_collection
from conjoin.retrieval.words import WordQuery
from conjoin.serving.endpoint import make_endpoint
from conjoin.serving.http import Gate
from conjoin.serving.searcher import Searcher
from tiny_encoder import tiny_encoder
from tiny_serving import COLOURS, LIMITS, png, uri


@pytest.fixture(scope="module")
def client(searcher):
    app = make_endpoint(searcher)
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_embeddings_are_those_of_the_model(client, searcher):
    items = ["a red thing", {"image": uri(png("red"))}, {"image": uri(png("blue")), "text": "both"}]
    answer = client.post("/embed", json={"items": items}).json()
    vectors = np.array(answer["embeddings"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], searcher.encoder.encode([{"text": "a red thing"}])[0], atol=1e-6)
    assert answer["fingerprint"] == searcher.encoder.fingerprint


def test_search_by_text_image_and_both(client):
    queries = [{"image": uri(png("blue")), "text": "a blue thing"}, {"image": uri(png("purple"))}]
    first, second = client.post("/search", json={"items": queries, "k": 2}).json()["results"]
    assert first[0]["score"] >= first[1]["score"]
    assert second[0]["row"]["text"].startswith("a ")
    everything = client.post("/search", json={"items": ["x"], "k": 5, "where": "price >= 4"}).json()["results"][0]
    assert {hit["id"] for hit in everything} == {"id-purple", "id-white"}


def test_concurrent_requests_get_their_own_answers(client):
    def ask(colour):
        items = [{"image": uri(png(colour)), "text": f"a {colour} thing"}]
        return client.post("/embed", json={"items": items}).json()["embeddings"][0]

    colours = [COLOURS[number % len(COLOURS)] for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(ask, colours))
    for colour, vector in zip(colours, together, strict=True):
        np.testing.assert_allclose(vector, ask(colour), atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "item", "problem"),
    [
        ("/embed", {"items": []}, 422, None, "0 items; expected 1 to 4"),
        ("/embed", {"items": 7}, 422, None, "items: "),
        ("/embed", {}, 422, None, "items: Field required"),
        ("/embed", {"items": ["a"], "extra": 1}, 422, None, "extra: "),
        ("/embed", {"items": ["a", 7]}, 422, 1, "items.1: "),
        ("/embed", {"items": [None]}, 422, 0, "items.0: "),
        ("/embed", {"items": [{"text": "a", "path": "/etc/passwd"}]}, 422, 0, "items.0.path: Extra inputs"),
        ("/embed", {"items": [{"text": 5}]}, 422, 0, "items.0.text: "),
        ("/embed", {"items": [{"image": {"path": "/etc/passwd"}}]}, 422, 0, "items.0.image: "),
        ("/embed", {"items": ["a", {"image": "/etc/passwd"}]}, 422, 1, "files are not opened"),
        (
            "/embed",
            {"items": ["a", {"image": [uri(png()), uri(png()[:45])]}]},
            422,
            1,
            "item 1: image 'image 1': cannot read",
        ),
        ("/embed", {"items": ["a"], "prompt": "b" * 201}, 422, None, "the prompt has 201 characters"),
        ("/search", {"items": ["a"], "k": 11}, 422, None, "k must be an integer from 1 to 10, got 11"),
        ("/search", {"items": ["a"], "offset": 9_999}, 422, None, "offset + k must be at most 10,000"),
        ("/search", {"items": ["a"], "ranking": "best"}, 422, None, "ranking: Input should be 'default'"),
        ("/search", {"items": ["a"], "where": "length(repeat(text, 9)) > 1"}, 422, None, "calls 'repeat'"),
        ("/search", {"items": ["a"], "where": "colour = 'red'"}, 422, None, "No field named colour"),
        ("/search", {"items": ["a"], "where": "true) or (true", "kind": "text"}, 422, None, "did not open"),
        ("/search", {"where": "true) or (true", "filters": {"price": [1]}, "facets": []}, 422, None, "did not open"),
        ("/search", {"items": ["a"], "group_by": "colour"}, 422, None, "the collection has no column 'colour'"),
        ("/search", {"items": ["a"], "weights": {"image": 1}}, 422, None, "item 0: its text has no weight"),
        ("/search", {"items": ["a"], "weights": {"title": 1}}, 422, None, "weights.title"),
        ("/search", {"items": ["a"], "min_score": "high"}, 422, None, "min_score"),
        (
            "/search",
            {"items": ["a", {"text": "b", "image": uri(png()[:45])}], "weights": {"image": 1, "text": 1}},
            422,
            1,
            "item 1: image 'the image': cannot read",
        ),
        ("/embed", {"items": [{"image": uri(png(size=(100, 100)))}] * 4}, 413, None, "have 40,000 pixels"),
        ("/nothing", {}, 404, None, "Not Found"),
    ],
)
def test_errors_are_json_that_names_the_item(client, path, body, status, item, problem):
    answer = client.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert problem in error["message"]
    assert error["item"] == item


def test_a_search_ranks_by_weights_groups_and_a_least_score(client, searcher):
    def ask(**asked):
        items = [{"text": "a red thing", "image": uri(png("blue"))}, "a thing"]
        return client.post("/search", json={"items": items, "k": 6, **asked}).json()["results"]

    image, text = searcher.encode([{"image": Image.new("RGB", (8, 8), "blue")}, {"text": "a red thing"}])
    query = 0.25 * image + 0.75 * text
    words = [WordQuery("a red thing", 0.75)]
    scores = searcher.collection.rank(query[None] / np.linalg.norm(query), 6, words=words).scores[0]
    weighed = ask(weights={"image": 0.25, "text": 0.75})
    np.testing.assert_allclose([hit["score"] for hit in weighed[0]], scores, atol=1e-5)
    assert weighed[1] == ask()[1]  # of one part
    (best, _), (other, _) = ask(group_by="kind")
    assert best == ask()[0][0] and other == ask()[1][0]
    least = weighed[0][2]["score"]
    assert ask(weights={"image": 0.25, "text": 0.75}, min_score=least)[0] == weighed[0][:3]
    assert ask(min_score=2.1) == [[], []]
    assert ask(kind="image") == ask() and ask(kind="text") == [[], []]


def test_words_are_searched_too_and_results_come_in_pages(client):
    def ask(**asked):
        answer = client.post("/search", json={"items": ["yellow", {"image": uri(png("blue"))}], "k": 2, **asked})
        return answer.json()["results"]

    words, picture = ask()
    assert words[0]["id"] == "id-yellow" and words[0]["score"] > 1, "a score of both"
    assert ask(min_score=-1) == ask() != ask(ranking="vectors"), "without words"
    assert picture == ask(ranking="vectors")[1]
    pages = [hit for offset in (0, 2, 4, 6) for hit in ask(offset=offset)[0]]
    assert len(pages) == 6 and pages == ask(k=6)[0]
    grouped = [ask(group_by="kind", k=1, offset=offset)[0][0] for offset in (0, 1)]
    assert grouped == ask(group_by="kind")[0]


def test_bodies_are_limited(searcher):
    client = TestClient(
        make_endpoint(Searcher(searcher.encoder, searcher.collection, LIMITS.__class__(body_bytes=1000))),
        base_url="http://127.0.0.1",
    )
    small, large = json.dumps({"items": ["a"]}).encode(), json.dumps({"items": ["a" * 2000]}).encode()
    kind = {"content-type": "application/json"}
    assert client.post("/embed", content=small, headers=kind).status_code == 200
    assert client.post("/embed", content=large, headers=kind).status_code == 413
    unsaid = client.post("/embed", content=iter([large[:900], large[900:]]), headers=kind)
    assert unsaid.status_code == 413
    assert unsaid.json()["error"]["message"] == "the request has over 1,000 bytes, the limit"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [1] * 10**5}),
        ("/embed", {"items": [[]] * 10**5}),
        ("/embed", {"items": ["a"], **{f"key {number}": 1 for number in range(10**5)}}),
        ("/search", {"items": ["a"], "weights": {f"key {number}": 1 for number in range(10**5)}}),
        ("/embed", {"items": ['"'] * 10**5}),
    ],
)
def test_a_body_of_many_small_parts_is_refused_before_it_is_parsed(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the JSON has over 2,048 bytes besides its strings, the limit"


def test_a_body_is_small_whatever_its_strings_hold(client):
    text = '[{"\\":1,"' * 20
    assert client.post("/embed", json={"items": [text, {"text": text, "image": uri(png())}]}).status_code == 200


# In UTF-16 the second character has the byte of a quote, which would hide what follows from the count.
UTF_16 = json.dumps({"items": ["a\u2230"] * 9}, ensure_ascii=False).encode("utf-16")


@pytest.mark.parametrize(
    ("body", "status"), [(b"", 422), (b"{", 422), (b"nul", 422), (b"[" * 5000, 413), (b"\xff\xfe", 422), (UTF_16, 422)]
)
def test_malformed_bodies_are_refused(client, body, status):
    answer = client.post("/embed", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize("memory", [0, 10**9])
def test_concurrent_searches_get_their_own_results(searcher, memory):
    shared = Searcher(searcher.encoder, open_collection(searcher.source, memory=memory), LIMITS)

    def ask(number):
        (hits,) = shared.search([f"a {COLOURS[number % 6]} thing"], 3, where=f"price >= {number % 4}", pictures=True)
        return hits

    expected = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        for _ in range(5):
            assert list(pool.map(ask, range(12))) == expected


def test_values_that_json_cannot_hold(searcher, tmp_path):
    kept = {"day": datetime.date(2026, 1, 2), "size": float("nan"), "odd name": [1, 2], "not": True, "raw": b"x"}
    encode_collection([{"id": "a", "text": "a", "metadata": kept}], searcher.encoder, tmp_path / "c", keep_pictures=9)
    one = Searcher(searcher.encoder, open_collection(tmp_path / "c"), LIMITS)
    client = TestClient(make_endpoint(one), base_url="http://127.0.0.1")
    found = client.post("/search", json={"items": ["a"], "where": "`not` and day > date '2025-01-01'"}).json()
    row = found["results"][0][0]["row"]
    assert (row["day"], row.get("size"), row["odd name"], row["raw"]) == ("2026-01-02", None, [1, 2], "eA==")
    assert client.get("/health").json()["columns"][-4:] == ["day", "odd name", "not", "raw"]


def test_health_and_reference_need_no_network(client):
    health = client.get("/health").json()
    assert (health["status"], health["rows"], health["dimension"]) == ("ok", len(COLOURS), 8)
    assert "price" in health["columns"]
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/embed", "/search", "/explain", "/health", "/ready", "/v1/embeddings", "/v1/models", "/pictures/{row}",
    }  # fmt: skip
    page = client.get("/docs")
    assert "POST /search" in page.text
    assert "src=" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_other_names_of_this_machine_are_refused(client):
    refused = client.get("/health", headers={"host": "evil.example:8000"})
    assert refused.status_code == 400 and "not as 'evil.example'" in refused.json()["error"]["message"]
    for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
        assert client.get("/health", headers={"host": host}).status_code == 200, host


def test_a_request_that_says_twice_how_long_it_is_is_refused(client):
    headers = [("content-length", "15"), ("transfer-encoding", "chunked"), ("content-type", "application/json")]
    answer = client.post("/embed", content=b'{"items":["a"]}', headers=headers)
    assert answer.status_code == 400 and "twice" in answer.json()["error"]["message"]


def test_a_failure_of_the_model_shows_nothing_of_it(searcher, monkeypatch):
    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1", raise_server_exceptions=False)
    monkeypatch.setattr(searcher.batcher, "encode", lambda *args: 1 / 0)
    answer = client.post("/embed", json={"items": ["a"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the server failed; its log says why")


def test_without_a_collection_there_is_only_embed():
    client = TestClient(make_endpoint(Searcher(tiny_encoder(), None, LIMITS)), base_url="http://127.0.0.1")
    assert len(client.post("/embed", json={"items": ["a"]}).json()["embeddings"]) == 1
    assert client.get("/health").json()["rows"] is None
    answer = client.post("/search", json={"items": ["a"]})
    assert "there is no collection to search" in answer.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{"authorization": "Bearer secret"}, {"x-api-key": "secret"}])
def test_keys(searcher, headers):
    client = TestClient(make_endpoint(searcher, keys=["other", "secret"]), base_url="http://127.0.0.1")
    for path in ("/health", "/docs", "/openapi.json", "/pictures/id-red", "/metrics"):
        refused = client.get(path)
        assert refused.status_code == 401 and client.get(path, headers=headers).status_code == 200, path
    both = {"authorization": "Bearer wrong", "x-api-key": "secret"}
    basic = {"authorization": "Basic c2VjcmV0"}
    for wrong in (
        {},
        {"authorization": "Bearer secre"},
        {"x-api-key": ""},
        basic,
        both,
        {"x-api-key": "sécret".encode()},
    ):
        answer = client.post("/embed", json={"items": ["a"]}, headers=wrong)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert "a key is needed" in answer.json()["error"]["message"]
    assert client.post("/embed", json={"items": ["a"]}, headers=headers).status_code == 200
    assert client.get("/ready").json() == {"status": "ready"}
    with pytest.raises(ValueError, match=r"the key sé1\.\.\. has letters outside ASCII"):
        make_endpoint(searcher, keys=["fine", "sé1234"])


def test_pages_of_allowed_sites_may_read_the_answers(searcher):
    app = make_endpoint(searcher, origins=["https://shop.example"])
    client = TestClient(app, base_url="http://127.0.0.1")
    for origin, allowed in (("https://shop.example", "https://shop.example"), ("https://evil.example", None)):
        answer = client.get("/health", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_results_name_pictures_by_their_address(client):
    hit = client.post("/search", json={"items": ["a red thing"], "k": 1}).json()["results"][0][0]
    assert hit["row"]["image"] == f"/pictures/{hit['id']}"
    answer = client.get(hit["row"]["image"])
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (8, 8)
    assert client.get("/pictures/nothing").status_code == 404


def test_a_picture_outside_of_the_collection_is_not_served(client, monkeypatch):
    monkeypatch.delenv("CONJOIN_ROOTS")
    assert client.get("/pictures/id-red").status_code == 404


def test_metrics(searcher):
    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1")
    client.post("/embed", json={"items": ["a"]})
    text = client.get("/metrics").text
    assert "conjoin_waiting_items 0.0" in text
    assert 'http_requests_total{handler="/embed",method="POST",status="2xx"} 1.0' in text


def test_a_new_version_is_served_by_the_searches_after_it(searcher, tmp_path, monkeypatch):
    rows = [{"id": f"id {number}", "text": f"text {number}"} for number in range(3)]
    encode_collection(rows, searcher.encoder, tmp_path / "c")
    one = Searcher(searcher.encoder, open_collection(tmp_path / "c"), LIMITS)
    client = TestClient(make_endpoint(one), base_url="http://127.0.0.1")
    assert (client.get("/health").json()["rows"], one.refresh()) == (3, False)
    before = one.collection
    Collection(tmp_path / "c").remove(["id 1"])
    assert client.get("/health").json()["rows"] == 3
    assert one.refresh()
    assert client.get("/health").json()["rows"] == 2
    assert [hit["id"] for hit in client.post("/search", json={"items": ["x"]}).json()["results"][0]] != ["id 1"]
    assert len(before.rows(["id 1"])) == 1, "searches that began go on in the version before"
    encode_collection(rows, tiny_encoder(9), tmp_path / "other")
    other = open_collection(tmp_path / "other")
    monkeypatch.setattr("conjoin.serving.searcher.open_collection", lambda *args, **options: other)
    Collection(tmp_path / "c").remove(["id 2"])
    with pytest.raises(ValueError, match="was made with model"):
        one.refresh()
    assert client.get("/health").json()["rows"] == 2


def test_health_and_readiness_do_not_wait_for_workers(searcher, monkeypatch):
    """More requests than threads wait for the model: what asks for the state is answered at once."""
    held = Searcher(searcher.encoder, searcher.collection, replace(LIMITS, requests=51))
    go = threading.Event()
    monkeypatch.setattr(held.batcher, "encode", lambda items, *args: go.wait(60) and searcher.encode(items))
    with TestClient(make_endpoint(held), base_url="http://127.0.0.1") as client, ThreadPoolExecutor(51) as pool:
        asked = [pool.submit(client.post, "/embed", json={"items": ["a"]}) for _ in range(50)]
        time.sleep(0.5)
        started = time.monotonic()
        assert client.get("/ready").status_code == client.get("/health").status_code == 200
        assert time.monotonic() - started < 20
        asked.append(pool.submit(client.post, "/embed", json={"items": ["a"]}))
        time.sleep(0.5)
        refused = client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["message"][:35]) == (
            503,
            "51 requests are being answered, the",
        )
        go.set()
        assert {request.result().status_code for request in asked} == {200}


JSON = [(b"content-type", b"application/json")]


async def through(gate, receive, headers=JSON, path="/search"):
    """The status of what a gate answers to a request; None for nothing."""
    statuses = []

    async def send(event):
        statuses.append(event.get("status"))

    await gate({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return statuses[0] if statuses else None


def sends(size):
    async def receive():
        return {"type": "http.request", "body": b'"' + b"a" * (size - 2) + b'"', "more_body": False}

    return receive


def test_bodies_in_flight_are_limited_together():
    async def run():
        go = asyncio.Event()

        async def answer(scope, receive, send):
            await receive()
            await go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        gate = Gate(answer, replace(LIMITS, held_bytes=1000), "0.0.0.0")
        alone = asyncio.create_task(through(gate, sends(1500)))
        await asyncio.sleep(0.1)
        assert await through(gate, sends(10)) == 503 and not alone.done()
        go.set()
        assert await alone == await through(gate, sends(10)) == 200
        assert gate.bytes == gate.requests == 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_slow_bodies_hold_nobody_up():
    async def run():
        async def answer(scope, receive, send):
            assert (await receive())["body"] == b'"aaaa"'
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def slow():
            await asyncio.sleep(0.1)
            return {"type": "http.request", "body": b'"', "more_body": True}

        gate = Gate(answer, replace(LIMITS, requests=2, body_seconds=1), "0.0.0.0")
        waiting = [asyncio.create_task(through(gate, slow)) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert await through(gate, sends(6)) == 200 and not any(each.done() for each in waiting)
        assert {*await asyncio.gather(*waiting)} == {408}
        assert gate.bytes == gate.requests == 0

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 401),
        ([*JSON, (b"x-api-key", b"other")], 401),
        ([(b"x-api-key", b"key"), (b"content-type", b"text/plain")], 415),
        ([(b"x-api-key", b"key")], 415),
        ([*JSON, (b"x-api-key", b"key"), (b"content-length", b"99999999999")], 413),
    ],
)
def test_a_request_is_refused_for_its_headers_before_its_body_is_read(headers, status):
    assert asyncio.run(through(Gate(None, LIMITS, "0.0.0.0", ["key"]), None, headers)) == status
