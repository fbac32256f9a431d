"""conjoin: any item (text, image, image + text, interleaved) in, one comparable vector out."""

__version__ = "0.1.0.dev0"
