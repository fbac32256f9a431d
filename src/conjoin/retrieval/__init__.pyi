from conjoin.constants import INDEX_KINDS as INDEX_KINDS
from conjoin.retrieval.collection import Changes as Changes, Collection as Collection, Skipped as Skipped
from conjoin.retrieval.encode import (
    EncodeOptions as EncodeOptions,
    encode_collection as encode_collection,
    launched_processes as launched_processes,
)
from conjoin.retrieval.encode_ray import encode_on_ray as encode_on_ray
from conjoin.retrieval.encoder import ItemEncoder as ItemEncoder, ModelIdentity as ModelIdentity
from conjoin.retrieval.load import load_encoder as load_encoder
from conjoin.retrieval.milvus import MilvusCollection as MilvusCollection, copy_to_milvus as copy_to_milvus
from conjoin.retrieval.mining import (
    MinedNegatives as MinedNegatives,
    Miner as Miner,
    load_mined as load_mined,
    mine_hard_negatives as mine_hard_negatives,
    parse_miners as parse_miners,
)
from conjoin.retrieval.reranker import Reranker as Reranker, load_reranker as load_reranker, rerank as rerank
from conjoin.retrieval.results import Hit as Hit, Hits as Hits, Ranking as Ranking, Searchable as Searchable
from conjoin.retrieval.search import (
    check_model as check_model,
    open_collection as open_collection,
    rank_items as rank_items,
    search_exactly as search_exactly,
    search_items as search_items,
)
from conjoin.retrieval.vectors import exact_search as exact_search
