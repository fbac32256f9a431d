"""conjoin: any item (text, image, interleaved) in, one comparable vector out."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0.dev0"

# The stub beside this file lists the public names, for type checkers and editors and for the imports below.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {name.name: line.module for line in _STUB.body if isinstance(line, ast.ImportFrom) for name in line.names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - imported when first used, so that `import conjoin` stays fast
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'conjoin' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
