import json
import os
import shutil
import subprocess
import sys

import pytest

from conjoin.cli.main import main
from conjoin.retrieval import Collection, load_encoder
from tiny_commands import COLOURS, conjoin, write_rows


@pytest.fixture(scope="module")
def built(model, data, tmp_path_factory):
    """A collection of the images."""
    folder = tmp_path_factory.mktemp("built") / "squares"
    conjoin("encode", model, data, "--only", "image", "--out", folder, "--quiet", "--no-bf16")
    return folder


@pytest.fixture
def shop(tmp_path):
    return tmp_path / "shop"


@pytest.fixture
def encode(model, data, shop, capsys, monkeypatch):
    """Encodes images into `shop`; returns what is printed."""
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))

    def run(*words, source=data, out=shop):
        conjoin("encode", model, source, "--out", out, "--only", "image", "--quiet", *words)
        return capsys.readouterr().out

    return run


@pytest.fixture
def search(shop, data, capsys):
    """Searches `shop`, for the blue square if nothing else is said; returns what is printed as JSON."""

    def run(*words, collection=shop, image="blue"):
        image = ["--image", data / f"{image}.png"] if image else []
        capsys.readouterr()
        conjoin("search", collection, *image, *words, "--json")
        return json.loads(capsys.readouterr().out)

    return run


def priced(data):
    return [{"id": colour, "image": f"{data}/{colour}.png", "price": price} for price, colour in enumerate(COLOURS)]


def test_text_and_composed_queries_as_json(built, data, model, search):
    found = search("--text", "a red square", collection=built, image=None)
    assert found["query"] == {"text": "a red square"}
    assert sorted(hit["id"] for hit in found["results"]) == sorted(COLOURS)
    assert len(found["results"]) == 7
    assert search("--text", "a red square", "--kind", "image", collection=built, image=None) == found
    assert search("--text", "a red square", "--kind", "both", collection=built, image=None)["results"] == []
    query = {"image": str(data / "red.png"), "text": "a blue square"}
    expected = Collection(built).search(load_encoder(model).encode([query]), 2)
    found = search("--text", "a blue square", "--model", model, "-k", 2, collection=built, image="red")
    assert [hit["id"] for hit in found["results"]] == expected.ids[0]


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_results_come_with_texts_image_paths_and_kept_columns(data, shop, tmp_path, encode, search, capsys, streaming):
    rows = [row | {"text": f"a {row['id']}\nsquare " * 9} for row in priced(data)]
    table = write_rows(tmp_path / "table.jsonl", rows)
    encode(*streaming, "--keep", "price", "text", source=table)
    row = {"image": str(data / "blue.png"), "price": 2, "text": ("a blue\nsquare " * 9).strip()}
    assert search("-k", 2)["results"][0]["row"] == row
    conjoin("search", shop, "--image", data / "blue.png", "-k", 2)
    header, first, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "score", "id", "text", "price", "image"]
    assert first.split()[:3] == ["1", "1.0000", "blue"] and first.index("a blue") == header.index("text")
    assert first.endswith(f"a blue square a b…  2      {data / 'blue.png'}")
    printed = encode(*streaming, "--keep", "price", source=table)  # the text is kept no longer
    assert "0 rows added, 7 replaced, 0 removed, 0 unchanged; 0 encoded" in printed
    with pytest.raises(ValueError, match="was made with only 'image', not 'text'"):
        encode(*streaming, "--only", "text", source=table)


def test_a_csv_is_filtered_by_numbers(data, shop, tmp_path, encode, search):
    lines = [f"{colour},{data}/{colour}.png,{9 + price}\n" for price, colour in enumerate(COLOURS)]
    table = tmp_path / "shop.csv"
    table.write_text("id,image,price\n" + "".join(lines))
    encode("--keep", "price:number", source=table)
    found = {hit["id"]: hit["row"]["price"] for hit in search("-k", 9, "--where", "price < 11")["results"]}
    assert found == {COLOURS[0]: 9, COLOURS[1]: 10}
    encode("--keep", "price", source=table, out=tmp_path / "words")
    with pytest.raises(ValueError, match=r"price \(string\); `conjoin encode --keep NAME:number` reads texts as"):
        search("--where", "price < 11", collection=tmp_path / "words")


