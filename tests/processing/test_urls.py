"""Images at URLs are fetched only if the user allows it, from public addresses, within limits."""

import http.server
import itertools
import os
import re
import socket
import threading
import time

import pytest
from PIL import Image

from conjoin.processing import allow_urls, load_image, parse_items, urls
from conjoin.processing.urls import ALLOW_URLS, fetch
from hostile import encoded

WHITE = (255, 255, 255)
ASKED = []
REDIRECTS = {"/again": "/clear.png", "/to-ftp": "ftp://127.0.0.1/clear.png", "/loop": "/loop"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Honest, endless and slow answers; `ASKED` lists the paths."""

    def do_GET(self):
        ASKED.append(self.path)
        try:
            self._answer()
        except OSError:
            pass  # the client has left

    def _answer(self):
        if self.path == "/slow-header":
            for letter in itertools.cycle("HTTP/1.1 200 OK"):
                self._drip(letter.encode())
        if self.path == "/gone.png":
            return self.send_error(404)
        if self.path == "/elsewhere":
            return self._redirect(f"http://127.0.0.2:{self.server.server_port}/clear.png")
        if self.path in REDIRECTS:
            return self._redirect(REDIRECTS[self.path])
        if self.path == "/endless-redirect":
            self._redirect("/clear.png", end=False)
        else:
            self.send_response(200)
        self.end_headers()
        for _ in itertools.repeat(None) if self.path.startswith("/endless") else ():
            self.wfile.write(bytes(2**16))
        for _ in itertools.repeat(None) if self.path == "/slow" else ():
            self._drip(b"x")
        self.wfile.write(encoded(Image.new("RGBA", (2, 2))))

    def _redirect(self, target, end=True):
        self.send_response(302)
        self.send_header("Location", target)
        if end:
            self.end_headers()

    def _drip(self, data):
        self.wfile.write(data)
        time.sleep(0.02)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch):
    monkeypatch.setenv(ALLOW_URLS, "")
    ASKED.clear()


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv(ALLOW_URLS, "private")


@pytest.mark.parametrize(
    "form",
    [
        lambda url: url,
        lambda url: {"image": {"bytes": None, "path": url}},
        lambda url: [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
        lambda url: {"image": [url.replace("http", "HTTP", 1)], "text": "a"},
    ],
)
def test_no_url_is_fetched_unless_allowed(form, server):
    item = form(f"{server}/clear.png")
    with pytest.raises(ValueError, match=r"item 0.*URLs are not fetched unless you allow it: pass --allow-urls"):
        parse_items([item])
    assert ASKED == []
    allow_urls(private=True)
    assert parse_items([item])[0].images[0].getpixel((0, 0)) == WHITE
    assert ASKED == ["/clear.png"]


def test_only_public_addresses_unless_allowed(server):
    allow_urls()
    with pytest.raises(ValueError, match=r"cannot fetch.*127\.0\.0\.1.*not public; allow it by --allow-private-urls"):
        load_image(f"{server}/clear.png")
    assert ASKED == []
    allow_urls(private=True)
    allow_urls()
    assert os.environ[ALLOW_URLS] == "private"  # what was allowed stays allowed


def test_the_resolved_address_counts(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [(2, 1, 6, "", ("10.1.2.3", 80))])
    allow_urls()
    with pytest.raises(ValueError, match=r"'pictures\.example' has the address 10\.1\.2\.3, which is not public"):
        load_image("http://pictures.example/a.png")


def test_a_redirect_cannot_reach_another_address(server, monkeypatch):
    monkeypatch.setattr(urls, "_is_public", lambda address: address == "127.0.0.1")
    allow_urls()
    assert load_image(f"{server}/again").size == load_image(f"{server}/endless-redirect").size == (2, 2)
    with pytest.raises(ValueError, match=r"127\.0\.0\.2, which is not public"):
        load_image(f"{server}/elsewhere")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        *((address, False) for address in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254")),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255")),
        *((address, False) for address in ("::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "ff02::1")),
        *((address, False) for address in ("64:ff9b::7f00:1", "2002:7f00:1::1")),
        ("64:ff9b::5db8:d70e", True),
    ],
)
def test_public_addresses(address, public):
    assert urls._is_public(address) is public


def test_a_limit_of_bytes(server, allowed):
    with pytest.raises(ValueError, match=r"/endless': cannot fetch the image \(it has over 1000000 bytes\)"):
        fetch(f"{server}/endless", "item", 10**6)


@pytest.mark.parametrize("path", ["/slow", "/slow-header"])
def test_a_limit_of_seconds(path, server, allowed, monkeypatch):
    monkeypatch.setattr(urls, "MAX_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"{path}': cannot fetch the image \(it takes over 0.3 seconds\)"):
        load_image(server + path)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{}/gone.png", "404 Not Found"),
        ("{}/to-ftp", "unsupported protocol 'ftp://'"),
        ("{}/loop", "Redirect response '302 Found'"),
        *((f"http://{host}/a.png", "") for host in ("ü..example", "ü" * 70 + ".example", "[::1", "a b", "x:port", "")),
    ],
)
def test_errors_name_the_url(url, message, server, allowed):
    url = url.format(server)
    with pytest.raises(ValueError, match=rf"^item 0: image '{re.escape(url)}': cannot fetch the image .*{message}"):
        parse_items([{"image": url}])
