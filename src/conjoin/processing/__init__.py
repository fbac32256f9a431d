"""Items, and the processors that turn them into model inputs. Each saved checkpoint contains the files of these."""

from .item_error import ItemError as ItemError, MissingFileError as MissingFileError
from .item_images import load_image as load_image
from .item_inputs import parse_item as parse_item, parse_items as parse_items
from .processing_image_text import ImageTextProcessor as ImageTextProcessor
from .processing_mllm import MllmRetrieverProcessor as MllmRetrieverProcessor
from .urls import allow_urls as allow_urls

ImageTextProcessor.register_for_auto_class()
MllmRetrieverProcessor.register_for_auto_class()
