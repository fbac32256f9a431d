"""What runs on a GPU keeps its tensors on one device: shown without a GPU, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends in Python",
)
def test_models_methods_and_search_on_a_second_device():
    """Autograd must know a device before the first backward pass of a process."""
    checks = Path(__file__).with_name("second_device_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(checks)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
