"""Encoding a corpus to disk, indexing it and searching it."""

from conjoin.retrieval.build import INDEX_KINDS, build_index, check_model, load_index, new_index, search_items
from conjoin.retrieval.corpus_encoding import encode_corpus
from conjoin.retrieval.embedding_store import EmbeddingStore
from conjoin.retrieval.encoder import ItemEncoder, ModelIdentity
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.retrieval.index import ExactIndex, Index, SearchResult

__all__ = [
    "INDEX_KINDS",
    "EmbeddingStore",
    "ExactIndex",
    "FaissIndex",
    "Index",
    "ItemEncoder",
    "ModelIdentity",
    "SearchResult",
    "build_index",
    "check_model",
    "encode_corpus",
    "load_index",
    "new_index",
    "search_items",
]
