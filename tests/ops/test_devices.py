import pytest
import torch

from conjoin.cli.main import main
from conjoin.ops import choose_device
from conjoin.retrieval import ItemEncoder, load_encoder


def test_the_device_asked_for_or_the_best(monkeypatch):
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    for available, best in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert choose_device() == torch.device(best)


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cuda:1 was asked for, but torch sees no GPU; use --device cpu"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="cuda:2 was asked for, but torch sees 2 GPUs, counted from 0"):
        choose_device("cuda:2")
    with pytest.raises(ValueError, match="'gpu' is not a device; expected cpu, cuda, cuda:1"):
        choose_device("gpu")


@pytest.mark.parametrize("load", [ItemEncoder.from_pretrained, load_encoder])
def test_encoders_ask_before_they_load(load, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cuda was asked for, but torch sees no GPU; use --device cpu"):
        load("no-such-model", device="cuda")


@pytest.mark.parametrize(
    "command",
    [
        "mine photos.csv --miner a model text text --out out",
        "teacher-cache model photos.csv --vision v --text t --out out",
        "explain model --image photo.jpg --text words --out out",
        "analyze model photos.csv --out out",
        "encode model photos.csv --out out",
        "evaluate model --benchmark emoji --out out",
    ],
)
def test_commands_name_the_way_out(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "1.jpg").touch()
    (tmp_path / "photos.csv").write_text("image,text\n1.jpg,one\n")
    assert main([*command.split(), "--device", "cuda"]) == 2
    assert "cuda was asked for, but torch sees no GPU; use --device cpu" in capsys.readouterr().err
