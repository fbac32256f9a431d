"""Encoding a corpus to disk, indexing it and searching it."""

from conjoin.retrieval.encode import encode_corpus as encode_corpus, encode_rank as encode_rank
from conjoin.retrieval.encode_ray import encode_on_ray as encode_on_ray
from conjoin.retrieval.encoder import Encoder as Encoder, ItemEncoder as ItemEncoder, ModelIdentity as ModelIdentity
from conjoin.retrieval.index.base import Index as Index, SearchResult as SearchResult
from conjoin.retrieval.index.build import (
    INDEX_KINDS as INDEX_KINDS,
    build_index as build_index,
    check_model as check_model,
    load_index as load_index,
    new_index as new_index,
    query_vectors as query_vectors,
    rows_of as rows_of,
    search_items as search_items,
    search_store as search_store,
    select_rows as select_rows,
)
from conjoin.retrieval.index.exact import ExactIndex as ExactIndex
from conjoin.retrieval.index.faiss import FaissIndex as FaissIndex
from conjoin.retrieval.index.update import update_index as update_index
from conjoin.retrieval.load import load_encoder as load_encoder
from conjoin.retrieval.mining.mine import mine_hard_negatives as mine_hard_negatives
from conjoin.retrieval.mining.miners import Miner as Miner, parse_miners as parse_miners
from conjoin.retrieval.mining.negatives import (
    Finding as Finding,
    MinedNegatives as MinedNegatives,
    load_mined as load_mined,
)
from conjoin.retrieval.mining.plan import plan_mining as plan_mining
from conjoin.retrieval.reranker import Reranker as Reranker, load_reranker as load_reranker, rerank as rerank
from conjoin.retrieval.store import EmbeddingStore as EmbeddingStore
from conjoin.retrieval.store_update import (
    StoreChanges as StoreChanges,
    remove_rows as remove_rows,
    update_store as update_store,
)
