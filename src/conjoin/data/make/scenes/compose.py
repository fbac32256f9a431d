"""Which objects the picture and the text of a scene have: what they share, and what only one of them has."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np

from conjoin.data.make.construction.symmetric import EDITS

Item = TypeVar("Item")

NEGATIVES = ("image_content", "text_content", "other_intersection")
"""Hard negatives of (picture O, text M): (O, O), (M, M), or the same objects in all with another intersection."""

_EDIT_ODDS = (0.5, 0.25, 0.25)
"""Of `EDITS`: the text names another object in place of one, one more, or one fewer than the picture."""
_MAX_SHARED = 3
_SPLITS = ("test", "validation", *("train",) * 8)


@dataclass(frozen=True)
class Composition:
    """The objects of a scene, as tuples of objects in no particular order.

    Attributes:
        shared: In the picture and in the text, 1 to 3.
        image_only: In the picture alone, 0 or 1.
        text_only: In the text alone, 0 or 1.
    """

    shared: tuple[str, ...]
    image_only: tuple[str, ...]
    text_only: tuple[str, ...]

    @property
    def image(self) -> tuple[str, ...]:
        """All objects of the picture."""
        return self.shared + self.image_only

    @property
    def text(self) -> tuple[str, ...]:
        """All objects of the text."""
        return self.shared + self.text_only

    @property
    def split(self) -> str:
        """`"train"`, `"validation"` or `"test"`: a function of the set of all objects, so no set is in two splits."""
        objects = " ".join(sorted({*self.image, *self.text}))
        return _SPLITS[int(hashlib.sha256(objects.encode()).hexdigest()[:8], 16) % len(_SPLITS)]

    def exchanged(self) -> "Composition":
        """The positive: the picture shows what the text named, and the text names what the picture showed."""
        return Composition(self.shared, self.text_only, self.image_only)

    def negatives(self) -> list[str]:
        """The kinds of `NEGATIVES` that differ from this composition in their objects or in their intersection.

        The text of an "add" edit names all objects, so (M, M) has the same objects as the query; "remove" mirrors it.
        """
        has = {
            "image_content": bool(self.text_only),
            "text_content": bool(self.image_only),
            "other_intersection": True,
        }
        return [kind for kind in NEGATIVES if has[kind]]

    def negative(self, kind: str, generator: np.random.Generator) -> "Composition":
        """Return a negative of `kind`; the intersection of `"other_intersection"` has the same size."""
        if kind == "image_content":
            return Composition(self.image, (), ())
        if kind == "text_content":
            return Composition(self.text, (), ())
        content = self.shared + self.image_only + self.text_only
        others = [part for part in combinations(content, len(self.shared)) if {*part} != {*self.shared}]
        shared = others[generator.integers(len(others))]
        private = shuffled([name for name in content if name not in shared], generator)
        cut = len(self.image_only)
        return Composition(shared, tuple(private[:cut]), tuple(private[cut:]))


def draw_composition(objects: Sequence[str], split: str, generator: np.random.Generator) -> Composition:
    """Draw a composition of `split` from at least five different `objects`."""
    while True:
        edit = EDITS[generator.choice(len(EDITS), p=_EDIT_ODDS)]
        shared = int(generator.integers(1, _MAX_SHARED + 1))
        names = [objects[place] for place in generator.choice(len(objects), size=shared + 2, replace=False)]
        image_only = () if edit == "add" else (names[shared],)
        text_only = () if edit == "remove" else (names[shared + 1],)
        composition = Composition(tuple(names[:shared]), image_only, text_only)
        if composition.split == split:
            return composition


def shuffled(values: Sequence[Item], generator: np.random.Generator) -> list[Item]:
    """Return `values` in random order."""
    return [values[place] for place in generator.permutation(len(values))]
