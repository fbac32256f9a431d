"""The symmetric benchmark from files: an encoder, triplets and any number of distractors in, results out."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from conjoin.data import prefixed, takes_instruction
from conjoin.retrieval import EmbeddingStore, ItemEncoder, encode_corpus

from .results import Headline, Results
from .symmetric import evaluate_symmetric

RESULTS_FILE = "results.json"
_ROLES = ("query", "positive", "negative")
_HEADLINE = {"average": "Avg", "mean_recall": "mR", "precision": "Precision"}


def evaluate_triplets(
    encoder: ItemEncoder,
    triplets: datasets.Dataset,
    folder: str | Path,
    distractors: Iterable[Mapping[str, Any]] | EmbeddingStore | None = None,
    *,
    instruction: str | None = None,
    shard_size: int = 4096,
    dtype: str = "float32",
    resamples: int = 10000,
    seed: int = 0,
    name: str = "symmetric triplets",
    show_progress: bool = False,
) -> Results:
    """Evaluate an encoder by the symmetric protocol (see `evaluate_symmetric`) and write `folder/results.json`.

    The distractors are encoded into `folder/distractors`, shard by shard and resumable, and their scores are counted
    block by block: a million of them need neither their vectors nor the N x M scores in memory. An item that occurs in
    several triplets, with the same image (its bytes, or its path) and text, enters the pool once.

    Args:
        encoder: The model.
        triplets: Columns `TRIPLET_FEATURES`, as `load_triplets` and `symmetric_triplets` give them.
        folder: For the distractors' embeddings and the results.
        distractors: Rows for `encode_corpus`, e.g. what `load_pairs` gives, streamed or not; or a finished store that
            this encoder's model made; `None`: the triplets' own items are the pool.
        instruction: Given with every item, distractors included, to models that follow one (the paper's is
            "Represent the given image with related text information:"); a processor that takes no `instruction` gets
            it in front of the text. A store of distractors must have been encoded under the same one.
        shard_size: As for `encode_corpus`.
        dtype: As for `encode_corpus`.
        resamples: Bootstrap samples per interval.
        seed: Of the bootstrap.
        name: Of the benchmark, carried into the results.
        show_progress: Show progress bars.

    Raises:
        ValueError: No triplets, two equal items in a triplet, an item that cannot be read (it is named), or a store
            that another model made.
    """
    if not len(triplets):
        raise ValueError("there are no triplets to evaluate")
    folder = Path(folder)
    encoder = _instructed(encoder, instruction)
    rows = triplets.to_list()
    keys = [_keys(row) for row in rows]
    anchor, positive, negative = (_encode(encoder, rows, role, show_progress) for role in _ROLES)
    varied = [bool(_item(row, "variant")) for row in rows]
    variant = anchor.copy()
    if any(varied):
        variant[varied] = _encode(encoder, list(itertools.compress(rows, varied)), "variant", show_progress)
    asked = "" if instruction is None else "-" + hashlib.sha256(instruction.encode()).hexdigest()[:8]
    pool = _distractor_store(encoder, distractors, folder / f"distractors{asked}", shard_size, dtype, show_progress)
    symmetric = evaluate_symmetric(
        anchor,
        positive,
        negative,
        variant,
        () if pool is None else (embeddings for _, embeddings in pool),
        keys,
        resamples=resamples,
        seed=seed,
        name=name,
    )
    count = 0 if pool is None else len(pool)
    results = Results(
        title=name,
        summary=f"{len(rows)} symmetric triplets, {sum(varied)} of them with a variant of the query, ranked "
        f"among {count} distractors and the items of the other triplets. Ties count as failures.",
        seed=seed,
        model={"name": encoder.name, "fingerprint": encoder.fingerprint},
        dataset={"triplets": len(rows), "variants": sum(varied), "distractors": count},
        config={"resamples": resamples, "instruction": instruction},
        headline=[Headline(label, symmetric.metrics[key], name) for key, label in _HEADLINE.items()],
        symmetric=[symmetric],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    results.save(folder / RESULTS_FILE)
    return results


def _instructed(encoder: ItemEncoder, instruction: str | None) -> ItemEncoder:
    """The encoder with an instruction for every item."""
    if instruction is None:
        return encoder
    processor: Any = encoder.processor
    takes_it = takes_instruction(processor)
    process = processor if takes_it else partial(_process_prefixed, processor)
    return encoder.with_processor(partial(process, instruction=instruction))


def _process_prefixed(processor: Callable[[list[Any]], Any], items: Sequence[Any], instruction: str) -> Any:  # noqa: ANN401
    return processor([prefixed(item, instruction) for item in items])


def _encode(encoder: ItemEncoder, rows: list[dict[str, Any]], role: str, show_progress: bool) -> np.ndarray:
    """Vectors `(N, D)` of one role of the triplets."""
    ids = [f"{row['id']}, {role}" for row in rows]
    return encoder.encode([_item(row, role) for row in rows], ids, show_progress=show_progress)


def _item(row: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What the role has: `{"image", "text"}` without what is null."""
    parts = {part: row[f"{role}_{part}"] for part in ("image", "text")}
    return {part: value for part, value in parts.items() if value is not None}


def _keys(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What names the items of a triplet, which must be three."""
    query, positive, negative = keys = tuple(_key(row, role) for role in _ROLES)
    alike = [role for role, key in zip(_ROLES, keys, strict=True) if keys.count(key) > 1]
    if alike:
        raise ValueError(f"triplet {row['id']!r}: {' and '.join(alike)} are the same item")
    return query, positive, negative


def _key(row: Mapping[str, Any], role: str) -> str:
    """Equal for equal content."""
    item = _item(row, role)
    image = item.get("image")
    if image is not None and image.get("bytes") is not None:
        item["image"] = hashlib.sha256(image["bytes"]).hexdigest()
    return json.dumps(item, sort_keys=True)


def _distractor_store(
    encoder: ItemEncoder,
    distractors: Iterable[Mapping[str, Any]] | EmbeddingStore | None,
    folder: Path,
    shard_size: int,
    dtype: str,
    show_progress: bool,
) -> EmbeddingStore | None:
    if isinstance(distractors, EmbeddingStore):
        if distractors.model.fingerprint != encoder.fingerprint:
            raise ValueError(
                f"the distractors in {str(distractors.directory)!r} were encoded with model {distractors.model}, the "
                f"triplets with {encoder.identity}; their vectors cannot be compared"
            )
        return distractors
    if distractors is None:
        return None
    return encode_corpus(distractors, encoder, folder, shard_size=shard_size, dtype=dtype, show_progress=show_progress)
