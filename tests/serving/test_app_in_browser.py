"""The app in a real browser, headless."""

import shutil
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import pytest

from conjoin.serving.app import Asked, make_app
from conjoin.serving.http import run_server
from tiny_serving import LIMITS, png

pytest.importorskip("gradio", minversion="6")
sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]
SECONDS = 60
COUNT = "count => document.querySelectorAll('#results-0 .cj-card').length === count"


@pytest.fixture(scope="module")
def url(searcher):
    """The address of the running app."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = make_app([searcher], limits=LIMITS, first=Asked(k=5))
    threading.Thread(target=run_server, args=(app, "127.0.0.1", port), daemon=True).start()
    for _ in range(10 * SECONDS):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}"):
            return f"http://127.0.0.1:{port}"
        time.sleep(0.1)
    raise TimeoutError("the app does not answer")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], slow_mo=250)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, url):
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
    page.get_by_text("6 rows").wait_for()
    page.wait_for_function(COUNT, arg=5)
    return page


def results(page):
    return page.locator("#results-0 button.cj-card")


def search(page, text, rest=1500):
    # Gradio's client loses an event that is sent while the stream of the one before closes.
    page.wait_for_timeout(rest)
    page.locator("#query textarea").fill(text)
    page.locator("#query textarea").press("Enter")


def unfold(page):
    if not page.get_by_label("Condition").is_visible():
        page.get_by_role("button", name="Filter and ranking").click()


def clear(page):
    unfold(page)
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="Clear all").click()
    page.get_by_text("Write a text, add images").wait_for()


def test_products_at_first_chips_and_numbers(page):
    rows = page.locator("#results-0 .cj-card")
    assert rows.count() == 5 and results(page).count() == 0
    page.locator("#chips").get_by_text("cold").click()
    page.wait_for_function(COUNT, arg=4)
    unfold(page)
    page.wait_for_timeout(1500)
    page.get_by_label("price to").fill("3")
    page.get_by_label("price to").press("Enter")
    page.wait_for_function(COUNT, arg=2)
    search(page, "a thing")
    results(page).nth(1).wait_for()
    assert rows.count() == 2
    clear(page)
    page.wait_for_function(COUNT, arg=5)
    assert results(page).count() == 0 and page.get_by_label("price to").input_value() == ""


def test_weights_and_a_least_score(page):
    unfold(page)
    page.get_by_label("Weight of the image").fill("1")
    search(page, "a thing")
    page.get_by_role("alert").get_by_text("Its text has no weight").wait_for()
    page.get_by_label("Weight of the image").fill("")
    page.wait_for_timeout(1500)
    page.get_by_label("Least score").fill("2")
    page.get_by_label("Least score").press("Enter")
    page.get_by_text("Nothing similar was found").wait_for()
    clear(page)
    page.wait_for_function(COUNT, arg=5)
    assert page.get_by_label("Least score").input_value() == ""


def test_search_by_keyboard_and_the_next_page(page):
    search(page, "a red thing")
    results(page).nth(4).wait_for()
    assert "Result 1, score" in results(page).first.get_attribute("aria-label")
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="Next").click()
    page.wait_for_function(COUNT, arg=1)
    assert "Result 6, score" in results(page).first.get_attribute("aria-label")
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="Previous").click()
    page.wait_for_function(COUNT, arg=5)
    page.wait_for_timeout(1500)
    results(page).first.focus()
    page.keyboard.press("Enter")
    page.get_by_text("Only a joint encoder").wait_for()


def test_search_by_upload_and_bad_upload(page, tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    (tmp_path / "broken.png").write_bytes(b"this is no image")
    for name, problem in (("blue.png", None), ("broken.png", "this is no image")):
        clear(page)
        page.locator("#query input[type=file]").set_input_files(tmp_path / name)
        page.locator("#query img").first.wait_for(state="attached")
        page.locator("#query textarea").press("Enter")
        results(page).nth(4).wait_for() if problem is None else page.get_by_role("alert").get_by_text(
            problem
        ).wait_for()


def test_a_filter_and_a_bad_one(page):
    clear(page)
    page.get_by_label("Condition").fill("price > 3")
    search(page, "a thing")
    page.wait_for_function(COUNT, arg=2)
    page.wait_for_timeout(1500)
    page.get_by_label("Condition").fill("price >")
    page.get_by_label("Condition").press("Enter")
    page.get_by_role("alert").get_by_text("cannot be evaluated").wait_for()
    page.get_by_label("Condition").fill("")


def test_quick_queries(page):
    """The last one wins, whatever overtook it."""
    clear(page)
    for number in range(15):
        search(page, f"query {number}", rest=0)
    page.get_by_role("button", name="Copy as Python").click()
    page.get_by_text("query 14").first.wait_for()
    results(page).nth(4).wait_for()


def test_results_stand_under_the_field_on_a_phone_and_a_link_leads_to_them(browser, url):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(url)
    page.wait_for_function(COUNT, arg=5)
    top = page.locator("#results-0 .cj-card").first.bounding_box()["y"]
    width = page.evaluate("document.documentElement.scrollWidth")
    assert top < 464 and width <= 390, "pictures fill nearly half of the first screen, and nothing is wider than it"
    skip = page.get_by_role("link", name="Skip to the results")
    skip.focus()
    skip.press("Enter")
    assert page.url.endswith("#results-0")
    page.close()


def test_nothing_came_from_elsewhere_and_nothing_failed(page):
    assert page.outside == []
    assert page.problems == []
