"""Rows name only the files and URLs that their source may name."""

import json
import unicodedata

import datasets
import pytest
from PIL import Image

from conjoin.data import allow_root, load_pairs
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.processing import load_image
from conjoin.processing.urls import ALLOW_URLS


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside.png"
    Image.new("RGB", (4, 4), "red").save(path)
    return path


@pytest.fixture
def folder(tmp_path, outside):
    """A folder with a picture of its own, and a symbolic link to one outside."""
    folder = tmp_path / "downloaded"
    (folder / "inner").mkdir(parents=True)
    Image.new("RGB", (4, 4), "blue").save(folder / "inner/own.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "inner/same.png").symlink_to(folder / "inner/own.png")
    return folder


def write(folder, *names):
    path = folder / "metadata.jsonl"
    path.write_text("".join(json.dumps({"file_name": str(name), "text": "a"}) + "\n" for name in names))
    return path


@pytest.mark.parametrize("name", ["../outside.png", "inner/../../outside.png", "link.png", "absolute"])
def test_folders_and_tables_name_files_inside_their_folder_or_an_allowed_one(
    name, folder, outside, tmp_path, monkeypatch
):
    name = outside if name == "absolute" else name
    table = write(folder, name)
    monkeypatch.setenv(ALLOW_ROOTS, "")
    for root in (None, folder / "inner"):  # another one does not help
        if root is not None:
            allow_root(root)
        for source in (folder, table):
            with pytest.raises(ValueError, match=r"row 0 .*the file is outside of the dataset; .* pass --root"):
                load_pairs(source)
    allow_root(tmp_path)
    for source in (folder, table):
        assert len(load_pairs(source)) == 1


def test_a_root_is_a_folder(outside):
    with pytest.raises(NotADirectoryError, match=r"outside\.png"):
        allow_root(outside)


def test_files_inside_a_folder(folder, tmp_path):
    write(folder, "inner/own.png", "inner/same.png", (folder / "inner/own.png").absolute())
    assert len(load_pairs(folder)) == 3
    (tmp_path / "alias").symlink_to(folder)
    assert len(load_pairs(tmp_path / "alias")) == 3


@pytest.mark.parametrize(
    "name", ["größe\\rot 1.png", "/größe/rot 1.png", "gro\u0308ße/rot 1.png", "gr%C3%B6%C3%9Fe/rot%201.png?v=2"]
)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_path_of_another_computer_finds_its_file(folder, name, form):
    own = folder / unicodedata.normalize(form, "größe") / "rot 1.png"
    own.parent.mkdir()
    (folder / "inner/own.png").rename(own)
    write(folder, name)
    assert load_pairs(folder)[0]["image"]["path"] == str(own)


def test_a_saved_dataset_names_files_inside_its_folder(folder, outside):
    for name, count in (("inner/own.png", 1), (str(outside), 0)):
        datasets.Dataset.from_dict({"image": [name], "text": ["a"]}).save_to_disk(folder)
        if count:
            assert len(load_pairs(folder)) == count
        else:
            with pytest.raises(ValueError, match=r"row 0 .*outside of the dataset"):
                load_pairs(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_embedded_images_are_read_and_not_the_file_of_their_path(folder, outside, streaming):
    image = {"bytes": (folder / "inner/own.png").read_bytes(), "path": str(outside)}
    table = folder / "embedded.parquet"
    datasets.Dataset.from_list([{"image": image, "images": [image], "text": "a"}]).to_parquet(table)
    for column in ("image", "images"):
        (row,) = load_pairs(table, columns={"image": column}, streaming=streaming)
        for found in row["image"] if column == "images" else [row["image"]]:
            assert load_image(found).getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_outside_of_a_folder_are_kept_as_problems(folder, streaming):
    (folder / "a.csv").write_text("image,text\ninner/own.png,a\nlink.png,a\nhttps://example.org/a.png,a\n")
    rows = list(load_pairs(folder / "a.csv", streaming=streaming, on_error="skip"))
    assert [row["image"] is None for row in rows] == [False, True, True]
    assert rows[0]["problem"] is None and "outside of the dataset" in rows[1]["problem"]
    assert "pass --allow-urls" in rows[2]["problem"]


STRUCT = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
COLUMNS = {
    "strings": {"image": datasets.Value("string")},
    "images": {"image": datasets.Image(decode=False)},
    "structs": {"image": STRUCT},
    "lists of strings": {"image": datasets.List(datasets.Value("string"))},
    "lists of images": {"image": datasets.List(datasets.Image(decode=False))},
    "lists of structs": {"image": datasets.List(STRUCT)},
}


def image_of(kind, path):
    """A cell of a column of `COLUMNS`; in a list, an image that has its bytes comes first."""
    image = str(path) if "strings" in kind else {"bytes": None, "path": str(path)}
    if "lists" not in kind:
        return image
    return [image, image] if "strings" in kind else [{"bytes": b"0", "path": "/other.png"}, image]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", COLUMNS)
def test_a_dataset_of_the_hub_names_no_local_file(kind, streaming, outside, tmp_path, monkeypatch):
    features = datasets.Features(COLUMNS[kind] | {"text": datasets.Value("string")})

    def opened(path):
        rows = datasets.Dataset.from_list([{"image": image_of(kind, path), "text": "a"}], features=features)
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: opened(outside))
    with pytest.raises(ValueError, match=r"row 0 .*outside.png.*outside of the dataset"):
        list(load_pairs("owner/pictures", streaming=streaming))
    assert len(list(load_pairs(opened(outside), streaming=streaming))) == 1  # the user's own
    monkeypatch.setattr("conjoin.data.row_images.HF_HUB_CACHE", str(tmp_path))
    assert len(list(load_pairs("owner/pictures", streaming=streaming))) == 1  # a file that the hub's client fetched


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", COLUMNS)
def test_urls_are_refused_before_anything_runs(kind, streaming, monkeypatch):
    monkeypatch.setenv(ALLOW_URLS, "")
    features = datasets.Features(COLUMNS[kind] | {"text": datasets.Value("string")})

    def pairs(url):
        rows = datasets.Dataset.from_list([{"image": image_of(kind, url), "text": "a"}], features=features)
        return list(load_pairs(rows, streaming=streaming))

    with pytest.raises(ValueError, match=r"row 0 .*example.org/a.png'.*pass --allow-urls"):
        pairs("https://example.org/a.png")
    with pytest.raises(ValueError, match=r"row 0 .*expected a path, or a URL of http or https"):
        pairs("ftp://example.org/a.png")
    monkeypatch.setenv(ALLOW_URLS, "public")
    (row,) = pairs("https://example.org/a.png")
    image = row["image"][-1] if "lists" in kind else row["image"]
    assert image == {"bytes": None, "path": "https://example.org/a.png"}
