"""The models under test, by name."""

from conjoin import JointEncoderModel, TokenFusionModel
from conjoin.hub.build import score_fusion_model, towers_model


def joint(vision, text, **config):
    config = {"hidden_size": 24, "num_attention_heads": 2, "num_vl_layers": 2, "vl_init": "normal"} | config
    return towers_model(JointEncoderModel, vision, text, **config)


def score(vision, text, **config):
    return score_fusion_model(vision, **config)


def token(vision, text, **config):
    return towers_model(TokenFusionModel, vision, text, **config)


MODELS = {
    "joint clip": (joint, "clip", "clip", {"readout": "sum"}),
    "joint siglip": (joint, "siglip", "siglip", {"balance_modalities": False}),
    "joint vit + clip": (joint, "vit", "clip", {"adapter_init": "normal"}),
    "joint dinov2 + bert": (joint, "dinov2", "bert", {"vision_hidden_layer": -2}),
    "joint dinov2 + xlm-roberta": (joint, "dinov2", "xlm_roberta", {}),
    "joint clip + bert, pooled": (joint, "clip", "bert", {"num_vl_layers": 0}),
    "score clip": (score, "clip", "clip", {}),
    "score siglip": (score, "siglip", "siglip", {"text_weight": 0.5}),
    "token dinov2 + bert": (token, "dinov2", "bert", {"vision_hidden_layer": -2}),
    "token clip + xlm-roberta": (token, "clip", "xlm_roberta", {"pooling": "mean"}),
    "token siglip + bert": (token, "siglip", "bert", {}),
    "token vit + xlm-roberta": (token, "vit", "xlm_roberta", {}),
}
"""Every pairing of towers: builder, vision checkpoint, text checkpoint, configuration."""

ONE_OF_EACH = ["joint dinov2 + bert", "score siglip", "token dinov2 + bert"]
