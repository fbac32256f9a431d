import io
from collections import Counter

import datasets
import numpy as np
import pytest
from PIL import Image

from conjoin.data import EMOJI_LANGUAGES, emoji_concepts, load_emoji, split_of
from conjoin.data.emoji.sample import EMOJI_STYLES, draw_emoji, emoji_drawings, wheel_folder


@pytest.fixture(scope="module")
def concepts():
    return {concept.concept: concept for concept in emoji_concepts(skin_tones=True)}


def test_true_split_counts(concepts):
    drawn = [set(emoji_drawings(style, concepts)) for style in EMOJI_STYLES]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 3944
    everything = Counter(concepts[name].split for name in drawn[0])
    bases = Counter(concepts[name].split for name in drawn[0] if concepts[name].skin_tone is None)
    assert everything == {"train": 2814, "validation": 389, "test": 741}
    assert bases == {"train": 1349, "validation": 179, "test": 386}


def test_split_rule():
    assert [split_of(base) for base in ("1f600", "1f44b", "2764", "1f1e9-1f1ea")] == ["test", "train", "test", "train"]


def test_skin_tones_follow_their_base(concepts):
    assert all(concept.split == split_of(concept.base) for concept in concepts.values())
    toned = concepts["1f44b-1f3fd"]
    assert (toned.base, toned.skin_tone, toned.text) == ("1f44b", "medium", "waving hand medium skin tone")
    assert concepts["1faf1-1f3fb-200d-1faf2-1f3ff"].skin_tone == "light+dark"
    assert [c.concept for c in emoji_concepts()] == [c.concept for c in concepts.values() if c.skin_tone is None]


def test_names_and_attributes(concepts):
    def told(name):
        concept = concepts[name]
        return concept.text, concept.alternative_text, concept.kind, concept.gender

    assert told("1f1e9-1f1ea") == ("flag for Germany", "Germany", "flag", None)
    assert told("1f1ee-1f1f2") == ("flag for Isle of Man", "Isle of Man", "flag", None)
    assert told("31-20e3") == ("keycap 1", "one", "keycap", None)
    assert told("1f482-200d-2640") == ("woman guard", "guardswoman", "person", "female")
    assert told("1f482") == ("guard", None, "person", None)
    assert told("1f46b") == ("woman and man holding hands", "couple", "person", "mixed")
    assert told("1f452")[2:] == ("other", None)  # a woman’s hat
    assert told("1f600")[2] == "face"
    assert told("1f4eb")[2] == "other"  # a mailbox with a flag


def test_alternative_texts_are_other_words(concepts):
    names = {concept.text.casefold() for concept in concepts.values()}
    given = [concept for concept in concepts.values() if concept.alternative_text]
    assert len(given) > 700
    for concept in given:
        assert concept.alternative_text.casefold() != concept.text.casefold()
        assert concept.alternative_text.casefold() not in names
        assert not {":", "_"} & {*concept.text, *concept.alternative_text}
    assert not any(concept.alternative_text for concept in emoji_concepts("de"))


def test_the_languages_are_those_of_the_package():
    files = (wheel_folder("emoji") / "unicode_codes").glob("emoji_*.json")
    assert sorted(EMOJI_LANGUAGES) == sorted(["en", *(path.stem.removeprefix("emoji_") for path in files)])
    assert emoji_concepts("es")[0].text == "medalla de oro"
    with pytest.raises(ValueError, match="unknown language 'xx'; the emoji package has en, "):
        emoji_concepts("xx")
    for language in EMOJI_LANGUAGES:
        names = [concept.text for concept in emoji_concepts(language)]
        assert len(set(names)) == len(names) and all(name.strip() for name in names)


def test_rows(small_sample):
    rows = small_sample("test")
    assert len(rows) == 80
    assert rows.features["image"] == datasets.Image()
    assert rows.features["alternative_text"] == datasets.Value("string")
    row = rows[0]
    assert row["id"] == f"{row['concept']}/twemoji"
    assert row["image"].size == (144, 144) and row["image"].mode == "RGB"
    assert set(rows["style"]) == set(EMOJI_STYLES)
    assert len(set(rows["id"])) == len(rows)
    rows = small_sample("test", "ja", styles=("twemoji",))
    assert len(rows) == 40 and rows["text"][0] == "銀メダル" and rows["alternative_text"][0] is None


def test_second_load_reuses_the_cache(tmp_path, monkeypatch):
    concepts = emoji_concepts()[:8]
    monkeypatch.setattr("conjoin.data.emoji.sample.emoji_concepts", lambda *_: concepts)
    first = load_emoji("train", cache_dir=tmp_path)

    def refuse(*_):
        raise AssertionError("drawn again")

    monkeypatch.setattr("conjoin.data.emoji.sample.draw_emoji", refuse)
    assert load_emoji("train", cache_dir=tmp_path)["id"][:] == first["id"][:]


@pytest.mark.parametrize("style", EMOJI_STYLES)
def test_pictures_are_on_white_and_not_empty(style):
    drawing = emoji_drawings(style, ["1f600"])["1f600"]
    pixels = np.asarray(Image.open(io.BytesIO(draw_emoji(drawing))))
    assert pixels.shape == (144, 144, 3)
    assert (pixels[0, 0] == 255).all() and (pixels.std(axis=(0, 1)) > 10).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "unknown split 'dev'; expected one of train, validation, test"),
        ({"split": "test", "language": "xx"}, "unknown language 'xx'; the emoji package has en, "),
        ({"split": "test", "styles": ["apple"]}, "unknown style 'apple'; expected one of twemoji, openmoji"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_emoji(**arguments, cache_dir=tmp_path)
