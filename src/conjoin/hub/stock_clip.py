"""Score fusion over CLIP as an ordinary CLIP checkpoint."""

import copy
import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

from conjoin.hub.save import drop_local_paths, staged
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor
from conjoin.processing.sentence_files import write_json_file
from conjoin.storage import write_checksums

logger = logging.getLogger(__name__)


def export_stock_clip(
    model: ScoreFusionModel, processor: ImageTextProcessor, folder: str | Path, prompts: dict[str, str] | None = None
) -> Path:
    """Save score fusion over CLIP as a CLIP checkpoint, without code.

    The vector of a text is its text features, that of an image its image features, that of both their sum; all are
    normalised at the end. The sum depends only on the ratio of the two weights, `w_t / w_i`, which the text projection
    takes up. The image features are those of the backbone.

    Args:
        model: Score fusion, with adapters merged.
        processor: Its processor.
        folder: Where to write, as `export` does.
        prompts: Named instructions, which are not written: those of the processor when None.

    Raises:
        ValueError: The backbone is not CLIP; or `normalize_inputs` is set, whose sum is not one of features.
    """
    kind = model.config.backbone_config.model_type
    if kind != "clip":
        raise ValueError(f"score fusion over {kind!r} cannot be a stock checkpoint; expected a backbone 'clip'")
    if model.config.normalize_inputs:
        raise ValueError(
            "normalize_inputs=True cannot be exported: both vectors are normalised before their sum, but the features "
            "of a CLIP checkpoint are not"
        )
    told = {name: text for name, text in (prompts or processor.prompts or {}).items() if text}
    if told:
        logger.warning("a CLIP checkpoint has no prompts; put them before the texts: %s", told)
    with staged(folder) as staging:
        _stock_clip(model).save_pretrained(staging)
        drop_local_paths(staging / "config.json")
        _save_processor(processor, staging)
        write_checksums(staging, sorted(file.name for file in staging.iterdir()))
    return Path(folder)


@torch.no_grad()
def _stock_clip(model: ScoreFusionModel) -> PreTrainedModel:
    """Return the backbone with `w_t / w_i` in its text projection."""
    image, text = model.config.image_weight, model.config.text_weight
    if model.config.learnable_weights:
        image, text = model.log_weights.double().exp().tolist()
    backbone = copy.deepcopy(model.backbone)
    backbone.text_projection.weight.mul_(text / image)
    return backbone


def _save_processor(processor: ImageTextProcessor, folder: Path) -> None:
    """Write tokenizer and image processor as CLIP's publishers do."""
    tokenizer = copy.deepcopy(processor.tokenizer)
    if processor.max_text_length is not None:
        tokenizer.model_max_length = min(processor.max_text_length, tokenizer.model_max_length)
    tokenizer._set_processor_class("CLIPProcessor")
    tokenizer.save_pretrained(folder)
    drop_local_paths(folder / "tokenizer_config.json", "auto_map")
    pixels = processor.image_processor.to_dict() | {"processor_class": "CLIPProcessor"}
    pixels["image_processor_type"] = pixels["image_processor_type"].removesuffix("Pil")
    write_json_file(folder / "preprocessor_config.json", pixels)
    drop_local_paths(folder / "preprocessor_config.json", "auto_map")