def test_a_collection_keeps_its_precision(shop, encode, monkeypatch):
    """Whichever a machine computes faster in: rows that are encoded later are like the others."""
    for faster in (True, False):
        monkeypatch.setattr("conjoin.devices._is_bf16_faster", lambda kind, faster=faster: faster)
        encode()
        assert Collection(shop).metadata["key"]["precision"] == "bfloat16"
    with pytest.raises(ValueError, match="was made with precision 'bfloat16', not 'full'"):
        encode("--no-bf16")


def test_a_sync_with_row_numbers_as_ids_warns(data, tmp_path, encode, caplog):
    lines = [{name: value for name, value in line.items() if name != "id"} for line in priced(data)]
    for options, warned in (((), False), (("--sync",), True)):
        encode(*options, source=write_rows(tmp_path / "table.jsonl", lines), out=tmp_path / "numbers")
        assert ("the ids are row numbers" in caplog.text) == warned


def test_a_living_collection(data, shop, tmp_path, encode, search, capsys):
    lines = priced(data)
    assert "7 rows added" in encode("--keep", "price", source=write_rows(tmp_path / "table.jsonl", lines))
    lines[3]["price"] = 50
    lines[2] = lines[0] | {"id": "crimson", "price": 99}
    printed = encode("--keep", "price", "--sync", source=write_rows(tmp_path / "table.jsonl", lines))
    assert "1 rows added, 1 replaced, 1 removed, 5 unchanged; 1 encoded" in printed
    found = search("--where", "price > 40 and id != 'red'", "--html", tmp_path / "pages" / "page.html")
    assert {(hit["id"], hit["row"]["price"]) for hit in found["results"]} == {("crimson", 99), (lines[3]["id"], 50)}
    page = (tmp_path / "pages" / "page.html").read_text()
    assert page.count("data:image/") == 3 and "crimson" in page and "price &gt; 40" in page
    conjoin("search", shop, "--image", data / "blue.png", "--where", "price > 1000")
    assert capsys.readouterr().out == "nothing found: no row fulfils --where and --min-score\n"
    with pytest.raises(ValueError, match=r"No field named colour.*; the columns are id \(string\), text"):
        search("--where", "colour = 1")


def test_words_and_vectors_together(model, data, shop, search, capsys):
    conjoin("encode", model, data, "--out", shop)
    for ranking, least in (("default", 1), ("words", 0.9)):
        (best,) = search("--text", "ornage", "--ranking", ranking, "-k", 1, image=None)["results"]
        assert best["id"] == "orange" and (best["score"] > least) == (ranking == "default")
    with pytest.raises(ValueError, match="it has no words to rank by"):
        search("--ranking", "words")
    conjoin("search", shop, "--text", "zzzqqq", "--ranking", "words")
    assert "or has one of the words" in capsys.readouterr().out


def test_weights_of_the_parts_of_a_query(built, search):
    def scores(*options):
        return {hit["id"]: hit["score"] for hit in search(*options, collection=built, image="red")["results"]}

    assert scores("--text", "a blue square", "--weight", "image=1", "text=0") == pytest.approx(scores(), abs=1e-5)
    for wrong, message in (
        ("colour=1", "has no weight; the weights are"),
        ("image=much", "invalid name_equals_number"),
    ):
        with pytest.raises(ValueError, match=message):
            scores("--weight", wrong)


