"""The HTTP endpoint: embeddings and search as JSON."""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry, Gauge
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import conjoin
from conjoin.constants import RankBy
from conjoin.processing.item_images import is_url
from conjoin.retrieval import Collection, Hit
from conjoin.serving.batching import BusyError
from conjoin.serving.html import render
from conjoin.serving.http import LOCAL, Gate
from conjoin.serving.limits import ItemError, Limits, TooLargeError, check_length, check_where, read_items
from conjoin.serving.openai import add_openai
from conjoin.serving.searcher import Searcher

_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
_Header = Annotated[str | None, Depends(APIKeyHeader(name="X-API-Key", auto_error=False))]
_FAILURE = {"description": 'a JSON object {"error": {"message", "item"}}; `item` is the position of an item, or null'}


def _one(value: Any) -> Any:  # noqa: ANN401
    return [value] if isinstance(value, str) else value


def _text(value: Any) -> Any:  # noqa: ANN401
    return {"text": value} if isinstance(value, str) else value


class Item(BaseModel):
    """A text, an image, or both; a string alone is a text."""

    model_config = ConfigDict(extra="forbid")
    text: str | None = Field(None, description="<image> marks the place of each image")
    image: Annotated[list[str], BeforeValidator(_one, json_schema_input_type=str | list[str])] = Field(
        [], description="one or several data:image/...;base64 URIs, or URLs where the server allows them"
    )


class Items(BaseModel):
    """Items of a request."""

    model_config = ConfigDict(extra="forbid")
    items: list[Annotated[Item, BeforeValidator(_text, json_schema_input_type=str | Item)]]
    prompt: str | None = Field(
        None, description="before each item, or an instruction, in place of the model's own prompt"
    )


class EmbedRequest(Items):
    """Items to embed."""

    role: Literal["query", "document"] | None = Field(
        None, description="what the items are: a model with a prompt for queries or documents gives it to them"
    )


class SearchRequest(Items):
    """Queries."""

    k: int = Field(10, description="results for each query")
    offset: int = Field(0, description="results that are left out before them: 10 for the second page of 10")
    where: str | None = Field(None, description="a condition on the columns of the collection: price < 50")
    kind: Literal["image", "text", "both"] | None = Field(
        None, description="only rows with an image alone, a text alone, or both"
    )
    weights: dict[Literal["image", "text"], FiniteFloat] | None = Field(
        None, description="of the parts of each item; their weighted sum in place of the model's vector of both"
    )
    group_by: str | None = Field(None, description="a column: only the best row of each of its values is a result")
    min_score: FiniteFloat | None = Field(None, description="the least score of a result")
    ranking: RankBy = Field(
        "default", description="what results are ranked by: vectors and the words of the text, or one of them"
    )


def make_endpoint(
    searcher: Searcher, host: str = LOCAL[0], *, keys: Sequence[str] = (), origins: Sequence[str] = ()
) -> FastAPI:
    """Make the endpoint.

    Args:
        searcher: A model with its collection, or without one to embed only; it holds the limits.
        host: The address that it will listen at.
        keys: Requests must have one of them, as a bearer token or as `X-API-Key`; without any, everybody may ask.
        origins: Of the pages whose scripts may read the answers (CORS).

    Raises:
        ImportError: prometheus-fastapi-instrumentator is not installed.
        ValueError: A key has letters outside ASCII, which headers do not carry.
    """
    if odd := next((key for key in keys if not key.isascii()), None):
        raise ValueError(f"the key {odd[:3]}... has letters outside ASCII, which clients send in different ways")
    app = FastAPI(
        title="conjoin", version=conjoin.__version__, docs_url=None, redoc_url=None, openapi_url=None,
        responses=dict.fromkeys((400, 401, 413, 422, 503), _FAILURE),
        description="Embed and search texts, images, and both.",
    )  # fmt: skip
    app.router.route_class = _bounded_route(searcher.limits)
    checks = [Depends(_key_check(keys))]
    _add_work(app, searcher, checks)
    add_openai(app, searcher, checks)
    _add_state(app, searcher, checks)
    for kind in (ValueError, BusyError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Gate, limits=searcher.limits, host=host)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return app


