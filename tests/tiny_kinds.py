"""A tiny model of each kind of the package with its processor."""

from conjoin import TokenFusionModel
from conjoin.hub.build import image_text_processor, mllm_model, mllm_processor, score_fusion_model, towers_model
from tiny_training import make_encoder


def score_fusion(tiny, mllms, name="clip", **processor):
    clip = tiny[name]
    return score_fusion_model(clip), image_text_processor(clip, clip, **processor)


def token_fusion(tiny, mllms):
    towers = tiny["dinov2"], tiny["bert"]
    return towers_model(TokenFusionModel, *towers), image_text_processor(*towers)


def mllm_retriever(tiny, mllms, name="qwen2_vl"):
    folder, _ = mllms(name)
    return mllm_model(folder, 2), mllm_processor(folder)


KINDS = {
    "joint_encoder": lambda tiny, mllms: make_encoder(tiny),
    "score_fusion": score_fusion,
    "score_fusion, siglip": lambda tiny, mllms: score_fusion(tiny, mllms, "siglip", text_padding="max_length"),
    "token_fusion": token_fusion,
    "mllm_retriever": mllm_retriever,
    "mllm_retriever, llava": lambda tiny, mllms: mllm_retriever(tiny, mllms, "llava"),
}
