"""The texts of scenes: the names of the objects in a phrase."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conjoin.data.make.scenes.compose import shuffled

PHRASES = {
    "en": (
        ("in this picture you can see {}", "the {}", " and "),
        ("a small picture with {} in front of a plain background", "{}", " and "),
        ("{} stand side by side in one drawing", "the {}", " and "),
        ("there are several things here to look at: {}", "{}", " as well as "),
        ("someone has drawn {} for a children's book", "the {}", " together with the "),
        ("{}, all of them on the same page", "{}", " and "),
    ),
    "de": (
        ("auf diesem Bild sieht man Folgendes: {}", "{}", " und "),
        ("{} sind zusammen in einer Zeichnung zu sehen", "{}", " sowie "),
        ("ein kleines Bild mit {} auf einfarbigem Grund", "{}", " und "),
    ),
    "es": (
        ("en esta imagen se puede ver lo siguiente: {}", "{}", " y "),
        ("un dibujo pequeño con {} sobre un fondo liso", "{}", " y "),
        ("{}, todo en la misma página de un libro", "{}", " y también "),
    ),
    "fr": (
        ("sur cette image on peut voir : {}", "{}", " et "),
        ("un petit dessin avec {} sur un fond uni", "{}", " et "),
        ("{}, le tout sur la même page d'un livre", "{}", " ainsi que "),
    ),
    "id": (
        ("dalam gambar ini Anda dapat melihat {}", "{}", " dan "),
        ("sebuah gambar kecil dengan {} di latar belakang polos", "{}", " dan "),
        ("{}, semuanya ada di halaman yang sama", "{}", " serta "),
    ),
    "it": (
        ("in questa immagine si può vedere quanto segue: {}", "{}", " e "),
        ("un piccolo disegno con {} su uno sfondo semplice", "{}", " e "),
        ("{}, tutto sulla stessa pagina di un libro", "{}", " e anche "),
    ),
    "pt": (
        ("nesta imagem é possível ver o seguinte: {}", "{}", " e "),
        ("um pequeno desenho com {} sobre um fundo liso", "{}", " e "),
        ("{}, tudo na mesma página de um livro", "{}", " e também "),
    ),
}
"""By language: frames of a list, the form of a name in the list, and the words before its last entry."""


@dataclass(frozen=True)
class Wording:
    """A phrase and an order: the same wording of other objects differs in their names alone.

    Attributes:
        language: Of `PHRASES`.
        phrase: Number of the phrase.
        seed: Of the order.
    """

    language: str
    phrase: int
    seed: int

    @classmethod
    def draw(
        cls, languages: Sequence[str], generator: np.random.Generator, other_than: "Wording | None" = None
    ) -> "Wording":
        """Draw a wording whose phrase is not that of `other_than`."""
        language = languages[int(generator.integers(len(languages)))]
        numbers = list(range(len(PHRASES[language])))
        if other_than is not None and other_than.language == language:
            numbers.remove(other_than.phrase)
        return cls(language, int(generator.choice(numbers)), int(generator.integers(2**31)))

    def write(self, objects: Sequence[str], names: dict[str, dict[str, str]]) -> tuple[str, list[dict[str, object]]]:
        """Return a text that names `objects`, and the place of each: `{"object", "start", "end"}` in characters."""
        frame, form, last = PHRASES[self.language][self.phrase]
        before, after = frame.split("{}")
        text, places = before, []
        for number, name in enumerate(shuffled(objects, np.random.default_rng(self.seed))):
            if number:
                text += last if number == len(objects) - 1 else ", "
            head, tail = form.split("{}") if number == 0 or not last.endswith("the ") else ("", "")
            start = len(text) + len(head)
            text += head + names[name][self.language] + tail
            places.append({"object": name, "start": start, "end": start + len(names[name][self.language])})
        return text + after, places
