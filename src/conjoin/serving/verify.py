"""Compare the vectors of a running endpoint with those of a checkpoint, and say which step differs."""

import base64
import io
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image, ImageOps

from conjoin.retrieval import ItemEncoder

SAME = 0.999
"""The least cosine of vectors that count as the same."""
_COUNT, _LONG, _SECONDS = 20, 1200, 600.0
_WORDS = "red green blue small large old new wooden table lamp chair glass shoe coat river house apple cat".split()
_PICTURES: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "squeezes pictures into a square": lambda picture: picture.resize(
        [min(picture.size)] * 2, Image.Resampling.BICUBIC
    ),
    "cuts out the middle square of pictures": lambda picture: ImageOps.fit(
        picture, (min(picture.size), min(picture.size))
    ),
    "pads pictures to a square": lambda picture: ImageOps.pad(picture, (max(picture.size), max(picture.size))),
    "exchanges red and blue": lambda picture: Image.merge("RGB", picture.split()[::-1]),
}
_Embed = Callable[[Sequence[Any]], np.ndarray]


class KindCheck(NamedTuple):
    """How the vectors of items of one kind compare.

    Attributes:
        kind: Such as `"long text"`.
        cosine: The least cosine between a vector of the endpoint and one of the checkpoint; None if not compared.
        finding: `"same"`, or what differs.
    """

    kind: str
    cosine: float | None
    finding: str

    @property
    def differs(self) -> bool:
        """Whether both gave vectors, and they are not the same."""
        return self.cosine is not None and self.finding != "same"


def check_endpoint(encoder: ItemEncoder, url: str, key: str = "") -> list[KindCheck]:
    """Compare a running endpoint with a checkpoint on twenty items of each kind.

    Where vectors differ, the items are encoded again as if a step were left out or done in another way; the step that
    comes nearest is named. How many words count shows by a search for the shortest beginning with the same vector.

    Args:
        encoder: The checkpoint; items get the prompt that it gives to items that are neither query nor document.
        url: Of the endpoint: `.../v1` in OpenAI's form, with pictures in `messages` as vLLM takes them; or
            `.../embed`, of Text Embeddings Inference or of `conjoin serve`, whose `/v1` is asked then.
        key: Sent as the bearer token, if there is one.

    Raises:
        ConnectionError: The endpoint does not answer.
        ValueError: Of no kind both give vectors.
    """
    source, headers = random.Random(0), {"Authorization": f"Bearer {key}"} if key else {}

    def texts(length: int) -> list[str]:
        return [" ".join(source.choices(_WORDS, k=length)) for _ in range(_COUNT)]

    def pictures(size: tuple[int, int]) -> list[Image.Image]:
        pixels = (source.randbytes(5 * 5 * 3) for _ in range(_COUNT))
        return [Image.frombytes("RGB", (5, 5), each).resize(size, Image.Resampling.BICUBIC) for each in pixels]

    short, wide = texts(6), pictures((480, 160))
    kinds: dict[str, list[Any]] = {
        "text": short,
        "text as a message": short,
        "long text": texts(_LONG),
        "square picture": pictures((224, 224)),
        "wide picture": wide,
        "picture and text": [{"image": image, "text": text} for image, text in zip(wide, short, strict=True)],
    }
    with httpx.Client(headers=headers, timeout=_SECONDS) as client:
        ask = _open(client, url.rstrip("/"), encoder.name)
        checks = [_check(kind, kinds[kind], encoder, partial(ask, kind == "text as a message")) for kind in kinds]
    if all(check.cosine is None for check in checks):
        raise ValueError(f"nothing to compare with {url!r}: {checks[0].finding}")
    return checks


def _open(client: httpx.Client, url: str, name: str) -> Callable[[bool, Sequence[Any]], np.ndarray]:
    """What asks an endpoint for the vectors `(N, D)` of items, as messages if told.

    Raises:
        ConnectionError: Of a call, too: it does not answer.
        ValueError: Of a call: it refuses, or answers in another form.
    """

    def send(method: str, address: str, body: Any = None) -> Any:  # noqa: ANN401
        try:
            answer = client.request(method, address, json=body)
        except httpx.RequestError as error:
            raise ConnectionError(f"{address} does not answer: {error}") from error
        if answer.status_code >= 400:
            raise ValueError(f"status {answer.status_code}, {answer.text:.200}")
        return answer.json()

    def get(address: str) -> Any:  # noqa: ANN401
        try:
            return send("GET", address)
        except ValueError:
            return None

    base = url.removesuffix("/embed").removesuffix("/embeddings").removesuffix("/v1")
    is_tei = url.endswith("/embed") and "fingerprint" not in (get(f"{base}/health") or {})  # `conjoin serve` says it
    models = None if is_tei else (get(f"{base}/v1/models") or {}).get("data")
    fixed = {"model": models[0]["id"] if models else name, "encoding_format": "float"}

    def embed(as_messages: bool, items: Sequence[Any]) -> np.ndarray:
        mappings: list[Any] = [{"text": item} if isinstance(item, str) else item for item in items]
        mappings = [item if isinstance(item, dict) else {"image": item} for item in mappings]
        as_messages |= any("image" in item for item in mappings)
        if is_tei and as_messages:
            raise ValueError("its form has no place for them")
        if is_tei:
            answers = [send("POST", url, {"inputs": [*items], "truncate": True})]
        elif as_messages:
            messages = ({"messages": [{"role": "user", "content": _content(item)}]} for item in mappings)
            answers = [send("POST", f"{base}/v1/embeddings", fixed | each) for each in messages]
        else:
            answers = [send("POST", f"{base}/v1/embeddings", fixed | {"input": [*items]})]
        try:
            data = [] if is_tei else [sorted(answer["data"], key=lambda one: one["index"]) for answer in answers]
            vectors = answers[0] if is_tei else [each["embedding"] for several in data for each in several]
        except (KeyError, TypeError) as error:
            raise ValueError(f"its answer has another form: {answers[0]!r:.200}") from error
        found = np.array(vectors, dtype=np.float64)
        if found.ndim != 2 or len(found) != len(items):
            raise ValueError(f"it gave vectors of shape {found.shape} for {len(items)} items")
        return found

    return embed


