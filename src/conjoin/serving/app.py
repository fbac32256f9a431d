"""The search app: a page that searches one collection, or two side by side."""

import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conjoin.serving.batching import BusyError
from conjoin.serving.columns import condition
from conjoin.serving.html import CLICK, STYLE, columns_html, message, results_html
from conjoin.serving.http import LOCAL, missing, protect
from conjoin.serving.limits import Limits, Picture, check_results, check_where, count_pixels, make_item, read_picture
from conjoin.serving.snippet import python_code

if TYPE_CHECKING:
    from conjoin.serving.searcher import Found, Searcher

FILTERS = 4
"""Columns with few values that get a list to choose from."""

START = "Write a text, add an image, or both. Choose a result to see what it shares with the query."
_FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "Arial", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "Liberation Mono", "monospace"]


class Query(NamedTuple):
    """The last query of a session, and what each collection found."""

    text: str | None
    pictures: list[Picture]
    found: "list[list[Found]]"


class SearchPage:
    """What the page does, without the page.

    Args:
        searchers: One or two; a future, so that the page answers before the models are loaded.
        limits: What is accepted.
        title_column: The column that names a result; its text, or else its id, if None.
        is_local: Whether only this machine sees the page, so that it may name folders.
    """

    def __init__(
        self,
        searchers: "Future[list[Searcher]]",
        limits: Limits,
        title_column: str | None = None,
        is_local: bool = True,
    ) -> None:
        self._searchers, self.limits = searchers, limits
        self.title_column, self.is_local = title_column, is_local
        self._choices: list[str] = []

    @property
    def searchers(self) -> "list[Searcher]":
        """The searchers, once they are loaded."""
        return self._searchers.result()

    def describe(self) -> tuple[str, str, list[tuple[str, list[str]]]]:
        """Lines on the collections, their columns as HTML, and the columns with few values."""
        shown = []
        for searcher in self.searchers:
            rows = 0 if searcher.collection is None else len(searcher.collection)
            shown.append(f"{searcher.model_name}: {rows:,} rows")
        columns = [searcher.columns for searcher in self.searchers]
        shared = [column for column in columns[0] if all(column.name in [c.name for c in some] for some in columns)]
        choices = [(column.name, column.values) for column in shared if column.values and len(column.values) > 1]
        self._choices = [name for name, _ in choices[:FILTERS]]
        hidden = {searcher.hidden_pictures for searcher in self.searchers if self.is_local}
        lines = [" · ".join(shown), *sorted(filter(None, hidden))]
        return "".join(map(message, lines)), columns_html(shared), choices[:FILTERS]

    def search(
        self, text: str | None, files: Sequence[Any] | None, k: float, where: str | None, *chosen: Sequence[str] | None
    ) -> tuple[list[str], str, Query | None]:
        """Search; returns the results of each collection as HTML, the code, and the query.

        What is asked while the models are loaded waits for them, and imports nothing: two threads that import packages
        in circles fail.
        """
        searchers = self.searchers
        from conjoin.retrieval.pictures import picture_folders

        try:
            query, item, names = self._read(text, files)
            k = check_results(int(k) if isinstance(k, float) and k.is_integer() else k, self.limits)
            filters = {name: list(values or ()) for name, values in zip(self._choices, chosen, strict=False)}
            where = condition(filters, check_where(where or "", self.limits))
            pixels = count_pixels(query.pictures, self.limits)
            found, times = [], []
            for searcher in searchers:
                started = time.perf_counter()
                found.append(searcher.search([item], k, where, pictures=True, pixels=pixels)[0])
                times.append(1000 * (time.perf_counter() - started))
        except (ValueError, BusyError) as error:
            problem = message(_sentence(str(error)), "error")
            return [problem, *[""] * (len(searchers) - 1)], "", None
        shared = None
        if len(found) > 1:
            shared = len(set.intersection(*({hit.id for hit in hits} for hits in found)))
        pages = [
            results_html(
                self.title(place), hits, spent, shared, picture_folders(searchers[place].source), self.title_column
            )
            for place, (hits, spent) in enumerate(zip(found, times, strict=True))
        ]
        codes = [
            python_code(one.source, one.encoder.name, query.text, names, k, where, one.encoder.input_type)
            for one in searchers
        ]
        return pages, "\n".join(codes), query._replace(found=found)

    def why(self, query: Query | None, side: int, rank: Any) -> str:  # noqa: ANN401 - what the browser sent
        """What a query and the result of a rank share, as HTML."""
        from conjoin.evaluation.report.search_page import row_title
        from conjoin.serving.why import NotExplainedError, explain_result

        hits = [] if query is None else query.found[side]
        if query is None or not isinstance(rank, int) or not 1 <= rank <= len(hits):
            return message("Search first, then choose a result.")
        hit = hits[rank - 1]
        try:
            images = [picture.source for picture in query.pictures]
            shared = explain_result(self.searchers[side], query.text, images, hit.row)
        except NotExplainedError as error:
            return message(str(error))
        name = row_title(hit.row, hit.id, self.title_column)
        return message(f"Result {rank}, score {hit.score:.4f}: {name}") + shared

    def title(self, place: int) -> str:
        """The name of a searcher for people."""
        searcher = self.searchers[place]
        return searcher.model_name if len(self.searchers) == 1 else f"{'AB'[place]}: {searcher.model_name}"

    def _read(self, text: str | None, files: Sequence[Any] | None) -> tuple[Query, Any, list[str]]:
        """The query, the item, and the names of its files."""
        paths = [Path(file[0] if isinstance(file, list | tuple) else file) for file in files or ()]
        text = text.strip() or None if text else None
        if text is None and not paths:
            raise ValueError("nothing to search for: write a text, add an image, or both")
        pictures = [self._picture(path) for path in paths]
        return Query(text, pictures, []), make_item(text, pictures, self.limits), [path.name for path in paths]

    def _picture(self, path: Path) -> Picture:
        """An uploaded image; Gradio made sure that it was uploaded."""
        size, name = path.stat().st_size, f"the file {path.name!r}"
        if size > self.limits.image_bytes:
            raise ValueError(f"{name}: {size:,} bytes; the limit is {self.limits.image_bytes:,}")
        return read_picture(path.read_bytes(), name, self.limits)


