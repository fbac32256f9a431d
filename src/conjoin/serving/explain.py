"""What a query and a result share: the heat map of an image and the words of a text."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from conjoin.retrieval import ItemEncoder

_PIXELS = 320


def explains(encoder: ItemEncoder) -> bool:
    """Whether a model compares the parts of an image with the words of a text: a joint encoder does."""
    from conjoin.models.joint_encoder import JointEncoderModel

    return isinstance(encoder.model, JointEncoderModel)


def explain_result(
    encoder: ItemEncoder, text: str | None, images: list[Any], row: Mapping[str, Any], folders: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Compare a query and a result: an image of one of them with the text of the other.

    Args:
        encoder: Holds the model.
        text: Of the query.
        images: Of the query.
        row: Of the result.
        folders: Where files may be that the row names as its pictures; see `conjoin.retrieval.pictures`.

    Returns:
        For each pair its `title` and `similarity`, the `images` (as the model sees it, and its patches like the text)
        as `data:` URIs by caption, and the `words` like the image: text, cosine, and colour from cold to warm.

    Raises:
        ValueError: The model is no joint encoder or an ONNX export, or there is no image beside a text.
    """
    from conjoin.data.row_images import plain_text
    from conjoin.evaluation.results import picture as data_uri
    from conjoin.retrieval.pictures import has_picture, read_picture
    from conjoin.trainers.solar_explain import explain_pair, heat_map, relative, warmth

    if not explains(encoder):
        raise ValueError("Only a joint encoder compares the parts of an image with the words of a text.")
    image = None
    if has_picture(row):
        with suppress(ValueError, FileNotFoundError):  # it cannot be read here
            image = read_picture(row, folders)
    pairs = {
        "The result's image and your text": (image, plain_text(images, text) if text else ""),
        "Your image and the result's text": (images or None, str(row.get("text") or "")),
    }
    drawn = []
    for title, (picture, words) in pairs.items():
        if picture is None or not words.strip():
            continue
        pair = explain_pair(encoder.model, encoder.processor, picture, words)
        patches = heat_map(pair.picture, pair.image_scores.numpy(), pair.grid)
        shown = {"the image as the model sees it": pair.picture, "patches like the text": patches}
        colours = [warmth(value) for value in relative(pair.text_scores.numpy())]
        drawn.append(
            {
                "title": title,
                "similarity": pair.similarity,
                "images": {caption: data_uri(each, _PIXELS) for caption, each in shown.items()},
                "words": list(zip(pair.words, pair.text_scores.tolist(), colours, strict=True)),
            }
        )
    if not drawn:
        raise ValueError(
            "The heat map compares an image with a text. Here the query and the result have no such pair: "
            "add a text to the query."
        )
    return drawn
