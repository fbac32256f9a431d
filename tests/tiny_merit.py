"""A tiny MERIT in the published layout, used by several tests."""

import io
import json

import datasets
from PIL import Image

from conjoin.data import PRODUCT_FEATURES

PRODUCTS = [  # idx, title, class, language, attributes, colour
    ("1", "red phone", "phone", "en", {"color": "red", "brand": "A"}, (250, 0, 0)),
    ("2", "kereta biru", "table", "ms", {"color": "blue", "material": "wood"}, (0, 0, 250)),
    ("3", "meja merah", "table", "ms", {"color": "red", "material": "wood"}, (200, 10, 10)),
    ("4", "โต๊ะ", "table", "th", {"color": "green", "material": "steel"}, (0, 200, 0)),
    ("5", "โต๊ะแดง", "table", "th", {"color": "red", "material": "steel"}, (220, 60, 60)),
    ("6", "blue shirt", "cloth", "en", {"color": "blue", "material": "cotton"}, (60, 60, 220)),
    ("7", "green shirt", "cloth", "en", {"color": "green", "material": "cotton"}, (60, 220, 60)),
]


def shown(number, title):
    return f"<Product {number}> <image>\n{title} </Product {number}>"


def query(**change):
    """The query: red as product 1, wooden as product 2; the answer is product 3."""
    text = f"Find a table with the color of {shown(1, 'red phone')} and the material of {shown(2, 'kereta biru')}."
    row = {
        "query": {"1": {"color": "red"}, "2": {"material": "wood"}},
        "pos_candidate": [3],
        "hard_negative": [5, "2"],
        "query instruction": text,
    }
    return row | change


QUERIES = [
    query(hard_negative=[5]),
    query(  # ids without attributes, as integers; both answers are right
        query=[6, 4],
        pos_candidate=["7", 1],
        hard_negative=[],
        **{"query instruction": f"Like {shown(1, 'blue shirt')} in the color of {shown(2, 'โต๊ะ')}"},
    ),
    query(  # the cold start: one condition is a text
        query={"4": {"others": "others"}},
        pos_candidate=[5],
        hard_negative=[],
        diff_attribute={"color": "red"},
        **{"query instruction": f"As {shown(1, 'โต๊ะ')} but <Product 2>a product with color: red</Product 2>."},
    ),
]


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (12, 12), colour).save(buffer, "PNG")
    return buffer.getvalue()


def product_rows(products=PRODUCTS):
    return [
        {
            "image": {"bytes": png(colour), "path": None},
            "title": title,
            "idx": pid,
            "class": kind,
            "country": "SG",
            "language": language,
            "attribute": json.dumps(attributes),
        }
        for pid, title, kind, language, attributes, colour in products
    ]


def write_products(root, rows, split="test"):
    (root / "data").mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows, features=PRODUCT_FEATURES)
    table.to_parquet(str(root / f"data/{split}-00000-of-00001.parquet"))


def write_queries(root, rows, split="test"):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (root / f"queries-{split}.json").write_bytes(b"".join(line + b"\n" for line in lines))


def write_merit(root, splits=("train", "test"), queries=QUERIES):
    for split in splits:
        write_products(root, product_rows(), split)
        write_queries(root, queries, split)
    return root
