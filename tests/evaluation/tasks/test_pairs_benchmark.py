"""Text → image and image → text on pairs: scores equal a naive computation, any partner is right, ties fail."""

import csv

import numpy as np
import pytest
from PIL import Image

from conjoin.data import load_pairs
from conjoin.evaluation import EvaluateOptions, evaluate
from conjoin.evaluation.tasks.pairs import CELLS, PairsOptions, pairs_cells
from tiny_encoder import tiny_encoder

CAPTIONS = [  # image 2 has one caption, the last but one is of two images
    *((0, "a red thing"), (0, "the first picture"), (1, "green"), (1, "grass or so"), (2, "blue sky")),
    *((3, "nothing much here"), (3, "a blank"), (0, "a blank"), (4, "x y z")),
]


@pytest.fixture
def pairs(tmp_path):
    for number in range(5):
        Image.new("RGB", (6, 6), (50 * number, 255 - 60 * number, 17 * number)).save(tmp_path / f"{number}.png")
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *((f"{number}.png", text) for number, text in CAPTIONS)])
    return load_pairs(tmp_path / "captions.csv")


def run(encoder, data, out, **which):
    return evaluate(encoder, "pairs", out, EvaluateOptions(baselines=False), data=data, **which)


def naive_ranks(encoder, folder, asked):
    images = [str(folder / f"{number}.png") for number in range(5)]
    texts = list(dict.fromkeys(text for _, text in CAPTIONS))
    right = {(number, texts.index(text)) for number, text in CAPTIONS}
    scores = encoder.encode(images) @ encoder.encode(texts).T
    if asked == "text":
        scores, right = scores.T, {pair[::-1] for pair in right}
    ranks = []
    for query, row in enumerate(scores):
        best = max(row[found] for found in range(len(row)) if (query, found) in right)
        ranks.append(1 + sum(row[found] >= best for found in range(len(row)) if (query, found) not in right))
    return np.array(ranks)


def test_scores_are_those_of_a_naive_loop(pairs, tmp_path):
    results = run(tiny_encoder(), pairs, tmp_path / "out")
    for asked, found, queries in (("text", "image", 8), ("image", "text", 5)):
        score = next(each for each in results.scores if each.name == f"{asked} → {found}")
        ranks = naive_ranks(tiny_encoder(), tmp_path, asked)
        assert (score.queries, score.candidates) == (queries, 13 - queries) and len(set(ranks)) > 1
        for k in (1, 5, 10):
            assert score.metrics[f"hit_rate@{k}"].value == pytest.approx((ranks <= k).mean())
        assert score.metrics["mrr@10"].value == pytest.approx((1 / ranks).mean())
    assert results.metrics("text → image")["hit_rate@1"].chance == pytest.approx((7 * 0.2 + 0.4) / 8)
    assert [headline.label for headline in results.headline] == [f"{name}, R@5" for name in CELLS]
    first = results.examples[0]
    assert first.query.text == "a red thing" and first.results[0].item.image.startswith("data:image/")
    assert results.examples[3].query.image and results.examples[3].results[0].item.text


def test_words_find_rows_of_picture_and_text(pairs, tmp_path):
    """What `conjoin start` shows; each row of the gallery is encoded once, and each text."""
    encoder = tiny_encoder(batch_size=1)
    (score,) = run(encoder, pairs, tmp_path / "out", cells=["text → image+text"]).scores
    assert (score.queries, score.candidates) == (8, 9) and len(encoder.model.batches) == 8 + 9
    items = encoder.encode([{"image": str(tmp_path / f"{number}.png"), "text": text} for number, text in CAPTIONS])
    texts = list(dict.fromkeys(text for _, text in CAPTIONS))
    ranks = []
    for text, row in zip(texts, encoder.encode(texts) @ items.T, strict=True):
        right = np.array([text == other for _, other in CAPTIONS])
        ranks.append(1 + (row[~right] >= row[right].max() - 1e-6).sum())
    assert score.metrics["mrr@10"].value == pytest.approx((1 / np.array(ranks)).mean())
    assert score.metrics["hit_rate@1"].chance == pytest.approx((7 / 9 + 2 / 9) / 8)


def test_the_score_that_most_wrong_answers_lie_below(pairs, tmp_path):
    table = run(tiny_encoder(), pairs, tmp_path / "out", cells=list(CELLS[:2])).tables[-1]
    images = [str(tmp_path / f"{number}.png") for number in range(5)]
    texts = list(dict.fromkeys(text for _, text in CAPTIONS))
    scores = tiny_encoder().encode(images) @ tiny_encoder().encode(texts).T
    is_right = np.array([[(number, text) in CAPTIONS for text in texts] for number in range(5)])
    for row, name, axis in zip(table.rows, ("text → image", "image → text"), (0, 1), strict=True):
        wrong = np.where(is_right, -np.inf, scores).max(axis=axis)
        right = np.where(is_right, scores, -np.inf).max(axis=axis)
        threshold = np.quantile(wrong, 0.95)
        assert row[:2] == [name, len(wrong)] and float(row[2]) == pytest.approx(threshold, abs=1e-4)
        assert row[3].value == pytest.approx((right > threshold).mean())


def test_only_the_gallery_is_searched(pairs, tmp_path):
    held_out = pairs.select([4, 5, 6])  # images 2 and 3, with one and two captions
    results = run(tiny_encoder(), held_out, tmp_path / "out", gallery=pairs)
    assert [(score.queries, score.candidates) for score in results.scores] == [(3, 5), (2, 8), (3, 9)]
    ranks = naive_ranks(tiny_encoder(), tmp_path, "text")[[4, 5, 6]]
    assert results.metrics("text → image")["mrr@10"].value == pytest.approx((1 / ranks).mean())


def test_a_query_does_not_find_its_own_text(pairs, tmp_path):
    """The words of a customer stand nowhere in the catalogue: right are the rows with the picture."""
    asked = pairs.select([4, 5]).map(lambda row: {"text": f"please {row['text']}"})
    to_image, to_text, to_row = pairs_cells(PairsOptions(data=asked, gallery=pairs))
    assert (to_image.qrels, to_row.qrels) == ({"4": ["4"], "5": ["5"]}, {"4": ["4"], "5": ["5", "6"]})
    assert to_text.qrels == {"4": ["4"], "5": ["5", "6"]}
    assert not any(row["text"].startswith("please") for row in to_row.corpus.rows)
    with pytest.raises(ValueError, match=r"row '0' of the data: the gallery has neither its image nor text"):
        pairs_cells(PairsOptions(data=pairs, gallery=asked))


def test_texts_that_differ_in_case_or_spacing_are_one(pairs):
    again = pairs.map(lambda row: {"text": {"7": "A  Blank", "2": "GREEN"}.get(row["id"], row["text"])})
    to_image, _, to_item = pairs_cells(PairsOptions(data=again))
    assert len(to_image.qrels) == 8
    assert to_image.qrels["6"] == ["0", "5"]  # "a blank" stands at two images
    assert to_item.qrels["6"] == ["6", "7"]
