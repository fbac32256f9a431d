"""The HTTP endpoint: embeddings and search as JSON."""

import hashlib
import hmac
import math
from base64 import b64encode
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import conjoin
from conjoin.processing.item_images import is_url
from conjoin.retrieval import Collection
from conjoin.serving.batching import BusyError
from conjoin.serving.http import LOCAL, Stopping, protect
from conjoin.serving.limits import ItemError, TooLargeError, check_length, check_results, check_where, read_items
from conjoin.serving.reference import reference_page
from conjoin.serving.searcher import Found, Ranking, Searcher

_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
_Header = Annotated[str | None, Depends(APIKeyHeader(name="X-API-Key", auto_error=False))]
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
    prompt: str | None = Field(
        None, description="before each item, or an instruction, in place of the model's own prompt"
    )
    role: Literal["query", "document"] | None = Field(
        None, description="what the items are: a model with a prompt for queries or documents gives it to them"
    )


class SearchRequest(BaseModel):
    """Queries."""

    model_config = ConfigDict(extra="forbid")
    items: list[Any] = Field(description=_ITEMS, examples=[["a red apple"]], json_schema_extra=_ITEM_SCHEMA)
    prompt: str | None = Field(
        None, description="before each query, or an instruction, in place of the model's own prompt for queries"
    )
    k: int | None = Field(None, description="results for each query; by default 10, or the server's limit if lower")
    where: str | None = Field(None, description="a condition on the columns of the collection: price < 50")
    weights: dict[Literal["image", "text"], FiniteFloat] | None = Field(
        None, description="of the parts of each item; their weighted sum in place of the model's vector of both"
    )
    group_by: str | None = Field(None, description="a column: only the best row of each of its values is a result")
    min_score: FiniteFloat | None = Field(None, description="results with a lower score are left out")


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


class OpenAIRequest(BaseModel):
    """Texts to embed, as OpenAI's clients ask for them."""

    input: str | list[str] = Field(description="a text, or several")
    model: str = Field("", description="is not read: there is one")
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class OpenAIEmbedding(BaseModel):
    """A vector: numbers, or their 32-bit floats in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class OpenAIUsage(BaseModel):
    """Tokens are not counted."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class OpenAIEmbeddings(BaseModel):
    """As OpenAI's clients read it."""

    object: Literal["list"] = "list"
    model: str
    data: list[OpenAIEmbedding]
    usage: OpenAIUsage = OpenAIUsage()


class Ready(BaseModel):
    """Whether requests are taken."""

    status: str


class Health(BaseModel):
    """What is being served."""

    status: str
    model: str
    fingerprint: str
    dimension: int
    rows: int | None
    version: int | None
    columns: list[str]


class Problem(BaseModel):
    """What is wrong with a request, and the position of the item that it is about."""

    message: str
    item: int | None = None


class Failure(BaseModel):
    """The answer to every request that fails."""

    error: Problem


def make_endpoint(
    searcher: Searcher,
    host: str = LOCAL[0],
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    stopping: Stopping | None = None,
) -> FastAPI:
    """Make the endpoint.

    Args:
        searcher: A model with its collection, or without one to embed only; it holds the limits.
        host: The address that it will listen at.
        keys: Requests must have one of them, as a bearer token or as `X-API-Key`; without any, everybody may ask.
        origins: Of the pages whose scripts may read the answers (CORS).
        stopping: Says when the server stops: then only what was begun is answered.

    Raises:
        ImportError: prometheus-fastapi-instrumentator is not installed.
    """
    failures: dict[int | str, dict[str, Any]] = {code: {"model": Failure} for code in (401, 408, 413, 422, 503)}
    app = FastAPI(
        title="conjoin", version=conjoin.__version__, docs_url=None, redoc_url=None, openapi_url=None,
        responses=failures, description="Embed and search texts, images, and both.",
    )  # fmt: skip
    _add_work(app, searcher, [Depends(_key_check(keys)), Depends(_stop_check(stopping))])
    _add_state(app, searcher, [Depends(_key_check(keys))], stopping)
    _answer_errors(app)
    protect(app, searcher.limits, host)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return app


def _add_work(app: FastAPI, searcher: Searcher, checks: Sequence[Any]) -> None:
    """Add the routes that need the model or the collection."""
    limits, encoder = searcher.limits, searcher.encoder

    @app.post("/embed", dependencies=checks)
    def embed(request: EmbedRequest) -> Embeddings:
        """Embed items."""
        items, pixels = read_items(request.items, limits)
        vectors = searcher.encode(items, request.role, _prompt(request, searcher), pixels)
        return Embeddings(model=searcher.model_name, fingerprint=encoder.fingerprint, embeddings=vectors.tolist())

    @app.post("/v1/embeddings", dependencies=checks)
    def embed_as_openai(request: OpenAIRequest) -> OpenAIEmbeddings:
        """Embed texts, for OpenAI's clients."""
        texts = [request.input] if isinstance(request.input, str) else request.input
        vectors = searcher.encode(read_items(texts, limits).items).astype("<f4")
        is_text = request.encoding_format == "base64"
        data = [
            OpenAIEmbedding(
                index=index, embedding=b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
            )
            for index, vector in enumerate(vectors)
        ]
        return OpenAIEmbeddings(model=searcher.model_name, data=data)

    @app.post("/search", dependencies=checks)
    def search(request: SearchRequest) -> SearchResults:
        """Search the collection for each of the items."""
        k = min(_RESULTS, limits.results) if request.k is None else check_results(request.k, limits)
        items, pixels = read_items(request.items, limits)
        where = None if request.where is None else check_where(request.where, limits)
        weights: Any = request.weights
        ranking = Ranking(_prompt(request, searcher), weights, request.group_by)
        results = searcher.search(items, k, where, ranking, pixels=pixels)
        least = -math.inf if request.min_score is None else request.min_score
        return SearchResults(
            results=[
                [Hit(**hit._replace(row=_public(hit))._asdict()) for hit in hits if hit.score >= least]
                for hits in results
            ]
        )

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


