"""Words of a collection: which rows have the words of a query, also mistyped ones, and how rare those are.

The score of a row is the share of the query that it has: Σ weight · credit / Σ weight over the words of the query. The
weight of a word is its rarity, its credit says how well the best word of the row matches it. So 1 is a row with all
words as they were typed, and 0 one without any, whatever the query and the other rows are.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Letters of scripts that write no spaces: each is a word."""
_INDIC = "\u0900-\u0dff"
_WORD = re.compile(rf"[{_ALONE}\u2190-\u2bff\U0001f000-\U0001fbff]|(?:[^\W_{_ALONE}]|[{_INDIC}])+")
_BYTES = bytes(ord(chr(byte).lower()) if byte > 127 or chr(byte).isalnum() else 32 for byte in range(256))
"""What ASCII letters become in words; all else that is ASCII parts them."""
_EXACT, _PLURAL, _BEGINNING = 1.0, 0.95, 0.85
"""Credits of words that match a word of the query; a mistyped one has the share of its letters that are right."""
_ONE_EDIT, _TWO_EDITS, _PREFIX = 4, 8, 4
"""Letters from which on a word may be mistyped once or twice, and may be the beginning of another."""
_MOST_WORDS, _LONGEST = 32, 40
"""Words of a query that are read, and letters in which a space is sought: a stranger may send many."""


def words_of(text: str) -> list[str]:
    """The words of a text, in small letters without accents."""
    letters = unicodedata.normalize("NFKD", text).casefold()
    return _WORD.findall("".join(letter for letter in letters if not unicodedata.combining(letter)))


class WordQuery(NamedTuple):
    """The words of a query.

    Attributes:
        text: They.
        share: Of the query that they are; the rest are pictures.
    """

    text: str
    share: float = 1.0

    @classmethod
    def of(cls, query: "str | WordQuery") -> "WordQuery":
        """A text alone is all of its query."""
        return cls(query) if isinstance(query, str) else query


