"""The HTTP endpoint: embeddings and search as JSON."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

import conjoin
from conjoin.serving.batching import BusyError
from conjoin.serving.http import LOCAL, protect
from conjoin.serving.limits import ItemError, TooLargeError, check_length, check_results, check_where, read_items
from conjoin.serving.reference import reference_page
from conjoin.serving.searcher import Searcher

_ITEM_SCHEMA: dict[str, Any] = {
    "items": {
        "anyOf": [
            {"type": "string", "description": "a text"},
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "text": {"type": "string"},
                    "image": {
                        "description": "data:image/...;base64 URIs, or URLs where the server allows them",
                        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
                    },
                },
            },
        ]
    }
}
_RESULTS = 10
_ITEMS = "texts, images and both; <image> in a text marks the place of each of its images"


class EmbedRequest(BaseModel):
    """Items to embed."""

    model_config = ConfigDict(extra="forbid")
    items: list[Any] = Field(description=_ITEMS, examples=[["a red apple"]], json_schema_extra=_ITEM_SCHEMA)
    instruction: str | None = Field(None, description="what to look for, for models that take instructions")


class SearchRequest(EmbedRequest):
    """Queries."""

    k: int | None = Field(None, description="results for each query; by default 10, or the server's limit if lower")
    where: str | None = Field(None, description="a condition on the columns of the collection: price < 50")


class Embeddings(BaseModel):
    """L2-normalised vectors, one for each item."""

    model: str
    fingerprint: str
    embeddings: list[list[float]]


class Hit(BaseModel):
    """A result, with what the collection keeps of the row."""

    rank: int
    score: float
    id: str
    row: dict[str, Any]


class SearchResults(BaseModel):
    """The results of each query, best first."""

    results: list[list[Hit]]


class Health(BaseModel):
    """What is being served."""

    status: str
    model: str
    fingerprint: str
    dimension: int
    rows: int | None
    columns: list[str]


class Problem(BaseModel):
    """What is wrong with a request, and the position of the item that it is about."""

    message: str
    item: int | None = None


class Failure(BaseModel):
    """The answer to every request that fails."""

    error: Problem


def make_endpoint(searcher: Searcher, host: str = LOCAL[0]) -> FastAPI:
    """Make the endpoint.

    Args:
        searcher: A model with its collection, or without one to embed only; it holds the limits.
        host: The address that it will listen at.
    """
    failures: dict[int | str, dict[str, Any]] = {code: {"model": Failure} for code in (413, 422, 503)}
    app = FastAPI(
        title="conjoin", version=conjoin.__version__, docs_url=None, redoc_url=None, responses=failures,
        description="Embed and search texts, images, and both.",
    )  # fmt: skip
    limits = searcher.limits
    collection, encoder = searcher.collection, searcher.encoder

    @app.post("/embed")
    def embed(request: EmbedRequest) -> Embeddings:
        """Embed items."""
        items, pixels = read_items(request.items, limits)
        vectors = searcher.encode(items, _instruction(request, searcher), pixels)
        return Embeddings(model=searcher.model_name, fingerprint=encoder.fingerprint, embeddings=vectors.tolist())

    @app.post("/search")
    def search(request: SearchRequest) -> SearchResults:
        """Search the collection for each of the items."""
        k = min(_RESULTS, limits.results) if request.k is None else check_results(request.k, limits)
        items, pixels = read_items(request.items, limits)
        where = None if request.where is None else check_where(request.where, limits)
        found = searcher.search(items, k, where, _instruction(request, searcher), pixels=pixels)
        return SearchResults(results=[[Hit(**hit._asdict()) for hit in hits] for hits in found])

    @app.get("/health")
    def health() -> Health:
        """Say what is being served."""
        return Health(
            status="ok",
            model=searcher.model_name,
            fingerprint=encoder.fingerprint,
            dimension=encoder.dimension,
            rows=None if collection is None else len(collection),
            columns=[column.name for column in columns],
        )

    @app.get("/", include_in_schema=False, response_class=HTMLResponse)
    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> str:
        """The reference, without anything from the network."""
        return page

    columns = searcher.columns
    page = reference_page(app.openapi(), limits)
    _answer_errors(app)
    protect(app, limits.body_bytes, host)
    return app


def _instruction(request: EmbedRequest, searcher: Searcher) -> str | None:
    if request.instruction is None:
        return None
    return check_length(request.instruction, searcher.limits, "the instruction")


def _answer_errors(app: FastAPI) -> None:
    """Answer every failure as `Failure`."""

    def answer(code: int, message: str, item: int | None = None) -> JSONResponse:
        headers = {"retry-after": "1"} if code == 503 else None
        return JSONResponse({"error": {"message": message, "item": item}}, code, headers)

    @app.exception_handler(ValueError)
    def refuse(request: Request, error: ValueError) -> JSONResponse:
        code = 413 if isinstance(error, TooLargeError) else 422
        return answer(code, str(error), error.item if isinstance(error, ItemError) else None)

    @app.exception_handler(BusyError)
    def busy(request: Request, error: BusyError) -> JSONResponse:
        return answer(503, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        return answer(422, f"{place}: {first['msg']}")

    @app.exception_handler(HTTPException)
    def other(request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> JSONResponse:
        return answer(500, "the server failed; its log says why")
