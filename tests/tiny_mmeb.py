"""A tiny MMEB-train, in the layout of the published files: one subset as JSON lines, one as Parquet."""

import json

import datasets
from PIL import Image


def write_mmeb(folder):
    """Write it; returns the files by subset."""
    (folder / "images").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (20, 20), (90 * number, 50, 99)).save(folder / f"images/{number}.png")
    composed = [
        {
            "qry": f"<|image_1|>\nFind it: {words}",
            "qry_image_path": f"images/{number}.png",
            "pos_text": "<|image_1|>\nIt is",
            "pos_image_path": f"images/{1 + number % 2}.png",
            "neg_text": "no hat" if number == 0 else "",
            "neg_image_path": "",
        }
        for number, words in enumerate(("with a hat", "in red", "alone"))
    ]
    dialogues = [
        {"qry": f"Q: is it {words}?", "qry_image_path": "", "neg_text": "", "neg_image_path": ""}
        | {"pos_text": "<|image_1|>\nRepresent the given image\n", "pos_image_path": f"images/{number}.png"}
        for number, words in enumerate(("red", "blue", "green"))
    ]
    files = {"CIRR": folder / "CIRR/original.jsonl", "VisDial": folder / "VisDial/original-00000-of-00001.parquet"}
    for file in files.values():
        file.parent.mkdir()
    files["CIRR"].write_text("".join(json.dumps(row) + "\n" for row in composed))
    datasets.Dataset.from_list(dialogues).to_parquet(str(files["VisDial"]))
    return files
