"""What the app and the endpoint have in common as web servers: limits of requests, headers, and the server itself."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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


class BodyLimit:
    """Refuses requests with too large a body, also those that do not say how large it is.

    Args:
        app: What answers the others.
        most: Bytes.
    """

    def __init__(self, app: Any, most: int) -> None:  # noqa: ANN401 - an ASGI application
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse

        problem = f"the request has over {self.most:,} bytes, the limit"
        length = dict(scope.get("headers", ())).get(b"content-length", b"")
        if scope["type"] == "http" and length.isdigit() and int(length) > self.most:
            refusal = JSONResponse({"error": {"message": problem}}, 413, {"connection": "close"})
            await refusal(scope, receive, send)
            return
        received = 0

        async def limited() -> Any:  # noqa: ANN401 - an ASGI message
            nonlocal received
            event = await receive()
            received += len(event.get("body", b""))
            if received > self.most:
                raise HTTPException(413, problem)
            return event

        await self.app(scope, limited if scope["type"] == "http" else receive, send)


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


def protect(app: Any, body_bytes: int, host: str) -> None:  # noqa: ANN401 - a FastAPI application
    """Add the limits and headers to an application that listens at `host`.

    At a local address, requests that name another host are refused: a page elsewhere cannot reach the application
    through a name that it points to this machine.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app.add_middleware(PageHeaders)
    app.add_middleware(BodyLimit, most=body_bytes)
    if host in LOCAL:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL[:2], "[", host], www_redirect=False)


def run_server(
    app: Any,  # noqa: ANN401 - an ASGI application
    host: str,
    port: int,
    on_start: Callable[[str, Callable[[], None]], object] | None = None,
) -> None:
    """Serve until interrupted.

    Args:
        app: The application.
        host: The address to listen at.
        port: 0 for any that is free.
        on_start: Called once the server answers, with its URL and a function that stops it.

    Raises:
        OSError: The address cannot be used.
    """
    import uvicorn

    sock = _listen(host, port)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    logging.getLogger("uvicorn.error").addFilter(_is_failure)
    server = uvicorn.Server(config)

    async def startup(sockets: Sequence[Any] | None = None) -> None:
        await uvicorn.Server.startup(server, list(sockets or ()))
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}"
        print_line(f"listening at {url}")
        if host not in LOCAL:
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


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a message of the log is about more than a page that was open when the server stopped."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def print_line(text: str) -> None:
    """Say something to whoever started the server, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
