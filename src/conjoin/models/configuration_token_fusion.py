"""Configuration of token fusion."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_towers import TowersConfig


@strict
class TokenFusionConfig(TowersConfig):
    """Configuration of `TokenFusionModel`: a vision tower whose patches enter a text encoder as tokens.

    Args:
        vision_config: Configuration (or its dict) of any transformers vision tower.
        text_config: Configuration (or its dict) of a BERT-family text encoder.
        pooling: `"cls"` reads the embedding at CLS (VISTA, BGE); `"mean"` averages over all tokens (MiniLM, E5).
        vision_hidden_layer: Index of the `hidden_states` entry to read in the vision tower (as in LLaVA, e.g. -2). The
            blocks above it are not built. None reads the tower's final, normalised output.
        cls_token_id: Id of the text encoder's CLS token, the first of every item.
        sep_token_id: Id of its SEP token, the last of every item.

    Raises:
        StrictDataclassError: A field has another type, or `pooling` is unknown.
    """

    model_type = "token_fusion"
    pooling: Literal["cls", "mean"] = "cls"
    cls_token_id: int | None = 101
    sep_token_id: int | None = 102

    @property
    def hidden_size(self) -> int:
        """Width of the embedding, which is the text encoder's width."""
        return self.text_config.hidden_size


__all__ = ["TokenFusionConfig"]
