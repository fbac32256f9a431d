"""What frozen teachers say of every row, computed once and read from disk while training.

A cache is a folder of `teachers-NNNNN.safetensors` shards and a `manifest.json`. The states of a row are read one by
one from memory-mapped shards; the text teacher's tokens are stored as they are, and aligned to the student's while
training, so that one cache serves students with different tokenizers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from conjoin.retrieval.atomic_files import atomic_path, write_json

from .digests import name_ids, rows_digest, text_digest, weights_digest
from .teachers import IMAGE_TARGETS, TEXT_TARGETS, TeacherCollator, Teachers

TOKENS, POOLED = TEXT_TARGETS
BOUNDS = "text_bounds"
NAMES = "names"
VERSION = 1


class TeacherCache:
    """A complete cache; `cache[index]` is what the teachers say of a row, under the collator's names.

    Args:
        folder: Where `cache_teachers` wrote it.

    Raises:
        FileNotFoundError: There is no cache.
        ValueError: The cache is of another version, or shards are missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        if manifest is None:
            raise FileNotFoundError(f"no teacher cache in {str(folder)!r}; `conjoin teacher-cache` makes one")
        self.rows, self.shard_size, self.key = manifest["rows"], manifest["shard_size"], manifest["key"]
        missing = [path.name for path in self._paths() if not path.is_file()]
        if missing:
            raise ValueError(
                f"the teacher cache in {str(folder)!r} is incomplete: {len(missing)} shards are missing, "
                f"the first is {missing[0]}; the command that began it goes on with it"
            )
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, place = self._open(index // self.shard_size), index % self.shard_size
        first, last = file.get_slice(BOUNDS)[place : place + 2].tolist()
        row = {name: file.get_slice(name)[place] for name in (*IMAGE_TARGETS, POOLED)}
        return row | {TOKENS: file.get_slice(TOKENS)[first:last]}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # a worker opens its own

    def name(self, index: int) -> int:
        """A digest of the id and text of the row that was cached at `index`."""
        return int(self._open(index // self.shard_size).get_slice(NAMES)[index % self.shard_size])

    def _open(self, shard: int) -> Any:  # noqa: ANN401 - the library is untyped
        if shard not in self._files:
            self._files[shard] = safe_open(str(_shard(self.folder, shard)), "pt")
        return self._files[shard]

    def _paths(self) -> Iterator[Path]:
        return (_shard(self.folder, shard) for shard in range(-(-self.rows // self.shard_size)))


class TaughtRows(Dataset[dict[str, Any]]):
    """Rows of pairs with what the teachers say of them, for `TeacherCollator`.

    The rows must be those that were cached, in the same order, their images not drawn anew.

    Args:
        rows: Pairs: `image`, `text`, optionally `id` and `group`.
        cache: Of the same rows.

    Raises:
        ValueError: The number of rows differs; on reading one, its id or text does.
    """

    def __init__(self, rows: Any, cache: TeacherCache) -> None:  # noqa: ANN401 - any sequence of rows
        if len(rows) != len(cache):
            raise ValueError(f"{len(rows)} rows, but the teacher cache in {str(cache.folder)!r} has {len(cache)}")
        self.rows, self.cache = rows, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if _name(row, index) != self.cache.name(index):
            raise ValueError(
                f"row {index} (id {row.get('id', index)!r}) is not the one in the teacher cache in "
                f"{str(self.cache.folder)!r}: its id or text differs"
            )
        return {**row, **self.cache[index]}


def cache_teachers(
    teachers: Teachers,
    collator: TeacherCollator,
    rows: Any,  # noqa: ANN401 - any sequence of rows
    folder: str | Path,
    *,
    batch_size: int = 32,
    shard_size: int = 1024,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    num_workers: int = 0,
    show_progress: bool = True,
) -> TeacherCache:
    """Compute a cache, or the shards that an interrupted run did not; a complete one is opened as it is.

    With the teachers' own `dtype`, what is read equals bit by bit what the teachers say of the same batch. (Rounding
    may differ, in the last bits, between batches of other rows.)

    Args:
        teachers: The teachers.
        collator: Prepares their inputs; for a student of the same grid.
        rows: Pairs with a length and an order.
        folder: Where to write.
        batch_size: Rows per forward.
        shard_size: Rows per file.
        dtype: What is stored; the teachers' own when None.
        device: Where to compute; where the vision teacher is when None.
        num_workers: Processes that decode images ahead.
        show_progress: Show a progress bar.

    Raises:
        ValueError: The folder holds a cache of other teachers, data or grid, or the rows cannot be cached.
    """
    folder, key = Path(folder), _key(teachers, collator, rows, dtype)
    found = _read_manifest(folder)
    if found is not None and (found["key"] != key or found["rows"] != len(rows)):
        differing = sorted(name for name in key if found["key"].get(name) != key[name]) or ["rows"]
        raise ValueError(
            f"{str(folder)!r} holds a teacher cache that differs in: {', '.join(differing)}; choose another folder"
        )
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        found = {"version": VERSION, "rows": len(rows), "shard_size": shard_size, "key": key}
        write_json(folder / "manifest.json", found)
    device = torch.device(device) if device is not None else teachers.vision.model.device
    size = found["shard_size"]
    with tqdm(total=len(rows), desc="Teachers", unit="row", disable=not show_progress) as progress:
        for shard, start in enumerate(range(0, len(rows), size)):
            chosen = range(start, min(start + size, len(rows)))
            if not _shard(folder, shard).is_file():
                loader = DataLoader(
                    _NamedRows(rows, chosen), batch_size, collate_fn=_NamingCollator(collator), num_workers=num_workers
                )
                with atomic_path(_shard(folder, shard)) as temporary:
                    save_file(_shard_tensors(teachers, loader, device, dtype), str(temporary))
            progress.update(len(chosen))
    return TeacherCache(folder)


class _NamedRows(Dataset[dict[str, Any]]):
    """Some of the rows, each with the digest of its name."""

    def __init__(self, rows: Any, chosen: range) -> None:  # noqa: ANN401
        self.rows, self.chosen = rows, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, place: int) -> dict[str, Any]:
        index = self.chosen[place]
        row = self.rows[index]
        return {**row, NAMES: _name(row, index)}


class _NamingCollator:
    """The collator, and the names of its rows beside."""

    def __init__(self, collator: TeacherCollator) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return self.collator(rows) | {NAMES: torch.tensor([row[NAMES] for row in rows])}


@torch.no_grad()
def _shard_tensors(
    teachers: Teachers,
    loader: DataLoader[Any],
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {name: [] for name in (*IMAGE_TARGETS, *TEXT_TARGETS, NAMES)}
    lengths: list[int] = []
    for batch in loader:
        states = teachers.states({name: value.to(device) for name, value in batch.items() if name != NAMES})
        counts = batch["teacher_attention_mask"].sum(1).tolist()
        tokens = states.pop(TOKENS)
        parts[TOKENS] += [row[:count].to("cpu", dtype) for row, count in zip(tokens, counts, strict=True)]
        for name, value in states.items():
            parts[name].append(value.to("cpu", dtype))
        parts[NAMES].append(batch[NAMES])
        lengths += counts
    tensors = {name: torch.cat(part) for name, part in parts.items()}
    return tensors | {BOUNDS: torch.tensor([0, *lengths]).cumsum(0)}


def _name(row: Mapping[str, Any], index: int) -> int:
    """A digest of a row's id (its place, if it has none) and text."""
    return int(name_ids([f"{row.get('id', index)}\n{row.get('text')}"])[0])


def _shard(folder: Path, number: int) -> Path:
    return folder / f"teachers-{number:05d}.safetensors"


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("version") != VERSION:
        raise ValueError(f"{str(path)!r} is of version {manifest.get('version')!r}, expected {VERSION}")
    return manifest


def _key(teachers: Teachers, collator: TeacherCollator, rows: Any, dtype: torch.dtype | None) -> dict[str, Any]:  # noqa: ANN401
    """What a cache depends on, each part under a name that an error message can use."""
    vision, text = teachers.vision, teachers.text
    return {
        "vision teacher": [weights_digest(vision.model), vision.hidden_layer],
        "text teacher": [
            weights_digest(text.model),
            text.max_length,
            text_digest(text.tokenizer.backend_tokenizer.to_str()),
        ],
        "global text teacher": None if text.global_model is None else weights_digest(text.global_model),
        "grid": [
            text_digest(collator.image_processor.to_json_string()),
            collator.patch_size,
            collator.teacher_patch_size,
        ],
        "dtype": None if dtype is None else str(dtype),
        "data": rows_digest(rows),
    }


def bytes_per_row(
    teachers: Teachers, collator: TeacherCollator, rows: Sequence[Mapping[str, Any]], dtype: torch.dtype
) -> float:
    """How much a row takes on disk, on average over `rows`."""
    batch = collator(rows)
    states = teachers.states({name: value for name, value in batch.items() if name != "ids"})
    numbers = sum(states[name].numel() for name in (*IMAGE_TARGETS, POOLED))
    numbers += int(batch["teacher_attention_mask"].sum()) * states[TOKENS].shape[-1]
    return numbers * dtype.itemsize / len(rows)
