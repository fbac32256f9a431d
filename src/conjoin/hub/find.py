"""Whether a model exists, asked before a library loads it: a library retries for a minute and names no model."""

import os
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import HFValidationError, validate_repo_id

CONFIGS = ("config.json", "modules.json")
TIMEOUT = 5.0
"""Seconds that the one request to the hub may take."""


def check_model(name: str | Path) -> None:
    """Refuse the name of a model that cannot be loaded; a folder and a model in the cache need no request.

    Args:
        name: A local folder or the name of a repository on the hub.

    Raises:
        FileNotFoundError: The folder holds no model; or there is no such folder, and no such repository, or the hub
            cannot be reached.
    """
    path, name = Path(name), str(name)
    if any((path / config).is_file() for config in CONFIGS):
        return
    problem = f"cannot load the model {name!r}: "
    if path.is_dir():
        raise FileNotFoundError(f"{problem}the folder has neither a config.json nor a modules.json")
    if path.exists():
        raise FileNotFoundError(f"{problem}it is a file; expected a folder or the name of a model on the hub")
    if not _may_be_repository(name):
        raise FileNotFoundError(f"{problem}there is no such folder, and models on the hub are named OWNER/NAME")
    if any(_is_cached(name, config) for config in CONFIGS):
        return
    try:
        HfApi().model_info(name, timeout=TIMEOUT)
    except RepositoryNotFoundError as error:
        found = f"there is no such folder, and on the hub no such model that you may read ({constants.ENDPOINT})"
        raise FileNotFoundError(f"{problem}{found}") from error
    except HfHubHTTPError:
        return  # the hub answers; loading will say more
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{problem}there is no such folder, the cache of downloads does not have it, and the hub cannot be "
            f"reached: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _is_cached(name: str, file: str) -> bool:
    return isinstance(try_to_load_from_cache(name, file), str)


def _may_be_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.startswith(("~", os.sep))
