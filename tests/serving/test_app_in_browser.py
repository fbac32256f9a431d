"""The search page in a real browser, headless."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tiny_serving import png

pytest.importorskip("fastapi")

from conjoin.serving.endpoint import make_endpoint
from conjoin.serving.http import run_server
from conjoin.serving.page import Page

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
SECONDS = 60


@pytest.fixture(scope="module")
def url(searcher, make_searcher):
    """The address of the running page of two collections, four results a page."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    page = Page(heading="Colours", k=4, currency="EUR")
    app = make_endpoint(searcher, page=page)
    app.mount("/two", make_endpoint(searcher, page=Page(k=4, beside=make_searcher(1))))
    threading.Thread(target=run_server, args=(app, "127.0.0.1", port), daemon=True).start()
    for _ in range(10 * SECONDS):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}"):
            return f"http://127.0.0.1:{port}/"
        time.sleep(0.1)
    raise TimeoutError("the page does not answer")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url):
    """The page; nothing of it comes from elsewhere, and no script fails."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1000 * SECONDS)
    odd = []
    page.on("request", lambda sent: None if sent.url.startswith((url, "data:", "blob:")) else odd.append(sent.url))
    page.on("pageerror", lambda error: odd.append(str(error)))
    visit(page, url)
    yield page
    page.close()
    assert odd == []


def visit(page, address):
    page.goto(address)
    settle(page)


def settle(page):
    sync_api.expect(page.locator("#results")).to_have_attribute("aria-busy", "false", timeout=1000 * SECONDS)


def expect_cards(page, count):
    sync_api.expect(page.locator(".card")).to_have_count(count, timeout=1000 * SECONDS)


def names(page):
    settle(page)
    return page.locator(".side").first.locator(".name").all_text_contents()


def search(page, words):
    page.locator("#q").fill(words)
    page.locator("#q").press("Enter")
    sync_api.expect(page.locator("#heading")).to_contain_text(words, timeout=1000 * SECONDS)
    return names(page)


def status(page):
    settle(page)
    return page.locator("#status").text_content()


def test_the_catalogue_at_first_and_its_pages(page):
    assert page.title() == "Everything – Colours" and page.locator("h1").text_content() == "Colours"
    assert len(names(page)) == 4 and status(page) == "6 results · page 1 of 2"
    assert page.locator(".price").first.text_content() == "€0.00" and page.get_by_text("Previous").count() == 0
    assert page.locator(".card img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
    page.get_by_role("link", name="Next").click()
    page.wait_for_url("**page=2")
    assert len(names(page)) == 2 and page.get_by_text("Next").count() == 0
    page.go_back()
    expect_cards(page, 4)


def test_filters_sort_and_a_shared_address(page, browser):
    assert search(page, "a thing")
    page.get_by_role("checkbox", name="cold").check()
    page.get_by_label("Price to").fill("3")
    page.get_by_label("Price to").press("Tab")
    expect_cards(page, 2)
    page.locator("#sort").select_option("-price")
    page.wait_for_url("**sort=-price**")
    assert names(page) == ["a blue thing", "a green thing"] and "2 results" in status(page)
    shared = browser.new_page()
    visit(shared, page.url)
    assert names(shared) == names(page) and shared.get_by_role("checkbox", name="cold").is_checked()
    assert shared.locator("#q").input_value() == "a thing"
    shared.close()
    page.reload()
    assert names(page) == ["a blue thing", "a green thing"]
    page.get_by_role("link", name="Remove the filter Kind: cold").click()
    expect_cards(page, 4)
    page.get_by_role("checkbox", name="<b>warm</b>").check()
    expect_cards(page, 2)
    assert page.locator("#is-kind-0").evaluate("box => box === document.activeElement"), "the focus stays"


def test_an_empty_page_says_what_to_change(page, url):
    visit(page, f"{url}?q=a+thing&is.kind=cold&to.price=0")
    assert "Nothing was found." in page.locator(".nothing").text_content()
    visit(page, f"{url}?q=a+thing&is.kind=cold&from.price=1&to.price=0")
    assert page.locator(".nothing a").all_text_contents() == ["Remove “Price 1–0”: 4 results", "Remove all filters"], (
        "what finds nothing is no advice"
    )
    page.get_by_role("link", name="Remove “Price 1–0”: 4 results").click()
    expect_cards(page, 4)
    visit(page, f"{url}?q=a+thing&least=9")
    page.get_by_role("link", name="Show the nearest all the same").click()
    expect_cards(page, 4)


def test_more_like_this(page):
    first = names(page)[0]
    page.get_by_role("link", name=f"More like this: {first}").click()
    page.wait_for_url("**like=id-red**")
    assert first not in names(page) and page.locator("h2").text_content() == f"More like “{first}”"
    page.get_by_role("link", name="Picture", exact=True).click()
    page.wait_for_url("**part=image**")
    assert len(names(page)) == 4 and first not in names(page)


def test_pictures_are_chosen_dropped_and_pasted(page, tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    page.locator("#upload").set_input_files(tmp_path / "blue.png")
    page.get_by_text("Your picture", exact=True).wait_for()
    alone = names(page)
    search(page, "in green")
    page.reload()
    page.get_by_text("Your picture and “in green”", exact=True).wait_for()
    page.get_by_role("button", name="Remove blue.png").click()
    page.get_by_text("“in green”", exact=True).wait_for()
    for event, field in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.locator("#home").click()
        page.get_by_text("Everything", exact=True).wait_for()
        page.evaluate(
            """([kind, field, bytes]) => {
              const data = new DataTransfer(), sent = new Event(kind, {bubbles: true, cancelable: true});
              data.items.add(new File([new Uint8Array(bytes)], 'blue.png', {type: 'image/png'}));
              Object.defineProperty(sent, field, {value: data});
              document.body.dispatchEvent(sent);
            }""",
            [event, field, [*png("blue")]],
        )
        page.get_by_text("Your picture", exact=True).wait_for()
        assert names(page) == alone
    (tmp_path / "broken.png").write_bytes(b"this is no image")
    page.locator("#upload").set_input_files(tmp_path / "broken.png")
    page.get_by_role("alert").get_by_text("this is no image").wait_for()


def test_details_conditions_and_the_code(page, url):
    assert page.locator("#panel").is_hidden() and page.locator(".card dl").count() == 0
    search(page, "a thing")
    page.get_by_label("Details").check()
    page.locator(".card dl").first.wait_for()
    page.get_by_label("Condition (SQL)").fill("price > 3")
    page.get_by_role("button", name="Apply").click()
    expect_cards(page, 2)
    scores = page.locator(".card dl").all_text_contents()
    assert all("rank" in text and "score" in text for text in scores)
    assert page.get_by_role("button", name="Why this result").count() == 0, "this model explains nothing"
    code = page.locator("#code").text_content()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    request = urllib.request.Request(
        f"{url}search",
        json.dumps({"items": "a thing", "k": 4, "where": "price > 3"}).encode(),
        {"content-type": "application/json"},
    )
    hits = json.load(urllib.request.urlopen(request))["results"][0]
    assert ran.splitlines() == [f"{hit['score']} {hit['id']}" for hit in hits]
    page.get_by_label("Condition (SQL)").fill("price >")
    page.get_by_label("Condition (SQL)").press("Enter")
    page.get_by_role("alert").get_by_text("cannot be evaluated").wait_for()
    assert page.get_by_role("link", name="Remove the filter price >").is_visible()
    assert page.locator(".card").count() == 0


def test_the_last_of_quick_queries_wins(page):
    for number in range(15):
        page.locator("#q").fill(f"query {number}")
        page.locator("#q").press("Enter")
    page.get_by_text("“query 14”", exact=True).wait_for()
    assert "page 1 of 2" in status(page) and page.locator("#error").text_content() == ""


def test_what_is_being_typed_stays_while_results_arrive(page):
    page.route("**/search", lambda route: (page.wait_for_timeout(500), route.continue_()))
    page.get_by_role("checkbox", name="cold").check()
    page.get_by_label("Price to").focus()
    page.keyboard.type("1")
    sync_api.expect(page.locator("#status")).to_contain_text("4 results", timeout=1000 * SECONDS)
    assert "to.price" not in page.url
    page.keyboard.type("0")
    assert page.get_by_label("Price to").input_value() == "10", "text and focus stay"
    page.keyboard.press("Tab")
    page.wait_for_url("**to.price=10**")
    settle(page)
    page.go_back()
    page.wait_for_url("**is.kind=cold")
    settle(page)
    assert page.get_by_label("Price to").input_value() == ""


def test_what_is_typed_and_not_sent_is_not_lost(page):
    page.get_by_label("Details").check()
    page.get_by_label("Condition (SQL)").fill("price > 3")
    page.locator("#q").fill("a thing")
    page.get_by_role("checkbox", name="cold").check()
    page.get_by_text("“a thing”", exact=True).wait_for()
    assert "4 results" in status(page) and page.get_by_label("Condition (SQL)").input_value() == "price > 3"
    page.locator("#q").fill("another thing")
    page.get_by_role("link", name="Remove the filter Kind: cold").click()
    sync_api.expect(page.locator("#status")).to_contain_text("6 results", timeout=1000 * SECONDS)
    assert page.locator("#q").input_value() == "another thing"
    page.locator("#home").click()
    page.get_by_text("Everything", exact=True).wait_for()
    assert page.locator("#q").input_value() == ""


def test_two_collections_side_by_side(page, url):
    visit(page, f"{url}two/?q=a+thing")
    assert page.locator(".side").count() == 2 and "found by both" in status(page)
    assert [len(side.locator(".card").all()) for side in page.locator(".side").all()] == [4, 4]


def test_a_phone_and_the_keyboard(page, url):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, url)
    assert page.locator(".card").first.bounding_box()["y"] < 422, "pictures fill half of the first screen"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.get_by_role("checkbox", name="cold").is_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert urlsplit(page.url).fragment == "heading", "the first link leads to the results"
    page.locator("#filters > summary").click()
    page.get_by_role("checkbox", name="cold").focus()
    page.keyboard.press("Space")
    expect_cards(page, 4)
    assert page.get_by_role("checkbox", name="cold").is_checked() and "4 results" in status(page)
    page.get_by_role("button", name="Show 4 results").click()
    assert page.get_by_role("checkbox", name="cold").is_hidden() and page.locator(".card").first.is_visible()
    page.locator("#upload").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png("blue")})
    page.get_by_text("Your picture", exact=True).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "also with a picture of the query"
