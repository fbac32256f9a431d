"""The files of a collection on this machine: their checksums, which Lance does not keep, and who may write them.

`SHA256SUMS` lists the files of the published version and names that version; `sha256sum -c` takes it. A file of Lance
never changes, so each is hashed once, at publication. Readers hash it again when they first meet it.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from conjoin.storage import FOLDER_CHECKSUMS, DamagedError, file_digest, write_text

TABLE = "data/train.lance"
"""Where the table lies in a collection: as the Hub expects it."""
_VERIFIED = ".verified.json"
_SMALL = 2**28
"""Bytes that are hashed in each process; of larger collections only the files that changed since they were hashed."""
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
_VERSION, _COUNT = re.compile(r"# version (\d+)"), re.compile(r"# (\d+) files")
_MUTABLE = {"_refs", "latest_version_hint.json"}
"""What Lance changes: tags, whose version the checksums name, and a hint that it does not rely on."""
_REMEDY = "restore it from a copy, or remove the folder and run `conjoin encode` again"


def publish_files(folder: Path, version: int, before: int | None) -> None:
    """Write the checksums of the files of a version that is about to be published.

    Args:
        folder: Of the collection.
        version: Of the table.
        before: The version that readers still see, if any.
    """
    sums = folder / FOLDER_CHECKSUMS
    known, verified = _known(sums), _recall(folder)
    hashed = {}
    for path in sorted(_files(folder)):
        name = path.relative_to(folder).as_posix()
        is_known = name in known and verified.get(name) == _state(path)
        hashed[name] = known[name] if is_known else file_digest(path)
    versions = dict.fromkeys([version, *([] if before is None else [before])])
    lines = [f"# {len(hashed)} files", *(f"# version {number}" for number in versions)]
    lines += [f"{value}  {name}" for name, value in hashed.items()]
    write_text(sums, "\n".join(lines) + "\n")
    _remember(folder, hashed)


def check_files(folder: Path, version: int, everything: bool = False) -> None:
    """Compare the files of a collection with their checksums.

    A file that is listed and missing belongs to an earlier version that was cleaned up, or Lance misses it by name.

    Args:
        folder: Of the collection.
        version: That readers are to see.
        everything: Hash all files, also those that were hashed before and did not change.

    Raises:
        DamagedError: A file differs, or another version is published than the checksums are of.
    """
    sums = folder / FOLDER_CHECKSUMS
    if not sums.is_file():
        raise DamagedError(f"the collection {str(folder)!r} has no {FOLDER_CHECKSUMS}; {_REMEDY}")
    versions, hashed = _read_sums(sums)
    if version not in versions:
        raise DamagedError(
            f"{str(sums)!r} is of version {versions} of the collection, and version {version} is published; {_REMEDY}"
        )
    states = {name: _state(folder / name) for name in hashed if (folder / name).is_file()}
    is_small = sum(size for size, _ in states.values()) <= _SMALL
    verified = {} if everything or is_small else _recall(folder)
    for name, state in states.items():
        if verified.get(name) != state and file_digest(folder / name) != hashed[name]:
            raise DamagedError(
                f"the file {str(folder / name)!r} is truncated or damaged: it differs from its checksum in "
                f"{FOLDER_CHECKSUMS}; {_REMEDY}"
            )
    if not is_small and verified != states:
        with suppress(OSError):  # a folder that may only be read
            _remember(folder, hashed)


def _files(folder: Path) -> Iterable[Path]:
    """The files of the table that never change."""
    table = folder / TABLE
    return (path for path in table.rglob("*") if path.is_file() and not _MUTABLE & {*path.relative_to(table).parts})


def _known(sums: Path) -> dict[str, str]:
    """The checksums so far; none if they are missing or damaged."""
    try:
        return _read_sums(sums)[1]
    except (FileNotFoundError, DamagedError):
        return {}


def _read_sums(path: Path) -> tuple[list[int], dict[str, str]]:
    versions: list[int] = []
    hashed: dict[str, str] = {}
    count = None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        version, counted, entry = (form.fullmatch(line) for form in (_VERSION, _COUNT, _LINE))
        if version:
            versions.append(int(version[1]))
        elif counted:
            count = int(counted[1])
        elif entry and ".." not in Path(entry[2]).parts and not Path(entry[2]).is_absolute():
            hashed[entry[2]] = entry[1]
        else:
            count = None
            break
    if count != len(hashed):
        raise DamagedError(f"the file {str(path)!r} is truncated or damaged; {_REMEDY}")
    return versions, hashed


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _remember(folder: Path, names: Iterable[str]) -> None:
    states = {name: _state(folder / name) for name in names if (folder / name).is_file()}
    write_text(folder / _VERIFIED, json.dumps(states))


def _recall(folder: Path) -> dict[str, list[int]]:
    try:
        found = json.loads((folder / _VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
