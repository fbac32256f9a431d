"""Words are matched one by one, over ids, texts and kept columns; a score is the share of the query that a row has."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies

from conjoin.retrieval import encode_collection, open_collection, search_items
from conjoin.retrieval.words import WordIndex, WordQuery, edit_distance, words_of
from tiny_collections import lookup_encoder, unit
from tiny_encoder import tiny_encoder

TITLES = {
    "AB-1042": "Red oak chair", "AB-1043": "Chair of red metal", "AB-2000": "Oak bookcase", "AB-2001": "Sofa bed",
    "AB-3000": "Große Stühle", "AB-3001": "红色的苹果", "AB-3002": "リンゴの木", "AB-3003": "a 🎁",
    "AB-3004": "Cafe\u0301 table", "AB-4000": "Mobile phone", "AB-4001": "Trampoline", "AB-4002": "Bookshelf",
}  # fmt: skip
BRANDS = {"AB-2001": "Norrvik", "AB-4001": "Halden"}
VECTORS = unit(len(TITLES), 8)


def rows():
    for number, (id_, title) in enumerate(TITLES.items()):
        kept = {"brand": BRANDS.get(id_), "tags": ["garden", "toy"] if title == "Trampoline" else []}
        yield {"id": id_, "text": f"{number}", "metadata": {"title": title, **kept}}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return encode_collection(list(rows()), lookup_encoder(VECTORS), tmp_path_factory.mktemp("words") / "c")


@pytest.mark.parametrize(
    ("first", "queries"),
    [
        ("AB-1042", ["red oak chair", '"oak chair"', "OAK CHAIR"]),
        ("AB-1043", ["chairs of metal", "chiar of metal", "ab-1043", "AB1043"]),
        ("AB-2000", ["bookcases", "book case"]),
        ("AB-2001", ["sofabed", "sof abed", "norrvik", "norvik"]),
        ("AB-4001", ["tramp", "trampolnie", "trampline", "trammpoline", "trempolinne", "toys"]),
        ("AB-4002", ["bookshelves"]),
        ("AB-3000", ["GROSSE STUHLE", "große"]),
        ("AB-3001", ["苹果"]),
        ("AB-3002", ["リンゴ"]),
        ("AB-3003", ["🎁"]),
        ("AB-3004", ["café", "cafe\u0301"]),
    ],
)
def test_what_finds_a_row(collection, first, queries):
    found = collection.rank(None, 3, words=queries).ids
    assert [ids[0] for ids in found] == [first] * len(queries)


@pytest.mark.parametrize(
    "query", ["hob", "pram", "zzzqqq", "tab", "", " ", "'", '"', '"77', "+(", "*", "\\", "\x00", "^77"]
)
def test_what_finds_nothing(collection, query):
    """Neither parts of words nor other letters of short ones; the default ranking is then that of vectors."""
    assert collection.rank(None, 20, words=[query]).ids == [[]]
    plain, both = (collection.rank(VECTORS[:1], 20, words=words) for words in (None, [query]))
    assert plain.ids == both.ids and (plain.scores == both.scores).all()


def test_a_score_is_the_share_of_the_query_by_rarity(collection):
    def score(query, id_):
        found = collection.rank(None, 20, words=[query])
        return dict(zip(found.ids[0], found.scores[0].tolist(), strict=False)).get(id_)

    count = len(TITLES)
    oak, chair = np.log(1 + count / 2), np.log(1 + count / 2)
    assert score("oak chair", "AB-1042") == 1
    assert score("oak chair", "AB-2000") == pytest.approx(oak / (oak + chair))
    unknown = np.log(1 + 2 * count)
    assert score("oak zzzqqq", "AB-2000") == pytest.approx(oak / (oak + unknown))
    assert score("trampolnie", "AB-4001") == pytest.approx(0.9) and score("chairs", "AB-1042") == pytest.approx(0.95)
    products = collection.rank(VECTORS[:1], 20)
    known = dict(zip(products.ids[0], products.scores[0], strict=True))
    both = collection.rank(VECTORS[:1], 20, words=["oak chair"])
    scores = dict(zip(both.ids[0], both.scores[0], strict=True))
    assert scores["AB-1042"] == pytest.approx(known["AB-1042"] + 1, abs=1e-6)
    assert scores["AB-2000"] == pytest.approx(known["AB-2000"] + score("oak chair", "AB-2000") ** 3, abs=1e-6)
    half = collection.rank(None, 1, words=[WordQuery("oak chair", 0.5)])
    assert half.scores[0].tolist() == [0.5]


def test_conditions_memory_and_several_queries(collection):
    opened = open_collection(collection.uri, memory=10**6)
    words, where = ["oak", "", "trampoline"], "id not in ('AB-1042', 'AB-4001')"
    for options in ({}, {"where": where}):
        found = collection.rank(VECTORS[:3], 5, words=words, **options)
        other = opened.rank(VECTORS[:3], 5, words=words, **options)
        assert found.ids == other.ids and (found.scores == other.scores).all()
    assert found.ids[0][0] == "AB-2000" and not {"AB-1042", "AB-4001"} & {id_ for ids in found.ids for id_ in ids}
    with pytest.raises(ValueError, match="got the words of 1 queries for the vectors of 3"):
        collection.rank(VECTORS[:3], 5, words=["one"])


def test_pictures_without_text_stand_beside_rows_with_one(tmp_path, pictures):
    """They have as many words as those above them have on average, so no half match pushes the nearest one down."""
    encoder = tiny_encoder()
    table = [{"id": "picture", "image": pictures[0]}, *({"id": f"t{n}", "text": f"a red {n}"} for n in range(5))]
    collection = encode_collection(table, encoder, tmp_path)
    vectors = np.concatenate([collection.vectors(["picture"]), encoder.encode(["a red 3"])])
    assert [ids[0] for ids in collection.rank(vectors, 6, words=["a red apple", "a red 3"]).ids] == ["picture", "t3"]


def test_ranking_by_name(collection):
    items, encoder = [{"text": "trampolnie"}], lookup_encoder(VECTORS)
    encoder.encode_query = lambda items, **how: VECTORS[: len(items)]
    names = ("default", "vectors", "words")
    found = {name: search_items(collection, encoder, items, 3, ranking=name)[0] for name in names}
    assert found["vectors"][0].id == "AB-1042" and found["default"][0].id == "AB-4001"
    assert [hit.id for hit in found["words"]] == ["AB-4001"]
    assert search_items(collection, None, items, 3, ranking="words")[0] == found["words"]
    least = found["default"][0].score
    encoder.encode_query = lambda items, **how: VECTORS[[0, 0]]
    kept = search_items(collection, encoder, [*items, {"text": "zzzqqq"}], 3, min_score=least)
    assert [hit.id for hit in kept[0]] == ["AB-4001"]
    assert [hit.score >= least for hit in kept[1]] == [True] * len(kept[1])
    encoder.encode_query = lambda items, **how: VECTORS[:1]
    for how, message in (
        ({"ranking": "best"}, r"unknown ranking 'best'; expected one of \['default', 'vectors', 'words'\]"),
        ({"ranking": "vectors", "encoder": None}, "compares vectors: pass the encoder"),
        ({"ranking": "words", "items": [{"text": "a"}, {"image": "x.png"}]}, "item 1: it has no words to rank by"),
    ):
        given = {"encoder": encoder, "items": items} | how
        with pytest.raises(ValueError, match=message):
            search_items(collection, **given)


@given(strategies.lists(strategies.text(max_size=12), max_size=5))
def test_the_words_of_an_index_are_those_of_a_query(texts):
    batch = pa.record_batch(
        {
            "_rowid": np.arange(len(texts)),
            "id": pa.array([""] * len(texts), pa.string()),
            "text": pa.array(texts, pa.string()),
        }
    )
    if texts:
        assert {*WordIndex([batch]).words.to_pylist()} - {""} == {word for text in texts for word in words_of(text)}


@pytest.mark.parametrize(
    ("one", "two", "edits"),
    [
        ("oak", "oak", 0),
        ("oak", "aok", 1),
        ("oak", "oa", 1),
        ("oak", "ook", 1),
        ("table", "tbael", 2),
        ("a", "abcd", 3),
    ],
)
def test_letters_that_are_swapped_are_one_edit(one, two, edits):
    assert edit_distance(one, two, 2) == edit_distance(two, one, 2) == edits
