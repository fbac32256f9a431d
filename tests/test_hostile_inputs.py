"""Hostile inputs through processors, models, `encode` and the endpoint: a vector, or an error that says why."""

import base64
import json
import signal
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from conjoin import JointEncoderModel
from conjoin.hub.build import image_text_processor, mllm_model, mllm_processor, towers_model
from conjoin.processing.urls import ALLOW_URLS
from conjoin.retrieval import ItemEncoder, encode_collection
from conjoin.serving import Limits
from conjoin.serving.searcher import Searcher
from hostile import CANARY, EITHER, PAGES, images, items, outside_paths, requests, texts

SECONDS = 20
"""More than any input may take, on a busy machine."""
_watched: list[str] = []


def _note(event, arguments):
    """Note what is opened, outside of the folder of the items, and what is connected to."""
    opened = event == "open" and CANARY in str(arguments[0])
    if _watched and (opened or event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system")):
        _watched.append(f"{event} {str(arguments)[:100]}")


sys.addaudithook(_note)


@contextmanager
def guarded(name):
    """Fail if the block takes too long, opens the file that it must not, or reaches for the network."""

    def stop(*unused):
        raise TimeoutError(f"{name} takes over {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    _watched.append("watching")
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        found = _watched[1:]
        _watched.clear()
    assert not found, f"{name}: {found}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the items; the file that nobody may open lies beside it."""
    folder = tmp_path_factory.mktemp("hostile") / "own"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def surroundings(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv(ALLOW_URLS, raising=False)


@pytest.fixture(scope="module")
def encoders(tiny_checkpoints, mllm_checkpoints):
    """A joint encoder and an MLLM retriever, with their processors."""
    torch.manual_seed(0)
    towers = tiny_checkpoints["dinov2"], tiny_checkpoints["bert"]
    joint = towers_model(JointEncoderModel, *towers, hidden_size=24, num_attention_heads=2, num_vl_layers=2)
    mllm, _ = mllm_checkpoints("qwen2_vl")
    return {
        "joint encoder": ItemEncoder(joint, image_text_processor(*towers)),
        "MLLM": ItemEncoder(mllm_model(mllm, 2), mllm_processor(mllm)),
    }


def are_unit(vectors):
    return bool(np.isfinite(vectors).all() and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3))


def judge(hostile, came):
    """What is wrong with what came of an input; None if that is allowed."""
    return None if came in ("vector", "error") and hostile.allowed in (came, EITHER) else f"{hostile} -> {came}"


def check(hostiles, run):
    """Run each; `run` returns "vector", "error", or what is wrong."""
    wrong = []
    for hostile in hostiles:
        try:
            with guarded(hostile), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow tells of damaged metadata
                came = run(hostile)
        except Exception as error:
            came = f"{type(error).__name__}: {str(error)[:200]}"
        wrong.append(judge(hostile, came))
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "item"])
@pytest.mark.parametrize("name", ["joint encoder", "MLLM"])
def test_processors_and_models(name, kind, encoders, folder):
    encoder = encoders[name]

    def run(hostile):
        item = hostile.value if kind == "item" else {kind: hostile.value}
        try:
            vectors = encoder.encode([item], ids=["it"])
        except (ValueError, FileNotFoundError) as error:
            return "error" if "item 'it'" in str(error) else f"an error without the name: {error}"
        return "vector" if are_unit(np.atleast_2d(vectors)) else "no unit vector"  # a message alone has one

    check({"image": images, "text": texts, "item": lambda: items(folder)}[kind](), run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_collection_skips_what_cannot_be_used(encoders, folder, tmp_path):
    known = [*images(), *texts()]
    rows = [{"id": str(each), each.kind: each.value} for each in known]
    rows += [{"id": str(each), "image": each.value} for each in items(folder)]  # anything may stand in a column
    made = [encode_collection(rows, encoders["joint encoder"], tmp_path, on_error="skip") for _ in range(2)]
    assert made[0].version == made[1].version and made[1].changes.unchanged == len(made[1])
    assert are_unit(made[1].vectors())
    skipped = {row.id: row.reason for row in made[1].skipped}
    assert len(made[1]) + len(skipped) == len(rows) and all(name in reason for name, reason in skipped.items())
    wrong = [judge(each, "error" if str(each) in skipped else "vector") for each in known]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.fixture(scope="module")
def searcher(encoders, tmp_path_factory):
    place = tmp_path_factory.mktemp("serving")
    hit = {"id": PAGES["a closing tag"], "text": PAGES["a script"], "metadata": {"price": 5, "<i>": "<b>"}}
    collection = encode_collection([hit, {"id": "b", "text": "b"}], encoders["joint encoder"], place)
    return Searcher(encoders["joint encoder"], collection, Limits())


@pytest.mark.slow
def test_the_endpoint(searcher, folder):
    from fastapi.testclient import TestClient

    from conjoin.serving.endpoint import make_endpoint

    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1", raise_server_exceptions=False)

    def run(hostile):
        value, codes = hostile.value, []
        if hostile.kind == "image":
            value = "data:image/png;base64," + base64.b64encode(value).decode()
        item = {"image": value} if hostile.kind in ("image", "path") else value
        bodies = [("/search", {"items": [item]})]
        if hostile.kind == "text":
            bodies += [
                ("/search", {"items": ["a"], "where": value}),
                ("/embed", {"items": ["a"], "instruction": value}),
            ]
        elif hostile.kind == "request":
            bodies = [("/search", value), ("/embed", value)]
        for path, body in bodies:
            try:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
            except (TypeError, ValueError, RecursionError):  # JSON cannot hold it
                continue
            answer = client.post(path, content=content, headers={"content-type": "application/json"})
            codes.append(answer.status_code)
            if answer.status_code == 200:
                vectors = answer.json().get("embeddings")
                assert vectors is None or are_unit(vectors)
            else:
                assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], answer.text
        return "vector" if codes[:1] == [200] else "error"

    served = [*images(), *texts(), *requests(), *outside_paths(folder)]
    served += [hostile._replace(allowed=EITHER) for hostile in items(folder)]  # a text among them, or not JSON
    check(served, run)
