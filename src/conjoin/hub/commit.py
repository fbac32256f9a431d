"""Pushing to the Hub: one atomic commit, private by default, never over something else unless told; its errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import get_session, validate_repo_id
from huggingface_hub.utils.sha import git_hash

_REMEDIES = {
    401: "it does not know you: run `hf auth login`, or set HF_TOKEN",
    403: "your token may not write there: use one that may write, or a repository of your own",
    404: "there is no such repository or branch, or your token may not see it",
    409: "something else was committed meanwhile: look at the repository, then run the command again",
    412: "something else was committed meanwhile: look at the repository, then run the command again",
    413: "a file or the commit is larger than it accepts: save the model in smaller shards (max_shard_size)",
    429: "too many requests: wait, then run the command again",
}


class PushError(OSError):
    """A push that the Hub did not take."""


def explain(error: Exception) -> str:
    """Return one sentence about an error of the Hub, and what to do."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in _REMEDIES:
            return f"the Hub refused ({status}); {_REMEDIES[status]}"
        if status >= 500:
            return f"the Hub failed ({status}); run the command again later"
    message = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__.endswith("Timeout"):
        return f"the Hub did not answer in time ({type(error).__name__}); run the command again later"
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError):
        return f"no connection to the Hub, or it broke off ({message}): is HF_ENDPOINT right, is there a network?"
    return message


PATIENCE = 120.0
"""Seconds without an answer, or without progress of an upload, before a request is given up."""

Kind = Literal["model", "dataset", "space"]
_CONTENT = {
    "model": ("*.safetensors",),
    "dataset": ("*.parquet", "data/train.lance/*"),
    "space": ("*.py", "*.safetensors", "collection/*"),
}
"""By the kind of repository, the files that make it what it is."""


