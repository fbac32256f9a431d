"""The search app: a page that searches one collection, or two side by side."""

import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conjoin.serving.batching import BusyError
from conjoin.serving.columns import Column, condition
from conjoin.serving.html import CLICK, NOTHING, STYLE, Face, browse_html, columns_html, message, results_html
from conjoin.serving.http import LOCAL, UploadRoom, missing, protect
from conjoin.serving.limits import Limits, Picture, check_results, check_where, count_pixels, make_item, read_picture
from conjoin.serving.snippet import python_code

if TYPE_CHECKING:
    from conjoin.serving.searcher import Found, Searcher

FILTERS = 4
"""Columns with few values that get a list to choose from."""

START = "Write a text, add an image, or both. Choose a result to see what it shares with the query."
_FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "Arial", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "Liberation Mono", "monospace"]


class Asked(NamedTuple):
    """What a visitor asks for: the values of the components of the page, in their order.

    Attributes:
        text: Of the query.
        files: Its images.
        k: Results.
        where: A condition.
        least: Of the column with the sliders.
        most: Likewise.
        image_weight: Of the query's image; without any weight, the model embeds image and text together.
        text_weight: Of its text.
        min_score: Results with a lower score are left out.
        chosen: Values of each column that has a list of them.
    """

    text: str | None = None
    files: Sequence[Any] | None = None
    k: float = 12
    where: str | None = None
    least: float | None = None
    most: float | None = None
    image_weight: float | None = None
    text_weight: float | None = None
    min_score: float | None = None
    chosen: Sequence[Sequence[str] | None] = ()

    @property
    def weights(self) -> dict[str, float] | None:
        """The weights of the parts; None without any."""
        weights = {"image": self.image_weight, "text": self.text_weight}
        return {part: weight for part, weight in weights.items() if weight is not None} or None


class Query(NamedTuple):
    """The last query of a session, and what each collection found."""

    text: str | None
    pictures: list[Picture]
    found: "list[list[Found]]"


class Filters(NamedTuple):
    """What a visitor may filter by.

    Attributes:
        columns: Those that a condition may name.
        choices: Columns with few values, and these.
        number: A column of numbers, such as prices, and its least and greatest, without decimals; None without one.
    """

    columns: list[Column]
    choices: list[tuple[str, list[str]]]
    number: tuple[str, float, float] | None


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """What the page shows at first, and how it names and groups results.

    Attributes:
        k: Results.
        title_column: The column that names a result; its text, or else its id, if None.
        group_by: A column, such as a product's id: only the best row of each of its values is shown.
        weights: Of the parts `"image"` and `"text"` of a query; the model embeds both together if empty.
        min_score: Results with a lower score are not shown.
    """

    k: int = 12
    title_column: str | None = None
    group_by: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    min_score: float | None = None


