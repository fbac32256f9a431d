"""Instructions of queries, from templates in data files: one JSON file for each language."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np

from conjoin.data.json_files import check_utf8
from conjoin.structure import build

TEMPLATE_LANGUAGES = ("en", "ms", "id", "vi", "th")
"""The languages of the templates in the package, those of MERIT."""


@dataclass(frozen=True)
class Template:
    """How a language asks for a product.

    Attributes:
        language: Its code.
        name: Its name, for reports.
        requests: Sentences with `{class}` and `{conditions}`.
        requests_of_any_class: Sentences with `{conditions}`.
        condition: With `{attribute}` and `{product}`.
        comma: Between conditions.
        last: Before the last of them.
        attributes: Translations of attribute names; others stay as the catalogue has them.
    """

    language: str
    name: str
    requests: list[str]
    requests_of_any_class: list[str]
    condition: str
    comma: str
    last: str
    attributes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = {"requests": ("class", "conditions"), "requests_of_any_class": ("conditions",)}
        for name, fields in wanted.items():
            sentences = self.requests if name == "requests" else self.requests_of_any_class
            if not sentences:
                raise ValueError(f"the template of {self.language!r}: {name} is empty")
            for sentence in sentences:
                self._check(name, sentence, fields)
        self._check("condition", self.condition, ("attribute", "product"))

    def write(
        self, attributes: Sequence[str], titles: Sequence[str], class_name: str | None, generator: np.random.Generator
    ) -> str:
        """Write an instruction; a product is its number, `<image>` and its title in tags, as in the published data.

        Args:
            attributes: The key of each condition.
            titles: The title of the product of each condition.
            class_name: Of all targets; None does not name it.
            generator: Chooses the sentence.
        """
        products = [
            f"<Product {number}> <image>\n{title} </Product {number}>" for number, title in enumerate(titles, start=1)
        ]
        parts = [
            self.condition.format(attribute=self.attributes.get(attribute, attribute), product=product)
            for attribute, product in zip(attributes, products, strict=True)
        ]
        conditions = self.last.join([self.comma.join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        sentences = self.requests_of_any_class if class_name is None else self.requests
        sentence = sentences[int(generator.integers(len(sentences)))]
        return sentence.format(**{"class": class_name, "conditions": conditions})

    def _check(self, name: str, sentence: str, fields: Sequence[str]) -> None:
        try:
            blank = sentence.format(**dict.fromkeys(fields, "\0"))
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"the template of {self.language!r}: {name} {sentence!r} has a wrong field") from error
        if blank.count("\0") != len(fields):
            named = " and ".join(f"{{{field}}}" for field in fields)
            raise ValueError(f"the template of {self.language!r}: {name} {sentence!r} must hold {named} once each")


def load_templates(languages: Sequence[str], paths: Sequence[str | Path] = ()) -> dict[str, Template]:
    """Load the templates of some languages.

    Args:
        languages: Their codes.
        paths: Further files; one replaces the package's template of its language.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is malformed, or a language has no template.
    """
    root = files("conjoin.data.make.composition") / "templates"
    texts = {
        f"{language}.json": (root / f"{language}.json").read_text(encoding="utf-8") for language in TEMPLATE_LANGUAGES
    }
    texts |= {str(path): _read(Path(path)) for path in paths}
    templates = {template.language: template for template in (_parse(name, text) for name, text in texts.items())}
    unknown = [language for language in languages if language not in templates]
    if unknown or not languages:
        raise ValueError(f"languages {list(languages)}; there are templates of {', '.join(templates)}")
    if len(set(languages)) < len(languages):
        raise ValueError(f"languages {list(languages)}: one is named twice")
    return {language: templates[language] for language in languages}


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}")
    try:
        check_utf8(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}, {error}") from error
    return path.read_text(encoding="utf-8")


def _parse(name: str, text: str) -> Template:
    try:
        content = json.loads(text)
        if not isinstance(content, Mapping):
            raise ValueError(f"expected an object, got {type(content).__name__}")
        template: Template = build(Template, content, "template")
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    return template
