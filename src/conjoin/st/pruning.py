"""Pruning of a model of sentence-transformers around a decoder."""

import copy
from typing import Any

from sentence_transformers import SentenceTransformer

from conjoin.models.mllm_retriever.configuration_mllm_retriever import keep_first_layers


def prune(model: SentenceTransformer, keep_layers: int) -> SentenceTransformer:
    """Return a copy of a `SentenceTransformer` with the first layers of its language model.

    It works for embedders around an MLLM (Qwen3-VL-Embedding) and around a decoder of texts (Qwen3-Embedding).

    Args:
        model: The model.
        keep_layers: Number of layers to keep.

    Raises:
        ValueError: The model has fewer layers, or image features enter at a deeper layer.
    """
    network: Any = model[0].model
    decoder, config = network.get_decoder(), keep_first_layers(network.config, keep_layers)
    copies = {id(decoder.config): config.get_text_config(), id(network.config): config}
    copies[id(decoder.layers)] = copy.deepcopy(decoder.layers[:keep_layers], copies)
    return copy.deepcopy(model, copies)
