"""`conjoin start`: what it finds in a table, and the commands that it runs."""

import csv
import shlex

import datasets
import pytest
from huggingface_hub import constants
from PIL import Image

from conjoin.cli.main import main
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.demo.products import find_products
from conjoin.demo.start import PUBLIC_MODEL, choose_model, describe, start_commands
from conjoin.processing.item_images import ALLOW_URLS
from conjoin.retrieval import Collection

GERMAN = {
    "Artikelnr": ["A-1", "A-2", "A-3", "A-4"],
    "Modell": ["m1", "m1", "m2", "m3"],
    "Titel": ["Rote Lampe", "Rote Lampe", "Stuhl", "Blaue Vase"],
    "Bild": ["bilder/0.png", "bilder/1.png", "bilder/2.png", "bilder/fehlt.png"],
    "Preis": ["1.299,00 €", "899,00 €", "1.100 €", ""],
    "Kategorie": ["Licht", "Licht", "Sitzen", "Deko"],
    "Nr": ["007", "008", "008", "009"],
    "Beschreibung": ["Eine Lampe.", "Eine Lampe, klein.", "Ein Stuhl.", "Eine Vase."],
}


def test_a_column_with_a_name_of_the_collection_is_said_and_not_kept(shop):
    products = find_products(shop({**GERMAN, "text": ["alt", "neu", "neu", "alt"], "picture": ["x", "y", "y", "x"]}))
    assert products.text == "Titel" and {"text", "picture"} <= {*products.others}
    assert not {"text", "picture"} & {*products.keep}


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
    assert (found.rows, found.image, found.text, found.id, found.group) == (4, "Bild", "Titel", "Artikelnr", "Modell")
    assert found.numbers == {"Preis": (":decimal-comma", 899, 1299, 1, [])}
    assert found.choices == {"Kategorie": ["Deko", "Licht", "Sitzen"], "Nr": ["007", "008", "009"]}
    assert found.others == {"Beschreibung": "Eine Lampe."}
    found = find_products(shop(GERMAN | {"Preis": ["1.299,00 €", "auf Anfrage", "3 €", "4 €"]}, "anfrage.csv"))
    assert found.others["Preis"] == "auf Anfrage" and not found.numbers
    (problem,) = found.unusable
    assert "row 3 (id 'A-4')" in problem and "fehlt.png': no such file" in problem


def test_columns_of_unknown_names_are_guessed_by_their_values(shop):
    columns = {
        "x": ["7", "7", "8"],
        "y": ["an oak chair", "a lamp of glass", "a soup bowl"],
        "z": ["bilder/0.png", "bilder/1.png", "bilder/2.png"],
        "u": ["k7", "k8", "k9"],
        "v": ["12.50", "1,299.00", "3"],
    }
    found = find_products(shop(columns, separator=","))
    assert (found.image, found.text, found.id, found.group) == ("z", "y", "u", None)
    assert found.numbers == {"x": (":number", 7, 8, 0, []), "v": (":number", 3, 1299, 0, [])}
    found = find_products("katalog.csv", text_column="u", id_column="")
    assert (found.text, found.id, found.others) == ("u", "", {"y": "an oak chair"})


def test_numbers_and_pictures_of_other_tables_are_kept_as_they_are(shop, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"name": "a", "cost": 1.5, "tags": ["x"]}\n{"name": "b", "cost": 3, "tags": []}\n'
    )
    found = find_products("a.jsonl")
    assert (found.text, found.keep, found.others) == ("name", ["cost"], {"tags": ""})
    pictures = datasets.Dataset.from_dict({"pic": ["bilder/0.png", "bilder/1.png"], "n": [3, 9]})
    pictures.cast_column("pic", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    found = find_products("a.parquet")
    assert (found.image, found.only, found.id, found.keep) == ("pic", "image", "n", [])


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        ({"a": ["1", "2"]}, {}, "none of its columns 'a' holds pictures .* or titles"),
        ({"title": ["a lamp"]}, {"image_column": "pic"}, "no column 'pic'; the columns are 'title'"),
        ({"title": []}, {}, "is empty: it has no rows"),
        (
            {"image": ["bilder/7.png"], "title": ["a"]},
            {},
            "none of the 1 rows of 'katalog.csv' can be used: row 0 .*no such",
        ),
    ],
)
def test_what_is_wrong_with_a_table(shop, columns, options, problem):
    with pytest.raises(ValueError, match=problem):
        find_products(shop(columns), **options)


