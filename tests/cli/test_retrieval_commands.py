import json
import shutil
import subprocess
import sys

import pytest

from conjoin.cli.main import main
from conjoin.retrieval import Collection, ItemEncoder
from conjoin.retrieval.collection_table import open_table, publish, read_metadata, write_metadata
from tiny_commands import COLOURS, conjoin, write_rows


@pytest.fixture(scope="module")
def built(model, data, tmp_path_factory):
    """A collection of the images."""
    folder = tmp_path_factory.mktemp("built") / "squares"
    conjoin("encode", model, data, "--only", "image", "--out", folder, "--quiet", "--no-bf16")
    return folder


def test_an_image_finds_itself(built, data, capsys):
    conjoin("search", built, "--image", data / "blue.png", "-k", 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "score", "id", "image"]
    assert lines[1].split() == ["1", "1.0000", "blue", str(data / "blue.png")]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]


def test_text_and_composed_queries_as_json(built, data, model, capsys):
    conjoin("search", built, "--text", "a red square", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["query"] == {"text": "a red square"}
    assert sorted(hit["id"] for hit in found["results"]) == sorted(COLOURS)
    assert [hit["rank"] for hit in found["results"]] == list(range(1, 8))
    composed = ["--image", data / "red.png", "--text", "a blue square"]
    conjoin("search", built, *composed, "--model", model, "--json", "-k", 2)
    query = {"image": str(data / "red.png"), "text": "a blue square"}
    expected = Collection.open(built).search(ItemEncoder.from_pretrained(model).encode([query]), 2)
    found = json.loads(capsys.readouterr().out)
    assert [hit["id"] for hit in found["results"]] == expected.ids[0]


def priced(data):
    return [{"id": colour, "image": f"{data}/{colour}.png", "price": price} for price, colour in enumerate(COLOURS)]


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_results_come_with_texts_image_paths_and_kept_columns(data, model, tmp_path, capsys, monkeypatch, streaming):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    rows = [row | {"text": f"a {row['id']}\nsquare " * 9} for row in priced(data)]
    table = write_rows(tmp_path / "table.jsonl", rows)
    command = ["encode", model, table, "--out", tmp_path / "shop", "--quiet"]
    conjoin(*command, *streaming, "--only", "image", "--keep", "price", "text")
    capsys.readouterr()
    query = ["search", tmp_path / "shop", "--image", data / "blue.png", "-k", 2]
    conjoin(*query, "--json")
    assert json.loads(capsys.readouterr().out)["results"][0]["row"] == {
        "image": str(data / "blue.png"),
        "price": 2,
        "text": "a blue\nsquare " * 9,
    }
    conjoin(*query)
    header, first, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "score", "id", "text", "price", "image"]
    assert first.split()[:3] == ["1", "1.0000", "blue"]
    assert first.endswith(f"a blue square a b…  2      {data / 'blue.png'}") and first.index("a blue") == header.index(
        "text"
    )
    conjoin(*command, *streaming, "--only", "image", "--keep", "price")  # the text is kept no longer
    assert "0 rows added, 7 replaced, 0 removed, 0 unchanged; 0 encoded" in capsys.readouterr().out
    with pytest.raises(ValueError, match="was made with only 'image', not 'text'"):
        conjoin(*command, *streaming, "--only", "text")