def make_app(
    searchers: "Future[list[Searcher]]",
    sides: int = 1,
    *,
    limits: Limits | None = None,
    k: int = 12,
    host: str = LOCAL[0],
    title_column: str | None = None,
) -> Any:  # noqa: ANN401 - a FastAPI application
    """Make the app.

    It loads nothing from the network, sends nothing to it, and serves no file but what its visitors uploaded.

    Args:
        searchers: As many as `sides`, now or later.
        sides: One collection, or two side by side.
        limits: What is accepted.
        k: Results at first.
        host: The address that it will listen at.
        title_column: The column that names a result; its text, or else its id, if None.

    Raises:
        ImportError: Gradio is not installed.
        ValueError: Neither one nor two sides.
    """
    limits = limits or Limits()
    if sides not in (1, 2):
        raise ValueError(f"the app shows one collection, or two side by side, got {sides}")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    uploads = tempfile.TemporaryDirectory(prefix="conjoin-app-")
    os.environ["GRADIO_TEMP_DIR"] = uploads.name
    try:
        import gradio
        from fastapi import FastAPI
    except ImportError as error:
        missing("app", error)
    blocks = _blocks(SearchPage(searchers, limits, title_column, host in LOCAL), sides, k)
    _accept_only_uploads(blocks, Path(uploads.name).resolve())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with uploads:  # removed when the app stops
            yield

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    protect(app, limits.body_bytes, host, limits.body_seconds)
    return gradio.mount_gradio_app(
        app,
        blocks,
        path="",
        footer_links=[],
        run_history=False,
        max_file_size=limits.image_bytes,
        allowed_paths=[],
        ssr_mode=False,
        show_error=False,
        enable_monitoring=False,
        theme=gradio.themes.Default(primary_hue="blue", font=_FONT, font_mono=_MONO),
        css=STYLE,
    )


class _Parts(NamedTuple):
    """The components of the page."""

    status: Any
    text: Any
    images: Any
    count: Any
    where: Any
    chosen: list[Any]
    columns: Any
    button: Any
    clear: Any
    results: list[Any]
    why: Any
    code: Any
    last: Any