def test_what_is_no_table(shop, tmp_path):
    for path, problem in (("bilder", "is a folder; expected a CSV"), ("gone.csv", "does not exist; expected a CSV")):
        with pytest.raises(FileNotFoundError, match=problem):
            find_products(path)
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"neither a folder nor one of the file kinds \.csv"):
        find_products("a.xlsx")


def test_only_what_there_is_is_encoded(shop, monkeypatch):
    titles = find_products(shop({"title": ["a lamp", "a chair"]}))
    (encode, _) = start_commands("katalog.csv", titles, "out", "m")
    assert encode[5:] == shlex.split("--text-column title --id-column '' --only text --on-error skip --sync")
    monkeypatch.setenv(ALLOW_ROOTS, "/a b")
    monkeypatch.setenv(ALLOW_URLS, "public")
    assert start_commands("katalog.csv", titles, "out", "m")[0] == [*encode, "--root", "/a b", "--allow-urls"]
    pictures = find_products(shop({"photo": ["bilder/0.png", "bilder/1.png"]}))
    assert (pictures.only, pictures.text) == ("image", None)


def test_the_steps_are_commands_and_the_second_run_has_nothing_to_do(shop, own_export, capsys, monkeypatch):
    shop(GERMAN)
    model = str(own_export[0])
    assert main(["start", "katalog.csv", "--model", model, "--no-app"]) == 0
    printed = capsys.readouterr().out
    assert "4 rows, 1 of which cannot be used and are skipped" in printed
    assert "3 rows added, 0 replaced" in printed and len(Collection("runs/katalog")) == 3
    (encode,) = [line.partition("conjoin ")[2] for line in printed.splitlines() if line.startswith("1/2  conjoin ")]
    app = printed.splitlines()[-1]
    assert app == f"conjoin app runs/katalog --model {model} --group-by Modell"
    assert main(shlex.split(encode)) == 0
    assert "0 rows added, 0 replaced, 0 removed, 3 unchanged; 0 encoded" in capsys.readouterr().out
    shop({name: values[:1] for name, values in GERMAN.items()} | {"Preis": ["5 €"]})
    monkeypatch.setattr("conjoin.demo.start.has_app", lambda: True)
    opened = []
    monkeypatch.setattr("conjoin.cli.app.run", lambda args: opened.append((args.collections, args.model)))
    assert main(["start", "katalog.csv"]) == 0  # the model of the collection
    assert "0 rows added, 1 replaced, 2 removed" in capsys.readouterr().out
    assert opened == [(["runs/katalog"], [model])]


def test_the_default_model(tmp_path, monkeypatch):
    """A public one if a hub answers, else the sample's towers."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("conjoin.demo.start.check_model", lambda name: None)
        assert choose_model(str(tmp_path / "out"))[0] == PUBLIC_MODEL
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name, reason = choose_model(str(tmp_path / "out"))
    assert name == "sample" and PUBLIC_MODEL in reason
    assert choose_model(str(tmp_path / "out"), "mine") == ("mine", "as asked for")


def test_a_few_repeated_ids_and_prices_that_are_none(shop):
    columns = {
        "sku": [f"A{n}" for n in range(11)] + ["A3"],
        "title": [f"A chair, number {n}" for n in range(12)],
        "price": ["$1,299.00", "N/A", "$3", "-", "n/a", "5", "6", "7", "8", "9", "on request", "11"],
    }
    found = find_products(shop(columns, separator=","))
    assert (found.id, found.rows, found.keep) == ("sku", 12, ["price:number"])
    assert found.unusable == ["row 11: the id 'A3' occurs twice, in lines 5 and 13; the first is kept"]
    lines = "\n".join(describe(found))
    assert "price: 3 to 1,299, read as price:number, blank in 3 rows, 1 are no numbers, such as 'on request'" in lines
