"""The page of a search: escaped, self-contained, and honest about pictures that are not there."""

import base64
import io
import re

from PIL import Image

from conjoin.retrieval import Hit
from conjoin.retrieval.pictures import make_thumbnail
from conjoin.serving.search_page import write_search_page


def test_a_page(tmp_path):
    Image.new("RGB", (600, 300), "red").save(tmp_path / "a.png")
    Image.new("RGB", (300, 300), "blue").save(tmp_path / "b.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = [
        {"text": "<script>alert(1)</script>", "image": str(tmp_path / "a.png"), "price": 5},
        {"image": str(tmp_path / "broken.png")},
        {"image": "https://example.com/far.png"},
        {"text": "words alone"},
        {"image": [str(tmp_path / "a.png"), str(tmp_path / "b.png")]},
        {"image": [str(tmp_path / "a.png"), str(tmp_path / "gone.png")]},
        {"image": "gone.png", "picture": make_thumbnail(str(tmp_path / "b.png"), 40, "b")},
    ]
    results = [Hit(f"id {n}", 1 / n, row) for n, row in enumerate(rows, start=1)]
    page = write_search_page(
        {"text": "red & round"}, results, tmp_path / "page.html", "price < 50", (str(tmp_path),)
    ).read_text()
    assert page.count("data:image/") == 3 and "<script>" not in page and "&lt;script&gt;" in page
    assert "<h1>red &amp; round</h1>" in page and "7 results, where price &lt; 50" in page
    assert (
        "cannot read the image" in page
        and page.count("the picture is not at this path here") == 1
        and "<dt>picture" not in page
    )
    one, both, kept = (Image.open(io.BytesIO(base64.b64decode(uri))) for uri in re.findall('base64,([^"]+)', page))
    assert one.size == (256, 128) and both.size == (256, 85) and kept.size == (40, 40)
    assert both.convert("RGB").getpixel((both.width - 9, 9))[2] > 200, "the second picture is there"
    assert "<dt>price</dt><dd>5</dd>" in page and "0.5000" in page and "default-src &#39;none&#39;" not in page
    nothing = write_search_page({"image": str(tmp_path / "a.png")}, [], tmp_path / "none.html").read_text()
    assert "0 results" in nothing and "Search by picture" in nothing and nothing.count("data:image/") == 1
