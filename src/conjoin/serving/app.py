"""The search app: a page that searches one collection, or two side by side."""

import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conjoin.constants import RANKINGS, RankBy
from conjoin.serving.batching import BusyError
from conjoin.serving.columns import condition
from conjoin.serving.html import CLICK, NOTHING, columns_html, message, results_html
from conjoin.serving.http import LOCAL, Gate, missing
from conjoin.serving.limits import Limits, check_count, check_pixels, check_where, make_item, read_picture
from conjoin.serving.snippet import python_code

if TYPE_CHECKING:
    from conjoin.retrieval import Hit
from conjoin.serving.searcher import Searcher

FILTERS = 4
"""Columns with few values that get a list to choose from."""

START = "Write a text, add images, or both. Choose a result to see what it shares with the query."


class Asked(NamedTuple):
    """What a visitor asks for: the values of the components of the page, in their order.

    Attributes:
        query: Its `"text"` and its image `"files"`.
        k: Results.
        least: Of the column of numbers.
        most: Likewise.
        where: A condition.
        image_weight: Of the query's image; without any weight, the model embeds image and text together.
        text_weight: Of its text.
        min_score: Results with a lower score are left out.
        ranking: What results are ranked by, as for `search_items`.
        chosen: Values of each column that has a list of them.
    """

    query: Mapping[str, Any] | None = None
    k: int = 12
    least: float | None = None
    most: float | None = None
    where: str = ""
    image_weight: float | None = None
    text_weight: float | None = None
    min_score: float | None = None
    ranking: RankBy = "default"
    chosen: Sequence[Sequence[str] | None] = ()


class Query(NamedTuple):
    """The last query of a session, and what each collection found, after `offset` results that came before."""

    text: str | None
    images: list[Any]
    found: "list[list[Hit]]"
    offset: int


