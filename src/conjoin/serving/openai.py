"""The part of OpenAI's API that the endpoint answers, with what vLLM adds for pictures and prompts."""

import re
import time
from base64 import b64encode
from copy import deepcopy
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conjoin.retrieval import ItemEncoder
from conjoin.retrieval.vectors import truncate
from conjoin.serving.limits import check_length, read_items
from conjoin.serving.searcher import Searcher


class Body(BaseModel):
    """A part of a request; a field that it does not know is refused."""

    model_config = ConfigDict(extra="forbid")


class ImageURL(Body):
    """Where an image is."""

    url: str = Field(description="a data:image/...;base64 URI, or a URL where the server allows them")


class TextPart(Body):
    """A text of a message."""

    type: Literal["text"]
    text: str


class ImagePart(Body):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _parts(value: Any) -> Any:  # noqa: ANN401
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _texts(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, list) and any(isinstance(each, int | list) for each in value):
        raise ValueError("tokens are numbers of one model; send texts (LangChain: check_embedding_ctx_length=False)")
    return [value] if isinstance(value, str) else value


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "user"]
    content: Annotated[list[Part], BeforeValidator(_parts, json_schema_input_type=str | list[Part])]


class EmbeddingsRequest(Body):
    """Texts, or one item as a message, to embed as OpenAI's clients and vLLM's ask for it."""

    input: Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])] | None = Field(
        None, description="texts"
    )
    messages: list[Message] | None = Field(
        None, description="in place of input: one user message, whose parts are one item; a system message before it "
        "is its prompt or instruction"
    )  # fmt: skip
    input_type: Literal["query", "document"] | None = Field(
        None, description="what the items are: a model with a prompt for queries or documents gives it to them"
    )
    dimensions: int | None = Field(
        None, ge=1, description="numbers of a vector: a width that the model was trained for (Matryoshka)"
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of 32-bit floats")
    model: str | None = Field(None, description="ignored: there is one model")
    user: str | None = Field(None, description="ignored")

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("expected input or messages, one of both")
        if self.messages is not None and [each.role for each in self.messages] not in (["user"], ["system", "user"]):
            raise ValueError("messages: expected one user message, or a system message and one user message")
        return self

    def items(self) -> list[tuple[str | None, list[str]]]:
        """The text and the images of each item, as `read_items` takes them: several images have their places."""
        if self.messages is None:
            return [(text, []) for text in self.input or []]
        parts = self.messages[-1].content
        images = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
        place = "<image>" if len(images) > 1 else ""
        texts = [part.text if isinstance(part, TextPart) else place for part in parts]
        return [(" ".join(filter(None, texts)) or None, images)]

    def prompt(self) -> str | None:
        """The text of the system message, if there is one."""
        if self.messages is None or len(self.messages) == 1:
            return None
        return " ".join(part.text for part in self.messages[0].content if isinstance(part, TextPart))


def add_openai(app: FastAPI, searcher: Searcher) -> None:
    """Add the routes below `/v1`."""
    tokenizer, widths, started = _own_tokenizer(searcher.encoder), trained_widths(searcher.encoder), int(time.time())

    @app.post("/v1/embeddings")
    def embed(request: EmbeddingsRequest) -> dict[str, Any]:
        """Embed items; `usage` counts the tokens of their texts and prompts. Pictures count none."""
        if request.dimensions is not None:
            check_width(request.dimensions, searcher, widths)
        values, prompt = request.items(), request.prompt()
        if prompt is not None:
            check_length(prompt, searcher.limits, "the system message")
        vectors = searcher.encode(read_items(values, searcher.limits), request.input_type, prompt)
        if request.dimensions is not None:
            vectors = truncate(vectors, request.dimensions)
        is_text = request.encoding_format == "base64"
        shown = [
            b64encode(vector.tobytes()).decode() if is_text else vector.tolist() for vector in vectors.astype("<f4")
        ]
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
        before = searcher.prompt_of(request.input_type, prompt) or ""
        texts = [text.replace("<image>", "") for text, _ in values if text]
        tokens = sum(len(tokenizer(f"{before}{text}")["input_ids"]) for text in texts) if tokenizer else 0
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": searcher.model_name, "data": data, "usage": usage}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        model = {"id": searcher.model_name, "object": "model", "created": started, "owned_by": "conjoin"}
        return {"object": "list", "data": [model]}


def trained_widths(encoder: ItemEncoder) -> list[int] | None:
    """The widths that a model was trained to be cut to; empty for any, None if its folder names none.

    `matryoshka_dimensions` or `is_matryoshka` of `config.json`, as training here writes it and vLLM reads it, or the
    parameters of `MatryoshkaLoss` in the card of sentence-transformers.
    """
    parts = [encoder.model, *(part for part in encoder.model.modules() if isinstance(part, PreTrainedModel))]
    for config in (getattr(part, "config", None) for part in parts):
        if dims := getattr(config, "matryoshka_dimensions", None):
            return sorted(dims)
        if getattr(config, "is_matryoshka", False):
            return []
    cards = (vars(part).get("_model_card_text") for part in encoder.model.modules())  # sentence-transformers read it
    card = re.search(r'"matryoshka_dims":\s*\[([\d,\s]+)\]', next(filter(None, cards), ""))
    return sorted(map(int, card[1].split(","))) if card else None


def check_width(width: int, searcher: Searcher, widths: list[int] | None) -> None:
    """Refuse a width that the model was not trained for, as vLLM does.

    Raises:
        ValueError: It was not; the message names the widths.
    """
    whole = searcher.encoder.dimension
    known = sorted({whole, *(widths or [])})
    if width > whole or (widths != [] and width not in known):
        expected = f"1 to {whole}" if widths == [] else ", ".join(map(str, known))
        raise ValueError(
            f"dimensions={width}: the model {searcher.model_name!r} was not trained for vectors of this width "
            f"(Matryoshka); expected {expected}, or no dimensions"
        )


def _own_tokenizer(encoder: ItemEncoder) -> Any:  # noqa: ANN401
    """A copy of the tokenizer of a model, for other threads than the model's; None without one."""
    held = (vars(part).get(name) for part in encoder.model.modules() for name in ("processor", "tokenizer"))
    for part in (encoder.processor, *held):
        tokenizer = getattr(part, "tokenizer", part)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = deepcopy(tokenizer)
            tokenizer("")  # the first call sets its truncation and padding; later ones only read
            return tokenizer
    return None
