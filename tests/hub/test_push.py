import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conjoin.hub import export
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.models.token_fusion import TokenFusionModel
from conjoin.processing import ImageTextProcessor

SCRIPT = Path(__file__).parents[2] / "hub_upload" / "push.py"
RECIPE = {
    "method": "gcl",
    "model": {"vision": "openai/clip-vit-base-patch32", "text": "/home/someone/bert"},
    "data": {"source": "emoji", "mined": "/home/someone/mined"},
    "training": {
        "output_dir": "/home/someone/out",
        "max_steps": 300,
        "num_train_epochs": 3.0,
        "learning_rate": 2e-3,
        "seed": 0,
    },
}
RESULTS = {
    "headline": [{"label": "text → image, R@10", "metric": {"value": 0.451, "low": 0.4, "high": 0.5, "chance": 0.027}}]
}
STRANGERS = (
    *("credentials.json", "optimizer.pt", "training_args.bin", "notes.py", "README.md", ".env", "extra.safetensors"),
    *("checkpoint-2/optimizer.pt", "checkpoint-2/config.json"),
)
BUILD = {
    "joint_encoder": lambda clip, bert: JointEncoderModel.from_backbones(
        clip, bert, hidden_size=24, num_attention_heads=2
    ),
    "score_fusion": lambda clip, bert: ScoreFusionModel.from_clip(clip),
    "token_fusion": TokenFusionModel.from_backbones,
}


class FakeHub(BaseHTTPRequestHandler):
    """The endpoints that a push of a new model calls; `server.log` holds the calls, `server.files` what arrived."""

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.log.append(self.path)
        if self.server.status != 200:
            return self._answer({"error": "no"}, self.server.status)
        if self.path.endswith("/repos/create"):
            self.server.created = json.loads(raw)
            return self._answer({"url": f"{self.server.url}/me/model", "name": "me/model"})
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(raw)["files"]]
            modes = {True: "lfs", False: "regular"}
            found = [
                {"path": f, "uploadMode": modes[f.endswith(".safetensors")], "shouldIgnore": False} for f in files
            ]
            return self._answer({"files": found})
        if self.path.endswith("/objects/batch"):
            upload = {"upload": {"href": f"{self.server.url}/store", "header": {}}}
            objects = [o | {"authenticated": True, "actions": upload} for o in json.loads(raw)["objects"]]
            return self._answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            for entry in map(json.loads, raw.splitlines()):
                if entry["key"] != "header":
                    self.server.files[entry["value"]["path"]] = entry["value"]
            return self._answer({"commitUrl": f"{self.server.url}/me/model/commit/1", "commitOid": "1" * 40})
        return self._answer({"warnings": [], "errors": []})

    def do_PUT(self):
        stored = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.stored.add(hashlib.sha256(stored).hexdigest())
        self._answer({})

    def do_GET(self):
        self._answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

    def _answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.log, server.files, server.stored, server.status = [], {}, set(), 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", params=sorted(BUILD))
def folder(request, tiny_checkpoints, tmp_path_factory):
    clip, bert = tiny_checkpoints["clip"], tiny_checkpoints["bert"]
    text = clip if request.param == "score_fusion" else bert
    saved = tmp_path_factory.mktemp(request.param)
    export(BUILD[request.param](clip, bert), ImageTextProcessor.from_backbones(clip, text), saved)
    (saved / "recipe.json").write_text(json.dumps(RECIPE))
    (saved / "results.json").write_text(json.dumps(RESULTS))
    (saved / "checkpoint-2").mkdir()
    for name in STRANGERS:
        (saved / name).write_text("secret")
    (saved / "link.json").symlink_to("/etc/hostname")
    return saved


def push(tmp_path, *arguments, endpoint="http://127.0.0.1:9"):
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_fake",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=60)


def test_pushes_the_folder_and_the_card_in_one_commit(hub, folder, tmp_path):
    before = sorted(path.name for path in folder.iterdir())
    left_out = {"results.json", "link.json", "checkpoint-2"} | {name for name in STRANGERS if "/" not in name}
    result = push(tmp_path, folder, "me/model", "--private", "--revision", "trial", endpoint=hub.url)
    assert result.returncode == 0, result.stderr
    assert f"{hub.url}/me/model/commit/1" in result.stdout
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    assert set(hub.files) == (set(before) - left_out) | {"README.md"}
    assert {"item_inputs.py", "modules.json", "tokenizer.json"} <= set(hub.files)
    told = result.stderr.partition("left out: ")[2].splitlines()[0].split(", ")
    assert set(told) == (left_out - {"checkpoint-2"}) | {"checkpoint-2/"}
    recipe = json.loads(base64.b64decode(hub.files["recipe.json"]["content"]))
    assert recipe["model"] == {"vision": "openai/clip-vit-base-patch32", "text": "bert"}
    assert (recipe["data"]["mined"], recipe["training"]["output_dir"]) == ("mined", "out")
    assert hub.files["model.safetensors"]["oid"] in hub.stored
    assert any(path.endswith("/commit/trial") for path in hub.log)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_card_says_what_the_folder_says(folder, tmp_path):
    result = push(tmp_path, folder, "me/model", "--dry-run", "--license", "mit", "--results", folder / "results.json")
    assert result.returncode == 0, result.stderr
    card = result.stdout
    assert "license: mit" in card and "- openai/clip-vit-base-patch32" in card
    assert "/home/someone" not in card and "`bert`" in card
    assert "| steps | 300 |" in card and "epochs" not in card
    assert "| text → image, R@10 | 45.1 % | 40.0 to 50.0 | 2.7 % |" in card
    assert "CC BY-SA 4.0" in card and 'SentenceTransformer("me/model"' in card
    assert "{{" not in card and "{%" not in card


def test_a_link_among_the_files_of_the_model_is_refused(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True)
    (copy / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (copy / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    result = push(tmp_path, copy, "me/model", "--dry-run")
    assert result.returncode == 2 and "tokenizer.json' is a symbolic link" in result.stderr


@pytest.mark.parametrize(("status", "message"), [(401, "hf auth login"), (403, "a token that may write")])
def test_refusal_says_what_to_do(hub, folder, tmp_path, status, message):
    hub.status = status
    result = push(tmp_path, folder, "me/model", endpoint=hub.url)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_mistakes_are_one_line(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((tmp_path / "absent", "me/model"), "no folder"),
        ((tmp_path / "empty", "me/model"), "lacks config.json, modules.json, processor_config.json, *.safetensors"),
        ((folder, "me/too/deep"), "me/too/deep"),
        ((folder, "me/model"), "cannot reach the Hub"),
    ):
        result = push(tmp_path, *arguments)
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