class SearchPage:
    """What the page does, without the page.

    Args:
        searchers: One or two.
        limits: What is accepted.
        first: What the page asks for at first.
        title_column: The column that names a result; its text, or else its id, if None.
        group_by: A column, such as a product's id: only the best row of each of its values is shown.
    """

    def __init__(
        self,
        searchers: "Sequence[Searcher]",
        limits: Limits,
        first: Asked = Asked(),
        title_column: str | None = None,
        group_by: str | None = None,
    ) -> None:
        self.searchers, self.limits = searchers, limits
        self.first, self.title_column, self.group_by = first, title_column, group_by
        columns, *others = [searcher.columns for searcher in searchers]
        self.columns = [
            column for column in columns if all(column.name in {each.name for each in some} for some in others)
        ]
        choices = [(column.name, column.values) for column in self.columns if len(column.values or ()) > 1]
        self.choices = choices[:FILTERS]
        numbers = ((column.name, *column.ends) for column in self.columns if column.ends and column.name != "id")
        self.number = next((each for each in numbers if each[1] < each[2]), None)

    def describe(self) -> str:
        """The models and the rows of the collections, as HTML."""
        shown = [f"{each.model_name}: {len(each.collection or ()):,} rows" for each in self.searchers]
        return message(" · ".join(shown))

    def search(self, asked: Asked, offset: int = 0) -> tuple[list[str], str, Query | None]:
        """Search; returns the results of each collection as HTML, the code, and the query.

        Without a text or an image it shows rows that fulfil the filter.
        """
        try:
            return self._search(asked, offset)
        except (ValueError, BusyError) as error:
            text = str(error).removeprefix("item 0: ").removeprefix("the item: ")
            return [message(text[:1].upper() + text[1:], "error"), *[""] * (len(self.searchers) - 1)], "", None

    def _search(self, asked: Asked, offset: int) -> tuple[list[str], str, Query | None]:
        given = asked.query or {}
        text, k = (given.get("text") or "").strip() or None, asked.k
        chosen = zip((name for name, _ in self.choices), asked.chosen, strict=False)
        ranges = {self.number[0]: (asked.least, asked.most)} if self.number else {}
        where = condition(dict(chosen), ranges, check_where(asked.where, self.limits))
        paths = [Path(path) for path in given.get("files") or ()]
        if text is None and not paths:
            found = [searcher.browse(k, where, self.group_by, offset) for searcher in self.searchers]
            return [self._html(index, START, hits, offset) for index, hits in enumerate(found)], "", None
        check_count(paths, self.limits)
        pictures = [read_picture(path.read_bytes(), f"the file {path.name!r}", self.limits) for path in paths]
        check_pixels(pictures, self.limits)
        item = make_item(text, pictures, self.limits)
        given_weights = {"image": asked.image_weight, "text": asked.text_weight}
        weights = {part: weight for part, weight in given_weights.items() if weight is not None} or None
        found, lines, codes = [], [], []
        for searcher in self.searchers:
            how: dict[str, Any] = {
                "ranking": asked.ranking,
                "where": where,
                "weights": weights,
                "group_by": self.group_by,
                "min_score": asked.min_score,
            }
            started = time.perf_counter()
            hits = searcher.search([item], k, offset=offset, pictures=True, **how)[0]
            found.append(hits)
            lines.append(f"{len(hits)} results in {1000 * (time.perf_counter() - started):.0f} ms")
            codes.append(python_code(searcher, text, [path.name for path in paths], {"k": offset + k, **how}))
        if len(found) > 1:
            lines[0] += f" · {len(set.intersection(*({hit.id for hit in hits} for hits in found)))} found by both"
        pages = [self._html(index, lines[index], hits, offset, asked.min_score) for index, hits in enumerate(found)]
        return pages, "\n".join(codes), Query(text, [picture.source for picture in pictures], found, offset)

    def _html(self, index: int, line: str, hits: "Sequence[Hit]", offset: int, min_score: float | None = None) -> str:
        """The results of a collection as HTML, below a line on them."""
        from conjoin.retrieval.pictures import picture_folders

        searcher = self.searchers[index]
        title = searcher.model_name if len(self.searchers) == 1 else f"{'AB'[index]}: {searcher.model_name}"
        number, folders = self.number and self.number[0], picture_folders(searcher.source)
        nothing = NOTHING if min_score is None else f"Nothing similar was found: no score reaches {min_score:g}."
        nothing = "There are no further results." if offset else nothing
        return results_html(title, line, hits, folders, self.title_column, number, nothing, offset)

    def why(self, query: Query | None, side: int, rank: Any) -> str:  # noqa: ANN401 - what the browser sent
        """What a query and the result of a rank share, as HTML."""
        from conjoin.serving.search_page import row_title
        from conjoin.serving.why import explain_result

        place = rank - 1 - query.offset if query and type(rank) is int else -1
        if query is None or not 0 <= place < len(query.found[side]):
            return message("Search first, then choose a result.")
        hit = query.found[side][place]
        try:
            shared = explain_result(self.searchers[side], query.text, query.images, hit.row)
        except ValueError as error:
            return message(str(error))
        return message(f"Result {rank}: {row_title(hit.row, hit.id, self.title_column)}") + shared


