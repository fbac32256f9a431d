"""A flipped bit or a cut in a file that the package writes: loading names the file, or reads the same content.

Collections are in `retrieval/test_collection_damage.py`, mined negatives in `retrieval/mining/test_mining.py`.
"""

import shutil

import pytest

from conjoin.hub import load_model
from conjoin.retrieval.load import load_encoder
from conjoin.storage import write_checksums
from damage import wrong_after_damage

FLIPS = 6
"""Bits flipped in each file."""


def read_model(folder):
    model, processor = load_model(folder)
    return [tensor.sum().item() for tensor in model.state_dict().values()], model.config.to_dict(), repr(processor)


def make_stock(folder):
    """A checkpoint of an ordinary architecture, with checksums as `conjoin export --stock` writes them."""
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    write_checksums(folder, sorted(path.name for path in folder.iterdir()))


KINDS = {
    "a model": (None, read_model),
    "a stock model": (make_stock, lambda folder: load_encoder(folder, pooling="cls").fingerprint),
}


def ends(content):
    return 0, 1, len(content) // 2, len(content) - 1


def checked_files(folder):
    """The files that `folder` is loaded from, less code and pages for people."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    sums = folder / "SHA256SUMS"
    listed = sums.read_text() if sums.is_file() else ""
    return [
        path for path in files if not listed or path == sums or f"  {path.relative_to(folder).as_posix()}\n" in listed
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_or_harmless(kind, tmp_path, own_export):
    make, read = KINDS[kind]
    folder = tmp_path / "made"
    shutil.copytree(own_export[0], folder) if make is None else make(folder)
    whole = read(folder)
    wrong, noticed, files = [], 0, checked_files(folder)
    for path in files:
        found, count, _ = wrong_after_damage(
            path, lambda: read(folder), whole, path.name.partition("-")[0], FLIPS, ends, path.name
        )
        wrong, noticed = wrong + found, noticed + count
    assert read(folder) == whole
    assert not wrong, "\n".join(wrong)
    assert noticed >= 8 * len(files)  # of ten
