import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from PIL import Image

from conjoin.retrieval import ItemEncoder, Miner, exact_search, load_mined, mine_hard_negatives, parse_miners
from tiny_encoder import tiny_encoder

MINERS = [
    Miner("one-text", "one", "text", "text"),
    Miner("one-image", "one", "image", "image"),
    Miner("one-cross", "one", "text", "image"),
    Miner("two-fused", "two", "fused", "fused"),
]
VIEWS = {"image": ["image"], "text": ["text"], "fused": ["image", "text"]}


class Loader:
    """Makes tiny encoders by name and remembers which were asked for."""

    def __init__(self):
        self.loaded = []

    def __call__(self, model: str) -> ItemEncoder:
        self.loaded.append(model)
        return tiny_encoder(seed={"one": 1, "two": 2}[model])


def pairs(count=30, groups=False):
    random = np.random.default_rng(0)
    words = ["apple", "chair", "river", "cloud", "zebra", "violin"]
    rows = []
    for number in range(count):
        pixels = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        text = " ".join(random.choice(words, size=3)) + f" {number}"
        rows.append({"id": f"row{number}", "image": Image.fromarray(pixels), "text": text})
        if groups:
            rows[-1]["group"] = f"group{number // 3}"
    return rows


def mine(rows, folder, miners=MINERS, **options):
    options = {"load_encoder": Loader(), "block": 7, "k": 4} | options
    found = mine_hard_negatives(Dataset.from_list(rows), miners, folder, **options)
    mined = load_mined(folder)
    assert [*mined.items()] == [*zip(found["id"], found["negatives"], strict=True)]
    return mined


def findings(mined):
    """By anchor and negative, what each miner found."""
    rows = pq.read_table(mined.path).to_pylist()
    return {row["id"]: dict(zip(row["negatives"], row["found_by"], strict=True)) for row in rows}


def naive(rows, miners, k, anchors=None):
    """Every miner by a full sort; returns `{anchor: {negative: {miner: rank}}}`."""
    anchors = rows if anchors is None else anchors
    found = {row["id"]: [] for row in anchors}
    close = {row["id"]: {} for row in anchors}
    for miner in miners:
        encoder = Loader()(miner.model)

        def encode(some, view, encoder=encoder):
            return encoder.encode([{key: row[key] for key in VIEWS[view]} for row in some]).astype(np.float64)

        scores = encode(anchors, miner.query) @ encode(rows, miner.candidate).T
        for anchor, line in zip(anchors, scores, strict=True):
            near, far = [], []
            for column in np.argsort(-line, kind="stable"):
                other = rows[column]
                if other["id"] == anchor["id"] or other.get("group", other["id"]) == anchor.get("group"):
                    continue
                (near if line[column] >= miner.duplicate_above else far).append(other["id"])
            found[anchor["id"]].append(near + far[:k])
            for name in near:
                close[anchor["id"]].setdefault(name, set()).update(VIEWS[miner.query] + VIEWS[miner.candidate])
    compared = {part for miner in miners for part in VIEWS[miner.query] + VIEWS[miner.candidate]}
    kept = {anchor: {} for anchor in found}
    for anchor, lists in found.items():
        for miner, names in zip(miners, lists, strict=True):
            different = [name for name in names if close[anchor].get(name) != compared]
            for rank, name in enumerate(different[:k], start=1):
                kept[anchor].setdefault(name, {})[miner.name] = rank
    return kept


def as_ranks(mined):
    return {
        anchor: {name: {each["miner"]: each["rank"] for each in by_miner} for name, by_miner in found.items()}
        for anchor, found in findings(mined).items()
    }


@pytest.mark.parametrize("groups", [False, True])
def test_the_union_of_all_miners_equals_a_naive_loop(tmp_path, groups):
    rows = pairs(groups=groups)
    mined = mine(rows, tmp_path)
    expected = naive(rows, MINERS, 4)
    assert as_ranks(mined) == expected
    assert list(mined) == [row["id"] for row in rows] and len(mined) == 30
    several = 0
    for anchor, negatives in mined.items():
        assert set(negatives) == set(expected[anchor]) and anchor not in negatives
        best = [min(expected[anchor][name].values()) for name in negatives]
        assert best == sorted(best)
        several += any(len(found) > 1 for found in expected[anchor].values())
    assert several, "no negative was found by two miners: the union is not tested"


