"""Encoding a corpus to disk, indexing it and searching it."""

from conjoin.retrieval.build import (
    INDEX_KINDS,
    build_index,
    check_model,
    load_index,
    new_index,
    search_items,
    search_store,
)
from conjoin.retrieval.corpus_encoding import encode_corpus
from conjoin.retrieval.embedding_store import EmbeddingStore
from conjoin.retrieval.encoder import ItemEncoder, ModelIdentity
from conjoin.retrieval.faiss_index import FaissIndex
from conjoin.retrieval.index import ExactIndex, Index, SearchResult
from conjoin.retrieval.mined_negatives import Finding, MinedNegatives, load_mined
from conjoin.retrieval.mining import mine_hard_negatives
from conjoin.retrieval.mining_metrics import MiningMetric, parse_metrics
from conjoin.retrieval.mining_plan import MiningPlan, plan_mining
from conjoin.retrieval.stock_encoder import load_encoder, load_stock_encoder

__all__ = [
    "INDEX_KINDS",
    "EmbeddingStore",
    "ExactIndex",
    "FaissIndex",
    "Finding",
    "Index",
    "ItemEncoder",
    "MinedNegatives",
    "MiningMetric",
    "MiningPlan",
    "ModelIdentity",
    "SearchResult",
    "build_index",
    "check_model",
    "encode_corpus",
    "load_encoder",
    "load_index",
    "load_mined",
    "load_stock_encoder",
    "mine_hard_negatives",
    "new_index",
    "parse_metrics",
    "plan_mining",
    "search_items",
    "search_store",
]
