"""The HTTP endpoint: embeddings and search as JSON."""

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired, Self, cast
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CollectorRegistry, Gauge
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import BeforeValidator, Field, FiniteFloat, model_validator
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from typing_extensions import TypedDict

import conjoin
from conjoin.constants import RankBy
from conjoin.processing.item_images import is_url
from conjoin.retrieval import Collection, Hit
from conjoin.serving.batching import BusyError
from conjoin.serving.columns import join_conditions
from conjoin.serving.http import LOCAL, Gate, answer_error
from conjoin.serving.limits import ItemError, check_length, read_items
from conjoin.serving.openai import Body, add_openai
from conjoin.serving.page import Page, add_page
from conjoin.serving.searcher import Searcher
from conjoin.templates import template

_FAILURE = {"description": 'a JSON object {"error": {"message", "item"}}; `item` is the position of an item, or null'}


def _one(value: Any) -> Any:  # noqa: ANN401
    return [value] if isinstance(value, str) else value


def _list(value: Any) -> Any:  # noqa: ANN401
    return [value] if isinstance(value, str | dict) else value


def _text(value: Any) -> Any:  # noqa: ANN401
    return {"text": value} if isinstance(value, str) else value


class Item(Body):
    """A text, an image, or both; a string alone is a text."""

    text: str | None = Field(None, description="<image> marks the place of each image")
    image: Annotated[list[str], BeforeValidator(_one, json_schema_input_type=str | list[str])] = Field(
        [], description="one or several data:image/...;base64 URIs, or URLs where the server allows them"
    )


class SearchItem(Item):
    """A text, an image, or both; or what a row of the collection has of them."""

    id: str | None = Field(None, description="of a row: search for rows like it; it is no result itself")
    part: Literal["image", "text"] | None = Field(None, description="of that row: its image or its text alone")

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if self.part is not None if self.id is None else (self.text is not None or self.image):
            raise ValueError("expected an id, with or without its part, or a text and images")
        return self


class _Prompted(Body):
    prompt: str | None = Field(
        None, description="before each item, or an instruction, in place of the model's own prompt"
    )


_OneItem = Annotated[Item, BeforeValidator(_text, json_schema_input_type=str | Item)]
_OneSearchItem = Annotated[SearchItem, BeforeValidator(_text, json_schema_input_type=str | SearchItem)]


class EmbedRequest(_Prompted):
    """Items to embed."""

    items: Annotated[list[_OneItem], BeforeValidator(_list)] = Field(description="one, or several")
    role: Literal["query", "document"] | None = Field(
        None, description="what the items are: a model with a prompt for queries or documents gives it to them"
    )


class SearchRequest(_Prompted):
    """Queries, and which rows are searched for them."""

    items: Annotated[list[_OneSearchItem], BeforeValidator(_list)] = Field(
        [], description="one query, or several; without any, rows are listed in their order, with null as score"
    )
    k: int = Field(10, description="results for each query")
    offset: int = Field(0, description="results that are left out before them: 10 for the second page of 10")
    where: str | None = Field(None, description="a condition on the columns of the collection: price < 50")
    filters: dict[str, list[bool | FiniteFloat | str] | dict[Literal["least", "most"], FiniteFloat | str]] = Field(
        {}, description='by column, the values that a row may have, or {"least": 5, "most": 50}'
    )
    kind: Literal["image", "text", "both"] | None = Field(
        None, description="only rows with an image alone, a text alone, or both"
    )
    sort: str | None = Field(
        None, description="a column, with - before it for falling values: lists rows, or the 100 best of a query, so"
    )
    facets: list[str] | None = Field(
        None,
        description="columns whose values are counted; the answer then has the `total` of rows and their `kinds`, too",
    )
    weights: dict[Literal["image", "text"], FiniteFloat] | None = Field(
        None, description="of the parts of each item; their weighted sum in place of the model's vector of both"
    )
    group_by: str | None = Field(None, description="a column: only the best row of each of its values is a result")
    min_score: FiniteFloat | None = Field(None, description="the least score of a result")
    ranking: RankBy = Field(
        "default", description="what results are ranked by: vectors and the words of the text, or one of them"
    )


class SearchAnswer(TypedDict):
    """Results for each item, best first; `row` is what the collection keeps of the row."""

    results: list[list[Hit]]
    total: NotRequired[int]
    facets: NotRequired[dict[str, Any]]
    kinds: NotRequired[dict[str, int]]


class ExplainRequest(Body):
    """A query and one of its results."""

    item: _OneSearchItem
    id: str = Field(description="of the result")


