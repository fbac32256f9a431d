"""A model that does not exist is refused at once, without the retries of the libraries."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conjoin.hub import check_model, load_model
from conjoin.retrieval import load_encoder
from conjoin.training import ModelArguments, build_model

UNREACHABLE = "http://127.0.0.1:9"


class EmptyHub(BaseHTTPRequestHandler):
    """A hub without repositories."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """Use the hub at an address, and an empty cache."""

    def use(address):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)

    return use


def test_without_a_network_the_message_names_the_model_and_a_recipe(endpoint):
    endpoint(UNREACHABLE)
    started = time.monotonic()
    for load in (check_model, load_model, load_encoder):
        with pytest.raises(FileNotFoundError, match=r"^cannot load the model 'o/m': .* the hub cannot be reached: \S"):
            load("o/m")
    with pytest.raises(FileNotFoundError, match=r"model.text: .*'o/m'.*downloads nothing is '.*sample.yaml'$"):
        build_model(ModelArguments(vision="sample", text="o/m"))
    assert time.monotonic() - started < 4


def test_a_name_that_the_hub_does_not_know(endpoint):
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint(f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(FileNotFoundError, match="no such folder, and on the hub no such model that you may read"):
        check_model("o/m")
    server.shutdown()
    server.server_close()


def test_what_cannot_be_a_repository_needs_no_request(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `runs/demo/model` may be below the current folder
    endpoint("no address at all")
    for name in ("runs/demo/model", "/absent", "./absent", "../x", "~/x", str(tmp_path / "absent"), "a b"):
        with pytest.raises(FileNotFoundError, match="there is no such folder, and models on the hub are named"):
            check_model(name)
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(FileNotFoundError, match="it is a file"):
        check_model(tmp_path / "weights.bin")
    with pytest.raises(FileNotFoundError, match=r"neither a config.json nor a modules.json"):
        check_model(tmp_path)


def test_a_folder_and_a_cached_model_pass(endpoint, tmp_path, tiny_checkpoints):
    endpoint(UNREACHABLE)
    check_model(tiny_checkpoints["clip"])
    snapshot = tmp_path / "cache/models--o--m/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "cache/models--o--m/refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    check_model("o/m")