def test_products_with_several_pictures(data, shop, tmp_path, encode, search, monkeypatch):
    table = [f"{colour},{data}/{colour}.png,{'bright' if 'l' in colour else 'dark'}" for colour in COLOURS]
    (tmp_path / "table.csv").write_text("\n".join(["id,image,product", *table]))
    monkeypatch.setenv("CONJOIN_ROOTS", "")
    encode("--root", data, "--keep", "product", source=tmp_path / "table.csv")
    monkeypatch.setenv("CONJOIN_ROOTS", "")  # each command is a process
    found = search("--group-by", "product", "-k", 2)["results"]
    assert len(found) == 2 and found[0]["row"]["product"] == "bright"
    assert found[1]["row"]["product"] == "dark" and found[0]["score"] > 0.9999
    with pytest.raises(ValueError, match="no column 'brand'; it has id, text, image, product"):
        search("--group-by", "brand")
    query = ["search", shop, "--image", data / "blue.png", "--html", tmp_path / "page.html", "-k", 1]
    conjoin(*query, "--title-column", "product")
    page = (tmp_path / "page.html").read_text()
    assert "<p>bright</p>" in page and "<dt>product" not in page and page.count(">blue<") == 1
    assert "outside of the collection: --root FOLDER" in page
    conjoin(*query, "--root", data)
    assert "--root" not in (tmp_path / "page.html").read_text()


def test_nothing_similar(built, data, tmp_path, search, capsys):
    scores = [hit["score"] for hit in search(collection=built)["results"]]
    answer = search("--min-score", scores[2], collection=built)
    assert [hit["score"] for hit in answer["results"]] == [score for score in scores if score >= scores[2]]
    page = tmp_path / "page.html"
    conjoin("search", built, "--image", data / "blue.png", "--min-score", "1.1", "--html", page)
    line = "nothing found: no row fulfils --where and --min-score"
    assert capsys.readouterr().out == line + "\n" and line in page.read_text()


def test_encode_says_what_next_and_stores_what_was_asked(model, shop, tmp_path, encode):
    options = ["--dtype", "float16", "--batch-size", 2]
    assert f"7 vectors of 16 dimensions in {shop}\nnext: conjoin search" in encode(*options)
    collection = Collection(shop)
    assert collection.ids == list(COLOURS) and collection.dtype == "float16"
    assert collection.model.name == str(model.resolve())
    encode(*options, "--streaming", out=tmp_path / "b")
    assert (Collection(tmp_path / "b").vectors() == collection.vectors()).all()


def test_thumbnails_are_shown_where_the_pictures_are_gone(data, shop, tmp_path, encode, capsys):
    pictures = shutil.copytree(data, tmp_path / "pictures")
    encode("--keep-pictures", 8, source=pictures)
    with pytest.raises(ValueError, match="--keep-pictures must be at least 1, got 0"):
        encode("--keep-pictures", 0, source=pictures)
    shutil.rmtree(pictures)
    conjoin("search", shop, "--text", "red", "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("data:image/") == 7
    assert "JFIF" not in capsys.readouterr().out


def test_verify(shop, encode, capsys):
    encode()
    assert main(["verify", str(shop)]) == 0
    assert "all files are as they were written" in capsys.readouterr().out
    assert main(["verify", str(shop), "--input", "cat"]) == 2
    assert "--input is for --against" in capsys.readouterr().err
    file = next((shop / "data/train.lance/data").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["verify", str(shop)]) == 2
    assert file.name in capsys.readouterr().err
    assert main(["verify", str(shop.parent)]) == 2


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_encode_skips_what_cannot_be_used(data, shop, tmp_path, encode, streaming):
    lines = [f"{data}/{colour}.png,{colour}" for colour in COLOURS]
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    table = tmp_path / "a.csv"
    table.write_text("\n".join(["image,sku", *lines[:3], "broken.jpg,x", *lines[3:], "gone.png,y"]))
    with pytest.raises((ValueError, FileNotFoundError), match=r"broken\.jpg|gone\.png"):
        encode(*streaming, source=table)
    printed = encode(*streaming, "--on-error", "skip", source=table)
    assert f"skipped 2 rows that cannot be used: {shop / 'skipped.jsonl'}\n7 vec" in printed
    new = Collection(shop)
    assert new.ids == list(COLOURS)
    assert [(row.row, row.id) for row in new.skipped] == [(3, "x"), (8, "y")]
    assert "gone.png': no such file" in new.skipped[1].reason


def test_encode_shows_a_bar_in_a_terminal_only(model, data, tmp_path, capsys, monkeypatch):
    conjoin("encode", model, data, "--out", tmp_path / "piped")
    assert "encoding" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    conjoin("encode", model, data, "--out", tmp_path / "terminal")
    progress = capsys.readouterr().err
    assert "encoding" in progress and "7/7" in progress and "row/s" in progress


def test_index(shop, encode, search, capsys):
    pytest.importorskip("faiss")
    assert "7 vectors of 8 dimensions" in encode("--truncate-dim", 8)
    conjoin("index", shop, "--kind", "ivf_flat")
    assert "7 rows indexed (ivf_flat), recall@10 1.000\nnext: conjoin search" in capsys.readouterr().out
    conjoin("index", shop, "--faiss", "Flat")
    assert f"FAISS index of 7 vectors in {shop}, recall@10 1.000" in capsys.readouterr().out
    assert search("-k", 1)["results"][0]["id"] == "blue"  # the query is cut to 8 numbers, too
    conjoin("index", shop, "--kind", "none")
    assert "7 rows indexed\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--probes must be at least 1, got 0"):
        conjoin("index", shop, "--probes", 0)


