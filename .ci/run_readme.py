"""Run the README's Python as printed, in the folder where `conjoin demo` ran."""

import re
import sys
from pathlib import Path

from PIL import Image

Image.new("RGB", (64, 64), "red").save("photo.jpg")
blocks = re.findall(r"^```python\n(.*?)^```$", Path(sys.argv[1]).read_text(encoding="utf-8"), re.M | re.S)
if not blocks:
    raise SystemExit("the README has no Python")
for block in blocks:
    exec(block, {"__name__": "readme"})
