"""Whether a model exists, asked before a library loads it: a library retries for a minute and names no model."""

import os
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import HFValidationError, validate_repo_id

CONFIGS = ("config.json", "modules.json")
TIMEOUT = 5.0
"""Seconds that the one request to the hub may take."""


def check_model(name: str | Path, revision: str | None = None) -> None:
    """Refuse the name of a model that cannot be loaded; a folder and a model in the cache need no request.

    Args:
        name: A local folder or the name of a repository on the hub.
        revision: Branch, tag or commit of the repository.

    Raises:
        ValueError: A local folder has no revisions.
        FileNotFoundError: The folder holds no model; or there is no such folder, and no such repository, or the hub
            cannot be reached.
    """
    path, name = Path(name), str(name)
    if revision is not None and path.exists():
        raise ValueError(f"revision={revision!r}: {name!r} is on this machine; only a model on the hub has revisions")
    if any((path / config).is_file() for config in CONFIGS):
        return
    problem = f"cannot load the model {name!r}: "
    if path.is_dir():
        raise FileNotFoundError(f"{problem}the folder has neither a config.json nor a modules.json")
    if path.exists():
        raise FileNotFoundError(f"{problem}it is a file; expected a folder or the name of a model on the hub")
    if not _may_be_repository(name):
        raise FileNotFoundError(f"{problem}there is no such folder, and models on the hub are named OWNER/NAME")
    if any(_is_cached(name, config, revision) for config in CONFIGS):
        return
    _ask_hub(name, revision, problem)


def _ask_hub(name: str, revision: str | None, problem: str) -> None:
    try:
        HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except RepositoryNotFoundError as error:
        reason = f"there is no such folder, and on the hub no such model that you may read ({constants.ENDPOINT})"
        raise FileNotFoundError(f"{problem}{reason}") from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"{problem}it has no branch, tag or commit {revision!r}") from error
    except HfHubHTTPError:
        return  # the hub answers; loading will say more
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{problem}there is no such folder, the cache of downloads does not have it, and the hub cannot be "
            f"reached: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _is_cached(name: str, file: str, revision: str | None) -> bool:
    return isinstance(try_to_load_from_cache(name, file, revision=revision), str)


def _may_be_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.startswith(("~", os.sep))