class SearchPage:
    """What the page does, without the page.

    Args:
        searchers: One or two; a future, so that the page answers before the models are loaded.
        limits: What is accepted.
        options: What is shown.
        is_local: Whether only this machine sees the page, so that it may name folders.
    """

    def __init__(
        self,
        searchers: "Future[list[Searcher]]",
        limits: Limits,
        options: PageOptions = PageOptions(),
        is_local: bool = True,
    ) -> None:
        self._searchers, self.limits = searchers, limits
        self.options, self.is_local = options, is_local
        self.first = Asked(
            k=options.k,
            image_weight=options.weights.get("image"),
            text_weight=options.weights.get("text"),
            min_score=options.min_score,
        )

    @property
    def searchers(self) -> "list[Searcher]":
        """The searchers, once they are loaded."""
        return self._searchers.result()

    @cached_property
    def filters(self) -> Filters:
        """The filters for a visitor: the columns that all collections have."""
        first, *others = [searcher.columns for searcher in self.searchers]
        shared = [column for column in first if all(column.name in [other.name for other in some] for some in others)]
        choices = [(column.name, column.values) for column in shared if column.values and len(column.values) > 1]
        ends = ((column.name, *column.ends) for column in shared if column.ends and column.name != "id")
        numbers = [(name, least // 1, -(-most // 1)) for name, least, most in ends if least < most]
        return Filters(shared, choices[:FILTERS], next(iter(numbers), None))

    def describe(self) -> str:
        """Lines on the collections, as HTML."""
        shown = []
        for searcher in self.searchers:
            rows = 0 if searcher.collection is None else len(searcher.collection)
            shown.append(f"{searcher.model_name}: {rows:,} rows")
        hidden = {searcher.hidden_pictures for searcher in self.searchers if self.is_local}
        return "".join(map(message, [" · ".join(shown), *sorted(filter(None, hidden))]))

    def search(self, asked: Asked) -> tuple[list[str], str, Query | None]:
        """Search; returns the results of each collection as HTML, the code, and the query.

        Without a text or an image it shows rows that fulfil the filter. What is asked while the models are loaded
        waits for them, and imports nothing: two threads that import packages in circles fail.
        """
        searchers = self.searchers
        from conjoin.serving.searcher import Ranking

        try:
            k = int(asked.k) if isinstance(asked.k, float) and asked.k.is_integer() else asked.k
            k, where = check_results(k, self.limits), self._where(asked)
            if not asked.files and not (asked.text and asked.text.strip()):
                return self._browse(k, where), "", None
            query, item, names = self._read(asked.text, asked.files)
            ranking = Ranking(None, asked.weights, self.options.group_by)
            pixels = count_pixels(query.pictures, self.limits)
            results, times = [], []
            for searcher in searchers:
                started = time.perf_counter()
                results.append(searcher.search([item], k, where, ranking, pictures=True, pixels=pixels)[0])
                times.append(1000 * (time.perf_counter() - started))
        except (ValueError, BusyError) as error:
            problem = message(_sentence(str(error)), "error")
            return [problem, *[""] * (len(searchers) - 1)], "", None
        query = query._replace(found=[_above(hits, asked.min_score) for hits in results])
        given = {name: value for name, value in ranking._asdict().items() if value is not None}
        codes = [
            python_code(each.source, each.encoder.name, query.text, names, k, where, *each.code_options(names, given))
            for each in searchers
        ]
        return self._results(query.found, results, times), "\n".join(codes), query

    def _results(self, shown: "list[list[Found]]", results: "list[list[Found]]", times: Sequence[float]) -> list[str]:
        """The results of each collection as HTML.

        Args:
            shown: Those to show.
            results: Also those below the least score.
            times: Milliseconds that each search took.
        """
        from conjoin.retrieval.pictures import picture_folders

        shared = None
        if len(shown) > 1:
            shared = len(set.intersection(*({hit.id for hit in hits} for hits in shown)))
        pages = []
        for index, (hits, every, spent) in enumerate(zip(shown, results, times, strict=True)):
            nothing = f"Nothing similar was found: the best score is {every[0].score:.4f}." if every else NOTHING
            folders = picture_folders(self.searchers[index].source)
            pages.append(results_html(self.title(index), hits, spent, shared, folders, self._face, nothing))
        return pages

    def _browse(self, k: int, where: str | None) -> list[str]:
        """Rows of each collection as HTML."""
        from conjoin.retrieval.pictures import picture_folders

        pages = []
        for index, searcher in enumerate(self.searchers):
            rows = searcher.browse(k, where, self.options.group_by)
            pages.append(browse_html(self.title(index), START, rows, picture_folders(searcher.source), self._face))
        return pages

    @property
    def _face(self) -> Face:
        number = self.filters.number
        return Face(self.options.title_column, None if number is None else number[0])

    def _where(self, asked: Asked) -> str | None:
        """The condition that all filters together are; sliders at their ends filter nothing."""
        choices = {
            name: list(values or ()) for (name, _), values in zip(self.filters.choices, asked.chosen, strict=False)
        }
        ranges: dict[str, tuple[float | None, float | None]] = {}
        if self.filters.number is not None:
            name, least, most = self.filters.number
            low = None if asked.least is None or asked.least <= least else _plain(asked.least)
            ranges[name] = low, None if asked.most is None or asked.most >= most else _plain(asked.most)
        return condition(choices, check_where(asked.where or "", self.limits), ranges)

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
        name = row_title(hit.row, hit.id, self.options.title_column)
        return message(f"Result {rank}, score {hit.score:.4f}: {name}") + shared

    def title(self, index: int) -> str:
        """Return the name of a searcher that the page shows."""
        searcher = self.searchers[index]
        return searcher.model_name if len(self.searchers) == 1 else f"{'AB'[index]}: {searcher.model_name}"

    def _read(self, text: str | None, files: Sequence[Any] | None) -> tuple[Query, Any, list[str]]:
        """The query, the item, and the names of its files."""
        paths = [Path(file[0] if isinstance(file, list | tuple) else file) for file in files or ()]
        text = text.strip() or None if text else None
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
    host: str = LOCAL[0],
    options: PageOptions = PageOptions(),
) -> Any:  # noqa: ANN401 - a FastAPI application
    """Make the app.

    It loads nothing from the network, sends nothing to it, and serves no file but what its visitors uploaded.

    Args:
        searchers: As many as `sides`, now or later.
        sides: One collection, or two side by side.
        limits: What is accepted.
        host: The address that it will listen at.
        options: What is shown.

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
    blocks = _blocks(SearchPage(searchers, limits, options, host in LOCAL), sides)
    _accept_only_uploads(blocks, Path(uploads.name).resolve())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with uploads:  # removed when the app stops
            yield

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    protect(app, limits, host)
    app.add_middleware(UploadRoom, folder=Path(uploads.name), most=limits.upload_bytes)
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
    """The components of the page; `asked` are those of `Asked`, with those of `chosen` behind."""

    status: Any
    asked: list[Any]
    sliders: list[Any]
    columns: Any
    button: Any
    clear: Any
    results: list[Any]
    why: Any
    code: Any
    last: Any


def _blocks(page: SearchPage, sides: int) -> Any:  # noqa: ANN401 - gradio.Blocks
    import gradio as gr

    with gr.Blocks(title="conjoin search", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        parts = _lay_out(sides, page.limits.results, page.first)
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


def _lay_out(sides: int, most: int, first: Asked) -> _Parts:
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
            count = gr.Slider(1, most, first.k, step=1, label="Results", elem_id="count")
            with gr.Accordion("Filter", open=False, elem_id="filter"):
                lists = [gr.Dropdown(choices=[], multiselect=True, visible=False) for _ in range(FILTERS - 1)]
                where = gr.Textbox(label="Condition", placeholder="price < 50 and kind = 'shoes'", elem_id="where")
                columns = gr.HTML()
            with gr.Accordion("Ranking", open=False, elem_id="ranking"):
                weights = [
                    gr.Number(weight, label=f"Weight of the {part}", placeholder="as the model does")
                    for part, weight in (("image", first.image_weight), ("text", first.text_weight))
                ]
                least_score = gr.Number(first.min_score, label="Least score", placeholder="none")
        with gr.Column(scale=3, min_width=320):
            why = gr.HTML(elem_id="why")
            chips = gr.CheckboxGroup(choices=[], visible=False, elem_id="chips")
            with gr.Row():
                sliders = [gr.Slider(visible=False, buttons=[]) for _ in range(2)]
            with gr.Row():
                results = [
                    gr.HTML("" if index else message(START), js_on_load=CLICK, elem_id=f"results-{index}")
                    for index in range(sides)
                ]
            with gr.Accordion("Copy as Python", open=False, elem_id="python"):
                code = gr.Code(language="python", interactive=False, show_label=False)
    ends = [gr.State(), gr.State()]  # a slider that has no column yet sends what is outside of that column's ends
    asked = [text, images, count, where, *ends, *weights, least_score, chips, *lists]
    return _Parts(status, asked, sliders, columns, button, clear, results, why, code, gr.State())


def _connect(page: SearchPage, parts: _Parts, blocks: Any) -> None:  # noqa: ANN401 - gradio.Blocks
    """Connect the events of the page with their functions."""
    import gradio as gr

    hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
    fixed = len(Asked._fields) - 1
    text, _, _, where, *ends = parts.asked[:6]
    chosen = parts.asked[fixed:]

    def describe() -> list[Any]:
        filters = page.filters
        lists = [gr.update(label=name, choices=values, visible=True) for name, values in filters.choices]
        lists += [gr.skip()] * (FILTERS - len(lists))
        return [page.describe(), columns_html(filters.columns), *lists, *_sliders(page)]

    def search(*values: Any) -> list[Any]:  # noqa: ANN401 - what the components hold
        pages, code, query = page.search(Asked._make([*values[:fixed], values[fixed:]]))
        return [*pages, "", code, query]

    def clear() -> list[Any]:
        first = ["", None, page.first.k, "", None, None, *page.first[6:fixed], *[[] for _ in chosen]]
        return [*first, *_sliders(page), *page.search(page.first)[0], "", "", None]

    shown = [*parts.results, parts.why, parts.code, parts.last]
    loaded = blocks.load(describe, outputs=[parts.status, parts.columns, *chosen, *parts.sliders], **hidden)
    loaded.then(search, parts.asked, shown, **hidden)  # perhaps somebody has asked already
    asks = [parts.button.click, text.submit, where.submit, *(some.input for some in chosen)]
    gr.on(asks, search, parts.asked, shown, trigger_mode="always_last", **hidden)
    for slider, end in zip(parts.sliders, ends, strict=True):
        moved = slider.input(lambda value: value, slider, end, trigger_mode="always_last", **hidden)
        moved.then(search, parts.asked, shown, **hidden)
    parts.clear.click(clear, outputs=[*parts.asked, *parts.sliders, *shown], **hidden)
    for side, component in enumerate(parts.results):

        def explain(query: Query | None, event: gr.EventData, side: int = side) -> str:
            return page.why(query, side, event._data.get("rank") if isinstance(event._data, dict) else None)

        component.select(explain, parts.last, parts.why, scroll_to_output=True, concurrency_limit=1, **hidden)


def _sliders(page: SearchPage) -> list[Any]:
    """The sliders at the ends of the column of numbers, if there is one."""
    import gradio as gr

    if page.filters.number is None:
        return [gr.skip(), gr.skip()]
    name, least, most = page.filters.number
    step = 1 if most - least > 10 or isinstance(least, int) else 0.01
    ends: dict[str, Any] = {"minimum": least, "maximum": most, "step": step, "visible": True}
    return [gr.update(label=f"{name} from", value=least, **ends), gr.update(label=f"{name} to", value=most, **ends)]


def _plain(number: float) -> float:
    """A number as a condition on a column of integers needs it, if it is one."""
    return int(number) if number == int(number) else float(number)


def _above(hits: "Sequence[Found]", least: float | None) -> "list[Found]":
    """The results with at least a score."""
    return [hit for hit in hits if least is None or hit.score >= least]


def _sentence(text: str) -> str:
    """A message of an error with a capital letter; those of items without the position."""
    text = text.removeprefix("item 0: ").removeprefix("the item: ")
    return text[:1].upper() + text[1:]
