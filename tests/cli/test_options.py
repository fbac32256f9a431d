"""The shared options: written once, read the same by every command."""

import argparse
import os

import pytest
import torch
from PIL import Image

from conjoin import constants
from conjoin.cli import analyze, encode, evaluate, explain, mine, options, search, train
from conjoin.cli.main import main
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.models.joint_encoder import READOUTS
from conjoin.processing.input_types import INPUT_TYPES
from conjoin.processing.item_images import ALLOW_URLS
from conjoin.retrieval import ItemEncoder


def parse(command, *words):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args([command.__name__.rpartition(".")[2].replace("_", "-"), *words])


def test_commands_share_defaults():
    encoding = parse(encode, "model", "data", "--out", "x")
    mining = parse(mine, "data", "--out", "x")
    for name in ("image_column", "text_column", "id_column", "split", "batch_size", "device", "num_workers", "quiet"):
        assert vars(encoding)[name] == vars(mining)[name]
    assert (encoding.split, encoding.batch_size, encoding.num_workers, encoding.bf16) == ("train", 32, 0, "auto")
    assert encoding.only is None and not encoding.streaming and not encoding.trust_remote_code
    with pytest.raises(SystemExit):
        parse(encode, "model", "data", "--out", "x", "--dtype", "bfloat16")
    assert not hasattr(parse(search, "index"), "batch_size")


def test_rows_are_read_by_the_options(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("name,words,other\na,one,1\nb,two,2\n")
    words = ["--id-column", "name", "--text-column", "words", "--only", "text"]
    rows = options.load_rows(parse(encode, "model", str(table), "--out", "x", *words), str(table))
    assert rows[:] == {"id": ["a", "b"], "text": ["one", "two"]}
    streamed = options.load_rows(parse(encode, "m", "d", "--out", "x", *words, "--streaming"), str(table))
    assert list(streamed) == list(rows)
    mining = parse(mine, str(table), "--out", "x", "--id-column", "name", "--text-column", "other")
    assert options.load_rows(mining, str(table), only="text")["text"] == ["1", "2"]


URL_COMMANDS = {
    analyze: ["m", "d", "--out", "x"],
    encode: ["m", "d", "--out", "x"],
    explain: ["m", "--image", "i", "--text", "t", "--out", "x"],
    mine: ["d", "--out", "x"],
    search: ["index"],
    train: ["recipe.yaml"],
}


@pytest.mark.parametrize("command", [*URL_COMMANDS, evaluate], ids=lambda command: command.__name__)
def test_commands_that_read_items_allow_urls_and_folders(command, monkeypatch, tmp_path):
    def run(*words):
        monkeypatch.setenv(ALLOW_URLS, "")
        monkeypatch.setenv(ALLOW_ROOTS, "")
        if command is evaluate:
            evaluate.parse(["m", "--benchmark", "emoji", "--out", "x", *words])
        else:
            parse(command, *URL_COMMANDS[command], *words)
        return os.environ[ALLOW_URLS]

    assert run() == ""
    assert run("--allow-urls") == "public"
    assert run("--allow-private-urls") == run("--allow-private-urls", "--allow-urls") == "private"
    if command in (explain, search):  # they read no table
        return
    run("--root", str(tmp_path))
    assert os.environ[ALLOW_ROOTS] == os.path.realpath(tmp_path)
    with pytest.raises(SystemExit):
        run("--root", str(tmp_path / "missing"))


def test_encoders_are_loaded_by_the_options(tiny_checkpoints):
    words = ["--batch-size", "7", "--device", "cpu", "--bf16", "--workers", "1"]
    encoder = options.make_encoder(parse(encode, "model", "data", "--out", "x", *words), tiny_checkpoints["clip"])
    assert isinstance(encoder, ItemEncoder)
    assert (encoder.batch_size, encoder.dtype, encoder.num_workers) == (7, torch.bfloat16, 1)
    plain = options.encoder_loader(parse(search, "index"), "cpu")(tiny_checkpoints["clip"])
    assert (plain.batch_size, plain.dtype, plain.device.type) == (32, None, "cpu")


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
    assert parse(search, "index", "--revision", "v1").revision == "v1"


def test_the_parser_knows_the_values_of_code_that_travels_with_checkpoints():
    assert (constants.INPUT_TYPES, constants.READOUTS) == (INPUT_TYPES, READOUTS)


@pytest.mark.parametrize(
    "name", ["config.json", "modules.json", "adapter_config.json", "cache.json", "data/train.lance"]
)
def test_an_output_folder_that_holds_something_is_refused(tmp_path, name, capsys):
    assert options.check_out(str(tmp_path)) == options.check_out(f"{tmp_path}/") == tmp_path
    (tmp_path / "notes.txt").write_text("x")
    options.check_out(str(tmp_path))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    commands = (
        ["mine", "emoji", "--miner", "a", "m", "text", "text"],
        ["evaluate", "m", "--benchmark", "emoji"],
        ["explain", "m", "--image", "a.png", "--text", "x"],
        ["analyze", "m", "emoji"],
        ["demo"],
    )
    for words in commands:
        assert main([*words, "--out", str(tmp_path)]) == 2
        assert f"({name}); choose another folder" in capsys.readouterr().err


def test_small_counts_are_refused():
    args = argparse.Namespace(batch_size=0, pairs=2)
    options.check_counts(args, pairs=2)
    with pytest.raises(ValueError, match="--batch-size must be at least 1, got 0"):
        options.check_counts(args, pairs=2, batch_size=1)
