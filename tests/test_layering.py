"""The folders of the package form layers: each imports only what stands above it."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/conjoin"
LAYERS = {
    "processing": set(),
    "models": set(),
    "ops": set(),
    "masking": {"ops"},
    "losses": {"ops"},
    "data": {"processing"},
    "retrieval": {"processing", "ops", "data"},
    "evaluation": {"processing", "retrieval", "data", "ops"},
    "training": {"processing", "models", "ops", "masking", "losses", "data", "retrieval", "evaluation"},
    "hub": {"processing", "models", "evaluation"},
    "cli": {"processing", "models", "ops", "masking", "losses", "data", "retrieval", "evaluation", "training", "hub"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def _imports(path):
    """`(level, module, names)` of every import of this package in a file, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "conjoin"):
            yield node.level, node.module or "", {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name, {alias.name}) for alias in node.names if alias.name.split(".")[0] == "conjoin")


def _layer(path):
    return path.relative_to(SOURCE).parts[0]


def test_every_folder_has_a_layer():
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_from_above(path):
    for level, module, names in _imports(path):
        assert level <= 1, f"from {'.' * level}{module} leaves its folder"
        if level == 0 and _layer(path) in LAYERS:  # conjoin/__init__.py and __main__.py stand above all
            layer, parts = _layer(path), module.split(".")
            allowed = {"conjoin"} | {f"conjoin.{name}" for name in {layer, *LAYERS[layer]}}
            assert ".".join(parts[:2]) in allowed, f"{layer} must not import {module}"
            assert parts != ["conjoin"] or names <= {"__version__", "conjoin"}, f"from conjoin import {names}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_code_that_travels_with_checkpoints_is_flat_and_uniquely_named():
    """Transformers copies what it finds by a pattern on the text, docstrings included, into one flat folder."""
    travelling = [path for path in FILES if _layer(path) in ("processing", "models")]
    modules = [path for path in travelling if path.name != "__init__.py"]
    assert len(modules) > 5
    assert len({path.name for path in modules}) == len(modules)
    for path in travelling:
        imported = {(level, module) for level, module, _ in _imports(path)}
        siblings = {(1, sibling.stem) for sibling in path.parent.glob("*.py")}
        assert imported <= siblings, f"{path.name} imports {imported - siblings}"
        source = path.read_text(encoding="utf-8")
        found = re.findall(r"^\s*from\s+\.(\S+)\s+import|^\s*import\s+\.(\S+)\s*$", source, flags=re.MULTILINE)
        assert {(1, "".join(names)) for names in found} == imported
