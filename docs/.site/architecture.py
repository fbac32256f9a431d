"""Draw the rooms of the package: `python docs/.site/architecture.py` writes docs/images/architecture.svg.

A room is a row with the first sentence of its docstring; the dots say which rooms above it its files import.
"""

import ast
import html
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/conjoin"
TARGET = ROOT / "docs/images/architecture.svg"
STEP, LEFT, TEXT = 26, 96, 660


def imports(room: Path) -> set[str]:
    """The names of the rooms that the files of a room import."""
    modules = [
        name
        for path in room.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    ]
    return {module.split(".")[1] for module in modules if module.startswith("conjoin.")}


def draw(rooms: tuple[str, ...]) -> str:
    """The drawing of rooms that each import only those before them."""
    width, height = LEFT + STEP * len(rooms) + TEXT, STEP * (len(rooms) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="The rooms of the package and which of them each imports">',
        "<style>text { font: 13px system-ui, sans-serif; fill: #333; } .name { font-weight: 600; } "
        "rect, line { fill: #8883; stroke: #8883; } circle { fill: #2563eb; } "
        "@media (prefers-color-scheme: dark) { text { fill: #ddd; } circle { fill: #60a5fa; } }</style>",
    ]
    for row, room in enumerate(rooms):
        y, x = STEP * (row + 0.5), LEFT + STEP * (row + 0.5)
        sentence = (ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text("utf-8"))) or "").split(
            "\n"
        )[0]
        parts.append(f'<text class="name" x="{LEFT - 8}" y="{y + 5}" text-anchor="end">{room}</text>')
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{y}" y2="{height}"/><rect x="{x - 8}" y="{y - 8}" width="16" height="16"/>'
        )
        known = imports(SOURCE / room)
        parts += [
            f'<circle cx="{LEFT + STEP * (column + 0.5)}" cy="{y}" r="5"><title>{room}: {other}</title></circle>'
            for column, other in enumerate(rooms[:row])
            if other in known
        ]
        parts.append(f'<text x="{LEFT + STEP * len(rooms) + 12}" y="{y + 5}">{html.escape(sentence)}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(ROOT / "tests"))
    from test_layering import LAYERS

    TARGET.write_text(draw(LAYERS), encoding="utf-8")
