"""Data, archives and checksums name only files of their own folder; URLs are fetched only when that is allowed."""

import json

import pytest

from conjoin import JointEncoderModel, TokenFusionModel
from conjoin.cli.main import main
from conjoin.data import load_pairs
from conjoin.hub.build import image_text_processor, mllm_processor, score_fusion_model, towers_model
from conjoin.processing import load_image
from conjoin.processing.urls import ALLOW_URLS
from conjoin.retrieval import Collection, encode_collection
from conjoin.retrieval.pictures import picture_folders
from conjoin.serving.search_page import write_search_page
from conjoin.storage import DamagedError, check_checksums
from conjoin.trainers.solar_teachers import Teachers
from hostile import CANARY, encoded, outside_paths, picture
from test_hostile_inputs import guarded
from tiny_encoder import tiny_encoder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv(ALLOW_URLS, raising=False)
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["../outside.png", "/etc/passwd", "a/../../outside.png", "a\\b"])
def test_checksums_name_files_of_their_folder(folder, name):
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(DamagedError, match=r"SHA256SUMS' is truncated or damaged|is missing"), guarded(name):
        check_checksums(folder, "remove it")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "url",
    [
        "zip://a.png::{outside}",
        "zip://a.png::https://127.0.0.1:9/a.zip",
        "file://{outside}",
        "simplecache::https://127.0.0.1:9/a.png",
        "hf://datasets/a/b/a.png",
        "HTTP://127.0.0.1:9/a.png",
    ],
)
def test_chained_and_remote_urls(url, streaming, folder):
    outside_paths(folder)
    url = url.format(outside=folder.parent / f"{CANARY}.png")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": url, "text": "a"}) + "\n")
    for source in (folder / "metadata.jsonl", folder):
        with guarded(url), pytest.raises((ValueError, FileNotFoundError), match="row 0"):
            list(load_pairs(source, streaming=streaming))


@pytest.mark.parametrize("allowed", [False, True])
def test_pictures_that_a_collection_names(folder, allowed, monkeypatch, capsys):
    """A stranger's collection that names a file of this machine: nothing shows or publishes it, unless allowed."""
    secret = folder.parent / "secret.png"
    secret.write_bytes(encoded(picture()))
    encode_collection([{"id": "a", "text": "a", "image": str(secret)}], tiny_encoder(), folder / "collection")
    monkeypatch.setattr("conjoin.retrieval.pictures.load_image", load_image if allowed else pytest.fail)
    if allowed:
        monkeypatch.setenv("CONJOIN_ROOTS", str(folder.parent))
    collection = Collection(folder / "collection")
    (hits,) = collection.search(collection.vectors(), 1)
    folders = picture_folders(collection.uri)
    page = write_search_page("a", hits, folder / "page.html", folders=folders).read_text()
    assert ("data:image" in page, "outside of the collection" in page) == (allowed, not allowed)
    words = ["push", collection.uri, "me/photos", "--keep-pictures", "9", "--dry-run"]
    assert main(words) == (0 if allowed else 2)
    assert ("the file is outside of the dataset" in capsys.readouterr().err) is not allowed


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: image_text_processor(folder, folder),
        lambda folder: mllm_processor(folder),
        lambda folder: towers_model(JointEncoderModel, folder, folder),
        lambda folder: towers_model(TokenFusionModel, folder, folder),
        lambda folder: score_fusion_model(folder),
        lambda folder: Teachers.from_pretrained(folder, folder),
    ],
)
def test_code_of_a_model_is_neither_run_nor_asked_about(load, folder, monkeypatch):
    """transformers asks on the terminal whether to run it, unless it is told not to."""
    parts = {name: f"code.{name}" for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoImageProcessor")}
    config = {"model_type": "strange", "auto_map": parts, "image_processor_type": "Strange"}
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('this ran')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("it asked"))
    with pytest.raises((ValueError, OSError)):
        load(str(folder))
