"""Configuration of the joint encoder."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from .configuration_towers import TowersConfig


@strict
class JointEncoderConfig(TowersConfig):
    """Configuration of `JointEncoderModel`: two towers, two adapters and a vision-language encoder.

    Widths and depth follow SOLAR (Sec. 4 and App. D). The paper does not give the heads and the feed-forward size of
    the vision-language encoder; they are fields here.

    Args:
        vision_config: Configuration (or its dict) of any transformers vision tower.
        text_config: Configuration (or its dict) of any transformers text tower.
        hidden_size: Width `d` of the shared space and of the embedding (768 in the paper).
        num_vl_layers: Attention layers of the vision-language encoder (3 in the paper). With 0 there is none: an image
            or a text is embedded as the adapter's output for the pooled tower state `[global; mean of local]` of width
            `2 h`, each half layer-normalised, and an item of both as the sum of their unit embeddings. An adapter that
            starts as the identity, with `hidden_size` of `2 h`, gives the pooled state itself.
        num_attention_heads: Attention heads per layer.
        intermediate_size: Feed-forward width of each layer; `4 * hidden_size` when None.
        vision_hidden_layer: Index of the `hidden_states` entry to read in the vision tower (as in LLaVA, e.g. -2). The
            blocks above it are not built. None reads the tower's final, normalised output.
        text_attends_padding: Let the text tower attend to padding; by default True for SigLIP, trained without a mask.
        balance_modalities: Give image and text equal total weight as keys of the vision-language encoder, however many
            tokens each has. Otherwise 256 patches outweigh 10 words, and a fused embedding starts as the picture's.
        adapter_init: `"identity"` starts each adapter as an exact identity (an orthogonal projection where widths
            differ), `A(x) = [I, -I] GELU([I; -I] x)`, with a hidden width of `2 * hidden_size`; `"normal"` starts it
            randomly, with a hidden width of `hidden_size`.
        vl_init: `"mean_pooling"` initialises the vision-language encoder to the mean of its (normalised) tokens, which
            suits small datasets; `"normal"` initialises it randomly.
        token_dropout: Fraction of local tokens dropped before the vision-language encoder in training.
        attention_dropout: Dropout rate of the attention weights in the vision-language encoder.
        readout: How an item of image and text is embedded: `"fused"`, by E_VL over the tokens of both (the paper's);
            `"sum"`, as the sum of the unit embeddings of its image and its text. An item of one modality is embedded
            alike by both. Training on pairs does not use it; training on queries does. Set it in a loaded model's
            `config` to change it.
        initializer_range: Standard deviation of the normal initialisation.
        layer_norm_eps: Epsilon of the layer norms.

    Raises:
        StrictDataclassError: A field has another type, a size is not positive, or heads do not divide the width.
    """

    model_type = "joint_encoder"
    hidden_size: int = 768
    num_vl_layers: int = 3
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    text_attends_padding: bool | None = None
    balance_modalities: bool = True
    adapter_init: Literal["identity", "normal"] = "identity"
    vl_init: Literal["mean_pooling", "normal"] = "mean_pooling"
    token_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    readout: Literal["fused", "sum"] = "fused"
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        super().__post_init__(**kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.text_attends_padding is None:
            self.text_attends_padding = self.text_config.model_type.startswith("siglip")

    def validate_architecture(self) -> None:
        """Refuse sizes that do not fit together; `@strict` calls it."""
        super().validate_architecture()
        width, heads = self.hidden_size, self.num_attention_heads
        if width <= 0 or heads <= 0 or width % heads:
            raise ValueError(f"num_attention_heads={heads} must divide hidden_size={width}")
        if self.num_vl_layers < 0:
            raise ValueError(f"num_vl_layers={self.num_vl_layers}; expected 0 or more")
        if not 0.0 <= self.token_dropout < 1.0:
            raise ValueError(f"token_dropout={self.token_dropout} must lie in [0, 1)")


__all__ = ["JointEncoderConfig"]
