"""An HTML page on which a person accepts, rejects and rewords candidate triplets and saves the accepted ones."""

import base64
import hashlib
import io
from pathlib import Path

from PIL import Image

from conjoin.data.json_files import JsonLines
from conjoin.processing import load_image

_ROLES = {"query": "query X", "positive": "positive X⁺", "negative": "negative X⁻", "variant": "variant X′"}


def write_review_sheet(candidates: str | Path, out: str | Path, *, size: int = 320, title: str | None = None) -> Path:
    """Write a self-contained page with inline pictures, which sends no data.

    Texts can be edited on the page. Decisions survive a reload if the browser keeps local data. The button saves the
    accepted rows with all their fields. Save them into the folder of the candidates' file, because image paths are
    relative to it.

    Args:
        candidates: Triplets in JSON lines, as `load_triplets` reads them.
        out: Path of the page.
        size: Longest side of a picture in pixels.
        title: Title of the page; by default the name of the candidates' file.

    Raises:
        FileNotFoundError: The file or a listed image does not exist.
        ValueError: A line is not a JSON object, or a picture cannot be read.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    candidates = Path(candidates)
    rows = list(JsonLines(candidates))
    pictures: dict[str, str] = {}
    triplets = []
    for number, row in enumerate(rows):
        items = []
        for role, label in _ROLES.items():
            image, text = row.get(f"{role}_image"), row.get(f"{role}_text")
            if image is None and text is None:
                continue
            items.append({"role": role, "label": label, "text": text, "picture": image})
            if image is not None and image not in pictures:
                name = f"line {number + 1}, {role}_image"
                source = image if "://" in image or image.startswith("data:") else candidates.parent / image
                pictures[image] = _thumbnail(load_image(source, name), size)
        triplets.append({"id": str(row.get("id", number)), "items": items})
    environment = Environment(
        loader=PackageLoader("conjoin.data.make.construction", "."), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("review_sheet.html.j2").render(
        title=title if title is not None else candidates.name,
        key=hashlib.sha256(candidates.read_bytes()).hexdigest()[:16],
        triplets=triplets,
        data={"rows": rows, "pictures": pictures},
    )
    out = Path(out)
    out.write_text(page, encoding="utf-8")
    return out


def _thumbnail(image: Image.Image, size: int) -> str:
    """Return a JPEG of at most `size` x `size` pixels as a `data:` URI."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "jpeg", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
