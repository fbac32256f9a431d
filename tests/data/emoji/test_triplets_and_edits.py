import pytest
from emoji_edits import find_edits

from conjoin import symmetric_triplets
from conjoin.data import TRIPLET_FEATURES, emoji_concepts


@pytest.fixture
def sample(small_sample, monkeypatch):
    monkeypatch.setattr("conjoin.data.emoji.triplets.load_emoji", small_sample)
    return small_sample


def test_symmetric_triplets(sample):
    triplets = symmetric_triplets("test")
    assert triplets.features == TRIPLET_FEATURES
    rows = {row["id"]: row for row in sample("test")}
    assert len(triplets) == sum(row["alternative_text"] is not None for row in rows.values()) / 2 > 10
    names = {row["alternative_text"] or row["text"]: row for row in rows.values()}
    for triplet in triplets:
        concept = triplet["id"].split("/")[0]
        query, positive = rows[f"{concept}/twemoji"], rows[f"{concept}/openmoji"]
        assert (triplet["query_text"], triplet["positive_text"]) == (query["text"], positive["alternative_text"])
        assert names[triplet["negative_text"]]["concept"] != concept
        assert (
            triplet["query_image"]["bytes"] != triplet["positive_image"]["bytes"] != triplet["negative_image"]["bytes"]
        )
        assert triplet["variant_image"] is None and triplet["variant_text"] is None
    pool = {t[f"{role}_image"]["bytes"]: t[f"{role}_text"] for t in triplets for role in ("positive", "negative")}
    shown = {(t[f"{role}_image"]["bytes"], t[f"{role}_text"]) for t in triplets for role in ("positive", "negative")}
    assert len(shown) == len(pool)  # a drawing has one name: no second right answer in a pool
    flags = [row for row in triplets if row["query_text"].startswith("flag for")]
    assert flags and all(names[row["negative_text"]]["kind"] == "flag" for row in flags)


def test_edits_by_name():
    concepts = {concept.text: concept for concept in emoji_concepts(skin_tones=True)}
    names = [
        "blue square",
        "red square",
        "flag for Peru",
        "flag for Cuba",
        "grinning face",
        "grinning face with sweat",
    ]
    names += ["man cook", "woman cook", "woman shrugging", "waving hand", "waving hand dark skin tone", "star"]
    edits = {(edit.reference.text, edit.target.text): edit.text for edit in find_edits(concepts[n] for n in names)}
    assert edits == {
        ("blue square", "red square"): "but red instead of blue",
        ("red square", "blue square"): "but blue instead of red",
        ("grinning face", "grinning face with sweat"): "but with sweat",
        ("grinning face with sweat", "grinning face"): "but without sweat",
        ("man cook", "woman cook"): "but woman instead of man",
        ("woman cook", "man cook"): "but man instead of woman",
        ("waving hand", "waving hand dark skin tone"): "but with dark skin tone",
    }
