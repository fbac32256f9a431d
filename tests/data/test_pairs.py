import csv
import io
import json
import logging
import tarfile

import datasets
import pandas as pd
import pytest
from PIL import Image

from conjoin.data import PAIR_FEATURES, load_pairs
from conjoin.processing import load_image

TEXTS = {"red": "a red square", "green": "nothing", "blue": "grün, “blau”"}


def rows_of(folder):
    return [{"image": f"{name}.png", "caption": text, "id": f"00{i}"} for i, (name, text) in enumerate(TEXTS.items())]


def png(colour="red"):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_table(path, rows):
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def embedded():
    """A dataset with pictures inside."""
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "n": datasets.Value("int32")}
    )
    rows = [{"image": {"bytes": png(colour), "path": None}, "text": colour, "n": i} for i, colour in enumerate(TEXTS)]
    return datasets.Dataset.from_list(rows, features=features)


def check(pairs, ids=("000", "001", "002")):
    rows = list(pairs)
    assert pairs.features == PAIR_FEATURES
    assert [row["id"] for row in rows] == list(ids)
    assert [row["text"] for row in rows] == list(TEXTS.values())
    assert load_image(rows[0]["image"]).getpixel((0, 0)) == (255, 0, 0)
    assert load_image(rows[2]["image"]).getpixel((0, 0)) == (0, 0, 255)


