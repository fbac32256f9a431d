"""The choice between bfloat16 and float32."""

import os
import subprocess
import sys

import pytest
import torch

from conjoin.ops import choose_bf16, precision
from conjoin.training import RetrievalConfig


@pytest.fixture(autouse=True)
def forget():
    """Choose anew in each test, and after it."""
    precision._is_bf16_faster.cache_clear()
    yield
    precision._is_bf16_faster.cache_clear()


@pytest.mark.parametrize(("half", "expected"), [(0.5, True), (4.0, False)])
def test_a_cpu_is_timed_once_and_the_choice_is_one_line(half, expected, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(precision, "time_cpu", lambda: calls.append(1) or (1.0, half))
    assert [choose_bf16("auto", "cpu") for _ in range(3)] == [expected] * 3
    assert len(calls) == 1
    (line,) = caplog.messages
    wanted = ("bfloat16", "2.0 times as fast") if expected else ("float32", "4.0 times as slow")
    assert line == f"computing in {wanted[0]}: bfloat16 is {wanted[1]} as float32 on this CPU"


@pytest.mark.parametrize("supported", [False, True])
def test_a_gpu_is_asked_for_its_instructions(supported, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    assert choose_bf16("auto") is supported
    assert f"this GPU has {'' if supported else 'no '}bfloat16 instructions" in caplog.text


def test_a_fixed_choice_is_obeyed_and_others_are_refused(monkeypatch):
    monkeypatch.setattr(precision, "time_cpu", lambda: pytest.fail("timed"))
    assert choose_bf16(True, "cpu") is True and choose_bf16(False, "cpu") is False
    assert choose_bf16("auto", "mps") is False
    with pytest.raises(ValueError, match="bf16 is 'yes'; expected true, false or 'auto'"):
        choose_bf16("yes")


def test_the_timing_leaves_the_threads_as_they_are():
    threads = torch.get_num_threads()
    assert min(precision.time_cpu()) > 0 and torch.get_num_threads() == threads


@pytest.mark.slow
def test_without_bfloat16_instructions_float32_is_chosen():
    """oneDNN is told not to use them."""
    if not torch.backends.mkldnn.is_available() or "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("oneDNN's instructions cannot be limited on this machine")
    code = "from conjoin.ops import choose_bf16; print(choose_bf16('auto', 'cpu'))"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and "computing in float32" in done.stderr


def test_training_resolves_the_choice(monkeypatch, tmp_path):
    monkeypatch.setattr(precision, "_is_bf16_faster", lambda kind: True)
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    assert RetrievalConfig(**settings).bf16 is False
    assert RetrievalConfig(**settings, bf16="auto").bf16 is True
    if not torch.accelerator.is_available():
        found = RetrievalConfig(output_dir=str(tmp_path), report_to="none", bf16="auto")
        assert found.bf16 is True and found.device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # accelerate launch has chosen
    assert RetrievalConfig(**settings, bf16="auto").bf16 is False
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    with pytest.raises(ValueError, match="bf16 is 'maybe'"):
        RetrievalConfig(**settings, bf16="maybe")
