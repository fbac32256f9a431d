"""`conjoin start`: what it finds in a table, and the commands that it runs."""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants
from PIL import Image

from conjoin.cli.main import main
from conjoin.data.csv_files import ENCODING
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.processing.urls import ALLOW_URLS
from conjoin.retrieval import Collection
from conjoin.start.commands import PUBLIC_MODEL, check_table, choose_model, start_commands
from conjoin.start.products import find_products

GERMAN = {
    "Artikelnr": ["A-1", "A-2", "A-3", "A-4"],
    "Modell": ["m1", "m1", "m2", "m3"],
    "Titel": ["Rote Lampe", "Rote Lampe", "Stuhl", "Blaue Vase"],
    "Bild": ["bilder/0.png", "bilder/1.png", "bilder/2.png", "bilder/fehlt.png"],
    "Preis": ["1.299,00 €", "899,00 €", "1.100 €", ""],
    "Kategorie": ["<b>Licht</b>", "Licht", "Sitzen", "Deko &amp; Kunst"],
    "Nr": ["007", "008", "008", "009"],
    "Beschreibung": ["Eine Lampe.", "Eine Lampe, klein.", "Ein Stuhl.", "Eine Vase."],
}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """`shop(columns)` writes a table beside three pictures, into the current folder."""
    monkeypatch.chdir(tmp_path)
    for variable in (ALLOW_ROOTS, ALLOW_URLS):
        monkeypatch.setenv(variable, "")
    (tmp_path / "bilder").mkdir()
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (20, 20), colour).save(tmp_path / f"bilder/{number}.png")

    def write(columns, name="katalog.csv", separator=";"):
        with open(name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=separator).writerows([columns, *zip(*columns.values(), strict=True)])
        return name

    return write


def test_a_german_table(shop):
    found = find_products(shop(GERMAN))
    assert found.columns[:4] == ("Bild", ("Titel",), "Artikelnr", "Modell")
    assert found.keep == ["Modell", "Preis:number", "Kategorie", "Nr"]
    lines = "\n".join(found.lines)
    assert "Preis: 899 to 1,299, read as Preis:number, blank in 1 rows" in lines
    assert "Kategorie: Deko & Kunst, Licht, Sitzen" in lines and "Nr: 007, 008, 009" in lines
    assert "not kept    Beschreibung ('Eine Lampe.')" in lines
    assert "4 rows\n  both        3 rows\n  text        1 rows\n" in lines
    found = find_products(shop(GERMAN | {"Preis": ["1.299,00 €", "auf Anfrage", "3 €", "4 €"]}, "anfrage.csv"))
    assert "Preis ('auf Anfrage')" in found.lines[-2] and found.keep == ["Modell", "Kategorie", "Nr"]
    found = find_products("katalog.csv", keep=["Preis:number", "Beschreibung"])
    assert found.keep == ["Modell", "Preis:number", "Beschreibung"]
    assert "not kept    Kategorie ('Licht'), Nr ('007')" in "\n".join(found.lines)
    found = find_products(shop({**GERMAN, "vector": ["alt", "neu", "neu", "alt"], "picture": ["x", "y", "y", "x"]}))
    assert not {"vector", "picture"} & {*found.keep}, "names of the collection's own"


def test_several_columns_are_one_text_and_may_be_filters_too(shop):
    found = find_products(shop(GERMAN), columns={"text": ["Titel", "Kategorie"]})
    assert found.columns.text == ("Titel", "Kategorie") and "Kategorie" in found.keep
    encode = start_commands("katalog.csv", found, "out", "sample")[0]
    assert "text=Titel,Kategorie" in encode[encode.index("--columns") :]


def test_rows_that_cannot_be_used_are_counted_by_reason(shop):
    pictures = ["bilder/0.png", "", "bilder/a.png", "bilder/b.png", ""]
    lines = find_products(shop({"image": pictures, "title": [f"a lamp {n}" for n in range(5)]})).lines
    assert lines[:3] == ["5 rows", "  both        1 rows", "  text        4 rows"]
    titles = ["a lamp", "a chair of oak", "", "", ""]
    lines = find_products(shop({"image": pictures, "title": titles})).lines
    assert lines[0] == "4 rows, 2 of which cannot be used and are skipped"
    assert lines[1].startswith("  skipped     2, such as row 2 ")