@dataclass(frozen=True)
class Upload:
    """What a push writes.

    Attributes:
        repo_id: The repository, `OWNER/NAME`.
        kind: What it is.
        files: By name in the repository, a file or its bytes. `README.md` is the card.
        left_out: What lies beside the files and is not pushed.
        parts: Patterns of the names that such an upload may have; `replace` removes these from the repository.
    """

    repo_id: str
    kind: Kind
    files: Mapping[str, Path | bytes]
    left_out: tuple[str, ...] = ()
    parts: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        validate_repo_id(self.repo_id)

    @property
    def card(self) -> str:
        """The text of the card."""
        card = self.files["README.md"]
        return card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8")

    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes."""
        return {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in _items(self)}


def push(
    upload: Upload,
    *,
    public: bool = False,
    replace: bool = False,
    revision: str | None = None,
    message: str | None = None,
    api: HfApi | None = None,
) -> str:
    """Commit all files at once; nothing is committed if anything fails.

    A repository that does not exist is made, as a private one unless `public`. One that exists must be private too,
    unless `public`; its visibility does not change.

    Args:
        upload: The files.
        public: Whether everybody may see them.
        replace: Allow that the repository holds another model (other weights), dataset, metric or search page; its
            files that are not among the new ones are deleted in the same commit.
        revision: The branch; `main` when None. One that does not exist is made from `main`, without the files of such
            an upload there.
        message: Of the commit.
        api: The client; that of the environment (`HF_TOKEN`, `HF_ENDPOINT`) when None.

    Returns:
        The URL of the commit.

    Raises:
        PushError: The Hub refused, failed, or cannot be reached; the message says what to do.
        ValueError: The repository is public or holds something else, and `public` or `replace` was not given.
    """
    api = api or HfApi()
    name: dict[str, Any] = {"repo_id": upload.repo_id, "repo_type": upload.kind}
    try:
        with _patience():
            info, is_new = _find(api, upload, revision)
            if info is None:
                space: dict[str, Any] = {"space_sdk": "gradio"} if upload.kind == "space" else {}
                api.create_repo(**name, private=not public, **space)
                info = api.repo_info(**name, timeout=PATIENCE)
            elif not public and not info.private:
                raise ValueError(
                    f"{upload.repo_id!r} is public; to push what everybody may see, say public (--public)"
                )
            # `list_repo_tree` would wait for ever for an answer that is lost
            listing: Any = api.repo_info(**name, revision=info.sha, files_metadata=True, timeout=PATIENCE)
            remote = {entry.rfilename: entry for entry in listing.siblings or ()}
            if not replace and not is_new:
                _check_same(upload, remote)
            if revision is not None:
                api.create_branch(**name, branch=revision, exist_ok=True)
            operations: list[Any] = [CommitOperationAdd(path, file) for path, file in _items(upload)]
            if replace or is_new:
                old = {path for path in remote if any(fnmatchcase(path, part) for part in upload.parts)}
                operations += [CommitOperationDelete(path) for path in sorted(old - set(upload.files))]
    except (HTTPError, OSError) as error:
        raise PushError(f"nothing was committed to {upload.repo_id!r}: {explain(error)}") from error
    return _commit(api, upload, operations, str(info.sha), revision, message or f"Upload {upload.kind}")


def _commit(api: HfApi, upload: Upload, operations: list[Any], head: str, revision: str | None, message: str) -> str:
    """Make the commit on top of `head`; if the answer is lost, ask whether it was made."""
    name: dict[str, Any] = {"repo_id": upload.repo_id, "repo_type": upload.kind}
    try:
        with _patience():
            done = api.create_commit(
                **name, operations=operations, commit_message=message, revision=revision, parent_commit=head
            )
    except (HTTPError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, HTTPError | OSError):
            raise
        try:
            with _patience():
                moved = api.repo_info(**name, revision=revision, timeout=PATIENCE).sha != head
        except (HTTPError, OSError):
            moved = None
        state = {
            None: "it is not known whether the commit was made to",
            True: "look at the newest commit before you push again to",
            False: "nothing was committed to",
        }[moved]
        cause: Any = error.__cause__ if isinstance(error, RuntimeError) else error  # the library's around an upload
        raise PushError(f"{state} {upload.repo_id!r}: {explain(cause)}") from error
    return str(done.commit_url)


def _find(api: HfApi, upload: Upload, revision: str | None) -> tuple[Any, bool]:
    """Return what the Hub says of the branch, or of `main` for a new branch, and whether it is new.

    There is nothing to return, None, without the repository.
    """
    try:
        return api.repo_info(upload.repo_id, repo_type=upload.kind, revision=revision, timeout=PATIENCE), False
    except RevisionNotFoundError:
        return api.repo_info(upload.repo_id, repo_type=upload.kind, timeout=PATIENCE), True
    except RepositoryNotFoundError as error:
        if error.response is not None and error.response.status_code == 401:
            raise
        return None, False


def _check_same(upload: Upload, remote: Mapping[str, RepoSibling]) -> None:
    """Refuse a repository with content that is not this upload's.

    Raises:
        ValueError: It holds another model, dataset, metric or search page.
    """
    for path, entry in remote.items():
        if any(fnmatchcase(path, pattern) for pattern in _CONTENT[upload.kind]):
            if path not in upload.files or not _is_equal(entry, upload.files[path]):
                raise ValueError(
                    f"{upload.repo_id!r} holds another {upload.kind} ({path} differs); to replace it, say replace "
                    "(--replace), or push to another repository or --revision"
                )


def _is_equal(entry: RepoSibling, file: Path | bytes) -> bool:
    operation = CommitOperationAdd(entry.rfilename, file)
    if entry.lfs is not None:
        return entry.lfs.sha256 == operation.upload_info.sha256.hex()
    with operation.as_file() as content:
        return entry.blob_id == git_hash(content.read())


def _items(upload: Upload) -> list[tuple[str, Path | bytes]]:
    return sorted(upload.files.items())


@contextmanager
def _patience() -> Iterator[None]:
    """Give up a request that makes no progress; the library's own waits for ever."""
    session: Any = get_session()
    before = session.timeout
    session.timeout = PATIENCE
    try:
        yield
    finally:
        session.timeout = before
