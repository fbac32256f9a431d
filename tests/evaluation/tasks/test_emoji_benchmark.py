import itertools

import numpy as np
import pytest

from conjoin.data import emoji_concepts
from conjoin.evaluation import EvaluateOptions, evaluate
from conjoin.evaluation.tasks.emoji import PARTS, EmojiOptions, emoji_cells, emoji_rows
from tiny_encoder import tiny_encoder


@pytest.fixture
def few(load_first_emoji, monkeypatch):
    for room in ("sample", "triplets"):
        monkeypatch.setattr(f"conjoin.data.emoji.{room}.load_emoji", load_first_emoji)


@pytest.mark.slow
def test_nine_combinations_equal_a_naive_loop(few, tmp_path):
    encoder = tiny_encoder(batch_size=64)
    options = EvaluateOptions(baselines=False)
    results = evaluate(encoder, "emoji", tmp_path, options, split="validation")
    queries, gallery = emoji_rows(EmojiOptions(split="validation"))
    named_twice = np.array([name is not None for name in gallery["alternative_text"]])
    vectors = [
        {part: encoder.encode([{name: row[name] for name in part.split("+")} for row in rows]) for part in PARTS}
        for rows in (queries, gallery)
    ]
    everything = np.concatenate(list(vectors[1].values()))
    assert encoder.model.batches.count(64) < 2 * len(everything) / 64 + 20  # each once for all cells
    for query, (place, target) in itertools.product(PARTS, enumerate(PARTS)):
        asked = np.flatnonzero(named_twice) if "text" in query and "text" in target else np.arange(len(queries))
        pools = {"local": (vectors[1][target], 0), "global": (everything, place * len(queries))}
        for setting, (pool, start) in pools.items():
            scores = vectors[0][query][asked] @ pool.T
            right = scores[np.arange(len(asked)), start + asked]
            ranks = (scores >= right[:, None] - 1e-6).sum(1)
            metrics = results.metrics(f"{setting} {query} → {target}")
            found = [metrics[f"hit_rate@{k}"].value for k in (1, 5, 10, 50)]
            assert found == pytest.approx([(ranks <= k).mean() for k in (1, 5, 10, 50)]), (setting, query, target)
            assert metrics["hit_rate@10"].chance == pytest.approx(10 / len(pool))
    cells = {cell.name: cell for cell in emoji_cells(EmojiOptions(split="validation"))}
    for query in PARTS:
        asked = np.flatnonzero(named_twice) if "text" in query else np.arange(len(queries))
        scores = vectors[0][query] @ everything.T
        own = scores.reshape(len(queries), 3, -1)[np.arange(len(queries)), :, np.arange(len(queries))]
        ranks = 1 + (scores >= own.max(1)[:, None] - 1e-6).sum(1) - (own >= own.max(1)[:, None] - 1e-6).sum(1)
        found = results.metrics(f"any {query}")
        assert [found[f"hit_rate@{k}"].value for k in (1, 10)] == pytest.approx(
            [(ranks[asked] <= k).mean() for k in (1, 10)]
        )
        cell, order = cells[f"once {query}"], [f"{part}/{id_}" for part in PARTS for id_ in gallery["id"]]
        places = np.array([order.index(name) for name in cell.candidates])
        assert sorted(places % len(queries)) == [*range(len(queries))], "each concept stands in the gallery once"
        kept = [
            n
            for n, place in enumerate(places)
            if named_twice[n] or "text" not in query or "text" not in PARTS[place // len(queries)]
        ]
        assert [*cell.qrels] == [queries["id"][n] for n in kept]
        some = scores[np.ix_(kept, places)]
        ranks = (some >= some[np.arange(len(kept)), kept][:, None] - 1e-6).sum(1)
        assert results.metrics(f"once {query}")["hit_rate@10"].value == pytest.approx((ranks <= 10).mean())
    titles = ["Local", "Global", "Any", "Once", "Scores", "Kinds found", "Gap between kinds"]
    assert [table.title.split(":")[0] for table in results.tables] == titles
    assert results.metrics("emoji triplets")["precision"].chance == 0.5


@pytest.mark.slow
def test_queries_in_another_language(few):
    english, german = (
        next(
            cell for cell in emoji_cells(EmojiOptions(split="validation", language=name)) if "text → text" in cell.name
        )
        for name in ("en", "de")
    )
    names = {concept.concept: concept.text for concept in emoji_concepts("de")}
    for id_, right in german.qrels.items():
        assert german.queries.item(id_) == {"text": names[id_.split("/")[0]]}
        assert german.corpus.item(right[0]) == english.corpus.item(right[0])
    assert len(english.qrels) < len(german.qrels) == len(german.queries.rows)  # also names without a second one
    with pytest.raises(ValueError, match="unknown language 'xx'"):
        emoji_cells(EmojiOptions(split="validation", language="xx"))
