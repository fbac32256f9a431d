"""The web server in front of the endpoint and the page: the gate that each request passes, and the server itself."""

import asyncio
import logging
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from conjoin.serving.batching import BusyError
from conjoin.serving.limits import ItemError, Limits, TooLargeError, check_json

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Keep a page from loading anything from elsewhere, and browsers from guessing types of files."""


class Gate:
    """Refuses requests without a key, too large, too slow, too many, malformed or for another host; adds `HEADERS`.

    At a local address, a request must name a local host: a page elsewhere cannot reach the application through a name
    that it points to this machine. The body of a request is read here, after its key; the request is one of those that
    are answered when all of it was received. Slow headers and idle connections are the business of a proxy.

    Args:
        app: What answers the others, an ASGI application.
        limits: Of a body, of all bodies in flight, and of requests at one time.
        host: The address that the application listens at.
        keys: A request must have one of them, as a bearer token or as `X-API-Key`, but for `/ready`; without any,
            everybody may ask.
    """

    def __init__(self, app: Any, limits: Limits, host: str, keys: Sequence[str] = ()) -> None:  # noqa: ANN401
        self.app, self.limits = app, limits
        self.hosts = LOCAL if host in LOCAL else None
        self.keys = [key.encode() for key in keys]
        self.requests = self.bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI says
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []

        async def with_headers(event: Any) -> None:  # noqa: ANN401
            if event["type"] == "http.response.start":
                MutableHeaders(scope=event).update(HEADERS)
            await send(event)

        async def replay() -> Any:  # noqa: ANN401
            return {"type": "http.request", "body": received.pop()} if received else await receive()

        try:
            try:
                received = await self._receive(scope, receive, parts)
            except (HTTPException, ValueError) as error:
                answer = await answer_error(None, error)
                answer.headers["connection"] = "close"
                await answer(scope, receive, with_headers)
                return
            self.requests += 1
            try:
                await self.app(scope, replay, with_headers)
            finally:
                self.requests -= 1
        finally:
            self.bytes -= sum(map(len, parts))

    async def _receive(self, scope: Any, receive: Any, parts: list[bytes]) -> list[bytes]:  # noqa: ANN401
        """Check a request, and read its body through `parts`; it is returned as the one of a list, if there is one.

        Raises:
            HTTPException: The request is refused.
            ValueError: Its body is no JSON, or too large a structure.
        """
        self._check_headers(scope)
        received = []
        if scope["method"] == "POST":
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    await self._read(receive, parts)
            except TimeoutError:
                late = f"the request was not received in {self.limits.body_seconds:g} seconds"
                raise HTTPException(408, late) from None
            received.append(b"".join(parts))
            await asyncio.to_thread(check_json, received[0], self.limits)
        if self.requests >= self.limits.requests:
            raise HTTPException(503, f"{self.requests} requests are being answered, the limit; try again later")
        return received

    async def _read(self, receive: Any, parts: list[bytes]) -> None:  # noqa: ANN401
        """Read the body of a request into parts."""
        size, is_more = 0, True
        while is_more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise HTTPException(400, "the client is gone")
            part, is_more = event.get("body", b""), event.get("more_body", False)
            parts.append(part)
            size, self.bytes = size + len(part), self.bytes + len(part)
            self._check_size(size)
            if self.bytes > max(size, self.limits.held_bytes):
                held = self.limits.held_bytes
                raise HTTPException(503, f"the requests in flight have over {held:,} bytes; try again later")

    def _check_size(self, size: int) -> None:
        if size > self.limits.body_bytes:
            raise HTTPException(413, f"the request has over {self.limits.body_bytes:,} bytes, the limit")

    def _check_headers(self, scope: Any) -> None:  # noqa: ANN401
        """Refuse a request for its headers, before anything of its body is read."""
        headers = Headers(scope=scope)
        framing = [*headers.getlist("content-length"), *headers.getlist("transfer-encoding")]
        host = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]")
        if len(framing) > 1:
            raise HTTPException(400, "the request says twice how long it is (Content-Length, Transfer-Encoding)")
        if self.hosts is not None and host not in self.hosts:
            raise HTTPException(400, f"this server answers as {', '.join(sorted(self.hosts))}, not as {host!r:.80}")
        bearer = re.findall(r"(?i)\Abearer +(.+)\Z", headers.get("authorization", ""))
        given = [key.encode("latin-1") for key in (*bearer, *headers.getlist("x-api-key")) if key]
        right = [any([secrets.compare_digest(key, known) for known in self.keys]) for key in given]
        if self.keys and scope["path"] != "/ready" and not (right and all(right)):
            needed = "a key is needed, as a bearer token or X-API-Key; if both are sent, both must be right"
            raise HTTPException(401, needed, {"www-authenticate": "Bearer"})
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise HTTPException(415, f"the body is {kind!r:.80}; expected application/json")
        if framing and framing[0].isdigit():
            self._check_size(int(framing[0]))


async def answer_error(request: Any, error: Exception) -> JSONResponse:  # noqa: ANN401 - as starlette calls it
    """Answer a failure as `{"error": {"message", "item"}}`; `item` is the position of an item, or null."""
    code, message, headers = 500, "the server failed; its log says why", None
    item = error.item if isinstance(error, ItemError) else None
    if isinstance(error, HTTPException):
        code, message, headers = error.status_code, str(error.detail), error.headers
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        code, message = 422, f"{field}: {first['msg']}"
        item = first["loc"][2] if first["loc"][1:2] == ("items",) and len(first["loc"]) > 2 else None
    elif isinstance(error, BusyError):
        code, message, headers = 503, str(error), {"retry-after": "1"}
    elif isinstance(error, ValueError):
        code, message = 413 if isinstance(error, TooLargeError) else 422, str(error)
    return JSONResponse({"error": {"message": message, "item": item}}, code, headers)


def run_server(
    app: Any,  # noqa: ANN401 - an ASGI application
    host: str,
    port: int,
    *,
    grace: int = 0,
    on_late: Callable[[], None] = lambda: None,
    access_log: bool = False,
    is_open: bool = True,
) -> None:
    """Serve until interrupted or terminated (SIGTERM): then nothing new is accepted, and what is in flight answered.

    Args:
        app: The application.
        host: The address to listen at.
        port: 0 for any that is free.
        grace: Seconds that what is in flight has when the server stops.
        on_late: Called when they are over, to answer what is left within two more.
        access_log: Whether uvicorn writes a line to stdout for each request.
        is_open: Whether everybody may ask, without a key.

    Raises:
        OSError: The address cannot be used.
    """

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            late = threading.Timer(grace, on_late)
            late.start()
            await super().shutdown(sockets)
            late.cancel()

    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen at {host}:{port}: {error}; add --port 0 for any port that is free") from error
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=grace + 2, access_log=access_log, server_header=False
    )
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    print_line(f"listening at http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}")
    if host not in LOCAL and is_open:
        print_line("anybody who can reach this machine can use it: there are no passwords")
    with sock:
        Server(config).run(sockets=[sock])


def print_line(text: str) -> None:
    """Say something to whoever started the server, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
