"""ONNX exports of this package behind the interface of `ItemEncoder`: onnxruntime computes, PyTorch does not."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import cached_file

from conjoin.hub.folder import loading
from conjoin.hub.onnx_export import GRAPHS, SETTINGS, WEIGHTS
from conjoin.models.modeling_towers import TowersOutput
from conjoin.storage import check_checksums, read_json, reading

REMEDY = "export the model again"


class OnnxModel(torch.nn.Module):
    """The graphs of an export: each item goes through the graph of its modality, on the CPU.

    onnxruntime gets as many threads as PyTorch has. A graph is loaded when the first item needs it.

    Args:
        path: What `export_onnx` wrote, a local folder or the name of a repository on the Hub.
        revision: Branch, tag or commit of the repository.

    Attributes:
        fingerprint: Of the model that was exported, whose collections a float32 export searches; one in 8 bits has its
            own.

    Raises:
        FileNotFoundError: A file is missing.
        ImportError: onnxruntime is not installed.
        ValueError: A file is damaged.
    """

    def __init__(self, path: str | Path, revision: str | None = None) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(f'{str(path)!r} needs onnxruntime: pip install "conjoin[onnx]"') from error
        check_checksums(Path(path), REMEDY)
        names = ("config.json", SETTINGS, WEIGHTS, *GRAPHS.values())
        with loading(path, revision):
            files = [Path(str(cached_file(path, name, revision=revision))) for name in names]
        folder = files[0].parent
        self.fingerprint = read_json(folder / SETTINGS)["fingerprint"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()

        @cache
        def session(name: str) -> Any:  # noqa: ANN401
            with reading(folder / GRAPHS[name], REMEDY):
                return onnxruntime.InferenceSession(folder / GRAPHS[name], options, ["CPUExecutionProvider"])

        self.session = session

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        **text_inputs: Tensor,
    ) -> TowersOutput:
        """Embed a batch of `ImageTextProcessor`: `(N, D)`."""
        given = {"pixel_values": pixel_values, "input_ids": input_ids, **text_inputs}
        inputs = {name: tensor.numpy() for name, tensor in given.items() if tensor is not None}
        count = len(next(iter(inputs.values())))
        images, texts = _rows(pixel_values, image_mask, count), _rows(input_ids, text_mask, count)
        kinds = {"image": images & ~texts, "text": texts & ~images, "fused": images & texts}
        parts = {name: self._embed(name, inputs, rows) for name, rows in kinds.items() if rows.any()}
        embeddings = np.empty((count, next(iter(parts.values())).shape[1]), dtype=np.float32)
        for name, part in parts.items():
            embeddings[kinds[name]] = part
        return TowersOutput(torch.from_numpy(embeddings))

    def _embed(self, name: str, inputs: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
        session = self.session(name)
        feed = {each.name: inputs[each.name][rows] for each in session.get_inputs()}
        return session.run(["embeddings"], feed)[0]


def _rows(values: Tensor | None, mask: Tensor | None, count: int) -> np.ndarray:
    """Which of the items have a modality, `(N,)`; all where there is no mask."""
    if values is None or mask is None:
        return np.full(count, values is not None)
    return mask.numpy()