class WordIndex:
    """Which rows of a table have which words, in their ids, texts and kept columns of texts.

    Args:
        batches: The rows: `_rowid`, `id`, `text`, and other columns, of which those that hold texts are read.

    Attributes:
        ids: Of the rows.
        numbers: Lance's numbers of the rows `(N,)`.
        has_text: Which rows have a text `(N,)`.
        words: All words.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        ids, numbers, has_text, counts, words = [], [], [], [], []
        for batch in batches:
            lists = _lists_of_words(_joined_texts(batch))
            ids.append(batch["id"])
            numbers.append(batch["_rowid"].to_numpy())
            has_text.append(np.asarray(pc.fill_null(pc.not_equal(batch["text"], ""), False)))
            counts.append(np.asarray(pc.list_value_length(lists)))
            words.append(pc.list_flatten(lists).dictionary_encode())
        encoded = pa.chunked_array(words).combine_chunks()
        self.ids, self.words = pa.chunked_array(ids), encoded.dictionary
        self.numbers, self.has_text = np.concatenate(numbers), np.concatenate(has_text)
        rows = np.repeat(np.arange(len(self.ids), dtype=np.int32), np.concatenate(counts))
        shape = len(self.words), len(self.ids)
        self._rows = sparse.csr_array((np.ones(len(rows), bool), (np.asarray(encoded.indices), rows)), shape=shape)
        is_long = pc.greater_equal(pc.utf8_length(self.words), _ONE_EDIT - 1)
        self._typed = np.flatnonzero(pc.and_not(is_long, pc.match_substring_regex(self.words, "[0-9]")))
        self._letters = _counts_of_bytes(self.words.take(pa.array(self._typed)))

    def places(self, ids: Sequence[str]) -> np.ndarray:
        """Where the rows of some ids stand."""
        return np.asarray(pc.index_in(pa.array(ids, pa.string()), value_set=self.ids), dtype=np.int64)

    def shares(self, query: WordQuery, among: np.ndarray | None = None) -> np.ndarray:
        """The share of a query that each row has, `(N,)` float32; 0 for rows that are not `among` some `(N,)`."""
        total, scores = 0.0, np.zeros(len(self.ids))
        for word, found in self._read(query.text).items():
            credit = np.zeros(len(scores))
            for place in sorted(found, key=found.__getitem__):
                credit[self._rows.indices[self._rows.indptr[place] : self._rows.indptr[place + 1]]] = found[place]
            count = np.count_nonzero(credit)
            weight = np.log(1 + len(scores) / (count or 0.5))
            if not count:  # it may be "a" or "for" of a sentence
                weight *= min(1, (len(word.encode()) - 1) / 4)
            total += weight
            scores += weight * credit
        shares = (scores * (query.share / (total or 1))).astype(np.float32)
        return shares if among is None else shares * among

    def _read(self, query: str) -> dict[str, dict[int, float]]:
        """The words of a query with what they match; where one is unknown, a space may be wrong."""
        read: list[tuple[str, dict[int, float]]] = []
        for word in dict.fromkeys(words_of(query)[:_MOST_WORDS]):
            read.append((word, self.matches(word)))
            for count in (2, 1):
                last = read[-count:]
                letters = "".join(word for word, _ in last)
                is_read = all(_EXACT in found.values() for _, found in last) or (count == 1 and last[0][1])
                if is_read or len(letters) > _LONGEST:
                    continue
                cuts = [[letters[:place], letters[place:]] for place in range(count % 2, len(letters))]
                parts = pa.array([part or letters for cut in cuts for part in cut], pa.string())
                known = pc.is_in(parts, value_set=self.words)
                left, right = np.asarray(known).reshape(-1, 2).T
                cuts = [cut for cut, both in zip(cuts, left & right, strict=True) if both and max(map(len, cut)) > 2]
                if cuts:
                    best = max(cuts, key=lambda cut: max(map(len, cut)))
                    read[-count:] = [(part, self.matches(part)) for part in best if part]
                    break
        return dict(read)

    def matches(self, word: str) -> dict[int, float]:
        """The places of the words that match a word of a query, each with its credit."""
        single = _singular(word)
        found = dict.fromkeys(self._beginning(word), _BEGINNING) if len(word) >= _PREFIX else {}
        likely = self._beginning(single[:-1] if len(single) > 3 else single)
        likely = {place: other for place, other in likely.items() if _singular(other) == single}
        found |= {place: _EXACT if other == word else _PLURAL for place, other in likely.items()}
        if likely or len(word) < _ONE_EDIT or not word.isalpha():
            return found
        most = 1 + (len(word) >= _TWO_EDITS)
        for form in {word, single}:
            near = np.abs(self._letters - _counts_of_bytes(pa.array([form]))).sum(1) <= 2 * most
            for place, other in self._at(self._typed[near]).items():
                edits = edit_distance(form, other, most) + (form[0] != other[0] and form[:2] != other[1::-1])
                if edits <= most:
                    found[place] = max(found.get(place, 0), 1 - edits / len(word))
        return found

    def _beginning(self, letters: str) -> dict[int, str]:
        """The words that begin with some letters, with their places."""
        return self._at(np.flatnonzero(pc.starts_with(self.words, letters)))

    def _at(self, places: np.ndarray) -> dict[int, str]:
        return dict(zip(places.tolist(), self.words.take(pa.array(places)).to_pylist(), strict=True))


def bonuses(shares: np.ndarray, has_text: np.ndarray | None = None) -> np.ndarray:
    """What is added to the scores by vectors: c³ of the shares c `(N,)`.

    Args:
        shares: Of rows in the order of their scores by vectors.
        has_text: Which of them have a text `(N,)`; the words of the others are unknown, so they get at least the mean
            of those that stand above with a text, or what the first with a text gets. All have one if None.
    """
    bonus = shares**3
    if has_text is None or has_text.all() or not has_text.any():
        return bonus
    above, first = np.cumsum(has_text), bonus[has_text.argmax()]
    mean = np.where(above > 0, np.cumsum(bonus * has_text) / np.maximum(above, 1), first).astype(np.float32)
    return np.where(has_text, bonus, np.maximum(bonus, mean))


def _joined_texts(batch: pa.RecordBatch) -> pa.StringArray:
    """The texts of each row, with spaces between."""
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        is_list = pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type) and field.name != "image"
        if pa.types.is_string(field.type) or is_list:
            columns.append(pc.binary_join(column, " ") if is_list else column)
    return pc.binary_join_element_wise(*columns, " ", null_handling="skip")


def _lists_of_words(texts: pa.StringArray) -> pa.ListArray:
    """As `words_of`, of many texts: ASCII takes a fifth of the time by bytes."""
    validity, offsets, letters = texts.buffers()
    small = pa.py_buffer(memoryview(letters or b"").tobytes().translate(_BYTES))
    small = pa.Array.from_buffers(texts.type, len(texts), [validity, offsets, small], offset=texts.offset)
    is_other = pc.invert(pc.string_is_ascii(texts))
    others = [" ".join(words_of(text)) for text in texts.filter(is_other).to_pylist()]
    return pc.ascii_split_whitespace(pc.replace_with_mask(small, is_other, pa.array(others, texts.type)))


def _counts_of_bytes(words: pa.StringArray) -> np.ndarray:
    """How often each word has each of 32 kinds of bytes, `(N, 32)` int8."""
    lengths = np.asarray(pc.binary_length(words))
    letters = np.frombuffer("".join(words.to_pylist()).encode(), dtype=np.uint8) & 31
    counts = np.bincount(32 * np.repeat(np.arange(len(words)), lengths) + letters, minlength=32 * len(words))
    return counts.reshape(-1, 32).clip(max=63).astype(np.int8)


def _singular(word: str) -> str:
    """A word without the ending of an English plural."""
    if len(word) < 4 or word.endswith(("ss", "us", "is")):
        return word
    for ending, single in (("ies", "y"), ("ves", "f"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("sses", "ss")):
        if word.endswith(ending):
            return word.removesuffix(ending) + single
    return word.removesuffix("s")


def edit_distance(one: str, two: str, most: int) -> int:
    """How many letters are changed, missing, added, or swapped with their neighbour; `most + 1` for more than most."""
    if abs(len(one) - len(two)) > most:
        return most + 1
    before: list[int] = []
    row = [*range(len(two) + 1)]
    for i, letter in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(two, 1):
            least = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == two[j - 2] and one[i - 2] == other:
                least = min(least, older[j - 2] + 1)
            row.append(least)
    return min(row[-1], most + 1)