def make_app(
    searchers: "Sequence[Searcher]",
    *,
    limits: Limits = Limits(),
    host: str = LOCAL[0],
    first: Asked = Asked(),
    title_column: str | None = None,
    group_by: str | None = None,
) -> Any:  # noqa: ANN401 - a FastAPI application
    """Make the app.

    It loads nothing from the network, sends nothing to it, and serves no file but what its visitors uploaded.

    Args:
        searchers: One, or two that are shown side by side.
        limits: What is accepted.
        host: The address that it will listen at.
        first: As for `SearchPage`.
        title_column: Likewise.
        group_by: Likewise.

    Raises:
        ImportError: Gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    uploads = tempfile.TemporaryDirectory(prefix="conjoin-app-")
    os.environ["GRADIO_TEMP_DIR"] = uploads.name
    try:
        import gradio
        from fastapi import FastAPI
    except ImportError as error:
        missing("app", error)
    blocks = _blocks(SearchPage(searchers, limits, first, title_column, group_by))
    _accept_only_uploads(blocks, Path(uploads.name).resolve())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with uploads:  # removed when the app stops
            yield

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(Gate, limits=limits, host=host)
    return gradio.mount_gradio_app(
        app,
        blocks,
        path="",
        footer_links=[],
        run_history=False,
        max_file_size=limits.image_bytes,
        ssr_mode=False,
        show_error=False,
        enable_monitoring=False,
        theme=gradio.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css_paths=Path(__file__).parent / "app.css",
    )


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


def _blocks(page: SearchPage) -> Any:  # noqa: ANN401 - gradio.Blocks
    """The page: the query, the results under it, and what is needed less often folded."""
    import gradio as gr

    first = page.first
    with gr.Blocks(title="conjoin search", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        gr.HTML('<a class="cj-skip" href="#results-0">Skip to the results</a><h1>Search</h1>')
        gr.HTML(page.describe(), elem_id="status")
        query = gr.MultimodalTextbox(
            label="Text, images, or both",
            placeholder="a red apple",
            file_types=["image"],
            file_count="multiple",
            max_plain_text_length=page.limits.text_characters + 1,
            autofocus=True,
            elem_id="query",
        )
        lists: list[Any] = []
        if page.choices:
            name, values = page.choices[0]
            lists.append(gr.CheckboxGroup(values, label=name, elem_id="chips"))
        with gr.Accordion("Filter and ranking", open=False, elem_id="filter"):
            with gr.Row():
                lists += [gr.Dropdown(values, label=name, multiselect=True) for name, values in page.choices[1:]]
                name, *ends = page.number or ("", 0, 0)
                numbers = [
                    gr.Number(label=f"{name} {word}", placeholder=f"{end:g}", visible=page.number is not None)
                    for word, end in zip(("from", "to"), ends, strict=True)
                ]
            where = gr.Textbox(label="Condition", placeholder="price < 50 and kind = 'shoes'", elem_id="where")
            gr.HTML(columns_html(page.columns))
            with gr.Row():
                weights = [
                    gr.Number(weight, label=f"Weight of the {part}", placeholder="as the model does")
                    for part, weight in (("image", first.image_weight), ("text", first.text_weight))
                ]
                least_score = gr.Number(first.min_score, label="Least score", placeholder="none")
                ranking = gr.Radio([*RANKINGS], value=first.ranking, label="Ranking", elem_id="ranking")
                count = gr.Slider(1, page.limits.results, first.k, step=1, label="Results", elem_id="count")
            clear = gr.Button("Clear all", elem_id="clear")
        why = gr.HTML(elem_id="why")
        with gr.Row():
            sides = range(len(page.searchers))
            results = [gr.HTML(js_on_load=CLICK, elem_id=f"results-{index}") for index in sides]
        with gr.Row():
            back, forward = gr.Button("Previous", elem_id="back"), gr.Button("Next", elem_id="forward")
        with gr.Accordion("Copy as Python", open=False, elem_id="python"):
            code = gr.Code(language="python", interactive=False, show_label=False)
        last, offset = gr.State(), gr.State(0)

        hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
        fixed = [query, count, *numbers, where, *weights, least_score, ranking]
        asked, shown = [*fixed, *lists], [*results, why, code, last, offset]

        def show(start: float, *values: Any) -> list[Any]:  # noqa: ANN401 - what the components hold
            begin = max(0, int(start))
            pages, code, query = page.search(Asked._make([*values[: len(fixed)], values[len(fixed) :]]), begin)
            return [*pages, "", code, query, begin]

        def start_again() -> list[Any]:
            return [*first[: len(fixed)], *[[] for _ in lists], *page.search(first)[0], "", "", None, 0]

        asks = [query.submit, where.submit, *(each.submit for each in (*numbers, *weights, least_score))]
        asks += [ranking.input, count.release, *(each.input for each in lists)]
        gr.on(asks, lambda *values: show(0, *values), asked, shown, trigger_mode="always_last", **hidden)
        for button, sign in ((back, -1), (forward, 1)):
            button.click(
                lambda start, *values, sign=sign: show(start + sign * values[1], *values),
                [offset, *asked],
                shown,
                scroll_to_output=True,
                **hidden,
            )
        clear.click(start_again, outputs=[*asked, *shown], **hidden)
        blocks.load(start_again, outputs=[*asked, *shown], **hidden)  # a folded number without a value would become 0
        for side, component in enumerate(results):

            def explain(query: Query | None, event: gr.EventData, side: int = side) -> str:
                return page.why(query, side, event._data.get("rank") if isinstance(event._data, dict) else None)

            component.select(explain, last, why, scroll_to_output=True, concurrency_limit=1, **hidden)
    return blocks.queue(max_size=256, default_concurrency_limit=16)
