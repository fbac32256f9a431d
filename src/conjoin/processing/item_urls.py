"""Fetch images from URLs, if the user allows it, within limits of bytes, seconds and addresses.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

import http.client
import ipaddress
import os
import socket
import ssl
import time
import urllib.request
from functools import partial
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit, urlunsplit

from .item_error import ItemError

ALLOW_URLS = "CONJOIN_ALLOW_URLS"
"""The environment variable that allows URLs: `public`, or `private` for all addresses; none if unset. So child
processes and the code in saved checkpoints obey the same switch."""

MAX_SECONDS = 30.0
"""The longest time for one image, redirects included."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_RESERVED = "%/:=&?~#+!$,;'@()*[]"
"""Characters of a URL that need no quoting."""


def allow_urls(private: bool = False) -> None:
    """Let this process, and those it starts, fetch images from http and https URLs. By default none is fetched.

    What was allowed before stays allowed.

    Args:
        private: Also allow private, loopback and link-local addresses, and use the proxies of the environment. Without
            this no proxy is used, because the address of a host cannot be checked behind a proxy.
    """
    if private or not os.environ.get(ALLOW_URLS):
        os.environ[ALLOW_URLS] = "private" if private else "public"


def is_url(source: object) -> bool:
    """Whether `source` is an http or https URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def check_urls_allowed(url: str, name: str) -> str:
    """Return which addresses are allowed, `"public"` or `"private"`.

    Raises:
        ItemError: None, so the image `url` of the item `name` cannot be used.
    """
    allowed = os.environ.get(ALLOW_URLS, "")
    if allowed not in ("public", "private"):
        raise ItemError(
            name,
            f"image {url!r}: URLs are not fetched unless you allow it: pass --allow-urls, call "
            f"conjoin.processing.allow_urls() or set {ALLOW_URLS}=public",
        )
    return allowed


def fetch(url: str, name: str, max_bytes: int) -> bytes:
    """Return the body of a URL.

    Raises:
        ItemError: URLs are not allowed, or it cannot be fetched within the limits.
    """
    limits = _Limits(max_bytes, check_urls_allowed(url, name) == "private")
    try:
        parts = urlsplit(url)
        path, query = (quote(part, safe=_RESERVED) for part in (parts.path, parts.query))
        ascii_url = urlunsplit((parts.scheme, parts.netloc.encode("idna").decode(), path, query, ""))
        request = urllib.request.Request(ascii_url, headers={"User-Agent": "Mozilla/5.0 (compatible; conjoin)"})
        with _opener(limits).open(request, timeout=MAX_SECONDS) as response:
            return b"".join(iter(partial(response.read, 2**16), b""))
    except (OSError, http.client.HTTPException, ValueError, MemoryError) as error:
        cause = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
        words = f"it takes over {MAX_SECONDS:g} seconds" if isinstance(cause, TimeoutError) else cause
        raise ItemError(name, f"image {url!r}: cannot fetch the image ({words})") from error


class _Limits:
    """What one fetch may use: its connections share the time and the bytes, also after redirects."""

    def __init__(self, max_bytes: int, private: bool) -> None:
        self.max_bytes, self.private = max_bytes, private
        self._received = 0
        self._end = time.monotonic() + MAX_SECONDS

    def connect(self, address: tuple[str, int], *unused: object) -> socket.socket:
        """Open a connection, as `socket.create_connection`, to an address that was checked."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        hidden = [ip for ip in (str(entry[4][0]) for entry in found) if not self.private and not _is_public(ip)]
        if hidden:
            raise OSError(
                f"the host {address[0]!r} has the address {hidden[0]}, which is not public; allow it by "
                f"--allow-private-urls, allow_urls(private=True) or {ALLOW_URLS}=private"
            )
        failure = OSError(f"the host {address[0]!r} has no address")
        for family, kind, protocol, _, where in found:
            connection = self.limited(socket.socket)(family, kind, protocol)
            try:
                connection.settimeout(self._seconds_left())
                connection.connect(where)
                return connection
            except OSError as error:
                connection.close()
                failure = error
        raise failure

    def limited(self, kind: type[socket.socket]) -> type[socket.socket]:
        """Return a kind of socket that receives no more than the limits allow."""

        def recv_into(connection: socket.socket, *args: Any) -> int:  # noqa: ANN401
            connection.settimeout(self._seconds_left())
            count = kind.recv_into(connection, *args)
            self._received += count
            if self._received > self.max_bytes:
                raise OSError(f"it has over {self.max_bytes} bytes")
            return count

        return type(kind.__name__, (kind,), {"recv_into": recv_into})

    def _seconds_left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https URLs by the connections of `_Limits`."""

    def __init__(self, limits: _Limits) -> None:
        super().__init__()
        self.limits = limits
        self.tls = ssl.create_default_context()
        self.tls.sslsocket_class = limits.limited(ssl.SSLSocket)  # type: ignore[assignment]

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request, context=self.tls)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _connection(self, kind: Any, host: str, **options: Any) -> Any:  # noqa: ANN401
        connection = kind(host, **options)
        connection._create_connection = self.limits.connect
        return connection


def _opener(limits: _Limits) -> urllib.request.OpenerDirector:
    """An opener of http and https alone; proxies of the environment only where addresses are not checked."""
    opener = urllib.request.OpenerDirector()
    kinds = urllib.request
    for kind in (kinds.HTTPRedirectHandler, kinds.HTTPDefaultErrorHandler, kinds.HTTPErrorProcessor):
        opener.add_handler(kind())
    opener.add_handler(kinds.UnknownHandler())
    opener.add_handler(_Handler(limits))
    if limits.private:
        opener.add_handler(kinds.ProxyHandler())
    return opener


def _is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also one that holds an address of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or translated or ip
    return ip.is_global and not ip.is_multicast
