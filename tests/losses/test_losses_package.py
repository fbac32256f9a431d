"""The names of the package are functions whatever is imported first."""

import subprocess
import sys

import pytest

CODE = """
import importlib, sys
names = "gcl", "info_nce", "mac", "multi_positive", "self_distillation"
files = "gcl_loss", "mac_loss", "info_nce_loss", "multi_positive_loss", "distillation", "state_distillation"
for first in files:
    for loaded in [name for name in sys.modules if name.startswith("conjoin")]:
        del sys.modules[loaded]
    for file in (first, *files):
        importlib.import_module(f"conjoin.losses.{file}")
    losses = importlib.import_module("conjoin.losses")
    for name in names:
        if not callable(getattr(losses, name)):
            raise SystemExit(f"after {first}, {name} is {getattr(losses, name)}")
"""


@pytest.mark.slow
def test_losses_are_functions_after_any_import_order():
    subprocess.run([sys.executable, "-c", CODE], check=True)
