"""Fetch images from URLs: only if the user allows it, from public addresses, within a time and a number of bytes."""

import asyncio
import ipaddress
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx

from conjoin.processing import item_images
from conjoin.processing.item_error import ItemError, MissingFileError

ALLOW_URLS = "CONJOIN_ALLOW_URLS"
"""The environment variable that allows URLs: `public`, or `private` for all addresses; none if unset. So child
processes obey the same switch."""
MAX_SECONDS = 30.0
"""The longest time for one image, redirects included."""
_MAX_REDIRECTS = 10
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; conjoin)", "Accept-Encoding": "identity"}


def allow_urls(private: bool = False) -> None:
    """Let this process, and those it starts, fetch images from http and https URLs. By default none is fetched.

    What was allowed before stays allowed.

    Args:
        private: Also allow private, loopback and link-local addresses, and use the proxies of the environment. Without
            this no proxy is used, because the address of a host cannot be checked behind a proxy.
    """
    if private or not os.environ.get(ALLOW_URLS):
        os.environ[ALLOW_URLS] = "private" if private else "public"


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


def fetch(url: str, name: str, max_bytes: int = item_images.MAX_IMAGE_BYTES) -> bytes:
    """Return the body of a URL.

    Raises:
        ItemError: URLs are not allowed, or it cannot be fetched within the limits.
        MissingFileError: There is nothing: the server says 404 or 410.
    """
    private = check_urls_allowed(url, name) == "private"
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook has a loop in its own
            body = asyncio.wait_for(_fetch(url, private, max_bytes), MAX_SECONDS)
            return thread.submit(asyncio.run, body).result()
    except TimeoutError as error:
        raise ItemError(
            name, f"image {url!r}: cannot fetch the image (it takes over {MAX_SECONDS:g} seconds)"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        said = str(error).partition("\n")[0]  # a second line of httpx links to a manual
        is_gone = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (404, 410)
        raise (MissingFileError if is_gone else ItemError)(
            name, f"image {url!r}: cannot fetch the image ({said})"
        ) from error


async def _fetch(url: str, private: bool, max_bytes: int) -> bytes:
    transport = None if private else _PublicTransport()
    async with httpx.AsyncClient(transport=transport, trust_env=private, timeout=None, headers=_HEADERS) as client:
        request = client.build_request("GET", url)
        for _ in range(_MAX_REDIRECTS):
            response = await client.send(request, stream=True)
            if response.next_request is None:
                break
            request = response.next_request
            await response.aclose()  # its body is not read
        response.raise_for_status()
        body = bytearray()
        async for block in response.aiter_bytes():
            body += block
            if len(body) > max_bytes:
                raise ValueError(f"it has over {max_bytes} bytes")
        return bytes(body)


class _PublicTransport(httpx.AsyncHTTPTransport):
    """Connects to public addresses only: to the one that it has checked, so that no second answer can differ."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.raw_host.decode()
        entries = await asyncio.get_running_loop().getaddrinfo(host, request.url.port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in entries]
        if hidden := [address for address in addresses if not _is_public(address)]:
            raise httpx.ConnectError(
                f"the host {request.url.host!r} has the address {hidden[0]}, which is not public; allow it by "
                f"--allow-private-urls, allow_urls(private=True) or {ALLOW_URLS}=private"
            )
        return await super().handle_async_request(
            httpx.Request(
                request.method,
                request.url.copy_with(host=addresses[0]),
                headers=request.headers,
                extensions=request.extensions | {"sni_hostname": host},
            )
        )


def _is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also one that holds an address of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or translated or ip
    return ip.is_global and not ip.is_multicast


item_images.read_url = fetch
