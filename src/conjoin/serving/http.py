"""What the app and the endpoint have in common as web servers: limits of requests, headers, and the server itself."""

import asyncio
import logging
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from conjoin.serving.limits import Limits

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "font-src 'self' data:; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Keep a page from loading anything from elsewhere (Gradio needs inline and evaluated scripts), and browsers from
guessing types of files."""


def missing(extra: str, error: ImportError) -> NoReturn:
    """Say which extra holds a package that is not installed.

    Raises:
        ImportError: Always.
    """
    raise ImportError(f'this needs further packages ({error}): pip install "conjoin[{extra}]"') from error


class Gate:
    """Refuses requests that are too large, too many, malformed or for another host, and adds `HEADERS` to answers.

    At a local address, a request must name a local host: a page elsewhere cannot reach the application through a name
    that it points to this machine. Slow and idle connections are the business of a proxy.

    Args:
        app: What answers the others, an ASGI application.
        limits: Of a body, of all bodies in flight, and of requests at one time.
        host: The address that the application listens at.
    """

    def __init__(self, app: Any, limits: Limits, host: str) -> None:  # noqa: ANN401
        self.app, self.limits = app, limits
        self.hosts = LOCAL if host in LOCAL else None
        self.requests = self.bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI says
        """Answer a request."""
        from starlette.datastructures import MutableHeaders
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received = 0

        async def limited() -> Any:  # noqa: ANN401
            nonlocal received
            event = await receive()
            size = len(event.get("body", b""))
            received, self.bytes = received + size, self.bytes + size
            if received > self.limits.body_bytes:
                raise HTTPException(413, f"the request has over {self.limits.body_bytes:,} bytes, the limit")
            if self.bytes > max(received, self.limits.held_bytes):
                raise HTTPException(
                    503, f"the requests in flight have over {self.limits.held_bytes:,} bytes; try again later"
                )
            return event

        async def with_headers(event: Any) -> None:  # noqa: ANN401
            if event["type"] == "http.response.start":
                MutableHeaders(scope=event).update(HEADERS)
            await send(event)

        if (refusal := self._refusal(scope["headers"])) is not None:
            code, message = refusal
            answer = JSONResponse({"error": {"message": message, "item": None}}, code, {"connection": "close"})
            await answer(scope, receive, with_headers)
            return
        counted = int(scope["method"] == "POST")  # an open page holds a GET as long as it is open
        self.requests += counted
        try:
            await self.app(scope, limited, with_headers)
        finally:
            self.requests, self.bytes = self.requests - counted, self.bytes - received

    def _refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """Status and message of a request that is refused for its headers, or because there are too many."""
        framing = [value for name, value in headers if name in (b"content-length", b"transfer-encoding")]
        host = re.sub(r":\d*$", "", dict(headers).get(b"host", b"").decode("latin-1")).strip("[]")
        if len(framing) > 1:
            return 400, "the request says twice how long it is (Content-Length, Transfer-Encoding)"
        if self.hosts is not None and host not in self.hosts:
            return 400, f"this server answers as {', '.join(sorted(self.hosts))}, not as {host!r:.80}"
        if framing and framing[0].isdigit() and int(framing[0]) > self.limits.body_bytes:
            return 413, f"the request has over {self.limits.body_bytes:,} bytes, the limit"
        if self.requests >= self.limits.requests:
            return 503, f"{self.requests} requests are being answered, the limit; try again later"
        return None


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
    import uvicorn

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
    logging.getLogger("uvicorn.error").addFilter(_is_failure)
    print_line(f"listening at http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}")
    if host not in LOCAL and is_open:
        print_line("anybody who can reach this machine can use it: there are no passwords")
    with sock:
        Server(config).run(sockets=[sock])


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a message of the log is about more than a page that was open when the server stopped."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def print_line(text: str) -> None:
    """Say something to whoever started the server, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
