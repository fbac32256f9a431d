import numpy as np
import pytest
from PIL import Image, ImageDraw

from conjoin.data import augment_image


@pytest.fixture
def drawing():
    """A red square left of the middle, on white."""
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).rectangle((20, 36, 44, 60), fill=(220, 30, 30))
    return image


def pixels(images):
    return np.stack([np.asarray(image) for image in images])


def test_the_same_seed_gives_the_same_pictures(drawing):
    generators = (np.random.default_rng(seed) for seed in (0, 0, 1))
    a, b, c = (pixels([augment_image(drawing, random) for _ in range(20)]) for random in generators)
    assert (a == b).all() and (a != c).any()
    assert len({picture.tobytes() for picture in a}) == 20


def test_pictures_stay_drawings_on_white(drawing):
    random = np.random.default_rng(0)
    changed = [augment_image(drawing, random) for _ in range(200)]
    assert {(image.mode, image.size) for image in changed} == {("RGB", (96, 96))}
    assert (pixels(changed)[:, [0, 0, -1, -1], [0, -1, 0, -1]] > 250).all()
    assert (pixels(changed).std(axis=(1, 2)).max(axis=1) > 5).all()


def test_never_mirrored(drawing):
    random = np.random.default_rng(0)
    for _ in range(200):
        dark = 255 - np.asarray(augment_image(drawing, random).convert("L"), dtype=float)
        assert (dark.sum(axis=0) * np.arange(96)).sum() / dark.sum() < 46


def test_red_stays_red(drawing):
    random = np.random.default_rng(0)
    changed = pixels([augment_image(drawing, random) for _ in range(200)]).reshape(200, -1, 3).astype(float)
    darkest = changed[np.arange(200), changed.sum(axis=2).argmin(axis=1)]
    reddish = (darkest[:, 0] > darkest[:, 1] + 40) & (darkest[:, 0] > darkest[:, 2] + 40)
    assert reddish.mean() > 0.7  # the others are grey or outlined


def test_alpha_and_grey_input():
    assert augment_image(Image.new("L", (32, 24), 255), np.random.default_rng(0)).size == (32, 24)
