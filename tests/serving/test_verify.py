"""`conjoin verify --against`: a right endpoint is the same, and of a wrong one the step is named."""

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import ImageOps

from conjoin.cli.main import main
from conjoin.processing import parse_items
from conjoin.retrieval import ItemEncoder
from conjoin.serving import Limits
from conjoin.serving.endpoint import make_endpoint
from conjoin.serving.searcher import Searcher
from conjoin.serving.verify import check_endpoint
from tiny_encoder import TinyModel

URL = "http://127.0.0.1"
KINDS = ["text", "text as a message", "long text", "square picture", "wide picture", "picture and text"]


def make_encoder(prompt="Look for it: ", words=None, crop=True, scale=1, width=8):
    """A model of letters and colours that is told something by default, and sees the middle square of pictures."""

    def process(items, instruction=None):
        text, pixels = np.zeros((len(items), 256), np.float32), np.zeros((len(items), 48), np.float32)
        for row, (item, told) in enumerate(zip(parse_items(items), instruction or [None] * len(items), strict=True)):
            read = (prompt if told is None else told) + " ".join(" ".join(item.texts).split()[:words])
            text[row] = np.bincount(np.frombuffer(read.encode(), np.uint8), minlength=256)
            for image in item.images:
                seen = ImageOps.fit(image, [min(image.size)] * 2) if crop else image
                pixels[row] = np.asarray(seen.resize((4, 4))).reshape(-1) / 16
        return {"text": torch.from_numpy(text), "pixels": torch.from_numpy(pixels)}

    model = TinyModel(width=width)
    forward = model.forward
    model.forward = lambda **inputs: _scaled(forward(**inputs), scale)
    return ItemEncoder(model, process, 20)


def _scaled(output, scale):
    output.embeddings = output.embeddings * scale
    return output


@pytest.fixture
def serve(monkeypatch):
    """`serve(app)` answers at `URL`."""

    def at(app):
        monkeypatch.setattr(
            "conjoin.serving.verify.httpx.Client",
            lambda headers, timeout: TestClient(app, base_url=URL, headers=headers),
        )

    return at


def endpoint(encoder):
    return make_endpoint(Searcher(encoder, None, Limits()), keys=["secret"])


@pytest.mark.parametrize("path", ["/v1", "/v1/embeddings", "", "/embed"])
def test_an_endpoint_of_the_same_model(serve, path):
    serve(endpoint(make_encoder()))
    checks = check_endpoint(make_encoder(), URL + path, "secret")
    assert [check.kind for check in checks] == KINDS
    for check in checks:
        assert check.finding == "same" and check.cosine == pytest.approx(1) and not check.differs


@pytest.mark.parametrize(
    ("wrong", "kinds", "finding"),
    [
        ({"prompt": ""}, ["text", "text as a message"], "the endpoint gives no prompt"),
        ({"scale": 3}, KINDS, "does not normalise: lengths are 3 to 3"),
        ({"words": 9}, ["long text"], "reads about the first 9 words of 1,200, the checkpoint 1,"),
        ({"crop": False}, ["wide picture"], "the endpoint squeezes pictures into a square"),
        ({"width": 4}, KINDS, "gives 4 numbers, the checkpoint 8"),
    ],
)
def test_the_wrong_step_is_named(serve, wrong, kinds, finding):
    serve(endpoint(make_encoder(**wrong)))
    checks = check_endpoint(make_encoder(), f"{URL}/v1", "secret")
    differing = [check.kind for check in checks if check.differs]
    assert set(kinds) <= set(differing) and ("long text" in kinds) == ("long text" in differing)
    assert all(finding in check.finding for check in checks if check.kind in kinds)


def test_text_embeddings_inference_takes_texts_alone(serve):
    app, encoder = FastAPI(), make_encoder()

    @app.get("/health")
    def health():
        return None

    @app.post("/embed")
    def embed(body: dict):
        return (encoder.encode(body["inputs"])[:, ::-1]).tolist()

    serve(app)
    found = {check.kind: check.finding for check in check_endpoint(encoder, f"{URL}/embed")}
    assert found["text"].startswith("the endpoint differs in another step") and found["long text"] != "same"
    assert all("no place for them" in found[kind] for kind in KINDS if kind not in ("text", "long text"))


def test_the_command(serve, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("conjoin.retrieval.load_encoder", lambda *args, **options: make_encoder())
    (tmp_path / "key").write_text("secret\n")
    command = ["verify", "model", "--against", f"{URL}/v1", "--api-key-file", str(tmp_path / "key")]
    serve(endpoint(make_encoder()))
    assert main(command) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == KINDS
    serve(endpoint(make_encoder(scale=2)))
    assert main(command) == 2
    assert "differ for text, text as a message, long text" in capsys.readouterr().err
    assert main(command[:-2]) == 2
    assert f"nothing to compare with '{URL}/v1'" in capsys.readouterr().err