def _add_state(app: FastAPI, searcher: Searcher, checks: Sequence[Any], stopping: Stopping | None) -> None:
    """What is answered whatever the model does: in the loop of events, from what is known."""
    encoder = searcher.encoder
    known: list[tuple[Any, Health]] = []

    def describe() -> Health:
        collection = searcher.collection
        return Health(
            status="ok",
            model=searcher.model_name,
            fingerprint=encoder.fingerprint,
            dimension=encoder.dimension,
            rows=None if collection is None else len(collection),
            version=collection.version if isinstance(collection, Collection) else None,
            columns=[] if collection is None else collection.schema.names,
        )

    @app.get("/health", dependencies=checks)
    async def health() -> Health:
        """Say what is being served."""
        if not known or known[0][0] is not searcher.collection:
            known[:] = [(searcher.collection, describe())]
        return known[0][1]

    @app.get("/ready")
    async def ready() -> Ready:
        """Say whether requests are taken; needs no key."""
        await _stop_check(stopping)()
        return Ready(status="ready")

    @app.get("/openapi.json", include_in_schema=False, dependencies=checks)
    async def schema() -> dict[str, Any]:
        return app.openapi()

    @app.get("/", include_in_schema=False, response_class=HTMLResponse, dependencies=checks)
    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse, dependencies=checks)
    async def docs() -> str:
        """The reference, without anything from the network."""
        return page

    page = reference_page(app.openapi(), searcher.limits)
    _add_metrics(app, searcher, checks)


def _add_metrics(app: FastAPI, searcher: Searcher, checks: Sequence[Any]) -> None:
    """`/metrics` for Prometheus, if its packages are installed."""
    try:
        from prometheus_client import CollectorRegistry, Gauge
        from prometheus_fastapi_instrumentator import Instrumentator
    except ImportError:
        return
    registry = CollectorRegistry()
    gauge = Gauge("conjoin_waiting_items", "Items that wait for the model", registry=registry)
    gauge.set_function(lambda: searcher.batcher.waiting)
    instrumentator = Instrumentator(registry=registry, excluded_handlers=["/metrics"]).instrument(app)
    instrumentator.expose(app, include_in_schema=False, dependencies=list(checks))


def _public(hit: Found) -> dict[str, Any]:
    """A row with the address of its picture in place of paths of this machine."""
    row = {**hit.row}
    image = row.pop("image", None)
    if image is not None:
        row["image"] = image if is_url(image) else f"/pictures/{quote(hit.id)}"
    return row


def _key_check(keys: Sequence[str]) -> Callable[..., Coroutine[Any, Any, None]]:
    """Refuses requests without a key, if there are keys."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def check(bearer: _Bearer, header: _Header) -> None:  # not in a thread: those may all wait
        given = hashlib.sha256((bearer.credentials if bearer else header or "").encode()).digest()
        if digests and not any([hmac.compare_digest(given, digest) for digest in digests]):
            raise HTTPException(401, "a key is needed, as a bearer token or X-API-Key", {"www-authenticate": "Bearer"})

    return check


def _stop_check(stopping: Stopping | None) -> Callable[[], Coroutine[Any, Any, None]]:
    """Refuses new work while the server stops."""

    async def check() -> None:
        if stopping is not None and stopping.until is not None:
            raise BusyError("the server stops")

    return check


def _prompt(request: EmbedRequest | SearchRequest, searcher: Searcher) -> str | None:
    return None if request.prompt is None else check_length(request.prompt, searcher.limits, "the prompt")


def _answer_errors(app: FastAPI) -> None:
    """Answer every failure as `Failure`."""

    def answer(code: int, message: str, item: int | None = None) -> JSONResponse:
        headers = {"retry-after": "1"} if code == 503 else None
        return JSONResponse({"error": {"message": message, "item": item}}, code, headers)

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: ValueError) -> JSONResponse:
        code = 413 if isinstance(error, TooLargeError) else 422
        return answer(code, str(error), error.item if isinstance(error, ItemError) else None)

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> JSONResponse:
        return answer(503, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        return answer(422, f"{field}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        refusal = answer(error.status_code, str(error.detail))
        refusal.headers.update(error.headers or {})
        return refusal

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return answer(500, "the server failed; its log says why")
