"""Manifests: what the files of a folder are, what they were made from, and their checksums."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conjoin.structure import build

from .atomic import commit, temporary_path, write_text
from .cache import differences
from .checksums import DamagedError, file_digest, has_checksum
from .journal import Journal

MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class FolderKind:
    """What a folder holds.

    Attributes:
        name: In messages and in the manifest.
        version: Of the format; another one is refused.
        remedy: What makes one, as an imperative: "run `conjoin encode`".
        prefix: How the names of its numbered files begin.
        is_cache: Whether a damaged manifest may be made again without asking, with a warning.
    """

    name: str
    version: int
    remedy: str
    prefix: str = "shard"
    is_cache: bool = False

    def file(self, number: int) -> str:
        """The name of a numbered file."""
        return f"{self.prefix}-{number:05d}.safetensors"

    def number(self, file: str) -> int:
        """The number of a file.

        Raises:
            ValueError: It is not a numbered file.
        """
        found = re.fullmatch(rf"{re.escape(self.prefix)}-(\d{{5,}})\.safetensors", file)
        if found is None:
            raise ValueError(f"{file!r} is not the name of a numbered file, such as {self.file(0)!r}")
        return int(found[1])


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file: its bare name, the rows in it, its size in bytes and its checksum."""

    file: str
    rows: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds; no times or machine names, so that equal work gives equal bytes.

    Attributes:
        format: `FolderKind.name`.
        version: `FolderKind.version`.
        complete: Whether all files are written.
        key: What the files were made from. Only the same key resumes.
        details: What else is known of them; never compared.
        files: The finished files, in order.
    """

    format: str
    version: int
    complete: bool
    key: dict[str, Any]
    details: dict[str, Any]
    files: tuple[StoredFile, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in the finished files."""
        return sum(file.rows for file in self.files)

    def save(self, folder: Path) -> None:
        """Write the manifest atomically; it names all files, so the journals go."""
        if not self.complete:
            remove_journals(folder)  # of files that no manifest named
        content = asdict(self)
        content["checksum"] = _content_digest(content)
        write_text(folder / MANIFEST, json.dumps(content, indent=2, ensure_ascii=True) + "\n")
        remove_journals(folder)


def rank_journal(folder: Path, rank: int) -> Journal:
    """The journal in which a process lists the files that it finished, while the folder grows."""
    return Journal(folder / f"manifest-{rank}.jsonl")


def rank_journals(folder: Path) -> list[Journal]:
    """The journals of all processes."""
    return [Journal(path) for path in sorted(folder.glob("manifest-*.jsonl"))]


def remove_journals(folder: Path) -> None:
    """Remove the journals of all processes."""
    for journal in rank_journals(folder):
        journal.remove()


def file_record(number: int, file: StoredFile, details: Mapping[str, Any]) -> dict[str, Any]:
    """What a journal says of file `number`; `details` are those of the folder that follow from this file."""
    return {"number": number, "file": asdict(file), "details": dict(details)}


