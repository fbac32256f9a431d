"""One function that loads an encoder from any model: ours, sentence-transformers', stock, or an ONNX export."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import VisionTextDualEncoderConfig

from conjoin.constants import SAMPLE_MODEL
from conjoin.data import SAMPLE_VISION_LAYER, load_sample_text_tower, load_sample_vision_tower, sample_image_processor
from conjoin.devices import choose_device
from conjoin.hub.embedder import UnsupportedEmbedderError, load_embedder
from conjoin.hub.load import REMEDY, has_file, is_embedder, is_own_model, load_model, loading
from conjoin.hub.onnx_export import SETTINGS as ONNX_SETTINGS
from conjoin.retrieval.encoder import EncoderOutput, ItemEncoder, model_name
from conjoin.retrieval.onnx_encoder import load_onnx_model
from conjoin.retrieval.sentence_encoder import SentenceEncoder, SentenceItems, load_sentence_transformer
from conjoin.retrieval.stock_encoder import StockProcessor, load_stock_model
from conjoin.storage import check_checksums


def load_encoder(
    path: str | Path,
    *,
    batch_size: int = 32,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    num_workers: int = 0,
    input_type: str | None = None,
    truncate_dim: int | None = None,
    pooling: str | None = None,
    preset: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> ItemEncoder:
    """Load any model as an encoder.

    `"sample"` is the towers of the embedded sample with nothing trained on top: words are compared with words, and
    pictures with pictures. Otherwise the folder decides how it is read:

    * a `config.json` with a `model_type` of this package: with the installed classes, never with code from the folder;
      an ONNX export of such a model with onnxruntime, on the CPU;
    * an MLLM with a `modules.json`, or with `preset`: as an MLLM retriever (`load_embedder`);
    * any other `modules.json`: with sentence-transformers;
    * else as a bare checkpoint of transformers: two towers by their projections, another model by the pooled output
      that its class was trained with, or by `pooling`.

    Args:
        path: A local folder, the name of a repository on the Hub, or `"sample"`.
        batch_size: Items per forward pass.
        device: Where to run; `None` takes a GPU when there is one.
        dtype: As for `ItemEncoder`, such as `"bfloat16"`.
        num_workers: Processes that decode images and tokenise ahead of the model; 0 does it in this one.
        input_type: How an item with several images is embedded, `"seq"`, `"cat"` or `"avg"`; see `ItemEncoder`.
        truncate_dim: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        pooling: Of a bare checkpoint that does not say how it pools: `"mean"`, `"cls"` or `"last"`.
        preset: Load an MLLM as a published embedder, one of `conjoin.hub.embedder.PRESETS`.
        trust_remote_code: Run Python code from the folder where a model of another package needs it.
        revision: Branch, tag or commit of a repository on the Hub; a commit never changes.

    Raises:
        FileNotFoundError: There is no such model.
        ImportError: The sample is needed and not installed.
        ValueError: The weights are damaged, the model is no encoder or does not say how it pools, it needs code that
            is not trusted, or there is no such `device` or `input_type`; an option does not belong to this kind of
            model; or an ONNX export is to run elsewhere than on the CPU in its own precision.
    """
    target = choose_device(device)  # refuses a wrong one before anything is loaded
    has_config, has_modules = (
        path != SAMPLE_MODEL and has_file(path, name, revision) for name in ("config.json", "modules.json")
    )
    if path != SAMPLE_MODEL and Path(path).is_dir() and not has_config and not has_modules:
        raise FileNotFoundError(
            f"cannot load the model {str(path)!r}: it has neither a config.json nor a modules.json"
        )
    is_own = has_config and is_own_model(path, revision)
    needed = {name: value for name, value in (("pooling", pooling), ("preset", preset)) if value is not None}
    says_pooling = has_modules or preset is not None
    if needed and (is_own or path == SAMPLE_MODEL or (pooling is not None and says_pooling)):
        raise ValueError(f"{needed}: the model {str(path)!r} says itself how it is read and pools; leave it out")
    settings: dict[str, Any] = {"num_workers": num_workers, "input_type": input_type, "truncate_dim": truncate_dim}
    settings |= {"name": model_name(path), "load_options": needed}
    if is_own and has_file(path, ONNX_SETTINGS, revision):
        if device is not None and target.type != "cpu":
            raise ValueError(f"{str(path)!r} is an ONNX export, which runs on the CPU, not on {device}")
        if dtype not in (None, "auto", "float32", torch.float32):
            raise ValueError(f"{str(path)!r} is an ONNX export, which computes in its own precision, not in {dtype}")
        return ItemEncoder(*load_onnx_model(path, revision), batch_size, "cpu", **settings)

    def load() -> tuple[Any, Any]:
        if path == SAMPLE_MODEL:
            return SampleTowers(), StockProcessor(sample_image_processor(), load_sample_text_tower()[1], "longest")
        if is_own:
            return load_model(path, revision=revision)
        check_checksums(Path(path), REMEDY)
        if preset is not None or (has_config and is_embedder(path, revision)):
            with loading(path, revision), suppress(UnsupportedEmbedderError):  # sentence-transformers may support it
                return load_embedder(path, preset=preset, revision=revision)
        if has_modules:
            return load_sentence_transformer(path, trust_remote_code, revision)
        return load_stock_model(path, pooling, trust_remote_code, revision)

    model, processor = load()
    kind = SentenceEncoder if isinstance(processor, SentenceItems) else ItemEncoder
    return kind(model, processor, batch_size, target, dtype, **settings)


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
