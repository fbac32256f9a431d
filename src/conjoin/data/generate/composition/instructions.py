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

from conjoin.storage import reading

Template = dict[str, Any]


def write_instruction(
    template: Template, products: Sequence[tuple[str, str]], class_name: str, generator: np.random.Generator
) -> str:
    """Write an instruction; a product is its number, `<image>` and its title in tags, as in the published data.

    Args:
        template: Of the language.
        products: The attribute of the condition and the title of each product.
        class_name: Of all targets; "" does not name it.
        generator: Chooses the sentence.
    """
    parts = [
        template["condition"].format(
            attribute=template["attributes"].get(attribute, attribute),
            product=f"<Product {number}> <image>\n{title} </Product {number}>",
        )
        for number, (attribute, title) in enumerate(products, start=1)
    ]
    conditions = template["last"].join([template["comma"].join(parts[:-1]), parts[-1]])
    sentences = template["requests" if class_name else "requests_of_any_class"]
    sentence: str = sentences[generator.integers(len(sentences))]
    return sentence.format(**{"class": class_name, "conditions": conditions})


def load_templates(languages: Sequence[str], paths: Sequence[str | Path] = ()) -> list[Template]:
    """Load the templates of some languages; the package has those of MERIT.

    Args:
        languages: Their codes.
        paths: Further files; one replaces the package's template of its language.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is malformed, or a language has no template.
    """
    templates = {}
    for path in (*sorted(Path(__file__).parent.glob("templates/*.json")), *map(Path, paths)):
        with reading(path, "expected a template", (FileNotFoundError,)):
            template = {"attributes": {}, **json.loads(path.read_text(encoding="utf-8"))}
            for class_name in ("", "c"):
                write_instruction(template, [("a", "b")] * 2, class_name, np.random.default_rng(0))
            templates[template["language"]] = template
    if not languages or not templates.keys() >= {*languages}:
        raise ValueError(f"languages {list(languages)}; there are templates of {', '.join(templates)}")
    return [templates[language] for language in languages]
