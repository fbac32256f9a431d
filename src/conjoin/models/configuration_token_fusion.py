"""Configuration of token fusion."""

from typing import Any

from .configuration_towers import TowersConfig

POOLINGS = ("cls", "mean")


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
        ValueError: `pooling` is unknown.
    """

    model_type = "token_fusion"
    pooling: str = "cls"
    cls_token_id: int = 101
    sep_token_id: int = 102

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        super().__post_init__(**kwargs)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r}; expected one of {POOLINGS}")

    @property
    def hidden_size(self) -> int:
        """Width of the embedding, which is the text encoder's width."""
        return self.text_config.hidden_size


__all__ = ["TokenFusionConfig"]