def test_only_a_candidate_with_the_same_picture_and_text_is_a_duplicate(tmp_path):
    rows = pairs()
    for number in (5, 11):
        rows[number]["text"] = rows[2]["text"]
    rows[11]["image"] = rows[2]["image"]
    rows[17]["image"] = rows[2]["image"]
    apart = [Miner(m.name, m.model, m.query, m.candidate, 1.1 if m.query != m.candidate else 0.9999) for m in MINERS]
    mined = mine(rows, tmp_path, apart, k=25)
    assert "row11" not in mined["row2"] and "row2" not in mined["row11"]
    assert {"row5", "row17"} <= set(mined["row2"])  # the same text or picture alone: the hardest negatives
    assert findings(mined)["row2"]["row5"][0] | {"score": 1} == {"miner": "one-text", "rank": 1, "score": 1}
    assert as_ranks(mined) == naive(rows, apart, 25)
    texts = mine(rows, tmp_path / "texts", apart[:1])
    assert not {"row5", "row11"} & set(texts["row2"])  # nothing else is known of them
    lenient = [Miner(m.name, m.model, m.query, m.candidate, duplicate_above=1.1) for m in MINERS]
    assert {"row5", "row11", "row17"} <= set(mine(rows, tmp_path / "lenient", lenient)["row2"])


def test_many_duplicates_do_not_use_up_the_results(tmp_path):
    rows = pairs(60)
    for row in rows[:50]:
        row["text"] = "the same caption"
    mined = mine(rows, tmp_path, MINERS[:1], k=3)
    assert as_ranks(mined) == naive(rows, MINERS[:1], 3)
    assert len(mined["row0"]) == 3 and all(int(name.removeprefix("row")) >= 50 for name in mined["row0"])


def test_an_anchor_may_be_left_without_negatives(tmp_path, caplog):
    rows = pairs(6)
    for row in rows[:5]:
        row["text"] = "the same caption"
    same = [Miner("text", "one", "text", "text", duplicate_above=-1.0)]
    mined = mine(rows, tmp_path, same)
    assert all(mined[anchor] == [] for anchor in mined)
    assert "6 of 6 anchors have no hard negative" in caplog.text


def test_anchors_of_their_own(tmp_path):
    rows = pairs(40)
    corpus, anchors = rows[:30], rows[25:]
    mined = mine(corpus, tmp_path, anchors=Dataset.from_list(anchors))
    assert as_ranks(mined) == naive(corpus, MINERS, 4, anchors)
    assert list(mined) == [row["id"] for row in anchors]
    assert {name for negatives in mined.values() for name in negatives} <= {row["id"] for row in corpus}


def test_every_view_is_encoded_once_and_every_model_loaded_once(tmp_path):
    loader = Loader()
    mine(pairs(), tmp_path, load_encoder=loader)
    assert loader.loaded == ["one", "two"]
    collections = sorted(path.name.rsplit("-", 2)[0] for path in (tmp_path / "embeddings").iterdir())
    assert collections == ["corpus-fused", "corpus-image", "corpus-text"]


def test_a_cut_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    rows = pairs()
    whole = mine(rows, tmp_path / "whole").path.read_bytes()
    searched = []

    def cut(queries, vectors, k, **options):
        searched.append(len(queries))
        if len(searched) == 8:
            raise KeyboardInterrupt
        return exact_search(queries, vectors, k, **options)

    monkeypatch.setattr("conjoin.retrieval.mining.exact_search", cut)
    with pytest.raises(KeyboardInterrupt):
        mine(rows, tmp_path / "cut")
    assert not (tmp_path / "cut" / "negatives.parquet").exists()
    assert mine(rows, tmp_path / "cut").path.read_bytes() == whole
    done = len(searched)
    mine(rows, tmp_path / "cut")
    assert len(searched) == done, "a finished run searches nothing again"


def test_a_miner_can_be_added_and_left_out_later(tmp_path):
    rows = pairs()
    mine(rows, tmp_path, MINERS[:2])
    assert as_ranks(mine(rows, tmp_path)) == naive(rows, MINERS, 4)
    assert as_ranks(mine(rows, tmp_path, MINERS[3:])) == naive(rows, MINERS[3:], 4)


