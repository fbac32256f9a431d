"""Run the README's Python as printed, in an empty folder and without a network.

A hub on this machine has a tiny random CLIP under the README's name; `photos.csv` has 64 rows.
"""

import csv
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from loopback_hub import ENVIRONMENT, Repository, serve  # noqa: E402

with serve() as hub, tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
    os.environ |= ENVIRONMENT | {"HF_ENDPOINT": hub.url, "HF_HOME": cache}  # read when huggingface_hub is imported
    from PIL import Image

    from tiny_checkpoints import CHECKPOINTS

    model, tokenizer, image_processor = CHECKPOINTS["clip"]()
    saved = Path(folder) / "clip"
    for part in (model, tokenizer, image_processor):
        part.save_pretrained(saved)
    hub.repositories["model", "openai/clip-vit-base-patch32"] = Repository(private=False)
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    hub.repositories["model", "openai/clip-vit-base-patch32"].commit("main", files)

    os.chdir(folder)
    Image.new("RGB", (64, 64), "red").save("photo.jpg")
    with open("photos.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "text"), *(("photo.jpg", f"photo {number}") for number in range(64))])
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    if not blocks:
        raise SystemExit("the README has no Python")
    for block in blocks:
        exec(block, {"__name__": "readme"})