def make_endpoint(
    searcher: Searcher,
    host: str = LOCAL[0],
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    page: Page | None = None,
) -> FastAPI:
    """Make the endpoint.

    Args:
        searcher: A model with its collection, or without one to embed only; it holds the limits.
        host: The address that it will listen at.
        keys: Requests must have one of them, as a bearer token or as `X-API-Key`; without any, everybody may ask.
        origins: Of the pages whose scripts may read the answers (CORS).
        page: The search page at `/`; None for the reference there.

    Raises:
        ImportError: prometheus-fastapi-instrumentator is not installed.
        ValueError: A key has letters outside ASCII, which headers do not carry.
    """
    if odd := next((key for key in keys if not key.isascii()), None):
        raise ValueError(f"the key {odd[:3]}... has letters outside ASCII, which clients send in different ways")
    app = FastAPI(
        title="conjoin", version=conjoin.__version__, docs_url=None, redoc_url=None, openapi_url=None,
        responses=dict.fromkeys((400, 401, 408, 413, 415, 422, 503), _FAILURE),
        description="Embed and search texts, images, and both.",
    )  # fmt: skip
    _add_work(app, searcher)
    add_openai(app, searcher)
    if page is not None:
        add_page(app, searcher, page)
        if page.beside is not None:
            app.mount("/beside", make_endpoint(page.beside, host))
    _add_state(app, searcher)
    for kind in (ValueError, BusyError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(Gate, limits=searcher.limits, host=host, keys=keys)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return app


def _add_work(app: FastAPI, searcher: Searcher) -> None:
    """Add the routes that need the model or the collection."""
    limits, explaining = searcher.limits, threading.Lock()

    def sources(item: Item, position: int = 0) -> tuple[str | None, list[str]]:
        if isinstance(item, SearchItem) and item.id is not None:
            try:
                return searcher.row_item(item.id, item.part)
            except (ValueError, FileNotFoundError) as error:
                raise ItemError(position, str(error)) from error
        return item.text, item.image

    def read(request: Any) -> tuple[list[Any], str | None]:  # noqa: ANN401 - with items and a prompt
        prompt = None if request.prompt is None else check_length(request.prompt, limits, "the prompt")
        return read_items([sources(item, position) for position, item in enumerate(request.items)], limits), prompt

    @app.post("/embed")
    def embed(request: EmbedRequest) -> dict[str, str | list[list[float]]]:
        """Embed items: `embeddings` are L2-normalised, one for each item."""
        items, prompt = read(request)
        vectors = searcher.encode(items, request.role, prompt).tolist()
        return {"model": searcher.model_name, "fingerprint": searcher.encoder.fingerprint, "embeddings": vectors}

    @app.post("/search")
    def search(request: SearchRequest) -> SearchAnswer:
        """Search the collection for each of the items, or list its rows."""
        items, prompt = read(request) if request.items else ([], None)
        how: dict[str, Any] = {}
        like = [item.id for item in request.items if item.id is not None]
        conditions = searcher.conditions(request.filters, request.where, request.kind, like, request.group_by)
        where = join_conditions(conditions)
        if items:
            how = request.model_dump(include={"weights", "min_score", "ranking"}) | {"prompt": prompt}
            pages: dict[str, Any] = {"offset": request.offset, "sort": request.sort, "group_by": request.group_by}
            results = searcher.search(items, request.k, where=where, **pages, **how)
        else:
            results = [searcher.browse(request.k, where, request.group_by, request.offset, request.sort)]
        pictured = searcher.pictured([hit.id for hits in results for hit in hits if "image" not in hit.row])
        answer = SearchAnswer(
            results=[[replace(hit, row=_public(hit, hit.id in pictured)) for hit in hits] for hits in results]
        )
        if request.facets is not None:
            counted = searcher.count(
                items, conditions, request.facets, request.group_by, request.sort is not None, **how
            )
            answer = cast(SearchAnswer, {**answer, **counted})
        return answer

    @app.post("/explain")
    def explain(request: ExplainRequest) -> list[dict[str, Any]]:
        """Say what a query and a result share: an image of one with the text of the other; for joint encoders."""
        text, images = sources(request.item)
        read = [item["image"] for item in read_items([(None, [image]) for image in images], limits)] if images else []
        with explaining:
            return searcher.explain(text, read, request.id)

    @app.get("/pictures/{row:path}", response_class=Response)
    def picture(row: str) -> Response:
        """The picture of a row, small, as a JPEG file; results name it as their `image`."""
        try:
            content = searcher.picture(row)
        except (ValueError, FileNotFoundError):
            content = None
        if content is None:
            raise HTTPException(404, "there is no picture of this row that may be shown")
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})


def _add_state(app: FastAPI, searcher: Searcher) -> None:
    """What is answered while all workers wait for the model."""

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Say what is being served."""
        collection = searcher.collection
        return {
            "status": "ok",
            "model": searcher.model_name,
            "fingerprint": searcher.encoder.fingerprint,
            "dimension": searcher.encoder.dimension,
            "rows": None if collection is None else await asyncio.to_thread(len, collection),
            "version": collection.version if isinstance(collection, Collection) else None,
            "columns": [] if collection is None else collection.schema.names,
        }

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Say that requests are taken; needs no key."""
        return {"status": "ready"}

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> dict[str, Any]:
        return app.openapi()

    @app.get("/", include_in_schema=False, response_class=HTMLResponse)
    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    async def docs() -> str:
        """The reference, without anything from the network."""
        schema = app.openapi()
        schemas = json.dumps(schema["components"]["schemas"], indent=2)
        return template("serving/reference.html.j2").render(paths=schema["paths"], schemas=schemas)

    registry = CollectorRegistry()
    gauge = Gauge("conjoin_waiting_items", "Items that wait for the model", registry=registry)
    gauge.set_function(lambda: searcher.batcher.waiting)
    instrumentator = Instrumentator(registry=registry, excluded_handlers=["/metrics"]).instrument(app)
    instrumentator.expose(app, include_in_schema=False)


def _public(hit: Hit, has_picture: bool) -> dict[str, Any]:
    """A row with the address of its picture in place of paths of this machine."""
    row = {**hit.row}
    image = row.pop("image", None)
    if image is not None or has_picture:
        row["image"] = image if is_url(image) else f"/pictures/{quote(hit.id)}"
    return row
