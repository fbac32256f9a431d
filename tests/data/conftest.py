import datasets
import pytest
from PIL import Image

from tiny_emoji import few_emoji

COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


@pytest.fixture(scope="session", autouse=True)
def own_datasets_cache(tmp_path_factory):
    """Keep the tests out of the user's cache."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="session")
def small_sample(tmp_path_factory):
    """`load_emoji` over the first 40 concepts of each split."""
    return few_emoji(40, tmp_path_factory.mktemp("emoji"))


@pytest.fixture
def image_folder(tmp_path):
    """A folder of three pictures named by their colour."""
    for name, colour in COLOURS.items():
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    return tmp_path
