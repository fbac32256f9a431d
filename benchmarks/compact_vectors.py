"""What compact vectors cost: bytes per item against R@10 on the embedded sample.

    python benchmarks/compact_vectors.py runs/demo/model --gallery runs/demo/gallery/image

Queries are the names of the unseen concepts, or their pictures by the other artist; candidates are the pictures of the
gallery. Queries stay float32. Ties count as failures.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from conjoin.retrieval.compact import DTYPES, pack, truncate, unpack

from conjoin.data import load_emoji
from conjoin.evaluation import best_ranks
from conjoin.retrieval import EmbeddingStore, encode_corpus, load_encoder


def hit_rate(queries: np.ndarray, candidates: np.ndarray, labels: torch.Tensor, k: int = 10) -> float:
    """R@k of queries whose candidate stands at the same place."""
    ranks = best_ranks(torch.from_numpy(queries), torch.from_numpy(candidates), labels, labels)
    return float((ranks <= k).float().mean())


def compact_hit_rate(queries: np.ndarray, vectors: np.ndarray, dims: int, dtype: str) -> tuple[int, float]:
    """Bytes per item and R@10 with candidates of `dims` numbers of a type."""
    packed = pack(truncate(vectors, dims), dtype)
    candidates = unpack(packed, dtype, dims).astype(np.float32)
    rate = hit_rate(truncate(queries, dims), candidates, torch.arange(len(queries)))
    return packed.nbytes // len(packed), rate


def rescored_hit_rate(queries: np.ndarray, vectors: np.ndarray, dims: int, factor: int = 4) -> tuple[int, float]:
    """The same of sign bits alone on both sides, whose best `10 factor` are rescored with int8 vectors."""
    few, many = truncate(vectors, dims), truncate(queries, dims)
    rough = (np.where(many > 0, 1.0, -1.0) @ np.where(few > 0, 1.0, -1.0).T).astype(np.float32)
    exact = many @ unpack(pack(few, "int8"), "int8", dims).T
    chosen = np.argsort(-rough, axis=1, kind="stable")[:, : 10 * factor]
    scores = np.full_like(exact, -np.inf)
    np.put_along_axis(scores, chosen, np.take_along_axis(exact, chosen, 1), 1)
    own = np.take_along_axis(scores, np.arange(len(scores))[:, None], 1)
    return -(-dims // 8) + dims, float((((scores >= own).sum(1) <= 10) & np.isfinite(own[:, 0])).mean())


def load_vectors(args: argparse.Namespace) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The vectors of the queries of each kind and of their candidates."""
    encoder = load_encoder(args.model, batch_size=64)
    drawn = {row["id"]: row for row in load_emoji("test", styles=("twemoji", "openmoji"))}
    if args.gallery is None:
        gallery = [{"id": id_, "image": row["image"]} for id_, row in drawn.items() if row["style"] == "twemoji"]
        store = encode_corpus(gallery, encoder, args.store)
    else:
        store = EmbeddingStore.open(args.gallery)
    ids, candidates = store.load()
    other = {row["concept"]: row for row in drawn.values() if row["style"] == "openmoji"}
    pairs = [(place, other[drawn[id_]["concept"]]) for place, id_ in enumerate(ids) if drawn[id_]["concept"] in other]
    found = candidates[[place for place, _ in pairs]]
    queries = {part: encoder.encode([{part: row[part]} for _, row in pairs]) for part in args.queries}
    return {part: (vectors, found) for part, vectors in queries.items()}


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--gallery", help="store of the gallery's pictures, as `conjoin demo` writes it")
    parser.add_argument("--store", default="runs/compact-gallery", help="where to encode them, without --gallery")
    parser.add_argument("--queries", nargs="+", choices=("text", "image"), default=["text", "image"])
    parser.add_argument("--dims", type=int, nargs="+", help="widths (default: whole, half, quarter, eighth)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = []
    for part, (queries, candidates) in load_vectors(args).items():
        width = candidates.shape[1]
        print(f"{part} to image, {len(queries)} queries\n{'dims':>5}  {'numbers':18}{'bytes per item':>15}{'R@10':>8}")
        for dims in args.dims or [width, width // 2, width // 4, width // 8]:
            rows = {dtype: compact_hit_rate(queries, candidates, dims, dtype) for dtype in DTYPES}
            rows["binary, then int8"] = rescored_hit_rate(queries, candidates, dims)
            for numbers, (size, rate) in rows.items():
                table.append({"queries": part, "dims": dims, "numbers": numbers, "bytes": size, "hit_rate@10": rate})
                print(f"{dims:5}  {numbers:18}{size:15}{rate:8.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
