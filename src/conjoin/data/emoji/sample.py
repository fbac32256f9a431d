"""The embedded sample: every emoji in two drawing styles, with its name, as a `datasets` dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets

from conjoin.data.emoji.art import EMOJI_STYLES, draw_emoji, emoji_drawings
from conjoin.data.emoji.names import EMOJI_LANGUAGES, emoji_concepts

EMOJI_SPLITS = ("train", "validation", "test")

_VERSION = datasets.Version("1.0.0")  # part of the cache path: increase it when the rows change
_FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "concept": datasets.Value("string"),
        "base": datasets.Value("string"),
        "style": datasets.Value("string"),
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "alternative_text": datasets.Value("string"),
        "kind": datasets.Value("string"),
        "skin_tone": datasets.Value("string"),
        "gender": datasets.Value("string"),
    }
)


@dataclass
class EmojiConfig(datasets.BuilderConfig):
    """Configuration of the sample: language (the config name), drawing styles and skin-tone variants.

    Attributes:
        styles: Any of `"twemoji"`, `"openmoji"` and, if its font is installed, `"noto"`.
        skin_tones: Whether to include skin-tone variants besides the base concepts.
        limit: Use only the first `limit` concepts of each split.
    """

    styles: Sequence[str] = EMOJI_STYLES
    skin_tones: bool = False
    limit: int | None = None


class EmojiSample(datasets.GeneratorBasedBuilder):
    """One row per concept and style, split by base concept (see `conjoin.data.emoji.names.split_of`).

    Columns: `id` (`1f600/twemoji`), `concept`, `base`, `style`, `image` (RGB PNG on white, 144 x 144), `text`, `kind`
    and the nullable `alternative_text`, `skin_tone` and `gender`; `EmojiConcept` defines them. A style that does not
    draw a concept has no row for it.
    """

    BUILDER_CONFIG_CLASS = EmojiConfig
    BUILDER_CONFIGS = [EmojiConfig(name=language, version=_VERSION) for language in EMOJI_LANGUAGES]  # noqa: RUF012
    DEFAULT_CONFIG_NAME = "en"

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description="Emoji drawn by different artists, with their names.",
            features=_FEATURES,
            license="Twemoji CC-BY-4.0; OpenMoji CC-BY-SA-4.0; Noto Color Emoji OFL-1.1; names BSD-3-Clause",
        )

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        concepts = emoji_concepts(self.config.name, self.config.skin_tones)
        drawings = {
            style: emoji_drawings(style, [concept.concept for concept in concepts]) for style in self.config.styles
        }
        generators = []
        for split in EMOJI_SPLITS:
            kept = [concept for concept in concepts if concept.split == split][: self.config.limit]
            rows = tuple(
                ({"id": f"{concept.concept}/{style}", "style": style, **asdict(concept)}, found[concept.concept])
                for concept in kept
                for style, found in drawings.items()
                if concept.concept in found
            )
            generator = datasets.SplitGenerator(name=split, gen_kwargs={"rows": rows})
            generator.split_info.num_examples = len(rows)  # the length of the progress bar
            generators.append(generator)
        return generators

    def _generate_examples(self, rows: Sequence[tuple[dict[str, Any], str]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for row, drawing in rows:
            yield row["id"], {**row, "image": {"bytes": draw_emoji(row["style"], drawing), "path": None}}


def load_emoji(
    split: str,
    language: str = "en",
    styles: Sequence[str] | None = None,
    skin_tones: bool = False,
    cache_dir: str | Path | None = None,
) -> datasets.Dataset:
    """Load a split of the emoji sample; the first call draws it (about 20 s), later calls read the datasets cache.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        language: One of `conjoin.data.emoji.names.EMOJI_LANGUAGES`.
        styles: By default the two that pip installs, `("twemoji", "openmoji")`; `"noto"` is optional.
        skin_tones: Whether to include skin-tone variants besides the base concepts.
        cache_dir: Cache folder; by default that of `datasets`.

    Raises:
        ImportError: The `sample` extra, or the font of an optional style, is not installed.
        ValueError: Unknown split, language or style.
    """
    if split not in EMOJI_SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(EMOJI_SPLITS)}")
    if language not in EMOJI_LANGUAGES:
        raise ValueError(f"unknown language {language!r}; expected one of {', '.join(EMOJI_LANGUAGES)}")
    builder = EmojiSample(
        config_name=language,
        styles=tuple(styles or EMOJI_STYLES),
        skin_tones=skin_tones,
        cache_dir=str(cache_dir) if cache_dir is not None else None,
    )
    builder.download_and_prepare()
    return builder.as_dataset(split=split)
