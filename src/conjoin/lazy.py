"""Names that a package exports, imported when they are first used (PEP 562).

The stub `__init__.pyi` beside the package's `__init__.py` lists them: type checkers and editors read the same file.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its `__name__`.
        file: Its `__file__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        alias.name: "." * line.level + (line.module or "")
        for line in stub.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }

    def getattribute(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    names = sorted(module_of)
    return getattribute, lambda: names, names
