"""Filters of composed queries (MERIT App. A.4.1): rules on titles, or a vision-language model that says yes or no.

A judge is a name and a function of a `Case`. Any function `ask(images, prompt)` makes a `VisionModel`; `ask_with`
wraps those of transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image

from conjoin.data.make.construction.models import chat_answer, pipeline_loader
from conjoin.processing import load_image


class VisionModel(NamedTuple):
    """A vision-language model.

    Attributes:
        name: In the record of what the queries were made with.
        ask: Answers a prompt about some pictures.
    """

    name: str
    ask: Callable[[Sequence[Image.Image], str], str]


PRINCIPLES = ("non_omission", "vision_centric", "accuracy")


PROMPTS = {
    "non_omission": (
        "The pictures show the products of a search, in order, each with its title:\n{products}\nThe search is about "
        "these attributes: {conditions}. Can each attribute be told from the title or the picture of its product? "
        "Answer yes or no."
    ),
    "vision_centric": (
        "The pictures show the products of a search, in order, each with its title:\n{products}\nThe search is about "
        "these attributes: {conditions}. Does the search need the pictures, because what can be seen in them is not "
        "already said in the titles? Answer yes or no."
    ),
    "accuracy": (
        "The last picture shows the product {positive!r}. The pictures before it show other products, in order, each "
        "with its title:\n{products}\nDoes the last product have exactly these attributes of the others: "
        "{conditions}? Answer yes or no."
    ),
}


@dataclass(frozen=True)
class Product:
    """A product as a judge sees it."""

    id: str
    title: str
    read: Callable[[], Any]
    """Reads what `load_image` takes."""

    @property
    def image(self) -> Image.Image:
        """Its picture, decoded at each access."""
        return load_image(self.read(), f"product {self.id!r}")


class Case(NamedTuple):
    """A query before a judge.

    Attributes:
        instruction: With `<image>` for each picture.
        conditions: The attribute and value of each of `products`.
        products: Of the query.
        positive: The product in question; None for judges of the query alone.
    """

    instruction: str
    conditions: tuple[tuple[str, str], ...]
    products: tuple[Product, ...]
    positive: Product | None = None


class Judge(NamedTuple):
    """A filter.

    Attributes:
        name: In the counts of the report, and in the record of what the queries were made with.
        accepts: Whether a case stays.
        of_positives: Whether it judges each positive; if not, the query once.
    """

    name: str
    accepts: Callable[[Case], bool]
    of_positives: bool = False


def judge_with(model: VisionModel, principle: str, prompt: str | None = None) -> Judge:
    """A judge that asks a vision-language model; an answer that begins with "yes" accepts.

    Args:
        model: See `ask_with`.
        principle: One of `PRINCIPLES`.
        prompt: Instead of that of `PROMPTS`, with the same fields.

    Raises:
        ValueError: The principle is unknown.
    """
    if principle not in PRINCIPLES:
        raise ValueError(f"unknown principle {principle!r}; expected one of {', '.join(PRINCIPLES)}")
    wording = prompt or PROMPTS[principle]

    def accepts(case: Case) -> bool:
        shown = [*case.products, *([case.positive] if case.positive else [])]
        text = wording.format(
            products="\n".join(f"{index}. {product.title}" for index, product in enumerate(case.products, start=1)),
            conditions="; ".join(f"{name} of product {index}" for index, (name, _) in enumerate(case.conditions, 1)),
            positive=case.positive.title if case.positive else "",
        )
        answer = model.ask([product.image for product in shown], text)
        return answer.strip(" \n\"'*").lower().startswith("yes")

    return Judge(f"{principle} ({model.name})", accepts, principle == "accuracy")


def judge_by_titles(principle: str, visual: Sequence[str]) -> Judge:
    """A judge that reads the titles only.

    `non_omission`: the title of a product says the value of its condition, unless the attribute is visual.
    `vision_centric`: the title does not say it if the attribute is visual.

    Args:
        principle: `"non_omission"` or `"vision_centric"`.
        visual: The attributes that a picture shows, such as the colour.

    Raises:
        ValueError: Another principle.
    """
    if principle not in PRINCIPLES[:2]:
        raise ValueError(f"titles cannot be judged for {principle!r}; expected one of {', '.join(PRINCIPLES[:2])}")
    seen, says_it = frozenset(visual), principle == "non_omission"

    def accepts(case: Case) -> bool:
        return all(
            (attribute in seen) is says_it or (value in product.title.lower()) is says_it
            for (attribute, value), product in zip(case.conditions, case.products, strict=True)
        )

    return Judge(f"{principle} (titles)", accepts)


def ask_with(model: str, *, max_new_tokens: int = 16, **options: Any) -> VisionModel:  # noqa: ANN401
    """Wrap an `"image-text-to-text"` model of transformers; it decodes greedily.

    The model is loaded at the first call.

    Args:
        model: Folder or Hub name.
        max_new_tokens: Maximum length of the answer in tokens.
        options: Further arguments of `transformers.pipeline`, e.g. `device="cuda"`.
    """
    load = pipeline_loader("image-text-to-text", model, options)

    def ask(images: Sequence[Image.Image], prompt: str) -> str:
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": prompt})
        return chat_answer(load(), "text", [{"role": "user", "content": content}], max_new_tokens)

    return VisionModel(model, ask)