def test_other_settings_are_refused(tmp_path):
    rows = pairs()
    mine(rows, tmp_path)
    with pytest.raises(ValueError, match=r"miners/one-image': it was made with k 4, not 5;"):
        mine(rows, tmp_path, k=5)
    with pytest.raises(ValueError, match=r"miners/one-image': it was made with .*corpus '"):
        mine(pairs(groups=True), tmp_path)
    other = Miner("one-text", "one", "image", "text")
    with pytest.raises(ValueError, match=r"miners/one-text': it was made with query 'text', not 'image'"):
        mine(rows, tmp_path, [other])


@pytest.mark.parametrize("index", ["Flat", "HNSW8", "IVF2,Flat"])
def test_an_index_of_faiss_finds_the_same(tmp_path, index):
    pytest.importorskip("faiss")
    rows = pairs()
    assert as_ranks(mine(rows, tmp_path, index=index)) == naive(rows, MINERS, 4)
    with pytest.raises(ValueError, match=f"was made with index '{index}', not 'exact'"):
        mine(rows, tmp_path)
    with pytest.raises(ValueError, match="FAISS cannot make 'nonsense'"):
        mine(rows, tmp_path / "other", index="nonsense")


class TestMinedNegatives:
    @pytest.fixture(scope="class")
    @classmethod
    def mined(cls, tmp_path_factory):
        return mine(pairs(), tmp_path_factory.mktemp("mined"))

    def test_an_unknown_anchor(self, mined):
        assert "nobody" not in mined
        with pytest.raises(KeyError, match="nobody"):
            mined["nobody"]

    def test_a_file_that_is_none(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"negatives\.parquet'.*no such file"):
            load_mined(tmp_path)
        (tmp_path / "negatives.parquet").write_text("nothing")
        with pytest.raises(ValueError, match=r"negatives\.parquet' cannot be read: .*conjoin mine"):
            load_mined(tmp_path)


class TestDescriptions:
    def test_as_in_yaml(self):
        described = {"a": {"model": "m", "query": "text", "candidate": "image", "duplicate_above": 0.9}}
        assert parse_miners(described) == [Miner("a", "m", "text", "image", 0.9)]

    @pytest.mark.parametrize(
        ("described", "message"),
        [
            ([], "expected miners as name"),
            ({"a": {"model": "m", "query": "text"}}, "miner 'a': expected .*missing 1 required .*'candidate'"),
            ({"a": {"model": "m", "query": "text", "candidate": "image", "k": 3}}, "miner 'a': .* argument 'k'"),
            ({"a": "m"}, "miner 'a': expected {model, query, candidate"),
            ({"a": {"model": "m", "query": "video", "candidate": "image"}}, "unknown query 'video'; expected one of"),
            ({"a/b": {"model": "m", "query": "text", "candidate": "image"}}, "the name of a miner .* got 'a/b'"),
        ],
    )
    def test_a_bad_description_names_its_miner(self, described, message):
        with pytest.raises(ValueError, match=message):
            parse_miners(described)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"duplicate_above": "0.9"}, "duplicate_above must be a number, got '0.9'"),
            ({"relative_margin": "much"}, "relative_margin must be a number, got 'much'"),
            ({"max_score": float("nan")}, "max_score must be a number, got nan"),
            ({"range_min": -1}, "range_min must be a whole number from 0, got -1"),
        ],
    )
    def test_limits_that_are_none(self, settings, message):
        with pytest.raises(ValueError, match=f"miner 'a': {message}"):
            parse_miners({"a": {"model": "m", "query": "text", "candidate": "text"} | settings})

    def test_names_are_unique(self, tmp_path):
        with pytest.raises(ValueError, match="expected at least one miner"):
            mine(pairs(), tmp_path, [])
        with pytest.raises(ValueError, match=r"no name twice, got \['one-text', 'one-text'\]"):
            mine(pairs(), tmp_path, MINERS[:1] * 2)
        with pytest.raises(ValueError, match="k must be at least 1, got 0"):
            mine(pairs(), tmp_path, k=0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-9],
        lambda content: b"",
        lambda content: content[:20] + bytes([content[20] ^ 1]) + content[21:],
    ],
)
def test_a_damaged_result_is_refused(tmp_path, damage):
    mine(pairs(), tmp_path)
    path = tmp_path / "negatives.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"negatives\.parquet' .*; run `conjoin mine` again$"):
        load_mined(tmp_path)
    assert len(mine(pairs(), tmp_path)) == 30