# every source


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_tables(image_folder, suffix, streaming):
    path = write_table(image_folder / f"pairs{suffix}", rows_of(image_folder))
    pairs = load_pairs(path, streaming=streaming)
    assert isinstance(pairs, datasets.IterableDataset if streaming else datasets.Dataset)
    check(pairs)
    check(load_pairs(str(path), columns={"image": "image", "text": "caption", "id": "id"}, streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_folder_with_metadata(image_folder, suffix, streaming, caplog):
    rows = [{"file_name": row["image"], "text": row["caption"]} for row in rows_of(image_folder)]
    write_table(image_folder / f"metadata{suffix}", rows)
    check(load_pairs(image_folder, streaming=streaming), ids="012")
    assert not caplog.records


def test_metadata_that_lists_a_subset_is_told(image_folder, caplog):
    write_table(image_folder / "metadata.csv", [{"file_name": "red.png", "text": "red"}])
    with caplog.at_level(logging.WARNING):
        assert len(load_pairs(image_folder)) == 1
    assert "lists 1 of the 3 images" in caplog.text


def test_folder_with_caption_files(image_folder):
    (image_folder / "sub").mkdir()
    for name, text in TEXTS.items():
        (image_folder / f"{name}.png").rename(image_folder / "sub" / f"{name}.png")
        (image_folder / "sub" / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    pairs = list(load_pairs(image_folder))
    assert [row["id"] for row in pairs] == ["sub/blue.png", "sub/green.png", "sub/red.png"]
    assert [row["text"] for row in pairs] == [TEXTS[name] for name in ("blue", "green", "red")]
    assert load_image(pairs[2]["image"]).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_webdataset_shards(tmp_path, streaming, as_list):
    shards = []
    for number, names in enumerate((["red", "green"], ["blue"])):
        shards.append(str(tmp_path / f"shard-{number}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for name in names:
                for suffix, data in (("png", png(name)), ("txt", TEXTS[name].encode())):
                    info = tarfile.TarInfo(f"{name}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    source = shards if as_list else str(tmp_path / "shard-*.tar")
    check(load_pairs(source, streaming=streaming), ids=["red", "green", "blue"])


@pytest.mark.parametrize("streaming", [False, True])
def test_emoji(small_sample, monkeypatch, streaming):
    monkeypatch.setattr("conjoin.data.pair_sources.load_emoji", small_sample)
    pairs = load_pairs("emoji", split="test", streaming=streaming)
    sample = small_sample("test")
    first = next(iter(pairs))
    assert (first["id"], first["text"]) == (sample["id"][0], sample["text"][0])
    assert load_image(first["image"]).size == (144, 144)


def test_selected_rows_keep_their_pictures(embedded):
    pairs = load_pairs(embedded.select([2, 0]), columns={"id": "n"})
    assert pairs["id"][:] == ["2", "0"]
    assert load_image(pairs[0]["image"]).getpixel((0, 0)) == (0, 0, 255)


def test_iterable_dataset_without_features():
    def rows():
        yield {"picture": Image.new("RGB", (4, 4), (255, 0, 0)), "text": "red"}

    pairs = load_pairs(datasets.IterableDataset.from_generator(rows), columns={"image": "picture"})
    (row,) = pairs
    assert row["id"] == "0" and load_image(row["image"]).getpixel((0, 0)) == (255, 0, 0)


def test_bytes_and_urls(monkeypatch):
    monkeypatch.setenv("CONJOIN_ALLOW_URLS", "public")
    raw = datasets.Dataset.from_dict({"image": [png()], "text": ["red"]})
    assert load_pairs(raw)[0]["image"] == {"bytes": png(), "path": None}
    for kind in ("large_binary", "binary_view"):  # Polars writes the former
        features = datasets.Features({"image": datasets.Value(kind), "text": datasets.Value("string")})
        assert load_pairs(raw.cast(features))[0]["image"] == {"bytes": png(), "path": None}
        several = datasets.Features(features | {"image": datasets.List(datasets.Value(kind))})
        lists = datasets.Dataset.from_dict({"image": [[png()] * 2], "text": ["red"]}, features=several)
        assert load_pairs(lists)[0]["image"] == [{"bytes": png(), "path": None}] * 2
    links = datasets.Dataset.from_dict({"URL": ["https://example.org/a.png"], "TEXT": ["a"]})
    assert load_pairs(links)[0] == {
        "id": "0",
        "image": {"bytes": None, "path": "https://example.org/a.png"},
        "text": "a",
    }


def test_hub_id(monkeypatch, embedded):
    asked = {}

    def load(name, **options):
        asked.update(options, name=name)
        return embedded

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_pairs("someone/captions", split="test[:3]")) == 3
    assert asked == {"name": "someone/captions", "split": "test[:3]", "streaming": False}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_images_or_texts_alone(image_folder, suffix, streaming):
    rows = rows_of(image_folder)
    for only, column in (("image", "image"), ("text", "caption")):
        path = write_table(image_folder / f"{only}{suffix}", [{column: row[column]} for row in rows])
        loaded = list(load_pairs(path, only=only, streaming=streaming))
        assert [list(row) for row in loaded] == [["id", only]] * 3
        both = list(load_pairs(write_table(image_folder / f"both{suffix}", rows)))
        assert [row[only] for row in loaded] == [row[only] for row in both]
    with pytest.raises(ValueError, match="found no image column among 'caption'; name it by columns, image=COLUMN"):
        load_pairs(path, only="image")
    with pytest.raises(ValueError, match="only='all'; expected None, 'image', 'text' or 'both'"):
        load_pairs(path, only="all")


# what cannot be used


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image": "rad.png"}, FileNotFoundError, r"row 2 \(id '002'\): image '.*rad.png': no such file"),
        ({"image": ""}, ValueError, r"row 2 \(id '002'\): the image is missing"),
        ({"caption": " "}, ValueError, r"row 2 \(id '002'\): the text is missing"),
        ({"id": ""}, ValueError, "row 2: the id is missing"),
    ],
)
def test_bad_rows_are_named(image_folder, streaming, change, error, message):
    rows = rows_of(image_folder)
    rows[2] |= change
    with pytest.raises(error, match=message):
        list(load_pairs(write_table(image_folder / "pairs.csv", rows), streaming=streaming, only="both"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("part", ["image", "text"])
def test_rows_of_pictures_or_of_texts_alone(embedded, part, streaming, caplog):
    other = {"image": "text", "text": "image"}[part]
    rows = embedded.remove_columns(other)
    rows = rows.to_iterable_dataset() if streaming else rows
    assert [list(row) for row in load_pairs(rows)] == [["id", part]] * 3
    assert f"there is no {other} column; name one by columns, {other}=COLUMN" in caplog.text
    with pytest.raises(ValueError, match=f"found no {other} column among .*'n'; name it by columns, {other}=COLUMN"):
        load_pairs(rows, only="both")
    with pytest.raises(ValueError, match="found no image or text column among 'n'"):
        load_pairs(rows.remove_columns(part))


def test_empty_dataset(embedded):
    with pytest.raises(ValueError, match="the dataset is empty: it has no rows"):
        load_pairs(embedded.select([]))


@pytest.mark.parametrize("streaming", [False, True])
def test_null_image_and_text_inside_a_dataset(embedded, streaming):
    rows = embedded.cast_column("image", datasets.Image(decode=False)).to_list()
    for column, message in (("image", r"row 1 \(id '1'\): the image is missing"), ("text", "the text is missing")):
        broken = [*rows[:1], rows[1] | {column: None}, *rows[2:]]
        data = datasets.Dataset.from_list(broken, features=embedded.features)
        with pytest.raises(ValueError, match=message):
            list(load_pairs(data.to_iterable_dataset() if streaming else data, only="both"))
        found = list(load_pairs(data.to_iterable_dataset() if streaming else data))
        assert [row[column] is None for row in found] == [False, True, False]


def test_wrong_kind_of_column(embedded):
    with pytest.raises(ValueError, match=r"column 'n' holds Value\('int32'\); expected images"):
        load_pairs(embedded, columns={"image": "n"})
    with pytest.raises(ValueError, match=r"column 'n' holds Value\('int32'\); expected texts"):
        load_pairs(embedded, columns={"text": "n"})


def test_folders_that_hold_no_pairs(image_folder, tmp_path):
    with pytest.raises(ValueError, match=r"no image in .* has a caption; expected a .txt"):
        load_pairs(image_folder, only="both")
    assert load_pairs(image_folder).column_names == ["id", "image"]
    for name in TEXTS:
        (image_folder / f"{name}.txt").write_text(name)
    with pytest.raises(ValueError, match="split is 'test'; a folder of images and captions has only the split"):
        load_pairs(image_folder, split="test")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"void' holds no images"):
        load_pairs(tmp_path / "void")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "cannot be read: it has no rows"),
        ("a.csv", b"image,text\n", "cannot be read: it has no rows"),
        ("a.jsonl", b"", "cannot be read: it has no rows"),
        ("a.csv", b"image,text\nred.png,caf\x81\n", r"read: line 2: not valid UTF-8 \(byte 0x81.*save it as UTF-8"),
        ("a.csv", b"image,text,x,x\nred.png,a,y,z\n", "cannot be read: two of its columns are named 'x'"),
        (
            "a.csv",
            b"id,text\n1,a chair, red\n2,b\n",
            "read: line 2 has 3 fields, the header 2; put a text that holds ','",
        ),
        (
            "a.tsv",
            b'text\tid\n"5 inch\t1\nblue\t2\n12" cake\t3\n',
            "read: lines 2 to 4: .*a cell begins with a double quote",
        ),
        ("a.jsonl", b'{"image": "red.png", "text": "a"}\n{"image": \n', r"cannot be read: \S+"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "\xff"}\n', r"read: line 3: not valid UTF-8 \(byte 0xff"),
        ("a.parquet", b"no parquet", r"cannot be read: \S+"),
    ],
)
def test_tables_that_cannot_be_read_are_named(tmp_path, name, content, message, streaming):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}' .*{message}"):
        load_pairs(tmp_path / name, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", [b"", b"no tar", b"\0" * 10240])
def test_shards_that_cannot_be_read_are_named(tmp_path, content, streaming):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.tar'\] cannot be read: .*expected webdataset"):
        load_pairs(tmp_path / "a.tar", streaming=streaming)
    with pytest.raises(FileNotFoundError, match=r"no such file: '.*b-\*.tar'"):
        load_pairs(str(tmp_path / "b-*.tar"), streaming=streaming)


def test_a_name_that_is_nowhere(monkeypatch):
    def load(name, **options):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(FileNotFoundError, match="there is no file or folder 'photo', and no such dataset: Couldn't"):
        load_pairs("photo")


def test_sources_that_are_none(tmp_path, embedded):
    with pytest.raises(FileNotFoundError, match=r"no such file: '.*gone.csv'"):
        load_pairs(tmp_path / "gone.csv")
    with pytest.raises(FileNotFoundError, match="gone' is neither a folder nor one of the file kinds"):
        load_pairs(str(tmp_path / "gone"))
    (tmp_path / "pairs.xlsx").touch()
    with pytest.raises(ValueError, match=r"pairs.xlsx' is neither a folder nor"):
        load_pairs(tmp_path / "pairs.xlsx")
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match=r"split is 'test'; the table .*a\.csv' has only the split 'train'"):
        load_pairs(tmp_path / "a.csv", split="test")
    with pytest.raises(TypeError, match="source is a DataFrame; expected"):
        load_pairs(embedded.to_pandas())
    with pytest.raises(TypeError, match=r"source is a DatasetDict; expected .* a dataset of one split"):
        load_pairs(datasets.DatasetDict(train=embedded))
    with pytest.raises(ValueError, match=r"expected files ending in .parquet, or in .tar.*'a.zip'"):
        load_pairs(["a.zip"])


def test_several_bad_rows_are_counted(image_folder):
    rows = [row | {"image": f"no-{row['image']}"} for row in rows_of(image_folder)]
    with pytest.raises(FileNotFoundError, match=r"row 0 .*no such file \(3 of 3 rows cannot be used\)"):
        load_pairs(write_table(image_folder / "pairs.csv", rows))


def test_which_of_two_columns_is_read_is_told(image_folder, caplog):
    rows = [row | {"title": "another"} for row in rows_of(image_folder)]
    pairs = load_pairs(write_table(image_folder / "pairs.csv", rows))
    assert "another" not in pairs["text"]
    assert "the column 'caption' is read as text, not 'title'; choose by columns, text=COLUMN" in caplog.text
    caplog.clear()
    assert set(load_pairs(image_folder / "pairs.csv", columns="text=title")["text"]) == {"another"}
    assert not caplog.text
