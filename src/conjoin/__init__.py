"""conjoin: any item (text, image, interleaved) in, one comparable vector out."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "conjoin.data": ("load_emoji", "load_pairs", "symmetric_triplets"),
    "conjoin.evaluation": ("evaluate_combinations", "evaluate_symmetric", "render_report"),
    "conjoin.hub": ("export",),
    "conjoin.losses": ("gcl", "info_nce", "mac", "multi_positive", "symmetric_info_nce"),
    "conjoin.models.joint_encoder": ("JointEncoderConfig", "JointEncoderModel"),
    "conjoin.models.score_fusion": ("ScoreFusionConfig", "ScoreFusionModel"),
    "conjoin.models.token_fusion": ("TokenFusionConfig", "TokenFusionModel"),
    "conjoin.processing": ("ImageTextProcessor",),
    "conjoin.retrieval": ("ItemEncoder", "build_index", "encode_corpus", "load_index", "search_items"),
    "conjoin.training": ("ContrastiveConfig", "ContrastiveTrainer", "GclConfig", "GclTrainer", "load_recipe", "train"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - imported when first used, so that `import conjoin` stays fast
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'conjoin' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
