"""Pushing to the Hub: one commit, private by default, never over something else unless told."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import HTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash

Kind = Literal["model", "dataset", "space"]


class PushError(OSError):
    """A push that the Hub did not accept."""


@dataclass(frozen=True)
class Upload:
    """What a push writes.

    Attributes:
        repo_id: The repository, `OWNER/NAME`.
        kind: What it is.
        files: By name in the repository, a file or its bytes. `README.md` is the card.
        parts: Patterns of the names that such an upload may have. A repository with other files of these names holds
            something else; `replace` removes them.
        left_out: What lies beside the files and is not pushed.
    """

    repo_id: str
    kind: Kind
    files: Mapping[str, Path | bytes]
    parts: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def card(self) -> str:
        """The text of the card."""
        card = self.files["README.md"]
        return card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8")

    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes."""
        files = sorted(self.files.items())
        return {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files}


def push(
    upload: Upload,
    *,
    public: bool = False,
    replace: bool = False,
    revision: str | None = None,
    message: str | None = None,
    api: HfApi | None = None,
) -> str:
    """Commit all files at once. The same call can be repeated after an error.

    A repository that does not exist is made, as a private one unless `public`. One that exists must be private too,
    unless `public`; its visibility does not change.

    Args:
        upload: The files.
        public: Whether everybody may see them.
        replace: Allow that the repository holds another model, dataset, metric or search page; its
            files that are not among the new ones are deleted in the same commit.
        revision: The branch; `main` when None. One that does not exist is made from `main`, without the files of such
            an upload there.
        message: Of the commit.
        api: The client; that of the environment (`HF_TOKEN`, `HF_ENDPOINT`) when None.

    Returns:
        The URL of the commit.

    Raises:
        PushError: The Hub refused or failed, cannot be reached, or something else was committed meanwhile.
        ValueError: The repository is public or holds something else, and `public` or `replace` was not given.
    """
    api = api or HfApi()
    name: dict[str, Any] = {"repo_id": upload.repo_id, "repo_type": upload.kind}
    sdk = RepoCard(upload.card).data.to_dict()["sdk"] if upload.kind == "space" else None
    try:
        api.create_repo(**name, private=not public, exist_ok=True, space_sdk=sdk)
        info: Any
        is_new_branch = False
        try:
            info = api.repo_info(**name, revision=revision, files_metadata=True)
        except RevisionNotFoundError:
            info, is_new_branch = api.repo_info(**name, files_metadata=True), True
        if not public and not info.private:
            raise ValueError(f"{upload.repo_id!r} is public; to push what everybody may see, say public (--public)")
        adds = {path: CommitOperationAdd(path, file) for path, file in sorted(upload.files.items())}  # hashes the file
        deletes = []
        for entry in info.siblings or ():
            path = entry.rfilename
            if not any(fnmatchcase(path, part) for part in upload.parts):
                continue
            if not (replace or is_new_branch or (path in adds and _is_same(entry, adds[path]))):
                raise ValueError(
                    f"{upload.repo_id!r} holds another {upload.kind} ({path} differs); to replace it, say replace "
                    "(--replace), or push to another repository or --revision"
                )
            if path not in adds:
                deletes.append(CommitOperationDelete(path))
        if is_new_branch:
            api.create_branch(**name, branch=str(revision))
        # not `upload_folder`: with hf_xet it splits a commit that is large or that fails into several
        done = api.create_commit(
            **name,
            operations=[*adds.values(), *deletes],
            commit_message=message or f"Upload {upload.kind}",
            revision=revision,
            parent_commit=info.sha,
        )
    except (HTTPError, OSError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error  # of an upload
        hint = "; log in with `hf auth login`, or set HF_TOKEN" if "401 " in str(cause) else ""
        raise PushError(f"cannot push to {upload.repo_id!r}: {cause}{hint}") from error
    return str(done.commit_url)


def _is_same(remote: RepoSibling, file: CommitOperationAdd) -> bool:
    """Whether the repository holds this file."""
    if remote.lfs is not None:
        return remote.lfs.sha256 == file.upload_info.sha256.hex()
    with file.as_file() as content:
        return remote.blob_id == git_hash(content.read())
