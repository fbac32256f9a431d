"""Folders of images: their splits, labels, captions and kinds of files; saved datasets; compressed tables."""

import gzip
import shutil

import datasets
import pytest
from PIL import Image

from conjoin.data import load_pairs
from conjoin.processing import load_image

COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


def draw(path, colour="red", caption=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


# kinds of pictures


def test_what_pillow_reads_is_read(tmp_path):
    kinds = [kind for kind in ("avif", "heic", "jp2", "png", "ppm") if f".{kind}" in Image.registered_extensions()]
    for suffix in kinds:
        draw(tmp_path / f"{suffix}.{suffix}", "red", suffix)
    pairs = load_pairs(tmp_path)
    assert pairs["text"][:] == kinds and len(kinds) >= 4  # Pillow before 11.3 reads no AVIF
    assert all(load_image(row["image"], row["id"]).getpixel((0, 0))[0] > 250 for row in pairs)


@pytest.mark.parametrize("only", [None, "image"])
def test_pictures_that_cannot_be_read_are_rows_at_fault(tmp_path, only, monkeypatch):
    monkeypatch.delitem(Image.EXTENSION, ".heic", raising=False)
    draw(tmp_path / "a.png", "red", "red")
    draw(tmp_path / "b.png")
    for name in ("c.HEIC", "d.svg"):
        (tmp_path / name).write_bytes(b"unread")
        (tmp_path / name).with_suffix(".txt").write_text("text")
    with pytest.raises(ValueError, match=r"HEIC.*heif"):
        load_pairs(tmp_path, only=only)
    problems = load_pairs(tmp_path, only=only, on_error="skip")["problem"][:]
    assert [problem is None for problem in problems] == [True, True, False, False]
    assert "heif" in problems[2] and "convert them to PNG" in problems[3]


def test_captions_are_utf_8(tmp_path):
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("rötlich", encoding="utf-8-sig")  # with the mark that some editors write
    assert load_pairs(tmp_path)["text"][:] == ["rötlich"]
    (tmp_path / "a.txt").write_text("rötlich", encoding="latin-1")
    with pytest.raises(ValueError, match=r"the caption '.*a.txt' cannot be read: .*position 1.*save it as UTF-8"):
        load_pairs(tmp_path)


def test_hidden_pictures_and_folders_are_ignored(tmp_path):
    for path in (".thumbs/1.png", "cat/1.png", "cat/._1.png", "dog/1.png"):
        draw(tmp_path / ".data" / path)
    assert load_pairs(tmp_path / ".data")["id"][:] == ["cat/1.png", "dog/1.png"]


# splits and labels


def test_folders_of_splits(tmp_path):
    for folder, colour in (("train", "red"), ("val", "green"), ("Test", "blue")):
        draw(tmp_path / folder / f"{colour}.png", colour)
        (tmp_path / folder / "metadata.jsonl").write_text(f'{{"file_name": "{colour}.png", "caption": "{colour}"}}\n')
    for split, colour in (("train", "red"), ("validation", "green"), ("val", "green"), ("test", "blue")):
        (row,) = load_pairs(tmp_path, split=split)
        assert row["text"] == colour
        assert load_image(row["image"]).getpixel((0, 0)) == COLOURS[colour]
    with pytest.raises(ValueError, match=r"split is 'dog'; .* has the splits 'Test', 'train', 'val'"):
        load_pairs(tmp_path, split="dog")
    shutil.copytree(tmp_path / "val", tmp_path / "dev")
    with pytest.raises(ValueError, match=r"split is 'validation'; .* has the splits 'Test', 'dev', 'train', 'val'"):
        load_pairs(tmp_path, split="validation")
    assert len(list(load_pairs(tmp_path, split="dev"))) == 1


def test_folders_of_labels(tmp_path, caplog):
    for path, colour in (("cat/1.png", "red"), ("cat/2.png", "green"), ("dog/1.png", "blue")):
        draw(tmp_path / path, colour)
    rows = list(load_pairs(tmp_path))
    assert [(row["id"], row["text"], row["group"]) for row in rows] == [
        ("cat/1.png", "cat", "cat"), ("cat/2.png", "cat", "cat"), ("dog/1.png", "dog", "dog")
    ]  # fmt: skip
    assert load_image(rows[2]["image"]).getpixel((0, 0)) == COLOURS["blue"]
    assert "the names of the classes in 'label' are read as text" in caplog.text
    assert [list(row) for row in load_pairs(tmp_path, only="image")] == [["id", "image"]] * 3
    for split in ("train", "test"):
        shutil.copytree(tmp_path / "cat", tmp_path / "animals" / split / "cat")
        shutil.copytree(tmp_path / "dog", tmp_path / "animals" / split / "dog")
    rows = list(load_pairs(tmp_path / "animals", split="test"))
    assert [row["id"] for row in rows] == ["cat/1.png", "cat/2.png", "dog/1.png"]


def test_labels_only_where_no_picture_has_a_caption(tmp_path):
    draw(tmp_path / "cat" / "1.png", "red", "a red cat")
    draw(tmp_path / "dog" / "1.png", "blue")
    assert load_pairs(tmp_path, on_error="skip")["text"][:] == ["a red cat", None]
    (tmp_path / "cat" / "1.txt").unlink()
    assert load_pairs(tmp_path)["text"][:] == ["cat", "dog"]


def test_classes_of_a_dataset(monkeypatch):
    monkeypatch.setenv("CONJOIN_ALLOW_URLS", "public")
    features = {"image": datasets.Value("string"), "label": datasets.ClassLabel(names=["cat", "dog"])}
    rows = {"image": ["https://a.org/1.png", "https://a.org/2.png"], "label": [1, 0]}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    assert load_pairs(data)["text"][:] == load_pairs(data)["group"][:] == ["dog", "cat"]
    unlabelled = datasets.Dataset.from_dict(rows | {"label": [1, -1]}, features=datasets.Features(features))
    assert load_pairs(unlabelled)["text"][:] == ["dog", None]


# saved datasets and compressed tables


def test_save_to_disk(tmp_path):
    rows = [{"image": Image.new("RGB", (4, 4), colour), "text": colour} for colour in COLOURS]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    data = datasets.Dataset.from_list(rows, features=features)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([2])).save_to_disk(tmp_path / "splits")
    for folder, split, texts in (
        ("one", "train", [*COLOURS]),
        ("splits", "train", [*COLOURS]),
        ("splits", "test", ["blue"]),
    ):
        found = list(load_pairs(tmp_path / folder, split=split))
        assert [row["text"] for row in found] == texts
        assert load_image(found[-1]["image"]).getpixel((0, 0)) == COLOURS["blue"]
    for folder, problem in (("one", "has only the split 'train'"), ("splits", "has the splits 'train', 'test'")):
        with pytest.raises(ValueError, match=f"split is 'val'; .*{folder}' {problem}"):
            load_pairs(tmp_path / folder, split="val")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"the saved dataset in .*one' cannot be read"):
        load_pairs(tmp_path / "one")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_compressed_tables(tmp_path, suffix, streaming):
    content = {".csv": "id,text\n007,001\n", ".jsonl": '{"id": "007", "text": "001"}\n'}[suffix].encode()
    path = tmp_path / f"pairs{suffix}.gz"
    path.write_bytes(gzip.compress(content))
    assert list(load_pairs(path, only="text", streaming=streaming)) == [{"id": "007", "text": "001"}]
    for broken in (gzip.compress(content)[:-12], content):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"pairs{suffix}.gz' cannot be read: "):
            load_pairs(path, only="text", streaming=streaming)
