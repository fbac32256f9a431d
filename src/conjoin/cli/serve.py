"""`conjoin serve`: embeddings and search over HTTP; and the options that `conjoin app` shares."""

import threading
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.cli.options import EncoderOptions, ImageOptions, PromptOptions, option, pick

if TYPE_CHECKING:
    from conjoin.serving.searcher import Searcher


@dataclass(kw_only=True)
class ServingOptions(PromptOptions, ImageOptions, EncoderOptions):
    """where to listen, and the limits.

    Args:
        host: 0.0.0.0 for all who can reach this machine.
        max_upload: Size of an image in MiB.
        max_megapixels: Pixels of an image.
        max_results: Results of a query.
    """

    host: str = "127.0.0.1"
    max_upload: int = option(10, least=1)
    max_megapixels: int = option(25, least=1)
    max_results: int = option(100, least=1)
    port: int = 0

    def load(self, collection: str | None, model: str | None, **limits: int) -> "Searcher":
        """Load a collection with its model, to be searched within the limits, also these."""
        from conjoin.serving import Limits
        from conjoin.serving.searcher import Searcher

        try:
            import fastapi  # noqa: F401
            import prometheus_fastapi_instrumentator  # noqa: F401
            import uvicorn  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError(f'this needs further packages ({error}): pip install "conjoin[serve]"') from error

        upload, pixels = self.max_upload * 2**20, self.max_megapixels * 10**6
        limits |= {"body_bytes": max(Limits.body_bytes, 2 * upload), "image_bytes": upload, "image_pixels": pixels}
        within = Limits(results=self.max_results, request_pixels=max(Limits.request_pixels, 2 * pixels), **limits)
        how = self.encoder_options() | {"prompt": self.prompt, "prompt_name": self.prompt_name}
        return Searcher.load(collection, model, within, **how)


@dataclass(kw_only=True)
class Options(ServingOptions):
    """Answer POST /embed, POST /search and GET /health as JSON; the reference is at /docs.

    The items of concurrent requests share forward passes. Needs pip install "conjoin[serve]".

    Args:
        collection: Folder that `conjoin encode` wrote, or a URI; without it, only /embed works.
        model: Folder or Hub name of the model (default: the folder on this machine that the collection records).
        port: 0 for a free one.
        max_items: Items of a request.
        api_key_file: Keys, one in each line, but for lines that begin with #: requests need one, as `Authorization:
            Bearer KEY` or `X-API-Key: KEY`.
        cors: Sites whose pages may ask, as https://example.org.
        max_connections: Requests at one time.
        grace: When it is terminated (SIGTERM), seconds to answer what is in flight.
        watch: Serve a new version of the collection within a second of its publication.
        access_log: Write a line to stdout for each request.

    Example:
        conjoin serve runs/photos; conjoin serve --model runs/demo/model
    """

    collection: str | None = option(MISSING, nargs="?")
    model: str | None = None
    port: int = option(8000, least=0)
    max_items: int = option(64, least=1)
    api_key_file: str | None = None
    cors: list[str] = field(default_factory=list)
    max_connections: int = option(256, least=1)
    grace: int = option(30, least=0)
    watch: bool = False
    access_log: bool = False


def run(options: Options) -> None:
    """Run the command."""
    file = options.api_key_file
    lines = [] if file is None else Path(file).read_text(encoding="utf-8").splitlines()
    keys = [key for key in map(str.strip, lines) if key and not key.startswith("#")]
    if file is not None and not keys:
        raise ValueError(f"there is no key in {file!r}: write one in each line, as `openssl rand -hex 32` makes it")

    limits = {"items": options.max_items, "requests": options.max_connections}
    searcher = options.load(options.collection, options.model, **limits)
    how = pick(options, "grace", "access_log", "watch")
    serve([searcher], options, keys=keys, origins=options.cors, **how)


def serve(
    searchers: "list[Searcher]",
    options: ServingOptions,
    *,
    grace: int = 0,
    access_log: bool = False,
    watch: bool = True,
    **how: Any,  # noqa: ANN401
) -> None:
    """Serve collections until interrupted; `how` as for `make_endpoint`."""
    from conjoin.serving.endpoint import make_endpoint
    from conjoin.serving.http import run_server

    stopped = threading.Event()
    for searcher in searchers if watch else ():
        threading.Thread(target=_watch, args=[searcher, stopped], name="conjoin-watch", daemon=True).start()
    app = make_endpoint(searchers[0], options.host, **how)
    running: dict[str, Any] = {"grace": grace, "access_log": access_log, "is_open": not how.get("keys")}
    try:
        run_server(app, options.host, options.port, on_late=searchers[0].batcher.stop, **running)
    finally:
        stopped.set()


def _watch(searcher: "Searcher", stopped: threading.Event) -> None:
    """Serve new versions of the collection; it looks for them twice a second, and says each problem once."""
    from conjoin.serving.http import print_line

    said = ""
    while not stopped.wait(0.5):
        try:
            if searcher.refresh():
                print_line(f"serving a new version of {searcher.source}")
            said = ""
        except (ValueError, OSError) as error:
            if str(error) != said:
                print_line(f"the version before is served: {error}")
            said = str(error)
