"""Folders of the wheels of the `sample` extra: their files are read as data, the packages are not imported."""

from importlib.util import find_spec
from pathlib import Path


def wheel_folder(package: str) -> Path:
    """Return the folder of an installed top-level package without importing it.

    Raises:
        ImportError: The package is not installed; the message names the extra that installs it.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f'the sample needs the package {package!r}: pip install "conjoin[sample]"')
    return Path(spec.submodule_search_locations[0])
