"""A catalogue of products with attributes, made of random codes, used by several tests."""

import io
import json

import numpy as np
from PIL import Image

LANGUAGES = ("en", "th", "id")
ATTRIBUTES = {"color": 4, "material": 4, "style": 5, "shape": 3}
"""How many values each has."""


def products(count=360, family=3, seed=0):
    """Rows with `sku`, `image`, `title`, `class`, `language`, `family` and attributes, the rarer the later."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        row = {
            "sku": str(1000 + number),
            "image": f"{number % 6}.png",
            "title": f"thing {number}",
            "class": ("shoes", "bags")[number % 2],
            "language": LANGUAGES[number % len(LANGUAGES)],
            "family": f"f{number // family}",
        }
        for place, (name, values) in enumerate(ATTRIBUTES.items()):
            has = generator.random() < 0.95 - 0.1 * place
            row[name] = f"{name} {generator.integers(values)}" if has else ""
        rows.append(row)
    return rows


def write_catalogue(folder, rows=None, name="shop.csv"):
    """Write pictures and a CSV file or JSON lines; returns the path of the table."""
    rows = products() if rows is None else rows
    for number in range(6):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (40 * number, 0, 9)).save(buffer, "PNG")
        (folder / f"{number}.png").write_bytes(buffer.getvalue())
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