def merge_details(details: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Details with those of another file: lists are united, mappings joined, all else replaced.

    The result does not depend on the order of the files if they agree on all else. A None removes an entry of a
    mapping.
    """
    merged = dict(details)
    for name, value in new.items():
        if isinstance(value, list):
            merged[name] = sorted({*merged.get(name, ()), *value})
        elif isinstance(value, dict):
            joined = merged.pop(name, {}) | value
            if joined := {key: entry for key, entry in joined.items() if entry is not None}:
                merged[name] = joined
        else:
            merged[name] = value
    return merged


def read_manifest(folder: Path, kind: FolderKind) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        FileNotFoundError: There is none.
        DamagedError: It is damaged.
        ValueError: It is of another kind or version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"no {kind.name} in {str(folder)!r}: it has no {MANIFEST}; {kind.remedy} to make one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, got {content!r:.40}")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{str(path)!r} is damaged ({error}); remove the folder and {kind.remedy} again") from error
    found = content.get("format"), content.get("version")
    if found != (kind.name, kind.version):
        make_again = f", or remove this one and {kind.remedy}" if found[0] == kind.name else ""
        raise ValueError(
            f"{str(path)!r} has format {found[0]!r} and version {found[1]!r}, expected {kind.name!r} and "
            f"{kind.version}; choose another folder{make_again}"
        )
    try:
        if content.pop("checksum", None) != _content_digest(content):
            raise ValueError("its content differs from its checksum")
        manifest: Manifest = build(Manifest, content, "manifest")
        if not manifest.complete:
            manifest = _with_finished(folder, kind, manifest)
        for file in manifest.files:
            if not _FILE_NAME.fullmatch(file.file):
                raise ValueError(f"{file.file!r} is not a bare file name")
    except ValueError as error:
        raise DamagedError(f"{str(path)!r} is damaged ({error}); remove the folder and {kind.remedy} again") from error
    return manifest


def _with_finished(folder: Path, kind: FolderKind, manifest: Manifest) -> Manifest:
    """An unfinished manifest with the files that the journals list, in the order of their numbers."""
    files = {kind.number(file.file): file for file in manifest.files}
    found: dict[int, list[dict[str, Any]]] = {}
    for journal in rank_journals(folder):
        for record in journal.read():
            if "file" in record:
                found.setdefault(record["number"], []).append(record)
    details = manifest.details
    for number, records in sorted(found.items()):
        record = records[-1] if len(records) == 1 else _latest(folder, records)
        files[number] = StoredFile(**record["file"])
        details = merge_details(details, record["details"])
    return replace(manifest, details=details, files=tuple(file for _, file in sorted(files.items())))


def _latest(folder: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several records of one file, which was made again, the one that it has the checksum of."""
    for record in records:
        path = folder / record["file"]["file"]
        if path.is_file() and has_checksum(path, record["file"]["sha256"]):
            return record
    return records[-1]


def recorded_rows(folder: Path, kind: FolderKind) -> int:
    """Rows that a folder holds already; 0 if there is no such folder.

    Raises:
        ValueError: As `read_manifest`.
    """
    return read_manifest(folder, kind).rows if (folder / MANIFEST).exists() else 0


def check_key(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path, kind: FolderKind) -> None:
    """Refuse a key that differs from the recorded one.

    Raises:
        ValueError: The message names each differing entry with both values.
    """
    differing = differences(found, wanted)
    if differing:
        raise ValueError(
            f"cannot resume the {kind.name} in {str(folder)!r}: it was made with {differing}; use the same settings "
            "or another folder"
        )


def check_file(folder: Path, file: StoredFile, kind: FolderKind, verify: bool = True) -> Path:
    """Return the path of an intact file; the checksum of a file is computed once in a process.

    Args:
        folder: Where it lies.
        file: What the manifest says of it.
        kind: Of the folder.
        verify: Whether to compare the checksum too, not only the size.

    Raises:
        DamagedError: It is missing, or its size or checksum differs.
    """
    if not _FILE_NAME.fullmatch(file.file):
        raise DamagedError(f"{str(folder / MANIFEST)!r} is damaged ({file.file!r} is not a bare file name)")
    path = folder / file.file
    try:
        intact = path.stat().st_size == file.size and (not verify or has_checksum(path, file.sha256))
    except OSError as error:
        raise DamagedError(
            f"the file {str(path)!r} is missing or unreadable ({error.strerror}); {kind.remedy} again"
        ) from error
    if not intact:
        raise DamagedError(
            f"the file {str(path)!r} is truncated or damaged: it differs from its checksum; {kind.remedy} again"
        )
    return path


def _content_digest(content: dict[str, Any]) -> str:
    """The checksum of a manifest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


SUFFIX = ".sha256"


def write_with_checksum(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, and its checksum beside it.

    While the file is replaced, the checksum file holds the old and the new checksum, so a reader accepts either file.

    Args:
        path: The file.
        write: Writes it to the path that it is given.
    """
    with temporary_path(path) as temporary:
        write(temporary)
        line = f"{file_digest(temporary)}  {path.name}\n"
        old = _read_beside(path)
        write_text(_beside(path), (old or "") + line if path.exists() else line)
        commit(temporary, path)
    write_text(_beside(path), line)


def check_checksum(path: Path, remedy: str) -> None:
    """Compare a file with its checksum; a file without one is accepted.

    Raises:
        DamagedError: It differs; the message names the file and ends with `remedy`.
    """
    recorded = _read_beside(path)
    while recorded is not None:
        digests = re.findall(rf"^([0-9a-f]{{64}})  {re.escape(path.name)}$", recorded, flags=re.MULTILINE)
        if file_digest(path) in digests:
            return
        before, recorded = recorded, _read_beside(path)
        if recorded == before:  # no other process is replacing the file
            raise DamagedError(
                f"the file {str(path)!r} is truncated or damaged: it differs from its checksum in "
                f"{path.name + SUFFIX}; {remedy}"
            )


def _read_beside(path: Path) -> str | None:
    beside = _beside(path)
    return beside.read_text(encoding="utf-8", errors="replace") if beside.is_file() else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)
