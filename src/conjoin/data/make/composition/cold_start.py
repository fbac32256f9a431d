"""Cold-start expansion (MERIT App. A.3.4): queries for products without attributes, which a model compares."""

from collections.abc import Sequence

import numpy as np

from .catalogue import Catalogue
from .judges import Product, VisionModel
from .pool import Pool
from .samplers import MOST_COMPARED

AS_SHOWN = ("product style", "as product image")
"""The condition of a product without attributes, as in the published queries."""
ATTRIBUTE_PROMPT = (
    "Compare the two pictures of products. Which one attribute has to change most visibly to turn the first product "
    "into the second? Choose one of: {choices}. Answer with the attribute only."
)
VALUE_PROMPT = (
    "Compare the two pictures of products. Which {attribute} does the second product have, unlike the first? "
    "Choose one of: {choices}. Answer with the value only, or with no if none of them fits."
)


def cold_products(pool: Pool) -> np.ndarray:
    """The products without any attribute, ascending."""
    return np.flatnonzero((pool.codes < 0).all(axis=0))


def draw_cold(pool: Pool, cold: np.ndarray, generator: np.random.Generator) -> tuple[int, int, np.ndarray] | str:
    """A product without attributes, a similar product as the target, and the siblings that are neither.

    Raises:
        ValueError: There are neither families nor vectors to find similar products by.
    """
    if pool.vectors is None and pool.families is None:
        raise ValueError("cold-start expansion needs families of products, or vectors to find similar products by")
    product = int(cold[int(generator.integers(len(cold)))])
    family = pool.family(product)
    if len(family):
        target = int(family[int(generator.integers(len(family)))])
        return product, target, family[family != target]
    if pool.vectors is None:
        return "no similar product"
    scores = pool.vectors @ pool.vectors[product]
    scores[product] = -np.inf
    return product, int(scores.argmax()), family


def difference(
    model: VisionModel, catalogue: Catalogue, pool: Pool, first: Product, second: Product
) -> tuple[int, int] | str:
    """What turns the first product into the second by the answers of a model: an attribute and its value.

    The choices are the attributes and values that several products of the pool have.
    """
    names = {catalogue.attributes[key].lower(): key for key in pool.keys.tolist()}
    images = [first.image, second.image]
    key = names.get(_answer(model.ask(images, ATTRIBUTE_PROMPT.format(choices=", ".join(names)))))
    if key is None:
        return "the model named no attribute"
    values = {catalogue.values[key][value]: value for value in pool.usable_values(key).tolist()}
    prompt = VALUE_PROMPT.format(attribute=catalogue.attributes[key], choices=", ".join(values))
    value = values.get(_answer(model.ask(images, prompt)))
    return "the model named no value" if value is None else (key, value)


def other_with(
    pool: Pool, key: int, value: int, target: int, barred: Sequence[int], generator: np.random.Generator
) -> int | None:
    """A product with this value, of those compared the most similar to the target."""
    found = pool.products(key, value)
    found = found[~np.isin(found, barred)]
    if not len(found):
        return None
    if len(found) > MOST_COMPARED:
        found = found[generator.choice(len(found), MOST_COMPARED, replace=False)]
    if pool.vectors is None:
        return int(found[int(generator.integers(len(found)))])
    return int(found[pool.similarities([target], found).argmax()])


def _answer(text: str) -> str:
    return text.strip().strip("\"'*.").strip().lower()
