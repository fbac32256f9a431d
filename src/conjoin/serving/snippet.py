"""A search as Python code."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any


def python_code(
    collection: str,
    model: str,
    text: str | None,
    images: Sequence[str],
    k: int,
    where: str | None,
    loading: Mapping[str, Any] = MappingProxyType({}),
    ranking: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The code that repeats a search.

    Args:
        collection: Its address.
        model: Folder or Hub name of its model.
        text: Of the query.
        images: Names of the image files of the query.
        k: Number of results.
        where: The condition, if any.
        loading: Further arguments of `load_encoder`.
        ranking: Further arguments of `search_items`.
    """
    lines = ["from conjoin import load_encoder, open_collection, search_items"]
    if images and "<image>" in (text or ""):
        lines.append("from conjoin.data.row_images import interleave")
        query = f"interleave({text!r}, {list(images)!r})"
    else:
        named = images[0] if len(images) == 1 else list(images)
        parts = [f'"image": {named!r}'] if images else []
        if text is not None:
            parts.append(f'"text": {text!r}')
        query = "{" + ", ".join(parts) + "}"
    how = "".join(f", {name}={value!r}" for name, value in loading.items())
    given = {"k": k} | ({"where": where} if where else {}) | dict(ranking)
    arguments = ", ".join(["collection, encoder, [query]", *(f"{name}={value!r}" for name, value in given.items())])
    lines += [
        "",
        f"collection = open_collection({collection!r})",
        f"encoder = load_encoder({model!r}{how})",
        f"query = {query}",
        f"found = search_items({arguments})",
        "for id_, score in zip(found.ids[0], found.scores[0]):",
        '    print(f"{score:.4f}  {id_}")',
    ]
    return "\n".join(lines) + "\n"