def _content(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message: the picture, then the text."""
    parts: list[dict[str, Any]] = []
    if "image" in item:
        buffer = io.BytesIO()
        item["image"].save(buffer, "png")
        uri = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": uri}})
    return [*parts, {"type": "text", "text": item["text"]}] if "text" in item else parts


def _check(kind: str, items: Sequence[Any], encoder: ItemEncoder, embed: _Embed) -> KindCheck:
    """Compare the vectors of items, and say what differs."""
    try:
        wanted = encoder.encode(items)
    except ValueError as error:
        return KindCheck(kind, None, f"the checkpoint takes none: {error}")
    try:
        found = embed(items)
    except ValueError as error:
        return KindCheck(kind, None, f"the endpoint takes none: {error}")
    lengths, cosine, differs = np.linalg.norm(found, axis=1), _cosine(found, wanted), []
    if cosine < SAME:
        differs.append(_explain(kind, items, encoder, embed, found, cosine))
    if np.abs(lengths - 1).max() > 1e-2:
        differs.append(f"does not normalise: lengths are {lengths.min():.3g} to {lengths.max():.3g}")
    if found.shape[1] != wanted.shape[1]:
        differs.append(f"gives {found.shape[1]} numbers, the checkpoint {wanted.shape[1]}")
    return KindCheck(kind, cosine, f"the endpoint {'; it '.join(differs)}" if differs else "same")


def _explain(
    kind: str, items: Sequence[Any], encoder: ItemEncoder, embed: _Embed, found: np.ndarray, cosine: float
) -> str:
    """The step that comes nearest to the vectors of an endpoint, if one comes much nearer than the checkpoint does."""
    tries: dict[str, tuple[Sequence[Any], str | None]] = {"gives no prompt": (items, "")}
    tries |= {f"gives the prompt {name!r}": (items, text) for name, text in encoder.prompts.items()}
    if "picture" in kind:
        for name, change in _PICTURES.items():
            mappings = [item if isinstance(item, dict) else {"image": item} for item in items]
            tries[name] = [item | {"image": change(item["image"])} for item in mappings], None
    tried = {}
    for name, (others, prompt) in tries.items():
        with suppress(ValueError):  # a model may take no prompt with a picture
            tried[name] = encoder.encode(others, prompt=prompt)
    nearest, near = max(
        ((name, _cosine(found, vectors)) for name, vectors in tried.items()),
        key=lambda pair: pair[1],
        default=("", -1.0),
    )
    if kind == "long text" and near < SAME:
        there, here = (_words_read(each, items[0]) for each in (embed, encoder.encode))
        if there != here:
            return f"reads about the first {there:,} words of {_LONG:,}, the checkpoint {here:,}"
    if near > (1 + cosine) / 2:
        return nearest + ("" if near >= SAME else f", with which the cosine is {near:.4f}")
    if "picture" in kind and cosine > 0.95:
        return "is near: it resizes pictures by another filter or rounds otherwise"
    return "differs in another step: template, special tokens, pixels, pooling or weights"


def _words_read(embed: _Embed, text: str) -> int:
    """About how many words of a text have a part in its vector."""
    words = text.split()
    whole, least, most = embed([text]), 1, len(words)
    while least < most:
        middle = (least + most) // 2
        if _cosine(embed([" ".join(words[:middle])]), whole) > 1 - 1e-6:
            most = middle
        else:
            least = middle + 1
    return least


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    """The least cosine between rows, of as many leading numbers as both have."""
    width = min(first.shape[1], second.shape[1])
    first, second = (each[:, :width].astype(np.float64) for each in (first, second))
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(((first * second).sum(1) / np.maximum(lengths, 1e-12)).min())
