"""A catalogue has the same columns, rows and ids, whichever command reads it."""

import csv
import re
import shlex
from pathlib import Path

import datasets
import pytest
from PIL import Image

import conjoin
from conjoin import load_recipe
from conjoin.cli.main import main
from conjoin.data import TableColumns, guess_columns, load_pairs
from conjoin.data.pair_sources import open_source
from conjoin.evaluation.tasks.pairs import PairsOptions, pairs_cells
from conjoin.retrieval import Collection, load_mined
from tiny_training import write_recipe

STAMPS = Path("/usr/share/tuxpaint/stamps")
TITLES = ["Oak chair, red", "Oak chair, blue", "Desk lamp", "Vase of glass", "Round table", "Garden bench"]
PICTURES = [f"pics/{number}.png" for number in range(6)]
PRODUCTS = ["chair", "chair", "lamp", "vase", "table", "bench"]
LONG = [f"<p>{title} of our workshop, made by hand{' and sanded' * 20}.</p>" for title in TITLES]
CATALOGUES = {
    "shopify.csv": {
        "Handle": PRODUCTS,
        "Title": TITLES,
        "Body (HTML)": LONG,
        "Vendor": ["Acme"] * 6,
        "Variant SKU": [f"AC-{number}" for number in range(6)],
        "Variant Price": ["1,299.00", "1,199.00", "49.00", "9.90", "320.00", "99.00"],
        "Image Src": PICTURES,
        "Image Alt Text": [f"a photo of {title}" for title in TITLES],
    },
    "merchant.tsv": {
        "id": [f"m{number}" for number in range(6)],
        "title": TITLES,
        "description": LONG,
        "link": [f"https://shop.example/{number}" for number in range(6)],
        "image_link": PICTURES,
        "additional_image_link": ["", PICTURES[0], "", "", "", ""],
        "item_group_id": PRODUCTS,
        "price": ["1299.00 USD", "1199.00 USD", "49.00 USD", "9.90 USD", "320.00 USD", "99.00 USD"],
        "brand": ["Acme"] * 6,
    },
    "woocommerce.csv": {
        "ID": ["11", "12", "13", "14", "15", "16"],
        "Type": ["simple"] * 6,
        "SKU": [f"AC-{number}" for number in range(5)] + [""],
        "Name": TITLES,
        "Short description": ["in stock"] * 6,
        "Description": LONG,
        "Regular price": ["1299", "1199", "49", "9.9", "320", "99"],
        "Categories": ["Home > Chairs", "Home > Chairs", "Home", "Home", "Home > Tables", "Garden"],
        "Images": PICTURES,
        "Price (incl. VAT)": ["1545.81", "1426.81", "58.31", "11.78", "380.8", "117.81"],
    },
    "katalog.csv": {
        "Artikelnummer": [f"A-{number}" for number in range(6)],
        "Bezeichnung": TITLES,
        "Beschreibung": LONG,
        "Bild-URL": PICTURES,
        "Preis": ["1.299,00 €", "1.199,00 €", "49,00 €", "9,90 €", "320,00 €", "99,00 €"],
        "Marke": ["Acme"] * 6,
        "Produkt": PRODUCTS,
    },
}
EXPECTED = {
    "emoji.parquet": ("image", ("text",), "id", None),
    "stamps.csv": ("image", ("text",), "id", None),
    "shopify.csv": ("Image Src", ("Title",), "Variant SKU", "Handle"),
    "merchant.tsv": ("image_link", ("title",), "id", "item_group_id"),
    "woocommerce.csv": ("Images", ("Name",), "ID", None),
    "katalog.csv": ("Bild-URL", ("Bezeichnung",), "Artikelnummer", "Produkt"),
}
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "stamps.csv" and not STAMPS.is_dir(), reason="tuxpaint-stamps is not installed"
        ),
    )
    for name in EXPECTED
]


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    """`catalogue(name)` is the path of a table beside its pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONJOIN_ROOTS", str(STAMPS) if STAMPS.is_dir() else "")

    def write(name):
        if name == "emoji.parquet":
            open_source("emoji", "test", False)[0].select(range(6)).to_parquet(name)
            return name
        columns = CATALOGUES.get(name)
        if name == "stamps.csv":
            pictures = [path for path in sorted(STAMPS.rglob("*.png")) if path.with_suffix(".txt").is_file()][:6]
            texts = [path.with_suffix(".txt").read_text().splitlines()[0] for path in pictures]
            columns = {"id": [path.stem for path in pictures], "image": pictures, "text": texts}
        Path("pics").mkdir()
        for number, path in enumerate(PICTURES):
            Image.new("RGB", (20, 20), (40 * number, 200 - 30 * number, 99)).save(path)
        with open(name, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writerows([columns, *zip(*columns.values(), strict=True)])
        return name

    return write


@pytest.mark.parametrize("name", NAMES)
def test_columns_are_found_by_names_and_values(catalogue, name, caplog):
    dataset, _ = open_source(catalogue(name), "train", False)
    assert guess_columns(dataset)[:4] == EXPECTED[name]
    rows = load_pairs(name, keep=["Price (incl. VAT)"] if name == "woocommerce.csv" else ())
    _, (text,), id_, group = EXPECTED[name]
    assert rows["id"][:] == [str(value) for value in dataset[id_]]
    assert rows["text"][:] == dataset[text][:]
    assert group is None or rows["group"][:] == dataset[group][:]
    if name == "woocommerce.csv":
        assert rows[0]["metadata"] == {"price_incl_vat": "1545.81"}
        assert "'Price (incl. VAT)' is 'price_incl_vat'" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_command_reads_the_same_rows(catalogue, name, tiny_checkpoints, exports, capsys):
    table, model = catalogue(name), str(exports("score_fusion")[0])
    rows = load_pairs(table)
    ids, texts = rows["id"][:], rows["text"][:]

    def read(uri):
        collection = Collection(uri)
        return {row["id"]: row["text"] for row in collection.rows(collection.ids)}

    assert main(["start", table, "--model", model, "--no-app"]) == 0
    printed = capsys.readouterr().out
    (encode,) = [line.partition("conjoin ")[2] for line in printed.splitlines() if line.startswith("1/2  conjoin ")]
    named = dict(word.split("=", 1) for word in shlex.split(encode) if "=" in word)
    image, text, id_, group = EXPECTED[name]
    assert named == {"image": image, "text": ",".join(text), "id": id_} | ({"group": group} if group else {})
    assert f"{len(ids)} rows\n" in printed and read(f"runs/{Path(table).stem}") == dict(zip(ids, texts, strict=True))
    assert main(["encode", model, table, "--out", "runs/encoded", "--quiet"]) == 0
    assert read("runs/encoded") == dict(zip(ids, texts, strict=True))
    words = ["--out", "runs/mined", "--miner", "own", model, "image", "text", "--duplicate-above", "1.1", "--quiet"]
    assert main(["mine", table, *words]) == 0
    groups = dict(zip(ids, rows["group"][:] if "group" in rows.column_names else ids, strict=True))
    mined = load_mined("runs/mined")
    assert {*mined} == {*ids}
    assert all(groups[one] != groups[other] for one, negatives in mined.items() for other in negatives)
    words = ["--benchmark", "pairs", "--data", table, "--out", "runs/scores", "--quiet"]
    assert main(["evaluate", model, *words]) == 0
    assert f"image → text, R@5 ({len(ids)} queries)" in capsys.readouterr().out
    (cell,) = pairs_cells(PairsOptions(data=table, cells=["image → text"]))
    assert [*cell.qrels] == ids and {text for texts in cell.qrels.values() for text in texts} <= {*ids}
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": "none", "save_strategy": "no"}
    recipe = write_recipe(Path.cwd(), tiny_checkpoints, "gcl", table, **settings)
    assert main(["train", str(recipe)]) == 0
    trained, _ = load_recipe(recipe).data.load()
    assert isinstance(trained, datasets.Dataset) and trained["id"][:] == ids and trained["text"][:] == texts


def test_one_module_knows_the_names_of_columns():
    telling = r"\b(artikelnummer|image_link|item_group_id|hard_neg|product_title|file_path|gtin)\b"
    files = [path for path in Path(conjoin.__file__).parent.rglob("*.py") if re.search(telling, path.read_text())]
    assert [path.name for path in files] == ["columns.py"]


def test_rows_of_trainers_are_guessed_without_a_file():
    rows = [{"Foto": Image.new("RGB", (2, 2)), "Name": "oak chair", "nr": 7}, {"Foto": None, "Name": "lamp", "nr": 8}]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert guess_columns(columns) == TableColumns(
        "Foto", ("Name",), "nr", None, {"image": [], "text": [], "id": [], "group": []}
    )
    assert guess_columns(columns, ["text=Name,nr", "id="])[1:3] == (("Name", "nr"), None)
    with pytest.raises(ValueError, match=r"no column 'Fotos'; the columns are .*; did you mean 'Foto'"):
        guess_columns(columns, {"image": "Fotos"})