def _blocks(page: SearchPage, sides: int, k: int) -> Any:  # noqa: ANN401 - gradio.Blocks
    import gradio as gr

    with gr.Blocks(title="conjoin search", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        parts = _lay_out(sides, page.limits.results, k)
        _connect(page, parts, blocks)
    return blocks.queue(max_size=256, default_concurrency_limit=16)


def _accept_only_uploads(blocks: Any, root: Path) -> None:  # noqa: ANN401
    """Refuse every path and URL that a browser sends, but those of uploads.

    A browser sends the path of what it uploaded. Gradio checks that path only in an app that it has launched itself,
    never a URL, and copies or downloads what it names, whichever component it is sent to.
    """

    async def own(path: str) -> str:
        if not Path(path).resolve().is_relative_to(root):
            raise PermissionError("this file was not uploaded")
        return path

    blocks.has_launched = True
    for block in blocks.blocks.values():
        block.async_move_resource_to_block_cache = own


def _lay_out(sides: int, most: int, k: int) -> _Parts:
    import gradio as gr

    gr.HTML("<h1>Search</h1>")
    status = gr.HTML(message("The model is being loaded …"), elem_id="status")
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            text = gr.Textbox(label="Text", placeholder="a red apple", autofocus=True, elem_id="text")
            images = gr.Gallery(
                label="Images",
                type="filepath",
                file_types=["image"],
                sources=["upload", "clipboard"],
                interactive=True,
                columns=3,
                height=180,
                object_fit="contain",
                buttons=[],
                elem_id="images",
            )
            with gr.Row():
                button = gr.Button("Search", variant="primary", elem_id="search")
                clear = gr.Button("Clear all", elem_id="clear")
            count = gr.Slider(1, most, k, step=1, label="Results", elem_id="count")
            with gr.Accordion("Filter", open=False, elem_id="filter"):
                chosen = [gr.Dropdown(choices=[], multiselect=True, visible=False) for _ in range(FILTERS)]
                where = gr.Textbox(label="Condition", placeholder="price < 50 and kind = 'shoes'", elem_id="where")
                columns = gr.HTML()
        with gr.Column(scale=3, min_width=320):
            why = gr.HTML(elem_id="why")
            with gr.Row():
                results = [
                    gr.HTML("" if place else message(START), js_on_load=CLICK, elem_id=f"results-{place}")
                    for place in range(sides)
                ]
            with gr.Accordion("Copy as Python", open=False, elem_id="python"):
                code = gr.Code(language="python", interactive=False, show_label=False)
    last = gr.State()
    return _Parts(status, text, images, count, where, chosen, columns, button, clear, results, why, code, last)


def _connect(page: SearchPage, parts: _Parts, blocks: Any) -> None:  # noqa: ANN401 - gradio.Blocks
    """Say what each event of the page does."""
    import gradio as gr

    hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
    inputs = [parts.text, parts.images, parts.count, parts.where, *parts.chosen]

    def describe() -> list[Any]:
        lines, table, choices = page.describe()
        shown = [gr.Dropdown(label=name, choices=values, visible=True) for name, values in choices]
        return [lines, table, *shown, *[gr.skip()] * (FILTERS - len(shown))]

    def search(*values: Any) -> list[Any]:  # noqa: ANN401 - what the components hold
        pages, code, query = page.search(*values)
        return [*pages, "", code, query]

    def clear() -> list[Any]:
        empty = [*[[] for _ in parts.chosen], message(START), *[""] * (len(parts.results) - 1)]
        return ["", None, "", *empty, "", "", None]

    blocks.load(describe, outputs=[parts.status, parts.columns, *parts.chosen], **hidden)
    shown = [*parts.results, parts.why, parts.code, parts.last]
    gr.on(
        [parts.button.click, parts.text.submit, parts.where.submit],
        search,
        inputs,
        shown,
        trigger_mode="always_last",
        **hidden,
    )
    parts.clear.click(clear, outputs=[parts.text, parts.images, parts.where, *parts.chosen, *shown], **hidden)
    for side, found in enumerate(parts.results):

        def explain(query: Query | None, event: gr.EventData, side: int = side) -> str:
            return page.why(query, side, event._data.get("rank") if isinstance(event._data, dict) else None)

        found.select(explain, parts.last, parts.why, scroll_to_output=True, concurrency_limit=1, **hidden)


def _sentence(text: str) -> str:
    """A message of an error with a capital letter; those of items without the position."""
    text = text.removeprefix("item 0: ").removeprefix("the item: ")
    return text[:1].upper() + text[1:]
