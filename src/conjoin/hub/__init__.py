"""Saving models so that others can load them."""

from .export import add_sentence_transformers_files, export

__all__ = ["add_sentence_transformers_files", "export"]
