"""Small limits and pictures for the tests of serving."""

import base64
import io

from PIL import Image

from conjoin.serving import Limits

COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
LIMITS = Limits(
    items=4, images=2, image_bytes=20_000, image_pixels=10_000, request_pixels=30_000, text_characters=200, results=10
)


def png(colour="red", size=(8, 8)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "png")
    return buffer.getvalue()


def uri(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
