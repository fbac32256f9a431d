"""Configuration of the joint encoder."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

READOUTS = ("fused", "sum")


class JointEncoderConfig(PreTrainedConfig):
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
        text_attends_padding: Let the text tower attend to padding, for towers trained without a mask (SigLIP).
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
        ValueError: A size is not positive, heads do not divide the width, or a start is unknown.
    """

    model_type = "joint_encoder"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012 - the library's convention

    def __init__(
        self,
        vision_config: PreTrainedConfig | dict[str, Any] | None = None,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        hidden_size: int = 768,
        num_vl_layers: int = 3,
        num_attention_heads: int = 12,
        intermediate_size: int | None = None,
        vision_hidden_layer: int | None = None,
        text_attends_padding: bool = False,
        balance_modalities: bool = True,
        adapter_init: str = "identity",
        vl_init: str = "mean_pooling",
        token_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        readout: str = "fused",
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-6,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self.vision_config = _as_config(vision_config, "dinov2")
        self.text_config = _as_config(text_config, "bert")
        self.hidden_size = hidden_size
        self.num_vl_layers = num_vl_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size if intermediate_size is not None else 4 * hidden_size
        self.vision_hidden_layer = vision_hidden_layer
        self.text_attends_padding = text_attends_padding
        self.balance_modalities = balance_modalities
        self.adapter_init = adapter_init
        self.vl_init = vl_init
        self.token_dropout = token_dropout
        self.attention_dropout = attention_dropout
        self.readout = readout
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        if hidden_size <= 0 or num_attention_heads <= 0 or hidden_size % num_attention_heads:
            raise ValueError(f"num_attention_heads={num_attention_heads} must divide hidden_size={hidden_size}")
        if num_vl_layers < 0:
            raise ValueError(f"num_vl_layers={num_vl_layers}; expected 0 or more")
        if vl_init not in ("mean_pooling", "normal"):
            raise ValueError(f'vl_init={vl_init!r}; expected "mean_pooling" or "normal"')
        if adapter_init not in ("identity", "normal"):
            raise ValueError(f'adapter_init={adapter_init!r}; expected "identity" or "normal"')
        if readout not in READOUTS:
            raise ValueError(f"readout={readout!r}; expected one of {READOUTS}")
        if not 0.0 <= token_dropout < 1.0:
            raise ValueError(f"token_dropout={token_dropout} must lie in [0, 1)")
        super().__init__(**kwargs)

    @property
    def num_vision_layers(self) -> int:
        """Number of vision-tower blocks to build: those up to `vision_hidden_layer`."""
        depth = self.vision_config.num_hidden_layers
        if self.vision_hidden_layer is None:
            return depth
        kept = self.vision_hidden_layer if self.vision_hidden_layer >= 0 else depth + 1 + self.vision_hidden_layer
        if not 1 <= kept <= depth:
            raise ValueError(
                f"vision_hidden_layer={self.vision_hidden_layer} is outside a tower of {depth} layers; "
                f"expected 1..{depth} or -1..-{depth}"
            )
        return kept

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:  # noqa: ANN401
        """The text tower's configuration."""
        return self.text_config.get_text_config(*args, **kwargs)


def _as_config(config: PreTrainedConfig | dict[str, Any] | None, default: str) -> PreTrainedConfig:
    if isinstance(config, PreTrainedConfig):
        return config
    values = dict(config or {})
    return AutoConfig.for_model(values.pop("model_type", default), **values)


__all__ = ["JointEncoderConfig"]
