"""The options: of the right types, shared by commands, and mistakes in them are one line."""

import os

import pytest
import torch
from PIL import Image

from conjoin.cli.main import main, read_command
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.processing.urls import ALLOW_URLS
from conjoin.retrieval import load_encoder


def parse(*words):
    return read_command(words)[1]


def test_types_and_defaults():
    encoding = parse(
        "encode", "model", "data", "--out", "x", "--keep", "a", "b", "--keep-pictures", "--truncate-dim=8"
    )
    mining = parse(
        "mine", "data", "--out=x", "--miner", "n", "m", "text", "text", "--miner", *"o m image text".split()
    )
    for name in ("columns", "split", "batch_size", "device", "threads", "quiet"):
        assert vars(encoding)[name] == vars(mining)[name]
    assert (encoding.split, encoding.batch_size, encoding.threads, encoding.bf16) == ("train", 32, None, None)
    assert (encoding.keep, encoding.keep_pictures, encoding.truncate_dim, encoding.only) == (["a", "b"], 256, 8, None)
    assert mining.miner == [["n", "m", "text", "text"], ["o", "m", "image", "text"]] and mining.bf16 is False
    assert parse("search", "--quiet", "runs/x", "--weight", "image=0.3").weight == [("image", 0.3)]
    training = parse("train", "r.yaml", "--root", "a", "--max_steps", "3", "--root", "b", "--text_only")
    assert (training.root, training.overrides) == (["a", "b"], ["--max_steps", "3", "--text_only"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serch x", "unknown command 'serch'; did you mean search?"),
        ("xyzzy", "unknown command 'xyzzy'; see conjoin --help"),
        ("search x --txt a", "unrecognized arguments: --txt a; did you mean --text?"),
        ("search x a", "unrecognized arguments: a; did you mean --text 'a'?"),
        ("index runs/x --colour=red", "unrecognized arguments: --colour=red; see conjoin index --help"),
        ("index runs/x more", "unrecognized arguments: more; see conjoin index --help"),
        ("encode m", "the following arguments are required: DATA, --out; see conjoin encode --help"),
        ("encode m d --out x --dtype bfloat16", "argument --dtype: invalid choice: 'bfloat16' (choose from"),
        ("encode m d --out x --batch-size 0", "--batch-size must be at least 1, got 0"),
        ("encode m d --out x --batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("search x --weight image", "argument --weight: invalid name_equals_number value: 'image'"),
        ("search x", "nothing to search for: pass --text, --image or both"),
        ("mine d --out x", "nothing to mine by: pass --miner, --miners or both"),
        ("evaluate m --out x", "a model needs --benchmark NAME, a collection a table of queries"),
        ("copy a b --keep-pictures 0", "--keep-pictures must be at least 1, got 0"),
    ],
)
def test_bad_options_are_one_line_with_a_remedy(words, message, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"conjoin: {message}") and error.count("\n") == 1


def test_rows_are_read_by_the_options(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("name,words,other\na,one,1\nb,two,2\n")
    words = ["encode", "m", "d", "--out", "x", "--only", "text", "--columns", "id=name", "text=words"]
    rows = parse(*words).load_rows(str(table))
    assert rows[:] == {"id": ["a", "b"], "text": ["one", "two"]}
    assert list(parse(*words, "--streaming").load_rows(str(table))) == list(rows)
    mining = parse("mine", "d", "--out", "x", "--columns", "id=name", "text=other")
    assert mining.load_rows(str(table), only="text")["text"] == ["1", "2"]


ITEM_COMMANDS = ["analyze m d --out x", "encode m d --out x", "explain m --image i --text t --out x", "mine d --out x"]
ITEM_COMMANDS += ["search index", "train recipe.yaml", "evaluate m --benchmark emoji --out x"]


@pytest.mark.parametrize("command", ITEM_COMMANDS)
def test_commands_that_read_items_allow_urls_and_folders(command, monkeypatch, tmp_path):
    def run(*words):
        monkeypatch.setenv(ALLOW_URLS, "")
        monkeypatch.setenv(ALLOW_ROOTS, "")
        parse(*command.split(), *words).allow()
        return os.environ[ALLOW_URLS]

    assert run() == ""
    assert run("--allow-urls") == "public"
    assert run("--allow-private-urls") == run("--allow-private-urls", "--allow-urls") == "private"
    run("--root", str(tmp_path))
    assert os.environ[ALLOW_ROOTS] == os.path.realpath(tmp_path)
    assert main([*command.split(), "--root", str(tmp_path / "missing")]) == 2


def test_encoders_are_loaded_by_the_options(tiny_checkpoints):
    words = ["--batch-size", "7", "--device", "cpu", "--bf16", "--threads", "1"]
    options = parse("encode", "model", "data", "--out", "x", *words)
    encoder = load_encoder(tiny_checkpoints["clip"], **options.encoder_options())
    assert (encoder.batch_size, encoder.dtype, encoder.threads) == (7, torch.bfloat16, 1)
    plain = load_encoder(tiny_checkpoints["clip"], **parse("search", "index").encoder_options())
    assert (plain.batch_size, plain.dtype) == (32, None) and plain.threads >= 1


def test_the_revision_reaches_what_loads_the_model(tiny_checkpoints, tmp_path, capsys):
    """A folder on this machine has no revisions, so each command stops where it loads the model."""
    model, table, out = tiny_checkpoints["clip"], tmp_path / "table.csv", str(tmp_path / "out")
    table.write_text("image,text\na.png,one\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    for words in (
        ["analyze", model, str(table)],  # reads the picture first
        ["encode", model, str(table), "--only", "text"],
        ["evaluate", model, "--benchmark", "emoji"],
        ["explain", model, "--image", "a.png", "--text", "x"],
        ["export", model],
    ):
        assert main([*words, "--out", out, "--revision", "v1"]) == 2, words
        assert "only a model on the hub has revisions" in capsys.readouterr().err, words