def test_a_csv_is_filtered_by_numbers(data, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    lines = [f"{colour},{data}/{colour}.png,{9 + price}\n" for price, colour in enumerate(COLOURS)]
    (tmp_path / "shop.csv").write_text("id,image,price\n" + "".join(lines))
    for keep in ("price", "price:number"):
        shop = tmp_path / f"shop-{keep}"
        conjoin("encode", model, tmp_path / "shop.csv", "--only", "image", "--keep", keep, "--quiet", "--out", shop)
    capsys.readouterr()
    conjoin("search", shop, "--image", data / "red.png", "-k", 9, "--where", "price < 11", "--json")
    found = {hit["id"]: hit["row"]["price"] for hit in json.loads(capsys.readouterr().out)["results"]}
    assert found == {COLOURS[0]: 9, COLOURS[1]: 10}
    with pytest.raises(ValueError, match=r"price \(string\); `conjoin encode --keep NAME:number` reads texts as"):
        conjoin("search", tmp_path / "shop-price", "--image", data / "red.png", "--where", "price < 11")


def test_a_collection_keeps_its_precision(data, model, tmp_path, monkeypatch):
    """Whichever a machine computes faster in: rows that are encoded later are like the others."""
    for faster in (True, False):
        monkeypatch.setattr("conjoin.ops.devices._is_bf16_faster", lambda kind, faster=faster: faster)
        conjoin("encode", model, data, "--only", "image", "--quiet", "--out", tmp_path / "store")
        assert Collection.open(tmp_path / "store").metadata["key"]["precision"] == "bfloat16"
    with pytest.raises(ValueError, match="was made with precision 'bfloat16', not 'full'"):
        conjoin("encode", model, data, "--only", "image", "--out", tmp_path / "store", "--no-bf16")


def test_a_living_collection(data, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    lines = priced(data)

    def encode_again(*options):
        command = ["encode", model, write_rows(tmp_path / "table.jsonl", lines), "--out", tmp_path / "shop"]
        conjoin(*command, "--only", "image", "--keep", "price", "--quiet", *options)
        return capsys.readouterr().out

    def search_shop(*options):
        conjoin("search", tmp_path / "shop", "--image", data / "blue.png", "-k", 9, *options, "--json")
        return json.loads(capsys.readouterr().out)

    assert "7 rows added, 0 replaced, 0 removed, 0 unchanged; 7 encoded" in encode_again("--sync")
    lines[3]["price"] = 50
    gone, new = lines.pop(2), lines[0] | {"id": "crimson", "price": 99}
    assert "0 rows added, 1 replaced, 0 removed, 5 unchanged; 0 encoded" in encode_again()
    assert gone["id"] in [hit["id"] for hit in search_shop()["results"]]
    lines.append(new)
    assert "1 rows added, 0 replaced, 1 removed, 6 unchanged; 1 encoded" in encode_again("--sync")
    assert gone["id"] not in [hit["id"] for hit in search_shop()["results"]]
    found = search_shop("--where", "price > 40 and id != 'red'", "--html", tmp_path / "pages" / "page.html")
    assert {(hit["id"], hit["row"]["price"]) for hit in found["results"]} == {("crimson", 99), (lines[2]["id"], 50)}
    assert found["where"] == "price > 40 and id != 'red'"
    page = (tmp_path / "pages" / "page.html").read_text()
    assert page.count("data:image/") == 3 and "crimson" in page and "price &gt; 40" in page
    assert search_shop("--where", "price > 1000")["results"] == []
    conjoin("search", tmp_path / "shop", "--image", data / "blue.png", "--where", "price > 1000")
    assert capsys.readouterr().out == "nothing found: the condition holds for no row\n"
    with pytest.raises(ValueError, match=r"No field named colour.*; the columns are id \(string\), text"):
        search_shop("--where", "colour = 1", "--model", "nowhere")


def test_words_and_vectors_together(data, model, tmp_path, capsys):
    conjoin("encode", model, data, "--out", tmp_path / "both", "--quiet")
    capsys.readouterr()
    conjoin("search", tmp_path / "both", "--text", "orange", "--hybrid", "-k", 1)
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "orange"
    with pytest.raises(ValueError, match="--hybrid finds the words of --text: pass one"):
        conjoin("search", tmp_path / "both", "--image", data / "red.png", "--hybrid")


def test_weights_of_the_parts_of_a_query(built, data, capsys):
    def scores(*options):
        conjoin("search", built, "--json", *options)
        return {hit["id"]: hit["score"] for hit in json.loads(capsys.readouterr().out)["results"]}

    image, text = ["--image", data / "red.png"], ["--text", "a blue square"]
    assert scores(*image, *text, "--weight", "image=1", "text=0") == pytest.approx(scores(*image), abs=1e-5)
    both, alone, words = scores(*image, *text, "--weight", "image=1", "text=2"), scores(*image), scores(*text)
    ratios = [(alone[colour] + 2 * words[colour]) / both[colour] for colour in COLOURS]
    assert ratios == pytest.approx([ratios[0]] * 7, rel=1e-3)
    with pytest.raises(ValueError, match="its text has no weight"):
        conjoin("search", built, *image, *text, "--weight", "image=1")
    for wrong in ("colour=1", "image=much"):
        with pytest.raises(SystemExit):
            conjoin("search", built, *image, "--weight", wrong)
        assert "=NUMBER" in capsys.readouterr().err


def test_products_with_several_pictures(model, data, tmp_path, capsys, monkeypatch):
    table = [f"{colour},{data}/{colour}.png,{'bright' if 'l' in colour else 'dark'}" for colour in COLOURS]
    (tmp_path / "table.csv").write_text("\n".join(["id,image,product", *table]))
    monkeypatch.setenv("CONJOIN_ROOTS", "")
    shop = tmp_path / "shop"
    encode_shop = ["encode", model, tmp_path / "table.csv", "--root", data, "--only", "image", "--keep", "product"]
    conjoin(*encode_shop, "--out", shop, "--quiet")
    monkeypatch.setenv("CONJOIN_ROOTS", "")  # each command is a process
    query = ["search", shop, "--image", data / "blue.png"]
    capsys.readouterr()
    conjoin(*query, "--group-by", "product", "-k", 2, "--json")
    found = json.loads(capsys.readouterr().out)["results"]
    assert [hit["rank"] for hit in found] == [1, 2] and found[0]["row"]["product"] == "bright"
    assert found[1]["row"]["product"] == "dark" and found[0]["score"] > 0.9999
    with pytest.raises(ValueError, match="no column 'brand'; it has id, text, image, product"):
        conjoin(*query, "--group-by", "brand", "--model", "nowhere")
    conjoin(*query, "--html", tmp_path / "page.html", "--title-column", "product", "-k", 1)
    printed, page = capsys.readouterr(), (tmp_path / "page.html").read_text()
    assert "<p>bright</p>" in page and "<dt>product" not in page and page.count(">blue<") == 1
    hint = f"add --root {data}"
    assert hint in printed.err and hint in page and hint not in printed.out
    conjoin(*query, "--html", tmp_path / "page.html", "--root", data, "-k", 1)
    assert "--root" not in capsys.readouterr().err + (tmp_path / "page.html").read_text()


def test_nothing_similar(built, data, tmp_path, capsys):
    query = ["search", built, "--image", data / "blue.png"]
    conjoin(*query, "--json")
    scores = [hit["score"] for hit in json.loads(capsys.readouterr().out)["results"]]
    conjoin(*query, "--min-score", scores[2], "--json")
    answer = json.loads(capsys.readouterr().out)
    assert [hit["score"] for hit in answer["results"]] == [score for score in scores if score >= scores[2]]
    assert answer["min_score"] == scores[2] and answer["best_score"] == scores[0]
    conjoin(*query, "--min-score", "1.1", "--html", tmp_path / "page.html")
    line = "nothing similar found (best score 1.0000)"
    assert capsys.readouterr().out == line + "\n" and line in (tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="--min-score needs scores of similarity"):
        conjoin("search", built, "--text", "blue", "--hybrid", "--min-score", "0.1")


def test_encode_says_what_next_and_stores_what_was_asked(model, data, tmp_path, capsys):
    arguments = ["encode", model, data, "--dtype", "float16", "--batch-size", 2, "--quiet"]
    conjoin(*arguments, "--out", tmp_path / "a")
    assert f"7 vectors of 16 dimensions in {tmp_path / 'a'}\nnext: conjoin search" in capsys.readouterr().out
    collection = Collection.open(tmp_path / "a")
    assert collection.ids == list(COLOURS) and collection.dtype == "float16"
    assert collection.model.name == str(model.resolve())
    conjoin(*arguments, "--out", tmp_path / "b", "--streaming")
    assert (Collection.open(tmp_path / "b").vectors() == collection.vectors()).all()


def test_thumbnails_are_shown_where_the_pictures_are_gone(model, data, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "pictures")
    command = ["encode", model, tmp_path / "pictures", "--only", "image", "--out", tmp_path / "squares", "--quiet"]
    conjoin(*command, "--keep-pictures", 8)
    with pytest.raises(ValueError, match="--keep-pictures must be at least 1, got 0"):
        conjoin(*command, "--keep-pictures", 0)
    shutil.rmtree(tmp_path / "pictures")
    capsys.readouterr()
    conjoin("search", tmp_path / "squares", "--text", "red", "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("data:image/") == 7
    assert "JFIF" not in capsys.readouterr().out


def test_verify(model, data, tmp_path, capsys):
    conjoin("encode", model, data, "--out", tmp_path / "squares", "--quiet")
    assert main(["verify", str(tmp_path / "squares")]) == 0
    assert "all files are as they were written" in capsys.readouterr().out
    file = next((tmp_path / "squares/data/train.lance/data").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["verify", str(tmp_path / "squares")]) == 2
    assert file.name in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_encode_skips_what_cannot_be_used(model, data, tmp_path, capsys, monkeypatch, streaming):
    monkeypatch.setenv("CONJOIN_ROOTS", str(data))
    lines = [f"{data}/{colour}.png,{colour}" for colour in COLOURS]
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "a.csv").write_text("\n".join(["image,sku", *lines[:3], "broken.jpg,x", *lines[3:], "gone.png,y"]))
    arguments = ["encode", model, tmp_path / "a.csv", "--only", "image", "--out", tmp_path / "new", "--quiet"]
    arguments += streaming
    with pytest.raises((ValueError, FileNotFoundError), match=r"broken\.jpg|gone\.png"):
        conjoin(*arguments)
    conjoin(*arguments, "--on-error", "skip")
    assert (
        f"skipped 2 rows that cannot be used: {tmp_path / 'new' / 'skipped.jsonl'}\n7 vec" in capsys.readouterr().out
    )
    new = Collection.open(tmp_path / "new")
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


@pytest.mark.slow
def test_two_processes_share_a_collection(built, model, data, tmp_path, launch):
    printed = launch("encode", model, data, "--only", "image", "--out", tmp_path / "new", "--quiet", "--no-bf16")
    assert printed.count(f"7 vectors of 16 dimensions in {tmp_path / 'new'}") == 1
    assert (Collection.open(tmp_path / "new").vectors(COLOURS) == Collection.open(built).vectors(COLOURS)).all()


def test_index(model, data, tmp_path, capsys):
    folder = tmp_path / "squares"
    conjoin("encode", model, data, "--only", "image", "--out", folder, "--quiet", "--dims", 8)
    assert "7 vectors of 8 dimensions" in capsys.readouterr().out
    conjoin("index", folder, "--kind", "ivf_flat")
    assert "7 rows indexed (ivf_flat), recall@10 1.000\nnext: conjoin search" in capsys.readouterr().out
    conjoin("index", folder, "--faiss", "Flat")
    assert f"FAISS index Flat of 7 vectors in {folder}, recall@10 1.000" in capsys.readouterr().out
    conjoin("search", folder, "--image", data / "green.png", "-k", 1)  # the query is cut to 8 numbers, too
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "green"
    conjoin("index", folder, "--kind", "none")
    assert "7 rows indexed\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--probes must be at least 1, got 0"):
        conjoin("index", folder, "--probes", 0)
    with pytest.raises(ValueError, match="--ray-workers 2 needs --engine ray"):
        conjoin("encode", model, data, "--out", folder, "--ray-workers", 2)


class TestErrors:
    def test_nothing_to_search_for(self, built):
        with pytest.raises(ValueError, match="nothing to search for: pass --text, --image or both"):
            conjoin("search", built)

    def test_another_model(self, built, tiny_checkpoints):
        with pytest.raises(ValueError, match=r"the collection was made with model .*, these queries come from"):
            conjoin("search", built, "--text", "a", "--model", tiny_checkpoints["clip"])

    @pytest.fixture
    def recorded(self, built, tmp_path):
        """Copies the collection and lets it record another model."""

        def record(name):
            folder = shutil.copytree(built, tmp_path / "copy")
            table = open_table(folder)
            metadata = read_metadata(table)
            write_metadata(table, metadata | {"details": metadata["details"] | {"model": str(name)}})
            publish(folder, table)
            return folder

        return record

    def test_model_has_moved(self, recorded, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"the model that made the collection is no longer at .*gone': pas"
        ):
            conjoin("search", recorded(tmp_path / "gone"), "--text", "a")

    @pytest.mark.parametrize("kind", ["hub name", "stock", "empty"])
    def test_only_a_local_model_of_this_package_is_loaded_on_the_word_of_a_collection(
        self, recorded, tiny_checkpoints, tmp_path, kind
    ):
        (tmp_path / "empty").mkdir()
        models = {"hub name": "someone/model", "stock": tiny_checkpoints["clip"], "empty": str(tmp_path / "empty")}
        with pytest.raises(ValueError, match=f"not a local model of this package: pass --model {models[kind]} to"):
            conjoin("search", recorded(models[kind]), "--text", "a")

    def test_code_beside_the_recorded_model_is_not_run(self, model, data, tmp_path, capsys):
        shutil.copytree(model, tmp_path / "model")
        conjoin("encode", tmp_path / "model", data, "--only", "image", "--out", tmp_path / "new", "--quiet")
        for file in (tmp_path / "model").glob("*.py"):
            file.write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
        capsys.readouterr()
        conjoin("search", tmp_path / "new", "--image", data / "green.png", "-k", 1)
        assert capsys.readouterr().out.splitlines()[1].split()[2] == "green" and not (tmp_path / "mark").exists()


def test_a_model_with_code_of_its_own_needs_the_option(tiny_checkpoints, data, tmp_path, capsys):
    folder = shutil.copytree(tiny_checkpoints["bert"], tmp_path / "evil")
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | code))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    command = ["encode", str(folder), str(data), "--only", "text", "--out", str(tmp_path / "new")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("conjoin: the model") and "--trust-remote-code" in error and error.count("\n") == 1
    assert not (tmp_path / "mark").exists()


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
    import datasets
    from transformers.utils import logging

    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    datasets.enable_progress_bars()
    try:
        assert main(["encode", str(model), str(data), "--out", str(tmp_path / "new"), "--quiet"]) == 0
        assert datasets.are_progress_bars_disabled()
        assert not logging.is_progress_bar_enabled()
    finally:
        datasets.enable_progress_bars()