def test_columns_of_unknown_names_are_guessed_by_their_values(shop):
    columns = {
        "x": ["7", "7", "8"],
        "y": ["an oak chair", "a lamp of glass", "a soup bowl"],
        "z": ["bilder/0.png", "bilder/1.png", "bilder/2.png"],
        "u": ["k7", "k8", "k9"],
        "v": ["12.50", "1,299.00", "3"],
    }
    found = find_products(shop(columns, separator=","))
    assert found.columns[:4] == ("z", ("y",), "u", None)
    assert found.keep == ["x:number", "v:number"] and "v: 3 to 1,299, read as v:number" in "\n".join(found.lines)
    found = find_products("katalog.csv", columns={"text": "u", "id": ""})
    assert found.columns[1:3] == (("u",), None) and "y ('an oak chair')" in found.lines[-2]


def test_numbers_and_pictures_of_other_tables_are_kept_as_they_are(shop, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"name": "a", "cost": 1.5, "tags": ["x"]}\n{"name": "b", "cost": 3, "tags": []}\n'
    )
    found = find_products("a.jsonl")
    assert (found.columns.text, found.keep) == (("name",), ["cost"]) and "not kept    tags" in found.lines[-2]
    pictures = datasets.Dataset.from_dict({"pic": ["bilder/0.png", "bilder/1.png"], "nr": [3, 9]})
    pictures.cast_column("pic", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    found = find_products("a.parquet")
    assert (found.columns[:4], found.keep) == (("pic", (), "nr", None), [])


def test_a_folder_of_pictures(shop, own_export):
    (folder,) = {path.parent for path in Path.cwd().rglob("*.png")}
    found = find_products(str(folder))
    assert (found.columns[:3], found.keep) == (("file_name", (), "id"), [])
    assert main(["start", str(folder), "--model", str(own_export[0]), "--no-app"]) == 0
    assert Collection("runs/bilder-folder").ids == ["0.png", "1.png", "2.png"]
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"a lamp, number {number}")
    found = find_products(str(folder))
    assert found.columns[:2] == ("file_name", ("text",))


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        ({"a": ["1", "2"]}, {}, "none of its columns 'a' holds pictures .* or titles"),
        ({"title": ["a lamp"]}, {"columns": {"image": "pic"}}, "no column 'pic'; the columns are 'title'"),
        ({"title": []}, {}, "cannot be read: it has no rows"),
        (
            {"image": ["bilder/7.png", "bilder/8.png"], "title": ["a", "b"]},
            {},
            "none of the 2 rows of 'katalog.csv' can be used: row 0 .*no such",
        ),
    ],
)
def test_what_is_wrong_with_a_table(shop, columns, options, problem):
    with pytest.raises(ValueError, match=problem):
        find_products(shop(columns), **options)


@pytest.mark.parametrize(
    ("table", "text", "problem"),
    [
        ("gone.csv", None, "does not exist; expected a CSV"),
        ("a.xlsx", "PK", "is of another kind; expected a CSV"),
        ("a.csv", "title,price\n", "is empty: it has no rows"),
        ("a.csv", "title,price\na,b,c\n", "cannot be read: line 2 has 3 fields, the header 2"),
    ],
)
def test_a_wrong_table_is_named(tmp_path, table, text, problem):
    if text is not None:
        (tmp_path / table).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=problem):
        check_table(str(tmp_path / table))


def test_a_table_is_checked_without_torch(tmp_path):
    (tmp_path / "a.csv").write_text("title,price\na lamp,3\n")
    code = "import sys, conjoin.start.commands as start; start.check_table(sys.argv[1]); print('torch' in sys.modules)"
    run = [sys.executable, "-c", code, str(tmp_path / "a.csv")]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "False\n"


def test_only_what_there_is_is_encoded(shop, monkeypatch):
    titles = find_products(shop({"title": ["a lamp", "a chair"]}))
    (encode, _) = start_commands("katalog.csv", titles, "out", "m")
    assert encode[5:] == shlex.split("--columns image= text=title id= --on-error skip --sync")
    monkeypatch.setenv(ALLOW_ROOTS, "/a b")
    monkeypatch.setenv(ALLOW_URLS, "public")
    assert start_commands("katalog.csv", titles, "out", "m")[0] == [*encode, "--root", "/a b", "--allow-urls"]


