"""The folders of the package form layers: each imports only what stands above it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/conjoin"
LAYERS = {
    "processing": set(),
    "models": set(),
    "ops": set(),
    "losses": {"ops"},
    "data": {"processing"},
    "retrieval": {"processing", "ops", "data"},
    "evaluation": {"processing", "retrieval", "data", "ops"},
    "training": {"processing", "models", "ops", "losses", "data", "retrieval", "evaluation"},
    "hub": {"processing", "models", "evaluation"},
    "cli": {"processing", "models", "ops", "losses", "data", "retrieval", "evaluation", "training", "hub"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def _imports(path):
    """`(level, module)` of every import of this package in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "conjoin"):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names if alias.name.split(".")[0] == "conjoin")


def test_every_folder_has_a_layer():
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_from_above(path):
    layer = path.relative_to(SOURCE).parts[0]
    if layer not in LAYERS:
        return  # conjoin/__init__.py and __main__.py stand above all
    for level, module in _imports(path):
        assert level <= 1, f"from {'.' * level}{module} leaves its folder"
        parts = module.split(".")
        if level == 0 and len(parts) > 1:
            assert parts[1] == layer or parts[1] in LAYERS[layer], f"{layer} must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_code_that_travels_with_checkpoints_is_flat_and_uniquely_named():
    travelling = [path for path in FILES if path.relative_to(SOURCE).parts[0] in ("processing", "models")]
    modules = [path for path in travelling if path.name != "__init__.py"]
    assert len({path.name for path in modules}) == len(modules)
    for path in modules:
        for level, module in _imports(path):
            assert (level, "." in module) == (1, False), f"{path.name}: from {'.' * level}{module}"
