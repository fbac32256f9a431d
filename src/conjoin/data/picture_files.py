"""Which files are pictures, and which of them Pillow can read here."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from conjoin.processing.item_inputs import IMAGE_SUFFIXES

try:
    from pillow_heif import register_heif_opener
except ImportError:
    pass  # HEIC files are then reported as unreadable
else:
    register_heif_opener()

_HEIF_SUFFIXES = (".heic", ".heif", ".hif")
_RAW_SUFFIXES = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2")
_OTHER_SUFFIXES = (".apng", ".avif", ".avifs", ".dds", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpx", ".jxl", ".pbm",
                   ".pgm", ".pnm", ".ppm", ".psd", ".qoi", ".svg", ".svgz", ".tga")  # fmt: skip
PICTURE_SUFFIXES = frozenset((*IMAGE_SUFFIXES, *_OTHER_SUFFIXES, *_HEIF_SUFFIXES, *_RAW_SUFFIXES))
"""How the names of picture files end, of formats that Pillow reads or not."""


def is_picture(path: Path) -> bool:
    """Whether a file is a picture by its name."""
    return path.suffix.lower() in PICTURE_SUFFIXES


def is_readable(path: Path) -> bool:
    """Whether Pillow, with its installed plug-ins, reads pictures of this kind; files of other kinds may be tried."""
    suffix = path.suffix.lower()
    return suffix not in PICTURE_SUFFIXES or Image.registered_extensions().get(suffix) in Image.OPEN


def describe_unreadable(paths: Iterable[Path]) -> str:
    """Count pictures that cannot be read, by kind, and say what to do about them."""
    paths = list(paths)
    first = {path.suffix.lower(): path.name for path in reversed(paths)}
    counts = sorted(Counter(path.suffix.lower() for path in paths).items())
    kinds = ", ".join(f"{count} {suffix} (such as {first[suffix]!r})" for suffix, count in counts)
    return f"{kinds}; {remedy(*first)}"


def remedy(*suffixes: str) -> str:
    """What to do about pictures that cannot be read, of these kinds."""
    convert = "convert them to PNG or JPEG"
    return f'{convert}, or `pip install "conjoin[heif]"` to read HEIC' if {*suffixes} & {*_HEIF_SUFFIXES} else convert
