"""The pixels of pictures, as an image processor of transformers makes them, in two steps.

The first decodes and resizes one picture to 8-bit levels, in any thread. The second scales a batch of them to floats,
on the device that the batch is on. An image processor that does more than that is called as it is.

Every saved checkpoint contains this file, so it imports nothing of this package outside its folder.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from .item_error import ItemError
from .item_images import CONCATENATED, load_image, pad_to_square

_DRAFT = 4
"""A large JPEG is decoded at a half, a quarter or an eighth of its size, but at least this many times the target."""
_TORCH_MODES = {2: "bilinear", 3: "bicubic"}
"""Pillow's filters that torch has, too."""
_KEYS = {"pixel_values", "image_grid_thw", "num_patches"}
_TRIALS = ((300, 200), (150, 310))
"""Sizes of the pictures on which the two steps are compared with the image processor."""
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")


class PictureReader:
    """Reads pictures as an image processor does; `picture_reader` makes one.

    Args:
        image_processor: Any of transformers.
        torch_resize: Resize by torch, as torchvision does, which takes a quarter of the time of Pillow. A few pixels
            in a thousand differ, by one of 256 levels. Image processors of torchvision do it anyway.

    Attributes:
        is_known: Whether pictures are read in two steps; else the image processor does all in the first.
        skipped: Arguments under which the image processor leaves levels as they are.
        patches: Side of the patches that a picture is cut into (Qwen); None if it stays whole.
    """

    def __init__(self, image_processor: Any, torch_resize: bool = False) -> None:
        self._call, settings = image_processor, image_processor.to_dict()
        self.skipped = {name: False for name in _STEPS if settings.get(name)}
        self._size: Mapping[str, int] = dict(settings.get("size") or {})
        self._crops = bool(settings.get("do_center_crop"))
        self._crop = dict(settings.get("crop_size") or {}) if self._crops else {}
        self.patches: int | None = settings.get("patch_size") if "merge_size" in settings else None
        self._merge, self._frames = settings.get("merge_size"), settings.get("temporal_patch_size")
        self._filter = settings.get("resample", Image.Resampling.BILINEAR)
        has_one_size = self._size and set(self._size) <= {"height", "width", "shortest_edge"}
        is_whole = has_one_size and settings.get("do_resize", True) and not settings.get("crop_to_patches", False)
        self._least = _DRAFT * max(self._size.values()) if is_whole else None
        factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale") else 1.0
        mean, std = [settings[f"image_{name}"] if settings.get("do_normalize") else value
                     for name, value in (("mean", 0.0), ("std", 1.0))]  # fmt: skip
        scale = factor / torch.tensor(std, dtype=torch.float64).expand(3)
        shift = -torch.tensor(mean, dtype=torch.float64).expand(3) * scale / factor
        self._scales = {torch.device("cpu"): (scale.float(), shift.float())}
        mode, backend = _TORCH_MODES.get(self._filter), getattr(image_processor, "backend", "")
        self._mode = mode if backend == "torchvision" else None
        fits = min(self._size.values(), default=0) >= max(self._crop.values(), default=0)
        has_limits = {"shortest_edge", "longest_edge"} <= set(self._size)
        self.is_known = bool(fits and (is_whole or (self.patches and has_limits and settings.get("do_resize"))))
        self.is_known = self.is_known and all(map(self._is_equal, _TRIALS))
        self._mode = mode if torch_resize or backend == "torchvision" else None

    def _is_equal(self, size: tuple[int, int]) -> bool:
        """Whether the two steps give what the image processor gives for a picture of noise."""
        noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
        try:
            theirs = self._call(images=[noise], return_tensors="pt")
        except ValueError:
            return False
        pixels, grid = self._cut(self.resize(noise))
        own, other = self.normalize(pixels), theirs.get("pixel_values")
        is_all = set(theirs) <= _KEYS and isinstance(other, Tensor) and other.shape == own.shape
        same_grid = grid is None or torch.equal(grid, theirs["image_grid_thw"])
        return is_all and same_grid and torch.allclose(own, other.float(), atol=1e-5)

    def read(self, source: Any, name: str = "item") -> tuple[Tensor, Tensor | None]:
        """Load one picture, resize it, and cut it as the model takes it; see `load_image`.

        Returns:
            Pixels, and the grid `(1, 3)` of patches for Qwen. They are 8-bit levels `(1, 3, H, W)`, or of patches
            `(P, 3 · side²)`, for `normalize`; or, if `is_known` is False, the floats of the image processor.

        Raises:
            FileNotFoundError: As `load_image`.
            ValueError: As `load_image`, or the image processor refuses the image.
        """
        image = load_image(source, name, self._least)
        if self._crops and image.info.get(CONCATENATED):
            image = pad_to_square(image)
        if self.is_known:
            return self._cut(self.resize(image))
        try:
            output = self._call(images=[image], return_tensors="pt")
        except ValueError as error:
            raise ItemError(name, f"image of {image.width} x {image.height} pixels is refused: {error}") from error
        return output["pixel_values"], output.get("image_grid_thw")

    def resize(self, image: Image.Image) -> np.ndarray:
        """Return the levels `(H, W, 3)` of an RGB image, resized and cropped."""
        height, width = self._target(image.height, image.width)
        if self._mode is None:
            levels = np.array(image.resize((width, height), self._filter))
        else:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
            if (height, width) != (image.height, image.width):
                pixels = F.interpolate(pixels, (height, width), mode=self._mode, antialias=True)
            levels = pixels[0].permute(1, 2, 0).numpy()
        if self._crop:
            top, left = (height - self._crop["height"]) // 2, (width - self._crop["width"]) // 2
            levels = levels[top : top + self._crop["height"], left : left + self._crop["width"]]
        return levels

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if self.patches:
            side, size = self.patches * self._merge, self._size
            least, most = size["shortest_edge"], size["longest_edge"]
            return smart_resize(height, width, side, least, most)
        if "shortest_edge" not in self._size:
            return self._size["height"], self._size["width"]
        short = self._size["shortest_edge"]
        long = int(short * max(height, width) / min(height, width))
        return (short, long) if height <= width else (long, short)

    def _cut(self, levels: np.ndarray) -> tuple[Tensor, Tensor | None]:
        pixels = torch.from_numpy(levels).permute(2, 0, 1)
        if not self.patches:
            return pixels[None], None
        grid = [length // self.patches for length in pixels.shape[1:]]
        cells = pixels.unflatten(2, (-1, self._merge, self.patches)).unflatten(1, (-1, self._merge, self.patches))
        rows = cells.permute(1, 4, 2, 5, 0, 3, 6).reshape(grid[0] * grid[1], -1)
        return rows, torch.tensor([[1, *grid]])

    def normalize(self, pixels: Tensor) -> Tensor:
        """Scale levels as the image processor does, on the device where they are; floats that `read` gave stay.

        Args:
            pixels: `(N, 3, H, W)`; or of patches `(..., P, 3 · side²)`, of which each frame of the model gets a copy,
                or `(..., P, 3 · frames · side²)`.

        Returns:
            `(N, 3, H, W)` float32; or of patches `(..., P, 3 · frames · side²)`.
        """
        if not self.is_known:
            return pixels
        if pixels.device not in self._scales:  # copied once: a copy waits for what the device is doing
            scale, shift = self._scales[torch.device("cpu")]
            self._scales[pixels.device] = scale.to(pixels.device), shift.to(pixels.device)
        scale, shift = self._scales[pixels.device]
        if not self.patches:
            floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
            return torch.addcmul(shift.view(3, 1, 1), floats, scale.view(3, 1, 1))
        floats = torch.addcmul(shift[:, None], pixels.unflatten(-1, (3, -1)).float(), scale[:, None])
        frames = self._frames if floats.shape[-1] == self.patches**2 else 1
        return floats.unsqueeze(-2).expand(*floats.shape[:-1], frames, -1).flatten(-3)


def by_pillow(image_processor: Any) -> Any:
    """Return transformers' image processor of Pillow in place of one of torchvision, if there is one.

    Their pixels differ, and which of them transformers takes depends on the machine, whatever class a folder names.
    """
    kind = getattr(transformers, f"{type(image_processor).__name__}Pil", None)
    return image_processor if kind is None else kind.from_dict(image_processor.to_dict())


def moved(values: Any, device: str | torch.device | None) -> Any:
    """Return tensors, and dicts and lists that hold them, on a device; None leaves them where they are.

    Those that cross to a GPU are pinned, so that no copy waits for what it computes.
    """
    if device is None:
        return values
    if isinstance(values, dict | list):
        each = values.items() if isinstance(values, dict) else enumerate(values)
        made = {name: moved(value, device) for name, value in each}
        return made if isinstance(values, dict) else [*made.values()]
    if not isinstance(values, Tensor):
        return values
    crosses = torch.device(device).type == "cuda" and values.device.type == "cpu"
    return (values.pin_memory() if crosses else values).to(device, non_blocking=crosses)


def picture_reader(image_processor: Any, torch_resize: bool = False) -> PictureReader:
    """Return the reader of an image processor as it is set now; the last ones are kept."""
    return _reader(image_processor, repr(image_processor.to_dict()), torch_resize)


@lru_cache(8)
def _reader(image_processor: Any, settings: str, torch_resize: bool) -> PictureReader:
    return PictureReader(image_processor, torch_resize)