@pytest.fixture
def recorded(built, tmp_path):
    """Copies the collection and lets it record another model."""

    def record(name):
        folder = shutil.copytree(built, tmp_path / "copy", dirs_exist_ok=True)
        with Collection.writing(folder) as newest:
            newest._record(details=newest.metadata["details"] | {"model": str(name)})
            newest.publish()
        return folder

    return record


def test_which_model_a_search_loads(built, recorded, tiny_checkpoints, tmp_path):
    """Nothing is fetched on the word of a collection, and vectors of two models are not compared."""
    with pytest.raises(ValueError, match=r"the collection was made with model .*, these queries come from"):
        conjoin("search", built, "--text", "a", "--model", tiny_checkpoints["clip"])
    with pytest.raises(FileNotFoundError, match=r"the model that made the collection is no longer at .*gone': pas"):
        conjoin("search", recorded(tmp_path / "gone"), "--text", "a")
    with pytest.raises(ValueError, match="is not on this machine: pass --model someone/model"):
        conjoin("search", recorded("someone/model"), "--text", "a")


def test_a_recorded_model_runs_no_code_of_its_own(recorded, tiny_checkpoints, tmp_path):
    folder = shutil.copytree(tiny_checkpoints["bert"], tmp_path / "evil")
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | code))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    with pytest.raises(ValueError, match="needs Python code from its own folder"):
        conjoin("search", recorded(folder), "--text", "a", "--trust-remote-code")
    assert not (tmp_path / "mark").exists()


def test_code_beside_the_recorded_model_is_not_run(model, data, shop, tmp_path, search):
    shutil.copytree(model, tmp_path / "model")
    conjoin("encode", tmp_path / "model", data, "--only", "image", "--out", shop)
    for file in (tmp_path / "model").glob("*.py"):
        file.write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    assert search("-k", 1)["results"][0]["id"] == "blue" and not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_a_pipe_gets_a_handful_of_lines(model, data, tmp_path):
    command = [sys.executable, "-m", "conjoin", "encode", str(model), str(data), "--out", str(tmp_path / "new")]
    piped = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    assert piped.splitlines()[-2:] == [
        f"7 vectors of 16 dimensions in {tmp_path / 'new'}",
        f"next: conjoin search {tmp_path / 'new'} --text ...",
    ]
    assert len(piped.splitlines()) <= 4 and "\r" not in piped and "%|" not in piped


def test_quiet_is_quiet(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for words, hidden in (((), ""), (("--quiet",), "1")):
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")
        assert main(["encode", str(model), str(data), "--out", str(tmp_path / "new"), *words]) == 0
        assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == hidden
