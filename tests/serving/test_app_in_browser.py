"""The app in a real browser, headless. Set CONJOIN_SCREENSHOTS to a folder to keep what it looks like."""

import json
import os
import shutil
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from conjoin.serving.app import PageOptions, make_app
from conjoin.serving.http import run_server
from tiny_serving import LIMITS, asked, png

pytest.importorskip("gradio", minversion="6")
sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]
SECONDS = 90
COUNT = "count => document.querySelectorAll('#results-0 .cj-card').length === count"


@pytest.fixture(scope="module")
def loading():
    """The searchers of the app, when they are loaded."""
    return Future()


@pytest.fixture(scope="module")
def url(loading):
    """The address of the running app."""
    started = Future()
    app = make_app(loading, limits=LIMITS, options=PageOptions(k=5))
    thread = threading.Thread(
        target=run_server, args=(app, "127.0.0.1", 0, lambda *given: started.set_result(given)), daemon=True
    )
    thread.start()
    address, stop = started.result(SECONDS)
    yield address
    stop()
    thread.join(SECONDS)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Gradio's client loses an event that is sent while the stream of the one before closes: wait, as a person does
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], slow_mo=250)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, url, loading, searcher):
    """The page, and in `page.outside` what it wanted from elsewhere."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1000 * SECONDS)
    page.outside, page.problems = [], []
    page.on(
        "request",
        lambda request: None if request.url.startswith((url, "data:", "blob:")) else page.outside.append(request.url),
    )
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(url)
    page.get_by_text("The model is being loaded").wait_for()
    page.get_by_label("Text", exact=True).fill("a thing")
    with page.expect_request("**/queue/join**"):
        page.keyboard.press("Enter")  # before the page knows the collection
    loading.set_result([searcher])
    page.get_by_text("6 rows").wait_for()
    page.locator("#results-0 button.cj-card").first.wait_for()
    page.get_by_role("button", name="Clear all").click()
    page.get_by_text("Write a text, add an image").wait_for()
    return page


@pytest.fixture
def keep(page, tmp_path):
    """`keep(name)` keeps a screenshot."""
    folder = Path(os.environ.get("CONJOIN_SCREENSHOTS") or tmp_path)

    def take(name):
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return take


def results(page):
    return page.locator("#results-0 button.cj-card")


def test_products_at_first_chips_and_sliders(page, keep):
    rows = page.locator("#results-0 .cj-card")
    assert rows.count() == 5 and results(page).count() == 0
    keep("first")
    page.locator("#chips").get_by_text("cold").click()
    page.wait_for_function(COUNT, arg=4)
    page.get_by_label("number input for price to").fill("3")
    page.get_by_label("number input for price to").press("Enter")
    page.wait_for_function(COUNT, arg=2)
    keep("chips")
    page.get_by_label("Text", exact=True).fill("a thing")
    page.keyboard.press("Enter")
    results(page).nth(1).wait_for()
    assert rows.count() == 2
    page.get_by_role("button", name="Clear all").click()
    page.wait_for_function(COUNT, arg=5)
    assert results(page).count() == 0 and page.get_by_label("number input for price to").input_value() == "5"


def test_weights_and_a_least_score(page, keep):
    page.get_by_role("button", name="Ranking").click()
    page.get_by_label("Weight of the image").fill("1")
    page.get_by_label("Text", exact=True).fill("a thing")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("alert").get_by_text("Its text has no weight").wait_for()
    page.get_by_label("Weight of the image").fill("")
    page.get_by_label("Least score").fill("2")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_text("Nothing similar was found").wait_for()
    keep("least-score")
    page.get_by_role("button", name="Clear all").click()
    page.wait_for_function(COUNT, arg=5)
    assert page.get_by_label("Least score").input_value() == ""


def test_search_by_text_and_keyboard(page, keep):
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.type("a red thing")
    page.keyboard.press("Enter")
    results(page).nth(4).wait_for()
    assert results(page).count() == 5
    assert "Result 1, score" in results(page).first.get_attribute("aria-label")
    keep("text")
    results(page).first.focus()
    page.keyboard.press("Enter")
    page.get_by_text("Only a joint encoder").wait_for()
    keep("why")


def test_search_by_upload_and_bad_upload(page, keep, tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    (tmp_path / "broken.png").write_bytes(b"this is no image")
    page.get_by_role("button", name="Clear all").click()
    page.get_by_text("Write a text, add an image").wait_for()
    page.locator("#images input[type=file]").set_input_files(tmp_path / "blue.png")
    page.locator("#images img").first.wait_for()
    page.get_by_role("button", name="Search", exact=True).click()
    results(page).nth(4).wait_for()
    keep("upload")
    page.get_by_role("button", name="Clear all").click()
    page.get_by_text("Write a text, add an image").wait_for()
    page.locator("#images input[type=file]").set_input_files(tmp_path / "broken.png")
    page.locator("#images img").first.wait_for(state="attached")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("alert").get_by_text("this is no image").wait_for()
    keep("bad-upload")


def test_a_filter_and_a_bad_one(page, keep):
    page.get_by_role("button", name="Clear all").click()
    page.get_by_text("Write a text, add an image").wait_for()
    page.get_by_role("button", name="Filter").click()
    page.get_by_label("Condition").fill("price > 3")
    page.get_by_label("Text", exact=True).fill("a thing")
    page.get_by_role("button", name="Search", exact=True).click()
    page.wait_for_function("() => document.querySelectorAll('#results-0 button.cj-card').length === 2")
    keep("filter")
    page.get_by_label("Condition").fill("price >")
    page.get_by_label("Condition").press("Enter")
    page.get_by_role("alert").get_by_text("cannot be evaluated").wait_for()
    keep("bad-filter")
    page.get_by_label("Condition").fill("")


def test_fifty_quick_queries(page, keep):
    """The last one wins, whatever overtook it."""
    page.get_by_role("button", name="Clear all").click()
    page.get_by_text("Write a text, add an image").wait_for()
    for number in range(50):
        page.get_by_label("Text", exact=True).fill(f"query {number}")
        page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy as Python").click()
    page.get_by_text("query 49").wait_for()
    results(page).nth(4).wait_for()
    keep("fifty-queries")


def test_twenty_visitors_at_once(url):
    """Twenty sessions search at one time, by the requests that the page sends."""
    with urllib.request.urlopen(f"{url}/config", timeout=SECONDS) as answer:
        target = next(event["id"] for event in json.load(answer)["dependencies"] if len(event["inputs"]) > 4)

    def visit(number):
        body = json.dumps(
            {"data": asked(f"a thing {number}", k=5), "fn_index": target, "session_hash": f"visitor{number}"}
        ).encode()
        join = urllib.request.Request(f"{url}/gradio_api/queue/join", body, {"content-type": "application/json"})
        urllib.request.urlopen(join, timeout=SECONDS).close()
        with urllib.request.urlopen(
            f"{url}/gradio_api/queue/data?session_hash=visitor{number}", timeout=SECONDS
        ) as data:
            return next(line for line in map(bytes.decode, data) if "process_completed" in line)

    with ThreadPoolExecutor(20) as pool:
        for number, answer in enumerate(pool.map(visit, range(20))):
            assert f"a thing {number}'" in answer  # the code of its own query
            assert answer.count("data-rank") == 5


def test_nothing_came_from_elsewhere_and_nothing_failed(page):
    assert page.outside == []
    assert page.problems == []
