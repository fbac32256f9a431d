"""A search as Python code."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.serving.searcher import Searcher


def python_code(searcher: "Searcher", text: str | None, images: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """The code that repeats a search.

    Args:
        searcher: The model and the collection.
        text: Of the query.
        images: Names of the image files of the query.
        arguments: Of `search_items`; those that are None or "default" are left out.
    """
    encoder, loading = searcher.encoder, dict(searcher.encoder.load_options)
    if len(images) > 1:
        loading["input_type"] = encoder.input_type
    if searcher.query_prompt != encoder.prompt_of("query"):
        arguments = {**arguments, "prompt": searcher.query_prompt}
    imported = ""
    if images and "<image>" in (text or ""):
        imported = "from conjoin.data.row_images import interleave\n"
        query = f"interleave({text!r}, {[*images]!r})"
    else:
        parts = {"image": images[0] if len(images) == 1 else [*images] or None, "text": text}
        query = repr({part: value for part, value in parts.items() if value is not None})
    given = "".join(f", {name}={value!r}" for name, value in arguments.items() if value not in (None, "default"))
    options = "".join(f", {name}={value!r}" for name, value in loading.items())
    return f"""from conjoin import load_encoder, open_collection, search_items
{imported}
collection = open_collection({searcher.source!r})
encoder = load_encoder({encoder.name!r}{options})
query = {query}
for hit in search_items(collection, encoder, [query]{given})[0]:
    print(f"{{hit.score:.4f}}  {{hit.id}}")
"""
