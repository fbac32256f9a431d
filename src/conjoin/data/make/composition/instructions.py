"""Instructions of queries, from templates in data files: one JSON file for each language.

A template has `language` (its code), `requests` (sentences with `{class}` and `{conditions}`), `requests_of_any_class`
(without `{class}`), `condition` (with `{attribute}` and `{product}`), `comma` (between conditions), `last` (before the
last of them), and `attributes`: translations of attribute names; others stay as the catalogue has them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Template = dict[str, Any]
TEMPLATE_LANGUAGES = ("en", "ms", "id", "vi", "th")
"""The languages of the templates in the package, those of MERIT."""


def write_instruction(
    template: Template,
    attributes: Sequence[str],
    titles: Sequence[str],
    class_name: str | None,
    generator: np.random.Generator,
) -> str:
    """Write an instruction; a product is its number, `<image>` and its title in tags, as in the published data.

    Args:
        template: Of the language.
        attributes: The key of each condition.
        titles: The title of the product of each condition.
        class_name: Of all targets; None does not name it.
        generator: Chooses the sentence.
    """
    parts = [
        template["condition"].format(
            attribute=template["attributes"].get(attribute, attribute),
            product=f"<Product {number}> <image>\n{title} </Product {number}>",
        )
        for number, (attribute, title) in enumerate(zip(attributes, titles, strict=True), start=1)
    ]
    conditions = template["last"].join([template["comma"].join(parts[:-1]), parts[-1]])
    sentences = template["requests_of_any_class" if class_name is None else "requests"]
    sentence: str = sentences[int(generator.integers(len(sentences)))]
    return sentence.format(**{"class": class_name, "conditions": conditions})


def load_templates(languages: Sequence[str], paths: Sequence[str | Path] = ()) -> dict[str, Template]:
    """Load the templates of some languages.

    Args:
        languages: Their codes.
        paths: Further files; one replaces the package's template of its language.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is malformed, or a language has no template.
    """
    templates = {}
    own = (Path(__file__).parent / f"templates/{language}.json" for language in TEMPLATE_LANGUAGES)
    for path in (*own, *map(Path, paths)):
        try:
            template = {"attributes": {}, **json.loads(path.read_text(encoding="utf-8"))}
            for class_name in (None, "c"):
                write_instruction(template, "ab", "ab", class_name, np.random.default_rng(0))
            templates[template["language"]] = template
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"{str(path)!r} is no template: {error!r}") from error
    if not languages or not templates.keys() >= {*languages}:
        raise ValueError(f"languages {list(languages)}; there are templates of {', '.join(templates)}")
    return {language: templates[language] for language in languages}
