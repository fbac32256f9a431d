"""What a query and a result share, as HTML: the heat map of an image and the words of a text."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conjoin.serving.html import render

if TYPE_CHECKING:
    from conjoin.serving.searcher import Searcher
    from conjoin.trainers.solar_explain import Explanation

_PIXELS = 320


def explain_result(searcher: "Searcher", text: str | None, images: list[Any], row: Mapping[str, Any]) -> str:
    """Draw what a query and a result share: an image of one of them with the text of the other.

    Args:
        searcher: Holds the model.
        text: Of the query.
        images: Of the query.
        row: Of the result.

    Raises:
        ValueError: The model is no joint encoder or an ONNX export, or there is no image beside a text.
    """
    from conjoin.data.row_images import plain_text
    from conjoin.models.joint_encoder import JointEncoderModel
    from conjoin.retrieval.pictures import has_picture, picture_folders, read_picture
    from conjoin.trainers.solar_explain import explain_pair

    encoder = searcher.encoder
    if not isinstance(encoder.model, JointEncoderModel):
        raise ValueError("Only a joint encoder compares the parts of an image with the words of a text.")
    image = None
    if has_picture(row):
        with suppress(ValueError, FileNotFoundError):  # it cannot be read here
            image = read_picture(row, picture_folders(searcher.source))
    query_text = plain_text(images, text) if text else ""
    pairs = {
        "The result's image and your text": (image, query_text),
        "Your image and the result's text": (images or None, str(row.get("text") or "")),
    }
    drawn = []
    for title, (picture, words) in pairs.items():
        if picture is not None and words.strip():
            drawn.append(_draw(title, explain_pair(encoder.model, encoder.processor, picture, words)))
    if not drawn:
        raise ValueError(
            "The heat map compares an image with a text. Here the query and the result have no such pair: "
            "add a text to the query."
        )
    return "".join(drawn)


def _draw(title: str, explanation: "Explanation") -> str:
    from conjoin.evaluation.results import picture as data_uri
    from conjoin.trainers.solar_explain import heat_map, relative, warmth

    patches = heat_map(explanation.picture, explanation.image_scores.numpy(), explanation.grid)
    figures = {"the image as the model sees it": explanation.picture, "patches like the text": patches}
    colours = [warmth(value) for value in relative(explanation.text_scores.numpy())]
    return render(
        "why",
        title=title,
        figures={caption: data_uri(picture, _PIXELS) for caption, picture in figures.items()},
        words=list(zip(explanation.words, explanation.text_scores.tolist(), colours, strict=True)),
        similarity=explanation.similarity,
    )
