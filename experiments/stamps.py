"""What a shop gets: unseen products searched in the whole catalogue by titles, by words of file names, and in German.

The catalogue is 538 photos and drawings of Tux Paint (`apt-get download tuxpaint-stamps-default`, then `dpkg -x` the
file into stamps). Pictures of one product or with one caption stay together; an eighth of these groups is held
out. Models are given by name; without names, the untouched towers of the sample and the demo's recipe, trained here on
the other captions, in English and with the text tower of `multilingual_tower.py` in `runs/e5-small`.

    python experiments/stamps.py
    python experiments/stamps.py MODEL ...
"""

import argparse
import csv
import re
from pathlib import Path

import numpy as np
import torch
from common import ROOT

from conjoin import load_encoder
from conjoin.data import allow_root
from conjoin.evaluation import bootstrap_ci
from conjoin.trainers import load_recipe, train

STAMPS = ROOT / "stamps/usr/share/tuxpaint/stamps"
WORK = ROOT / "runs/claims-stamps"
TABLE = WORK / "train.csv"
TOWERS = ("sample", "runs/e5-small")
Row = dict[str, str]


def read_stamps() -> list[Row]:
    """Rows with an id, an image, the caption in three languages, the words of the file's name, and the product."""
    rows = []
    for picture in sorted(STAMPS.rglob("*.png")):
        captions, name = picture.with_suffix(".txt"), picture.relative_to(STAMPS)
        if name.parts[0] == "symbols" or not captions.exists():
            continue
        english, *others = captions.read_text(encoding="utf-8").splitlines()
        translated = dict(line.split("=", 1) for line in others if "=" in line)
        rows.append({
            "id": name.with_suffix("").as_posix(),
            "image": str(picture),
            "text": english,
            "de": translated["de.utf8"],
            "es": translated["es.utf8"],
            "words": re.sub(r"[_\-0-9]+", " ", picture.stem).strip() or picture.stem,
            "product": f"{name.parts[0]}/{picture.stem.rstrip('0123456789')}",
        })  # fmt: skip
    return rows


def groups_of(rows: list[Row]) -> list[int]:
    """A number for each row, the same for rows that share a product or a caption, directly or through others."""
    groups = list(range(len(rows)))
    for key in ("product", "text", "product", "text"):
        smallest: dict[str, int] = {}
        for row, group in zip(rows, groups, strict=True):
            smallest[row[key]] = min(group, smallest.get(row[key], group))
        groups = [smallest[row[key]] for row in rows]
    return groups


def split_stamps() -> tuple[list[Row], np.ndarray, list[int]]:
    """The rows, the group of each, and the places of those held out; the other rows are written to `TABLE`."""
    allow_root(str(STAMPS))
    rows = read_stamps()
    groups = np.array(groups_of(rows))
    is_held = np.isin(groups, sorted(set(groups.tolist()))[::8])
    WORK.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        kept = [row for row, held in zip(rows, is_held, strict=True) if not held]
        csv.writer(file).writerows([["id", "image", "text"], *([r["id"], r["image"], r["text"]] for r in kept)])
    return rows, groups, np.flatnonzero(is_held).tolist()


def train_on(tower: str) -> Path:
    """The demo's recipe on the rows of `TABLE`, unless it is done."""
    folder = WORK / f"trained-{Path(tower).name}"
    if not (folder / "model.safetensors").is_file():
        flags = ["--text_model_name_or_path", tower, "--dataset_name", str(TABLE), "--dataset_test_split", "null"]
        flags += [
            "--features_dir",
            str(WORK / f"features-{Path(tower).name}"),
            "--output_dir",
            str(folder),
            "--overwrite",
        ]
        flags += ["--per_device_train_batch_size", "128", "--max_steps", "200", "--eval_strategy", "no"]
        train(load_recipe(ROOT / "training_args/sample/demo.yaml", flags))
    return folder


def measure(name: str | Path, rows: list[Row], asked: list[int], groups: np.ndarray) -> list[tuple[str, list[str]]]:
    """Hit rates in % with intervals over the queries: right is every row of the query's group; ties fail."""
    encoder = load_encoder(str(name), device="cpu")
    items = [{"image": row["image"], "text": row["text"]} for row in rows]
    pictures = encoder.encode([{"image": item["image"]} for item in items])
    galleries = {"image": pictures, "title": encoder.encode([row["text"] for row in rows])}
    galleries["image + title"] = encoder.encode(items)
    table = []
    for query in ("text", "words", "de", "es", "picture"):
        vectors = pictures[asked] if query == "picture" else encoder.encode([rows[index][query] for index in asked])
        for target in ("image",) if query in ("text", "picture") else galleries:
            right = groups[asked, None] == groups
            scores = vectors @ galleries[target].T
            if query == "picture":  # another picture of the product, where there is one
                right[range(len(asked)), asked], scores[range(len(asked)), asked] = False, -np.inf
            kept = right.any(1)
            best = np.where(right, scores, -np.inf).max(1, keepdims=True)
            ranks = ((scores >= best) & ~right).sum(1)[kept] + 1
            table.append((f"{query} → {target} ({kept.sum()})", [cell(ranks <= k) for k in (1, 10)]))
    return table


def cell(hits: np.ndarray) -> str:
    low, high = bootstrap_ci(torch.from_numpy(hits).double())
    return f"{100 * hits.mean():.1f} [{100 * low:.0f}, {100 * high:.0f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    args = parser.parse_args()
    rows, groups, asked = split_stamps()
    print(f"{len(rows)} pictures, {len(set(groups))} groups; {len(asked)} of them are queries, the others train")
    models = args.models or ["sample", *map(train_on, TOWERS)]
    tables = {str(model): measure(model, rows, asked, groups) for model in models}
    print(f"| query → candidates (queries) |{'|'.join(f' {model}, R@1 | R@10 ' for model in tables)}|")
    print(f"|---{'|---|---' * len(tables)}|")
    for lines in zip(*tables.values(), strict=True):
        print(f"| {lines[0][0]} | {' | '.join(value for _, cells in lines for value in cells)} |")


if __name__ == "__main__":
    main()
