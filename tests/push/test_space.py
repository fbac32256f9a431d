import shutil

import pytest
import yaml
from PIL import Image

from conjoin.cli.main import main
from conjoin.push.model import model_upload
from conjoin.push.space import SPACE, space_upload
from conjoin.retrieval import Collection, encode_collection, load_encoder
from conjoin.retrieval.pictures import read_picture
from conjoin.serving.searcher import Searcher
from conjoin.serving.why import explain_result
from tiny_serving import png


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
    assert (card["title"], card["sdk"], card["app_file"], card["license"]) == ("things", "gradio", "app.py", "mit")
    assert card["sdk_version"].startswith("6.")
    assert not [
        path
        for path in (tmp_path / "space").rglob("*")
        if path.is_file() and str(folder).encode() in path.read_bytes()
    ]
    monkeypatch.chdir(tmp_path / "space")
    searcher = Searcher.load("collection", "model")
    best = searcher.search([{"image": Image.new("RGB", (600, 300), "blue")}], 1, pictures=True)[0][0]
    assert (best.id, best.row["text"]) == ("blue", "a blue thing")
    assert best.row["image"] == "blue.png" and read_picture(best.row, ()).size == (512, 256)
    compile((SPACE / "app.py").read_text(), "app.py", "exec")


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
    assert "sdk: gradio" in printed.out


def test_several_images_are_averaged_by_a_model_of_one(folder):
    searcher = Searcher.load(folder / "collection")
    assert searcher.encoder.input_type == "avg"
    images = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    assert len(searcher.search([{"image": images, "text": "both"}], 2)[0]) == 2
    assert Searcher.load(folder / "collection", input_type="cat").encoder.input_type == "cat"


def test_a_query_and_a_result_are_explained_by_an_image_and_a_text(folder):
    searcher = Searcher.load(folder / "collection")
    row = searcher.search(["a red thing"], 1)[0][0].row
    html = explain_result(searcher, "a <red> thing", [], row)
    assert html.count("<figure>") == 2
    assert "The result&#39;s image and your text" in html
    assert "<red>" not in html
    image = Image.new("RGB", (9, 9), "red")
    assert explain_result(searcher, None, [image], row).count("<figure>") == 2
    assert explain_result(searcher, "a thing", [image], row).count("<figure>") == 4
    with pytest.raises(match="compares an image with a text"):
        explain_result(searcher, None, [image], {"image": row["image"]})
    with pytest.raises(match="no such pair"):
        explain_result(searcher, "a thing", [], {"text": "another"})


def test_several_pictures_of_a_row_are_one(folder, tmp_path):
    pictures = [str(folder / f"{colour}.png") for colour in ("red", "blue")]
    encoder = load_encoder(folder / "model", input_type="avg")
    encode_collection([{"id": "both", "image": pictures}], encoder, tmp_path / "collection")
    searcher = Searcher.load(tmp_path / "collection", folder / "model")
    row = searcher.search(["a red thing"], 1)[0][0].row
    assert row["image"] == pictures
    assert explain_result(searcher, "a red thing", [], row).count("<img") == 2
    space_upload(tmp_path / "collection", "me/things", tmp_path / "work", model=folder / "model")
    shown = read_picture(Collection(tmp_path / "work/collection").rows(["both"], pictures=True)[0], ())
    assert shown.size == (512, 128)
    assert shown.getpixel((9, 9))[0] > 200 and shown.getpixel((500, 9))[2] > 200
