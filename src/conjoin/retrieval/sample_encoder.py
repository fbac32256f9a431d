"""The towers of the embedded sample as they are, behind the interface of `ItemEncoder`."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import VisionTextDualEncoderConfig

from conjoin.data import SAMPLE_VISION_LAYER, load_sample_text_tower, load_sample_vision_tower, sample_image_processor
from conjoin.retrieval.encoder import EncoderOutput
from conjoin.retrieval.stock_encoder import StockProcessor


class SampleTowers(torch.nn.Module):
    """The unit vectors of a vision tower and a text tower side by side, L2-normalised; a missing part is zero.

    Nothing is trained on top: words are compared with words, and pictures with pictures.

    Raises:
        ImportError: The `sample` extra is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = load_sample_vision_tower()
        self.text_model, _ = load_sample_text_tower()
        self.config = VisionTextDualEncoderConfig.from_vision_text_configs(
            self.vision_model.config, self.text_model.config, vision_hidden_layer=SAMPLE_VISION_LAYER
        )

    def forward(
        self, items: Tensor, images: dict[str, Tensor] | None = None, texts: dict[str, Tensor] | None = None
    ) -> EncoderOutput:
        """Embed a batch of `StockProcessor`; `items` `(N, 2)` says which have an image and which a text."""
        parts = torch.zeros(len(items), 2, self.text_model.config.hidden_size, device=items.device)
        if images is not None:
            states = self.vision_model(**images, output_hidden_states=True).hidden_states[SAMPLE_VISION_LAYER]
            parts[items[:, 0], 0] = F.normalize(states[:, 0].float(), dim=1)
        if texts is not None:
            mask = texts["attention_mask"][..., None]
            words = (self.text_model(**texts).last_hidden_state.float() * mask).sum(1)  # normalised: as their mean
            parts[items[:, 1], 1] = F.normalize(words, dim=1)
        return EncoderOutput(F.normalize(parts.flatten(1), dim=1))


def load_sample_towers() -> tuple[SampleTowers, StockProcessor]:
    """Load both towers and what turns items into their inputs.

    Raises:
        ImportError: The `sample` extra is not installed.
    """
    return SampleTowers(), StockProcessor(sample_image_processor(), load_sample_text_tower()[1], "longest")
