"""Other vectors that a joint encoder gives: those of its towers, and those of SOLAR's projection heads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from conjoin.constants import SOLAR_HEADS
from conjoin.models.modeling_towers import TowersOutput
from conjoin.retrieval import ItemEncoder
from conjoin.storage import reading

TOWERS, HEADS = "towers alone", "with W"


def other_encoders(encoder: ItemEncoder) -> dict[str, ItemEncoder]:
    """What the towers of a joint encoder give alone, and SOLAR's stage 1 with its projection heads; by label."""
    from conjoin.models.joint_encoder import JointEncoderModel

    if not isinstance(encoder.model, JointEncoderModel):
        return {}
    file = Path(encoder.model.name_or_path or "", SOLAR_HEADS)
    with reading(file):
        saved = load_file(str(file)) if file.is_file() else {}
    heads = [weight for name, weight in sorted(saved.items()) if name.startswith("heads.")]  # of images, of texts
    how = {name: getattr(encoder, name) for name in ("batch_size", "device", "dtype", "threads", "input_type")}
    return {
        label: ItemEncoder(_Readout(encoder.model, chosen), encoder.processor, name=f"{encoder.name}, {label}", **how)
        for label, chosen in ({TOWERS: [], HEADS: heads} if heads else {TOWERS: []}).items()
    }


class _Readout(nn.Module):
    """A joint encoder read in another way; `(N, D)`, normalised.

    With the heads W_V and W_L: the embedding, projected where an item is a picture alone or a text alone (Eq. 2).
    Without heads: the unit vectors of both towers side by side, the picture's global token and the mean of the text's
    tokens; a part that is missing is zero.
    """

    def __init__(self, model: Any, heads: Sequence[Tensor]) -> None:  # noqa: ANN401 - a `JointEncoderModel`
        super().__init__()
        self.model, self.config = model, model.config
        self.heads = nn.ParameterList([head.to(model.device) for head in heads])

    def forward(self, **inputs: Any) -> TowersOutput:  # noqa: ANN401 - of the processor
        output = self.model(**inputs, views=None if self.heads else [], output_tokens=True)
        image, text = output.image_features, output.text_features  # of a row without the part: zeros
        count, device = len(text if image is None else image), self.model.device
        if self.heads:
            has_image, has_text = (
                torch.zeros(count, 1, dtype=torch.bool, device=device) if mask is None else mask.any(1, keepdim=True)
                for mask in (output.image_token_mask, output.text_token_mask)
            )
            of_image, of_text = (output.embeddings @ head.float().T for head in self.heads)
            vectors = torch.where(has_image & has_text, output.embeddings, torch.where(has_image, of_image, of_text))
        else:
            sizes = self.config.vision_config.hidden_size, self.config.text_config.hidden_size
            vectors = torch.zeros(count, sum(sizes), device=device)
            if image is not None:
                vectors[:, : sizes[0]] = F.normalize(image[:, 0].float(), dim=1)
            if text is not None:
                tokens = text[:, 1:].float() * inputs["attention_mask"][..., None]
                vectors[:, sizes[0] :] = F.normalize(tokens.sum(1), dim=1)
        return TowersOutput(F.normalize(vectors, dim=1))
