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

from conjoin.serving.limits import Limits, TooLargeError, check_json

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Keep a page from loading anything from elsewhere, and browsers from guessing types of files."""


class _RefusedError(Exception):
    """A request that the gate refuses.

    Attributes:
        code: The HTTP status.
        message: For the client.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


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
        from starlette.datastructures import MutableHeaders
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received: list[bytes] = []

        async def with_headers(event: Any) -> None:  # noqa: ANN401
            if event["type"] == "http.response.start":
                MutableHeaders(scope=event).update(HEADERS)
            await send(event)

        async def replay() -> Any:  # noqa: ANN401
            return {"type": "http.request", "body": received.pop()} if received else await receive()

        parts: list[bytes] = []
        counted = 0
        try:
            self._check_headers(scope)
            if scope["method"] == "POST":
                async with asyncio.timeout(self.limits.body_seconds):
                    if not await self._read(receive, parts):
                        return  # the client is gone
                received.append(b"".join(parts))
                await asyncio.to_thread(check_json, received[0], self.limits)
            if self.requests >= self.limits.requests:
                raise _RefusedError(503, f"{self.requests} requests are being answered, the limit; try again later")
            counted = 1
            self.requests += 1
            await self.app(scope, replay, with_headers)
        except (_RefusedError, TimeoutError, ValueError) as error:
            if counted:  # of the application
                raise
            code, message = 413 if isinstance(error, TooLargeError) else 400, str(error)
            if isinstance(error, _RefusedError):
                code, message = error.code, error.message
            elif isinstance(error, TimeoutError):
                code, message = 408, f"the request was not received in {self.limits.body_seconds:g} seconds"
            headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if code == 401 else {})
            await JSONResponse({"error": {"message": message, "item": None}}, code, headers)(
                scope, receive, with_headers
            )
        finally:
            self.requests, self.bytes = self.requests - counted, self.bytes - sum(map(len, parts))

    async def _read(self, receive: Any, parts: list[bytes]) -> bool:  # noqa: ANN401
        """Read the body of a request into parts; returns whether the client stayed."""
        size, is_more = 0, True
        while is_more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return False
            part, is_more = event.get("body", b""), event.get("more_body", False)
            parts.append(part)
            size, self.bytes = size + len(part), self.bytes + len(part)
            self._check_size(size)
            if self.bytes > max(size, self.limits.held_bytes):
                held = self.limits.held_bytes
                raise _RefusedError(503, f"the requests in flight have over {held:,} bytes; try again later")
        return True

    def _check_size(self, size: int) -> None:
        if size > self.limits.body_bytes:
            raise _RefusedError(413, f"the request has over {self.limits.body_bytes:,} bytes, the limit")

    def _check_headers(self, scope: Any) -> None:  # noqa: ANN401
        """Refuse a request for its headers, before anything of its body is read."""
        headers = dict(scope["headers"])
        framing = [value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")]
        host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1")).strip("[]")
        if len(framing) > 1:
            raise _RefusedError(400, "the request says twice how long it is (Content-Length, Transfer-Encoding)")
        if self.hosts is not None and host not in self.hosts:
            raise _RefusedError(400, f"this server answers as {', '.join(sorted(self.hosts))}, not as {host!r:.80}")
        bearer = re.findall(rb"(?i)\Abearer +(.+)\Z", headers.get(b"authorization", b""))
        given = [*bearer, *filter(None, [headers.get(b"x-api-key")])]
        right = [any([secrets.compare_digest(key, known) for known in self.keys]) for key in given]
        if self.keys and scope["path"] != "/ready" and not (right and all(right)):
            raise _RefusedError(
                401, "a key is needed, as a bearer token or X-API-Key; if both are sent, both must be right"
            )
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            raise _RefusedError(415, f"the body is {kind.decode('latin-1')!r:.80}; expected application/json")
        if framing and framing[0].isdigit():
            self._check_size(int(framing[0]))


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
    print_line(f"listening at http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}")
    if host not in LOCAL and is_open:
        print_line("anybody who can reach this machine can use it: there are no passwords")
    with sock:
        Server(config).run(sockets=[sock])


def print_line(text: str) -> None:
    """Say something to whoever started the server, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