def _add_work(app: FastAPI, searcher: Searcher, checks: Sequence[Any]) -> None:
    """Add the routes that need the model or the collection."""
    limits = searcher.limits

    def read(request: Items) -> tuple[list[Any], str | None]:
        prompt = None if request.prompt is None else check_length(request.prompt, limits, "the prompt")
        return read_items([(item.text, item.image) for item in request.items], limits), prompt

    @app.post("/embed", dependencies=checks)
    def embed(request: EmbedRequest) -> dict[str, str | list[list[float]]]:
        """Embed items: `embeddings` are L2-normalised, one for each item."""
        items, prompt = read(request)
        vectors = searcher.encode(items, request.role, prompt).tolist()
        return {"model": searcher.model_name, "fingerprint": searcher.encoder.fingerprint, "embeddings": vectors}

    @app.post("/search", dependencies=checks)
    def search(request: SearchRequest) -> dict[Literal["results"], list[list[Hit]]]:
        """Search the collection for each of the items, best first; `row` is what the collection keeps of the row."""
        items, prompt = read(request)
        where = None if request.where is None else check_where(request.where, limits)
        how = request.model_dump(include={"offset", "kind", "weights", "group_by", "min_score", "ranking"})
        results = searcher.search(items, request.k, where=where, prompt=prompt, **how)
        return {"results": [[replace(hit, row=_public(hit)) for hit in hits] for hits in results]}

    @app.get("/pictures/{row:path}", dependencies=checks, response_class=Response)
    def picture(row: str) -> Response:
        """The picture of a row, small, as a JPEG file; results name it as their `image`."""
        try:
            content = searcher.picture(row)
        except (ValueError, FileNotFoundError):
            content = None
        if content is None:
            raise HTTPException(404, "there is no picture of this row that may be shown")
        return Response(content, media_type="image/jpeg")


def _add_state(app: FastAPI, searcher: Searcher, checks: Sequence[Any]) -> None:
    """What is answered while all workers wait for the model."""

    def describe() -> dict[str, Any]:
        collection = searcher.collection
        return {
            "status": "ok",
            "model": searcher.model_name,
            "fingerprint": searcher.encoder.fingerprint,
            "dimension": searcher.encoder.dimension,
            "rows": None if collection is None else len(collection),
            "version": collection.version if isinstance(collection, Collection) else None,
            "columns": [] if collection is None else collection.schema.names,
        }

    @app.get("/health", dependencies=checks)
    async def health() -> dict[str, Any]:
        """Say what is being served."""
        return await asyncio.to_thread(describe)

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Say that requests are taken; needs no key."""
        return {"status": "ready"}

    @app.get("/openapi.json", include_in_schema=False, dependencies=checks)
    async def schema() -> dict[str, Any]:
        return app.openapi()

    @app.get("/", include_in_schema=False, response_class=HTMLResponse, dependencies=checks)
    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse, dependencies=checks)
    async def docs() -> str:
        """The reference, without anything from the network."""
        schema = app.openapi()
        schemas = json.dumps(schema["components"]["schemas"], indent=2)
        return render("reference", paths=schema["paths"], schemas=schemas)

    registry = CollectorRegistry()
    gauge = Gauge("conjoin_waiting_items", "Items that wait for the model", registry=registry)
    gauge.set_function(lambda: searcher.batcher.waiting)
    instrumentator = Instrumentator(registry=registry, excluded_handlers=["/metrics"]).instrument(app)
    instrumentator.expose(app, include_in_schema=False, dependencies=list(checks))


def _public(hit: Hit) -> dict[str, Any]:
    """A row with the address of its picture in place of paths of this machine."""
    row = {**hit.row}
    image = row.pop("image", None)
    if image is not None:
        row["image"] = image if is_url(image) else f"/pictures/{quote(hit.id)}"
    return row


def _key_check(keys: Sequence[str]) -> Callable[..., Any]:
    """Refuses requests without a key, or with a wrong one, if there are keys."""

    async def check(bearer: _Bearer, header: _Header) -> None:  # not in a thread: those may all wait
        given = [key.encode() for key in (bearer and bearer.credentials, header) if key]
        right = [any([secrets.compare_digest(key, known.encode()) for known in keys]) for key in given]
        if keys and not (right and all(right)):
            raise HTTPException(
                401,
                "a key is needed, as a bearer token or X-API-Key; if both are sent, both must be right",
                {"www-authenticate": "Bearer"},
            )

    return check


def _bounded_route(limits: Limits) -> type[APIRoute]:
    """Routes that parse JSON in a thread, and none whose structure is larger than their items need.

    A body of a few bytes for each number or key would take a hundred times as much memory as objects.
    """
    most = 1024 + 256 * limits.items

    def parse(body: bytes) -> Any:  # noqa: ANN401
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
        if plain.count(b'"') > 2 * most or sum(map(len, plain.split(b'"')[::2])) > most:
            raise TooLargeError(f"the JSON has over {most:,} bytes besides its strings, the limit")
        return json.loads(body.decode())  # as UTF-8: in UTF-16 other characters have the byte of a quote

    class BoundedRequest(Request):
        async def json(self) -> Any:  # noqa: ANN401
            try:
                return await asyncio.to_thread(parse, await self.body())
            except TooLargeError as error:
                raise HTTPException(413, str(error)) from error

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()

            async def handler(request: Request) -> Response:
                return await handle(BoundedRequest(request.scope, request.receive))

            return handler

    return BoundedRoute


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a failure as the JSON of `_FAILURE`."""
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
