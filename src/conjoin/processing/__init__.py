"""Items and the processors that turn them into model inputs. A saved checkpoint carries these files with it."""

from .item_inputs import Item, load_image, parse_item, parse_items, to_rgb
from .processing_image_text import ImageTextProcessor
from .processing_mllm import MllmRetrieverProcessor

ImageTextProcessor.register_for_auto_class()
MllmRetrieverProcessor.register_for_auto_class()

__all__ = [
    "ImageTextProcessor",
    "Item",
    "MllmRetrieverProcessor",
    "load_image",
    "parse_item",
    "parse_items",
    "to_rgb",
]
