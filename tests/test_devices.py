"""The device, and its precision: bfloat16 where it is faster."""

import os
import subprocess
import sys

import pytest
import torch

from conjoin import devices
from conjoin.cli.main import main
from conjoin.devices import choose_bf16, choose_device
from conjoin.retrieval import load_encoder
from conjoin.trainers import RetrievalConfig


def gpus(monkeypatch, count):
    """Let torch see some GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_the_device_asked_for_or_the_best(monkeypatch):
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    for count, best in ((0, "cpu"), (2, "cuda")):
        gpus(monkeypatch, count)
        assert choose_device() == torch.device(best)
    assert choose_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("count", "device", "message"),
    [
        (0, "cuda:1", "cuda:1 was asked for, but torch sees no GPU; use --device cpu"),
        (2, "cuda:2", "cuda:2 was asked for, but torch sees 2 GPUs, counted from 0"),
        (2, "gpu", "'gpu' is not a device; expected cpu, cuda, cuda:1"),
    ],
)
def test_devices_that_are_not_there_are_named_before_anything_is_loaded(count, device, message, monkeypatch):
    gpus(monkeypatch, count)
    with pytest.raises(ValueError, match=message):
        load_encoder("no-such-model", device=device)


@pytest.mark.parametrize(
    "command",
    [
        "mine photos.csv --miner a model text text --out out",
        "explain model --image photo.jpg --text words --out out",
        "analyze model photos.csv --out out",
        "encode model photos.csv --out out",
        "evaluate model --benchmark emoji --out out",
    ],
)
def test_commands_name_the_way_out(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gpus(monkeypatch, 0)
    (tmp_path / "1.jpg").touch()
    (tmp_path / "photos.csv").write_text("image,text\n1.jpg,one\n")
    assert main([*command.split(), "--device", "cuda"]) == 2
    assert "cuda was asked for, but torch sees no GPU; use --device cpu" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def forget():
    """Choose anew in each test, and after it."""
    devices._is_bf16_faster.cache_clear()
    yield
    devices._is_bf16_faster.cache_clear()


@pytest.mark.parametrize(("half", "expected"), [(0.5, True), (4.0, False)])
def test_a_cpu_is_timed_once_and_the_choice_is_one_line(half, expected, monkeypatch, caplog):
    seconds = [1.0, half]
    monkeypatch.setattr(devices, "_time_cpu", lambda dtype: seconds.pop(0))
    assert [choose_bf16("cpu") for _ in range(3)] == [expected] * 3
    (line,) = caplog.messages
    wanted = ("bfloat16", "2.0 times as fast") if expected else ("float32", "4.0 times as slow")
    assert line == f"computing in {wanted[0]}: bfloat16 is {wanted[1]} as float32 on this CPU"


@pytest.mark.parametrize("supported", [False, True])
def test_a_gpu_is_asked_for_its_instructions(supported, monkeypatch, caplog):
    gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    assert choose_bf16() is supported
    assert f"this GPU has {'' if supported else 'no '}bfloat16 instructions" in caplog.text


def test_other_devices_are_not_timed(monkeypatch):
    monkeypatch.setattr(devices, "_time_cpu", lambda dtype: pytest.fail("timed"))
    assert choose_bf16("mps") is False


@pytest.mark.slow
def test_without_bfloat16_instructions_float32_is_chosen():
    """oneDNN is told not to use them."""
    if not torch.backends.mkldnn.is_available() or "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("oneDNN's instructions cannot be limited on this machine")
    code = "from conjoin.devices import choose_bf16; print(choose_bf16('cpu'))"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and "computing in float32" in done.stderr


def test_training_resolves_the_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_is_bf16_faster", lambda kind: True)
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    assert RetrievalConfig(**settings).bf16 is False
    assert RetrievalConfig(**settings, bf16="auto").bf16 is True
    if not torch.accelerator.is_available():
        found = RetrievalConfig(output_dir=str(tmp_path), report_to="none", bf16="auto")
        assert found.bf16 is True and found.device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # accelerate launch has chosen
    assert RetrievalConfig(**settings, bf16="auto").bf16 is False
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    with pytest.raises(ValueError, match="bf16='maybe'"):
        RetrievalConfig(**settings, bf16="maybe")
