"""How often is the right row first: by vectors, by words, and by the default ranking, which adds both?

Hand-written queries of eight kinds over a shop of 820 rows that is made here, on which the constants were chosen, and
over the captions of the stamps of Tux Paint, which chose nothing (`stamps.py` says how to get them); then titles with
invented names, in collections of growing size with random vectors, which only words can find.

    python experiments/ranking.py
    python experiments/ranking.py --sizes 1000 20000 200000
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ranking_queries import SHOP, STAMPS, read_queries, shop
from stamps import read_stamps

from conjoin import encode_collection, load_encoder
from conjoin.constants import RANKINGS
from conjoin.processing import parse_items
from conjoin.retrieval import Collection, ItemEncoder, rank_items

Query = tuple[str, str, list[set[str]]]


def stamps() -> list[dict[str, str]]:
    """The captions, with the folder of each as its category."""
    rows = [{"id": row["id"], "text": row["text"], "category": row["id"].partition("/")[0]} for row in read_stamps()]
    return [row | {"terms": f"{row['text']}, #{row['category']}"} for row in rows]


def codes(rows: list[dict[str, str]]) -> list[Query]:
    """Every fortieth id, typed as it is or in small letters."""
    return [
        ("SKU", row["id"] if place % 2 else row["id"].lower(), [{row["id"]}]) for place, row in enumerate(rows[::40])
    ]


def mistype(word: str, kind: str, rng: random.Random) -> str:
    """A text with two letters swapped, or one missing, in one of its longer words."""
    words = word.split()
    place = rng.choice([place for place, each in enumerate(words) if len(each.strip(",")) > 4])
    letters, at = words[place], rng.randrange(1, len(words[place].strip(",")) - 1)
    rest = letters[at + 1] + letters[at] + letters[at + 2 :] if kind == "swapped" else letters[at + 1 :]
    words[place] = letters[:at] + rest
    return " ".join(words)


def score(collection: Collection, encoder: ItemEncoder, rows: list[dict[str, str]], queries: list[Query]) -> None:
    """Print R@1 and R@10 of each kind of query by each ranking."""
    terms = {row["id"]: {*row["terms"].split(", "), row["id"]} for row in rows}
    hits = {}
    for name in RANKINGS:
        found = rank_items(collection, encoder, [{"text": words} for _, words, _ in queries], 10, ranking=name)
        right = [[any(each <= terms[id_] for each in wanted) for id_ in ids]
                 for ids, (_, _, wanted) in zip(found.ids, queries, strict=True)]  # fmt: skip
        hits[name] = np.array([[any(row[:1]), any(row)] for row in right])
    print(f"\n| {len(rows)} rows | queries | " + " | ".join(RANKINGS) + " |\n|---|---:|" + "---:|" * len(RANKINGS))
    kinds = [*dict.fromkeys(kind for kind, _, _ in queries)]
    for kind in [*kinds, "all"]:
        chosen = np.array([kind in (each, "all") for each, _, _ in queries])
        shown = [" / ".join(f"{100 * value:.0f}" for value in hits[name][chosen].mean(0)) for name in RANKINGS]
        print(f"| {kind} | {chosen.sum()} | " + " | ".join(shown) + " |")


class RandomVectors(torch.nn.Module):
    """A random vector for each item."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: {"width": width}, model_type="random", _name_or_path="random")
        self.weight = torch.nn.Parameter(torch.zeros(width))

    def forward(self, count: torch.Tensor) -> SimpleNamespace:
        vectors = torch.randn(len(count), len(self.weight))
        return SimpleNamespace(embeddings=torch.nn.functional.normalize(vectors, dim=-1))


def invented(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a large shop: each title begins with one of many invented names."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    names = ["".join(rng.choices(syllables, k=3)).capitalize() for _ in range(count // 4)]
    rows = shop(count, seed)
    return [{"id": f"{number}-{row['id']}", "text": f"{rng.choice(names)} {row['text']}",
             "metadata": {"brand": row["brand"]}} for number, row in enumerate(rows)]  # fmt: skip


def grow(sizes: Sequence[int], width: int = 64) -> None:
    """Print R@1 of the default ranking, and what it costs, for collections of some sizes."""
    encoder = ItemEncoder(
        RandomVectors(width), lambda items: {"count": torch.zeros(len(parse_items(items)))}, batch_size=4096
    )
    ask: dict[str, Callable[[dict[str, Any], random.Random], str]] = {
        "title": lambda row, rng: row["text"],
        "title, swapped": lambda row, rng: mistype(row["text"], "swapped", rng),
        "name": lambda row, rng: row["text"].split()[0],
        "name, swapped": lambda row, rng: mistype(row["text"].split()[0], "swapped", rng),
        "name, missing": lambda row, rng: mistype(row["text"].split()[0], "missing", rng),
        "SKU": lambda row, rng: row["id"],
    }
    print("\n| rows | " + " | ".join(ask) + " | words read, s | ms a query |\n|---|" + "---:|" * (len(ask) + 2))
    for size in sizes:
        rng, rows = random.Random(1), invented(size)
        texts = {row["id"]: row["text"] for row in rows}
        with tempfile.TemporaryDirectory() as folder:
            collection = encode_collection(rows, encoder, f"{folder}/c")
            started = time.process_time()
            collection.words  # noqa: B018 - read now
            read, shown, spent = time.process_time() - started, [], 0.0
            for kind, make in ask.items():
                chosen = rng.sample(rows, 100)
                queries = [{"text": make(row, rng)} for row in chosen]
                started = time.process_time()
                found = rank_items(collection, encoder, queries, 10, ranking="default").ids
                spent += time.process_time() - started
                parts = 1 if kind.startswith("name") else None  # of the words, which another row may share
                pairs = [(texts[ids[0]].split(), row["text"].split()) for ids, row in zip(found, chosen, strict=True)]
                hits = [first[:parts] == right[:parts] for first, right in pairs]
                shown.append(f"{100 * np.mean(hits):.0f}")
        print(f"| {size:,} | " + " | ".join(shown) + f" | {read:.2f} | {1000 * spent / (100 * len(ask)):.1f} |")


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 20_000], help="rows of the larger collections")
    parser.add_argument("--without-stamps", action="store_true", help="the shop alone")
    options = parser.parse_args()
    encoder = load_encoder("sample")
    made = shop()
    catalogues = [(made, [*read_queries(SHOP), *codes(made)])]
    catalogues += [] if options.without_stamps else [(stamps(), read_queries(STAMPS))]
    for rows, queries in catalogues:
        table = [{"id": row["id"], "text": row["text"],
                  "metadata": {name: row[name] for name in row if name not in ("id", "text", "terms")}}
                 for row in rows]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            score(encode_collection(table, encoder, f"{folder}/c"), encoder, rows, queries)
    grow(options.sizes)


if __name__ == "__main__":
    main()
