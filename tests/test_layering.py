"""The folders of the package form layers: each imports only what stands above it."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/conjoin"
HUB_CODE = ("processing", "models")
"""Copied into checkpoints: flat folders that import nothing of the package."""
NOT_COPIED = [SOURCE / name for name in ("models/shortcuts.py", "processing/input_types.py", "processing/urls.py")]
LAYERS = (
    *HUB_CODE,
    "storage",
    "losses",
    "st",
    "data",
    "hub",
    "retrieval",
    "evaluation",
    "push",
    "trainers",
    "serving",
    "start",
    "demo",
    "cli",
)
"""A folder imports what stands before it."""
TOP = {f"conjoin.{name}" for name in ("constants", "devices", "lazy", "progress", "templates")}
"""Modules of one file that every folder may import, but for hub code."""
FILES = sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")])


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


def test_one_file_modules_stand_above_all_folders():
    alone = {f"conjoin.{path.stem}" for path in SOURCE.glob("*.py")}
    assert alone == TOP | {"conjoin.__init__", "conjoin.__main__"}
    for name in TOP:
        path = SOURCE / f"{name.removeprefix('conjoin.')}.py"
        assert not list(_imports(path)), f"{name} must import nothing of the package"


def test_files_import_only_from_above():
    for path in FILES:
        layer = _layer(path)
        for level, module, names in _imports(path):
            assert level <= 1, f"{path}: from {'.' * level}{module} leaves its folder"
            if level == 0 and layer in LAYERS:  # conjoin/__init__.py and __main__.py stand above all
                if module == "conjoin":
                    assert names <= {"__version__", "conjoin"}, f"{path}: from conjoin import {names}"
                    continue
                above = LAYERS[: LAYERS.index(layer) + 1]
                allowed = {f"conjoin.{name}" for name in above} | (set() if layer in HUB_CODE else TOP)
                assert ".".join(module.split(".")[:2]) in allowed, f"{path}: {layer} must not import {module}"


def test_code_that_travels_with_checkpoints_is_flat_and_uniquely_named():
    """Transformers copies what it finds by a pattern on the text, docstrings included, into one flat folder."""
    travelling = [path for path in FILES if _layer(path) in HUB_CODE and path not in NOT_COPIED]
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


def test_the_drawing_of_the_rooms_is_of_today(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE.parents[1] / "docs/.site")
    import architecture

    assert architecture.TARGET.read_text(encoding="utf-8") == architecture.draw(LAYERS), (
        "run: python docs/.site/architecture.py"
    )
