"""A model, and a folder of seven squares with captions."""

import pytest
from PIL import Image

from tiny_commands import COLOURS


@pytest.fixture(scope="session")
def model(own_export):
    return own_export[0]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    lines = ["file_name,text,id"]
    for colour in COLOURS:
        Image.new("RGB", (20, 20), colour).save(directory / f"{colour}.png")
        lines.append(f"{colour}.png,a {colour} square,{colour}")
    (directory / "metadata.csv").write_text("\n".join(lines))
    return directory
