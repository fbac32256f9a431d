"""`conjoin app` and `conjoin serve`: their mistakes, and the endpoint as a process."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from conjoin.cli.main import main
from conjoin.serving import Limits
from conjoin.serving.http import run_server
from conjoin.serving.searcher import Searcher


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("app nowhere", "there is no collection in 'nowhere'"),
        ("app a b c", "expected one or two collections"),
        ("app a b --model m", "a model for each or none"),
        ("serve", "there is nothing to serve"),
        ("serve nowhere", "there is no collection in 'nowhere'"),
        ("serve --model m --max-items 0", "--max-items must be at least 1"),
        ("serve --model m --api-key-file keys", "there is no key in 'keys'"),
    ],
)
def test_what_cannot_be_served_is_one_line(words, problem, capsys, tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("# none yet\n\n  # later\n")
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_the_options_of_the_page(monkeypatch):
    pytest.importorskip("fastapi")
    made, columns = [], []
    searcher = SimpleNamespace(collection=None, limits=Limits(), batcher=SimpleNamespace(stop=None), refresh=bool)
    monkeypatch.setattr("conjoin.retrieval.search.check_column", lambda collection, column: columns.append(column))
    monkeypatch.setattr(Searcher, "load", lambda *args, **options: searcher)
    monkeypatch.setattr("conjoin.serving.endpoint.make_endpoint", lambda *args, **how: made.append(how["page"]))
    monkeypatch.setattr("conjoin.serving.http.run_server", lambda *args, **how: None)
    words = "--weight image=0.3 text=0.7 --group-by product --min-score 0.2 --title-column name -k 7"
    more = "--heading Shop --currency EUR --show brand size"
    assert main(["app", "runs/x", *words.split(), *more.split()]) == 0
    assert vars(made[0]) == {
        "heading": "Shop", "title_column": "name", "show": ["brand", "size"], "currency": "EUR", "group_by": "product",
        "weights": {"image": 0.3, "text": 0.7}, "min_score": 0.2, "k": 7, "beside": None,
    }  # fmt: skip
    assert columns == ["name", "product", "brand", "size"]


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("127.0.0.1", None, "Address already in use"),
        ("127.0.0.1", 99999, "port must be 0-65535"),
        ("256.1.1.1", 0, ""),
    ],
)
def test_an_address_that_cannot_be_used_is_an_error(host, port, problem):
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port is None else port
        with pytest.raises(OSError, match=rf"cannot listen at {host}:{port}: .*{problem}"):
            run_server(None, host, port)


@pytest.mark.slow
def test_the_endpoint_answers_until_it_is_stopped(tiny_checkpoints):
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "conjoin", "serve", "--model", tiny_checkpoints["bert"], "--port", "0"]
    command += ["--pooling", "cls"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(
                found[1] for line in lines if (found := re.search(r"listening at (http://127.0.0.1:\d+)", line))
            )
            with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
                assert json.load(answer)["dimension"] == 24
            body = json.dumps({"items": ["a"]}).encode()
            slow = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
            slow.putrequest("POST", "/embed")
            for header in (("content-type", "application/json"), ("content-length", str(len(body)))):
                slow.putheader(*header)
            slow.endheaders(body[:5])  # in flight: its body is on the way
            time.sleep(0.5)
            process.terminate()
            time.sleep(0.5)
            with pytest.raises(urllib.error.URLError, match="refused"):
                urllib.request.urlopen(f"{url}/ready", timeout=60)
            slow.send(body[5:])
            assert slow.getresponse().status == 200, "what was in flight is answered"
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()
