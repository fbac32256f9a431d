"""How a trained joint encoder embeds items of image and text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin

from conjoin.models.joint_encoder import READOUTS, JointEncoderModel

from .scores import fit_intersection, pair_tokens


@torch.no_grad()
def set_readout(
    model: PreTrainedModel,
    readout: str,
    processor: ProcessorMixin | None = None,
    pairs: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Change the readout of a joint encoder in place; see `JointEncoderConfig`. Vectors made before no longer fit.

    Args:
        model: The joint encoder.
        readout: `"fused"`, `"sum"` or `"intersection"`.
        processor: Its processor, for `"intersection"`.
        pairs: For `"intersection"`, items with `"image"` and `"text"` like those it was trained on, some hundreds: the
            thresholds of shared patches and words are fitted to them.

    Raises:
        ValueError: The model is no joint encoder, the readout is unknown, or the pairs are too few or incomplete.
    """
    if not isinstance(model, JointEncoderModel):
        raise ValueError(f"a readout is chosen for a joint encoder, not for {type(model).__name__}")
    if readout not in READOUTS:
        raise ValueError(f"readout={readout!r}; expected one of {READOUTS}")
    masks = None
    if readout == "intersection":
        if processor is None or len(pairs) < 2:
            raise ValueError(f"readout='intersection' is fitted to pairs of image and text; got {len(pairs)}")
        for index, pair in enumerate(pairs):
            if not isinstance(pair, Mapping) or any(pair.get(part) is None for part in ("image", "text")):
                raise ValueError(f"pair {index} is no image with a text: {pair!r:.80}")
        inputs = processor([{"image": pair["image"], "text": pair["text"]} for pair in pairs])
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        masks = fit_intersection(model, pair_tokens(model.eval()(**inputs, views=(), output_tokens=True)))
    model.intersection = masks
    model.config.readout = readout