def test_the_steps_are_commands_and_the_second_run_has_nothing_to_do(shop, own_export, capsys, monkeypatch):
    shop(GERMAN)
    model = str(own_export[0])
    assert main(["start", "katalog.csv", "--model", model, "--no-app"]) == 0
    printed = capsys.readouterr().out
    assert "  both        3 rows\n  text        1 rows\n" in printed
    assert "4 rows added, 0 replaced" in printed and len(Collection("runs/katalog")) == 4
    (encode,) = [line.partition("conjoin ")[2] for line in printed.splitlines() if line.startswith("1/2  conjoin ")]
    app = printed.splitlines()[-1]
    assert app == f"conjoin app runs/katalog --model {model} --group-by Modell --currency '€'"
    assert main(shlex.split(encode)) == 0
    assert "0 rows added, 0 replaced, 0 removed, 4 unchanged; 0 encoded" in capsys.readouterr().out
    shop({name: values[:1] for name, values in GERMAN.items()} | {"Preis": ["5 €"]})
    monkeypatch.setattr("conjoin.cli.start.find_spec", lambda name: True)
    opened = []
    monkeypatch.setattr("conjoin.cli.app.run", lambda args: opened.append((args.collections, args.model)))
    assert main(["start", "katalog.csv"]) == 0  # the model of the collection
    assert "0 rows added, 1 replaced, 3 removed" in capsys.readouterr().out
    assert opened == [(["runs/katalog"], [model])]


def test_the_encoding_of_a_table_is_found_out_or_told(shop, own_export, monkeypatch, caplog, capsys):
    monkeypatch.setenv(ENCODING, "")
    text = "image;title\nbilder/0.png;Łódź lamp\nbilder/1.png;Gdańsk lamp\n"
    Path("a.csv").write_bytes("image;title\nbilder/0.png;Grüne Lampe\n".encode("cp1252"))
    assert find_products("a.csv").columns.text == ("title",) and "read as Windows-1252" in caplog.text
    Path("b.csv").write_bytes(text.encode("cp1250"))
    assert main(["start", "b.csv", "--encoding", "cp1250", "--model", str(own_export[0]), "--no-app"]) == 0
    assert "--encoding cp1250" in capsys.readouterr().out
    rows = Collection("runs/b").rows(Collection("runs/b").ids)
    assert [row["text"] for row in rows] == ["Łódź lamp", "Gdańsk lamp"]
    assert main(["start", "b.csv", "--encoding", "cp9999", "--no-app"]) == 2
    assert "unknown encoding 'cp9999'" in capsys.readouterr().err


def test_the_default_model(tmp_path, monkeypatch):
    """A public one if a hub answers, else the sample's towers."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("conjoin.hub.folder.check_model", lambda name: None)
        assert choose_model(str(tmp_path / "out"))[0] == PUBLIC_MODEL
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name, reason = choose_model(str(tmp_path / "out"))
    assert name == "sample" and PUBLIC_MODEL in reason
    assert choose_model(str(tmp_path / "out"), "mine") == ("mine", "as asked for")


def test_what_is_no_id_is_said(shop):
    found = find_products(shop({"title": ["a lamp", "a chair", "a vase"], "price": ["1", "2", "3"], "sku": [*"aab"]}))
    row_numbers = "  ids         row numbers: no column has a value of its own in each row"
    assert found.columns.id is None and row_numbers in found.lines


def test_a_few_repeated_ids_and_prices_that_are_none(shop):
    columns = {
        "sku": [f"A{n}" for n in range(11)] + ["A3"],
        "title": [f"A chair, number {n}" for n in range(12)],
        "price": ["$1,299.00", "N/A", "$3", "-", "n/a", "5", "6", "7", "8", "9", "on request", "11"],
    }
    found = find_products(shop(columns, separator=","))
    assert (found.columns.id, found.keep) == ("sku", ["price:number"])
    lines = "\n".join(found.lines)
    assert "1, such as row 11: the id 'A3' occurs twice, in rows 3 and 11; the first is kept" in lines
    assert "price: 3 to 1,299, read as price:number, blank in 3 rows, 1 are no numbers, such as 'on request'" in lines
