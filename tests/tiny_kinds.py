"""A tiny model of each kind of the package with its processor."""

from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from tiny_training import make_encoder


def score_fusion(tiny, mllms, name="clip", **processor):
    clip = tiny[name]
    return ScoreFusionModel.from_clip(clip), ImageTextProcessor.from_backbones(clip, clip, **processor)


def token_fusion(tiny, mllms):
    towers = tiny["dinov2"], tiny["bert"]
    return TokenFusionModel.from_backbones(*towers), ImageTextProcessor.from_backbones(*towers)


def mllm_retriever(tiny, mllms, name="qwen2_vl"):
    folder, _ = mllms(name)
    return MllmRetrieverModel.from_mllm(folder, 2), MllmRetrieverProcessor.from_mllm(folder)


KINDS = {
    "joint_encoder": lambda tiny, mllms: make_encoder(tiny),
    "score_fusion": score_fusion,
    "score_fusion, siglip": lambda tiny, mllms: score_fusion(tiny, mllms, "siglip", text_padding="max_length"),
    "token_fusion": token_fusion,
    "mllm_retriever": mllm_retriever,
    "mllm_retriever, llava": lambda tiny, mllms: mllm_retriever(tiny, mllms, "llava"),
}
