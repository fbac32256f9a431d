"""What the app and the endpoint have in common as web servers: limits of requests, headers, and the server itself."""

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from conjoin.serving.limits import Limits

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""

POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Keeps a page from loading anything from elsewhere; Gradio needs inline and evaluated scripts."""

Scope = dict[str, Any]
Receive = Callable[[], Any]
Send = Callable[[Any], Any]


def missing(extra: str, error: ImportError) -> NoReturn:
    """Say which extra holds a package that is not installed.

    Raises:
        ImportError: Always.
    """
    raise ImportError(f'this needs further packages ({error}): pip install "conjoin[{extra}]"') from error


@dataclass
class Stopping:
    """How a server stops that is terminated.

    Attributes:
        seconds: That what is in flight has; new work is refused meanwhile.
        on_late: Called when they are over, to answer what is left.
        until: The end of that time; None while the server does not stop.
    """

    seconds: float = 2.0
    on_late: Callable[[], None] = lambda: None
    until: float | None = None


class BodyLimit:
    """Refuses requests with too large or too slow a body, also those that do not say how large it is.

    Args:
        app: What answers the others.
        limits: Of a body, and of all that are being received or answered; a body alone is never too many.
    """

    def __init__(self, app: Any, limits: Limits) -> None:  # noqa: ANN401 - an ASGI application
        self.app, self.limits, self.held = app, limits, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse

        most, seconds = self.limits.body_bytes, self.limits.body_seconds
        problem = f"the request has over {most:,} bytes, the limit"
        length = dict(scope.get("headers", ())).get(b"content-length", b"")
        if scope["type"] == "http" and length.isdigit() and int(length) > most:
            refusal = JSONResponse({"error": {"message": problem}}, 413, {"connection": "close"})
            await refusal(scope, receive, send)
            return
        received, end, is_whole = 0, time.monotonic() + seconds, False

        async def limited() -> Any:  # noqa: ANN401 - an ASGI message
            nonlocal received, is_whole
            try:
                event = await asyncio.wait_for(receive(), None if is_whole else max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise HTTPException(408, f"the body takes over {seconds:g} seconds to arrive") from None
            is_whole = not event.get("more_body", False)
            size = len(event.get("body", b""))
            received, self.held = received + size, self.held + size
            if received > most:
                raise HTTPException(413, problem)
            if self.held > max(received, self.limits.held_bytes):
                raise HTTPException(
                    503, f"the requests in flight have over {self.limits.held_bytes:,} bytes; try again later"
                )
            return event

        try:
            await self.app(scope, limited if scope["type"] == "http" else receive, send)
        finally:
            self.held -= received


class UploadRoom:
    """Removes the oldest files of the folder of uploads before a new one comes.

    Args:
        app: What answers.
        folder: Of the uploads.
        most: Bytes that stay; a small file counts as 4 KiB.
    """

    def __init__(self, app: Any, folder: Path, most: int) -> None:  # noqa: ANN401 - an ASGI application
        self.app, self.folder, self.most = app, folder, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and scope["path"].endswith("/upload"):
            await asyncio.to_thread(self._make_room)
        await self.app(scope, receive, send)

    def _make_room(self) -> None:
        files, held = [], 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file():
                    files.append((path.stat().st_mtime_ns, max(path.stat().st_size, 4096), path))
        for _, size, path in sorted(files, reverse=True):
            held += size
            if held > self.most:
                path.unlink(missing_ok=True)
                if path.parent != self.folder:
                    with suppress(OSError):  # it has other files
                        path.parent.rmdir()


class PageHeaders:
    """Adds headers that keep browsers from loading anything from elsewhere, and from guessing types of files."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        added = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
        added["referrer-policy"] = "no-referrer"

        async def with_headers(event: Any) -> None:  # noqa: ANN401 - an ASGI message
            if event["type"] == "http.response.start":
                event["headers"] = [
                    *(pair for pair in event.get("headers", ()) if pair[0].decode().lower() not in added),
                    *((name.encode(), value.encode()) for name, value in added.items()),
                ]
            await send(event)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


def protect(app: Any, limits: Limits, host: str) -> None:  # noqa: ANN401 - a FastAPI application
    """Add the limits and headers to an application that listens at `host`.

    At a local address, requests that name another host are refused: a page elsewhere cannot reach the application
    through a name that it points to this machine.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app.add_middleware(PageHeaders)
    app.add_middleware(BodyLimit, limits=limits)
    if host in LOCAL:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL[:2], "[", host], www_redirect=False)


def run_server(
    app: Any,  # noqa: ANN401 - an ASGI application
    host: str,
    port: int,
    on_start: Callable[[str, Callable[[], None]], object] | None = None,
    *,
    stopping: Stopping | None = None,
    connections: int | None = None,
    access_log: bool = False,
    is_open: bool = True,
) -> None:
    """Serve until interrupted, or terminated (SIGTERM): then what is in flight is answered first.

    Args:
        app: The application.
        host: The address to listen at.
        port: 0 for any that is free.
        on_start: Called once the server answers, with its URL and a function that stops it.
        stopping: How it stops.
        connections: At one time; more are refused with status 503.
        access_log: Whether to write a line of JSON to stdout for each request.
        is_open: Whether everybody may ask, without a key.

    Raises:
        OSError: The address cannot be used.
    """
    import uvicorn

    sock, stop = _listen(host, port), stopping or Stopping()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if sig != signal.SIGTERM or stop.until is not None:
                super().handle_exit(sig, frame)
            else:
                stop.until = time.monotonic() + stop.seconds

        async def on_tick(self, counter: int) -> bool:
            if stop.until is not None and not self.should_exit:
                is_late = time.monotonic() > stop.until
                if is_late:
                    stop.on_late()
                self.should_exit = is_late or not self.server_state.tasks
            return await super().on_tick(counter)

    server = Server(
        uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=2, limit_concurrency=connections, access_log=access_log
        )
    )
    logging.getLogger("uvicorn.error").addFilter(_is_failure)
    if access_log:
        _log_requests()

    async def startup(sockets: Sequence[Any] | None = None) -> None:
        await uvicorn.Server.startup(server, list(sockets or ()))
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}"
        print_line(f"listening at {url}")
        if host not in LOCAL and is_open:
            print_line("anybody who can reach this machine can use it: there are no passwords")
        if on_start is not None:
            on_start(url, lambda: setattr(server, "should_exit", True))

    server.startup = startup  # type: ignore[method-assign]
    with sock:
        server.run(sockets=[sock])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        OSError: The address cannot be used; the message names it.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise OSError(f"cannot listen at {host}:{port}: {error}") from error
    return sock


class _JsonLines(logging.Formatter):
    """A request as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        names = ("client", "method", "path", "http", "status")
        return json.dumps({"time": round(record.created, 3), **dict(zip(names, record.args or (), strict=True))})


def _log_requests() -> None:
    log = logging.getLogger("uvicorn.access")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_JsonLines())
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a message of the log is about more than a page that was open when the server stopped."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def print_line(text: str) -> None:
    """Say something to whoever started the server, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
