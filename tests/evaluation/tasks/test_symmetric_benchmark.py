"""The symmetric protocol: equal to all scores at once, ties fail, items enter the pool once."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from conjoin.evaluation import EvaluateOptions, evaluate
from tiny_encoder import tiny_encoder
from tiny_letters import letters_encoder

ALONE = EvaluateOptions(baselines=False)
ROLES = ("query", "positive", "negative", "variant")


@pytest.fixture
def random():
    return np.random.default_rng(0)


def item(random, folder, number):
    image = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    image.save(folder / f"{number}.png")
    letters = "".join(random.choice(list("abcdefgh "), size=9))
    return f"{number}.png", f"text {number} {letters}"


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def rows(tmp_path, random):
    """Twelve triplets, every third with a variant, the positive near the query."""
    rows = []
    for number in range(12):
        row = {"id": f"t{number}", "kind": ("a_b", "c", None)[number % 3]}
        for place, role in enumerate(ROLES):
            if role != "variant" or number % 3 == 0:
                row[f"{role}_image"], row[f"{role}_text"] = item(random, tmp_path, 4 * number + place)
        if number % 4:
            row["positive_image"] = row["query_image"]
        if number % 4 == 2:
            row["positive_text"] = row["query_text"] + " ok"
        rows.append(row)
    rows[0] |= {f"variant_{part}": rows[0][f"negative_{part}"] for part in ("image", "text")}  # it loses by this
    return rows


@pytest.fixture
def distractors(tmp_path, random):
    rows = [(f"d{number}", *item(random, tmp_path, 100 + number)) for number in range(40)]
    with (tmp_path / "more.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "image", "text"), *rows])
    return str(tmp_path / "more.csv")


def naive(encoder, folder, rows, more=None, parts=("image", "text")):
    """Which triplets are right, and the ranks of the positives, from all scores at once."""

    def vectors(pairs):
        items = [{"image": str(folder / image), "text": text} for image, text in pairs]
        return encoder.encode([{part: each[part] for part in parts} for each in items]).astype(np.float64)

    own = vectors([(row[f"{role}_image"], row[f"{role}_text"]) for row in rows for role in ROLES[:3]])
    others = list(csv.reader(open(more)))[1:] if more else []
    pool = np.concatenate([own, vectors([row[1:] for row in others])]) if others else own
    wins, ranks = [], []
    for number, row in enumerate(rows):
        x, positive, negative = pool[3 * number : 3 * number + 3]
        other = vectors([(row["variant_image"], row["variant_text"])])[0] if row.get("variant_text") else x
        wins.append(x @ positive > other @ negative)
        rivals = np.delete(pool, [3 * number, 3 * number + 1], axis=0)
        ranks.append(1 + int((rivals @ x >= x @ positive).sum()))
    return np.array(wins), np.array(ranks)


@pytest.mark.parametrize("how", [{}, {"streaming": True}])
def test_equals_all_scores_at_once(rows, distractors, tmp_path, how):
    path, encoder = write(tmp_path / "triplets.jsonl", rows), tiny_encoder(batch_size=5)
    results = evaluate(encoder, "symmetric", tmp_path / "out", ALONE, data=path, distractors=distractors, **how)
    wins, ranks = naive(encoder, tmp_path, rows, distractors)
    recalls = [np.mean(ranks <= k) for k in (1, 5, 10)]
    assert not wins[0] and naive(encoder, tmp_path, [{**rows[0], "variant_text": None}])[0][0]
    assert 0 < wins.mean() < 1 and 0 < recalls[0] < recalls[2], "the test would not tell a wrong pool"
    (score,) = results.scores
    assert (score.name, score.queries, score.candidates) == ("triplets", 12, 3 * 12 - 1 + 40)
    assert [score.metrics[f"hit_rate@{k}"].value for k in (1, 5, 10)] == pytest.approx(recalls)
    assert score.metrics["hit_rate@5"].chance == pytest.approx(5 / 75)
    expected = {"average": (np.mean(recalls) + wins.mean()) / 2, "mean_recall": np.mean(recalls)}
    for name, value in (expected | {"precision": wins.mean()}).items():
        metric = score.metrics[name]
        assert metric.value == pytest.approx(value) and metric.low <= metric.value <= metric.high
    assert [entry.label for entry in results.headline] == ["triplets, Avg", "triplets, mR", "triplets, Precision"]
    by_kind = {row[0]: row[results.tables[1].columns.index("Precision")].value for row in results.tables[1].rows}
    assert by_kind == {"a b": wins[0::3].mean(), "c": wins[1::3].mean()}


def test_baselines_see_the_variants_that_have_the_part(rows, tmp_path):
    for row in rows:
        row.pop("variant_image", None)
    path, encoder = write(tmp_path / "triplets.jsonl", rows), tiny_encoder()
    options = EvaluateOptions(baselines=True)
    table = evaluate(encoder, "symmetric", tmp_path / "out", options, data=path).tables[-1]
    precision = {row[1]: row[table.columns.index("Precision")].value for row in table.rows}
    texts = [{key: value for key, value in row.items() if not key.startswith("variant")} for row in rows]
    assert precision["picture alone"] == naive(encoder, tmp_path, texts, parts=["image"])[0].mean()
    with_variant = [row | {"variant_image": row["query_image"]} for row in rows]
    assert precision["text alone"] == naive(encoder, tmp_path, with_variant, parts=["text"])[0].mean()


def test_ties_are_failures(tmp_path):
    row = {"query_text": "ab", "positive_text": "ba", "negative_text": "b a", "query_image": None}
    path = write(tmp_path / "same.jsonl", [row | {"positive_image": None, "negative_image": None}])
    metrics = evaluate(letters_encoder(), "symmetric", tmp_path / "out", ALONE, data=path).metrics("same")
    assert metrics["precision"].value == metrics["hit_rate@1"].value == 0


def test_items_shared_by_triplets_enter_the_pool_once(rows, tmp_path):
    swapped = []
    for row in rows:
        roles = {f"{a}_{part}": row[f"{b}_{part}"] for part in ("image", "text") for a, b in (ROLES[:2], ROLES[1::-1])}
        swapped.append(row | roles | {"id": row["id"] + "s"})
    path = write(tmp_path / "triplets.jsonl", rows + swapped)
    (score,) = evaluate(tiny_encoder(), "symmetric", tmp_path / "out", ALONE, data=path).scores
    assert (score.queries, score.candidates) == (24, 3 * 12 - 1)


def test_an_instruction_goes_with_every_item(rows, distractors, tmp_path):
    seen, encoder = [], tiny_encoder()
    plain = encoder.processor

    def instructed(items, instruction):
        seen.extend(instruction)
        return plain(items)

    encoder.processor = instructed
    which = {"data": write(tmp_path / "triplets.jsonl", rows), "distractors": distractors}
    for instruction in ("Represent:", "Other:"):
        seen.clear()
        evaluate(encoder, "symmetric", tmp_path / "out", ALONE, **which, instruction=instruction)
        assert seen == [f"{instruction} "] * (12 + 4 + 36 + 40)  # distractors are encoded for each instruction


def test_equal_items_in_a_triplet(rows, tmp_path):
    rows[0] |= {f"positive_{part}": rows[0][f"query_{part}"] for part in ("image", "text")}
    with pytest.raises(ValueError, match="triplet 't0': two of query, positive and negative are the same item"):
        evaluate(tiny_encoder(), "symmetric", tmp_path, data=write(tmp_path / "same.jsonl", rows))
