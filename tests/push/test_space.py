import io
import json
import re
import shutil

import pytest
import yaml
from PIL import Image

from conjoin.cli.main import main
from conjoin.push import model_upload, space_upload
from conjoin.retrieval import Collection, encode_collection, load_encoder
from conjoin.retrieval.pictures import read_picture
from conjoin.serving.searcher import Searcher
from tiny_serving import png, uri

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from conjoin.serving.endpoint import make_endpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory, own_export):
    """A joint encoder, and its collection of two pictures."""
    folder = tmp_path_factory.mktemp("space")
    shutil.copytree(own_export[0], folder / "model")
    rows = []
    for colour in ("red", "blue"):
        (folder / f"{colour}.png").write_bytes(png(colour, (600, 300)))
        rows.append({"id": colour, "image": str(folder / f"{colour}.png"), "metadata": {"text": f"a {colour} thing"}})
    encode_collection(rows, load_encoder(folder / "model"), folder / "collection")
    return folder


@pytest.fixture(autouse=True)
def root(folder, monkeypatch):
    monkeypatch.setenv("CONJOIN_ROOTS", str(folder))


def test_a_space_runs_from_its_own_files(folder, tmp_path, monkeypatch):
    upload = space_upload(folder / "collection", "me/things", tmp_path / "work", license="mit")
    for name, file in upload.files.items():
        target = tmp_path / "space" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file) if isinstance(file, bytes) else shutil.copy(file, target)
    card = yaml.safe_load((tmp_path / "space/README.md").read_text().split("---")[1])
    assert (card["title"], card["sdk"], card["app_port"], card["license"]) == ("things", "docker", 7860, "mit")
    assert not [
        path
        for path in (tmp_path / "space").rglob("*")
        if path.is_file() and str(folder).encode() in path.read_bytes()
    ]
    monkeypatch.chdir(tmp_path / "space")
    searcher = Searcher.load("collection", "model")
    best = searcher.search([{"image": Image.new("RGB", (600, 300), "blue")}], 1)[0][0]
    assert (best.id, best.row["text"]) == ("blue", "a blue thing")
    assert best.row["image"] == "blue.png" and Image.open(io.BytesIO(searcher.picture("blue"))).size == (512, 256)
    (command,) = re.findall("^CMD (.+)$", (tmp_path / "space/Dockerfile").read_text(), re.MULTILINE)
    pages = []
    monkeypatch.setattr("conjoin.serving.http.run_server", lambda *app, **how: pages.append(app))
    assert main(json.loads(command)[1:]) == 0
    assert pages[0][1:] == ("0.0.0.0", card["app_port"])
    assert TestClient(pages[0][0]).get("/page.json").json()["sides"][0]["rows"] == 2


def test_the_sample_is_pushed_as_a_model_and_in_a_space(tmp_path):
    """As any folder of sentence-transformers: what is pushed gives the same vectors."""
    sample = load_encoder("sample", device="cpu")
    rows = [{"id": str(number), "text": text} for number, text in enumerate(("a lamp", "soup"))]
    encode_collection(rows, sample, tmp_path / "rows")
    uploads = [model_upload("sample", "me/sample"), space_upload(tmp_path / "rows", "me/space", tmp_path)]
    for upload, below in zip(uploads, ("", "model/"), strict=True):
        folder = tmp_path / upload.kind
        for name, content in upload.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        again = load_encoder(folder / below, device="cpu")
        assert again.fingerprint == sample.fingerprint
    assert "A model of sentence-transformers: Router, Normalize." in uploads[0].files["README.md"].decode()


def test_the_command_lists_the_files(folder, capsys):
    assert main(["push", str(folder / "collection"), "me/things", "--type", "space", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "collection/data/train.lance/_refs/tags/published.json" in printed.err
    assert "sdk: docker" in printed.out


def test_several_images_are_averaged_by_a_model_of_one(folder):
    searcher = Searcher.load(folder / "collection")
    assert searcher.encoder.input_type == "avg"
    images = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    assert len(searcher.search([{"image": images, "text": "both"}], 2)[0]) == 2
    assert Searcher.load(folder / "collection", input_type="cat").encoder.input_type == "cat"


def test_a_query_and_a_result_are_explained_by_an_image_and_a_text(folder):
    searcher = Searcher.load(folder / "collection")
    ask = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1").post
    image = uri(png("red"))
    for item, titles in {
        "a red thing": ["The result's image and your text"],
        (None, image): ["Your image and the result's text"],
        ("a thing", image): ["The result's image and your text", "Your image and the result's text"],
    }.items():
        item = item if isinstance(item, str) else {"text": item[0], "image": item[1]}
        pairs = ask("/explain", json={"item": item, "id": "red"}).json()
        assert [pair["title"] for pair in pairs] == titles
        for pair in pairs:
            assert -1 <= pair["similarity"] <= 1 and len(pair["images"]) == 2
            assert all(len(colour) == 3 for _, _, colour in pair["words"])
    like = ask("/explain", json={"item": {"id": "blue", "part": "image"}, "id": "red"}).json()
    assert [pair["title"] for pair in like] == ["Your image and the result's text"]
    wrong = ask("/explain", json={"item": "a", "id": "green"})
    assert wrong.status_code == 422 and "no row 'green'" in wrong.json()["error"]["message"]


def test_several_pictures_of_a_row_are_one(folder, tmp_path):
    pictures = [str(folder / f"{colour}.png") for colour in ("red", "blue")]
    encoder = load_encoder(folder / "model", input_type="avg")
    encode_collection([{"id": "both", "image": pictures}], encoder, tmp_path / "collection")
    searcher = Searcher.load(tmp_path / "collection", folder / "model")
    assert searcher.search(["a red thing"], 1)[0][0].row["image"] == pictures
    assert len(searcher.explain("a red thing", [], "both")[0]["images"]) == 2
    space_upload(tmp_path / "collection", "me/things", tmp_path / "work", model=folder / "model")
    shown = read_picture(Collection(tmp_path / "work/collection").rows(["both"], pictures=True)[0], ())
    assert shown.size == (512, 128)
    assert shown.getpixel((9, 9))[0] > 200 and shown.getpixel((500, 9))[2] > 200
