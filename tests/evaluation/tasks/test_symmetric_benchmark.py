import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from conjoin.data import load_triplets
from conjoin.evaluation import EvaluateOptions
from conjoin.evaluation.tasks.symmetric import evaluate_triplets
from conjoin.processing.item_inputs import parse_items
from conjoin.retrieval import ItemEncoder, encode, encode_collection

FEW = EvaluateOptions(resamples=50)


class Projection(torch.nn.Module):
    """A stand-in for a model: a random projection of the colours and of the letters."""

    def __init__(self, seed=0):
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: {"seed": seed})
        self.weight = torch.nn.Parameter(torch.randn(256 + 48, 10, generator=torch.Generator().manual_seed(seed)))

    def forward(self, features):
        return SimpleNamespace(embeddings=torch.nn.functional.normalize(features @ self.weight, dim=-1))


def processor(items):
    features = torch.zeros(len(items), 256 + 48)
    for row, item in enumerate(parse_items(items)):
        for byte in " ".join(item.texts).encode():
            features[row, byte] += 1
        for image in item.images:
            features[row, 256:] = torch.from_numpy(np.asarray(image.resize((4, 4))).reshape(-1) / 64.0)
    return {"features": features}


@pytest.fixture
def encoder():
    return ItemEncoder(Projection(), processor, batch_size=5, name="projection")


@pytest.fixture
def random():
    return np.random.default_rng(0)


def item(random, folder, number):
    image = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    image.save(folder / f"{number}.png")
    letters = "".join(random.choice(list("abcdefgh "), size=9))
    return f"{number}.png", f"text {number} {letters}"


@pytest.fixture
def triplets(tmp_path, random):
    """Twelve triplets on disk, every third with a variant, the positive near the query."""
    rows = []
    for number in range(12):
        row = {"id": f"t{number}"}
        for place, role in enumerate(("query", "positive", "negative", "variant")):
            if role == "variant" and number % 3:
                continue
            row[f"{role}_image"], row[f"{role}_text"] = item(random, tmp_path, 4 * number + place)
        if number % 4:
            row["positive_image"] = row["query_image"]
        if number % 4 == 1:
            row["positive_text"] = row["query_text"] + " indeed"
        rows.append(row)
    path = tmp_path / "triplets.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_triplets(path)


@pytest.fixture
def distractors(tmp_path, random):
    rows = []
    for number in range(40):
        image, text = item(random, tmp_path, 100 + number)
        rows.append({"id": f"d{number}", "image": str(tmp_path / image), "text": text})
    return rows


def naive_metrics(encoder, triplets, distractors):
    """Precision and Recall@k from all scores at once."""

    def vectors(items):
        return encoder.encode(items).astype(np.float64)

    def role(row, name):
        return {"image": row[f"{name}_image"]["path"], "text": row[f"{name}_text"]}

    items = [role(row, name) for row in triplets for name in ("query", "positive", "negative")]
    pool = vectors(items + [{"image": row["image"], "text": row["text"]} for row in distractors])
    wins, ranks = [], []
    for number, row in enumerate(triplets):
        x, positive, negative = pool[3 * number : 3 * number + 3]
        other = x if row["variant_text"] is None else vectors([role(row, "variant")])[0]
        wins.append(x @ positive > other @ negative)
        rivals = np.delete(pool, [3 * number, 3 * number + 1], axis=0)
        ranks.append(1 + int((rivals @ x >= x @ positive).sum()))
    recalls = [np.mean([rank <= k for rank in ranks]) for k in (1, 5, 10)]
    return np.mean(wins), recalls


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_equals_all_scores_at_once(encoder, triplets, distractors, tmp_path, dtype):
    results = evaluate_triplets(
        encoder, triplets, tmp_path / "out", distractors, EvaluateOptions(dtype=dtype, resamples=200)
    )
    (symmetric,) = results.symmetric
    precision, recalls = naive_metrics(encoder, triplets, distractors)
    assert 0 < precision < 1 and 0 < recalls[0] < recalls[2], "the test would not tell a wrong pool"
    metrics = symmetric.metrics
    assert metrics["precision"].value == pytest.approx(precision)
    assert [metrics[f"recall@{k}"].value for k in (1, 5, 10)] == pytest.approx(recalls)
    assert metrics["mean_recall"].value == pytest.approx(np.mean(recalls))
    assert metrics["average"].value == pytest.approx((np.mean(recalls) + precision) / 2)
    assert metrics["average"].low <= metrics["average"].value <= metrics["average"].high
    assert (symmetric.triplets, symmetric.pool) == (12, 3 * 12 - 1 + 40)
    assert results.dataset == {"triplets": 12, "variants": 4, "distractors": 40}
    assert results.model["fingerprint"] == encoder.fingerprint
    assert [headline.label for headline in results.headline] == ["Avg", "mR", "Precision"]


def test_distractors_streamed_stored_or_absent(encoder, triplets, distractors, tmp_path):
    listed = evaluate_triplets(encoder, triplets, tmp_path / "a", distractors, options=FEW)
    stream = Dataset.from_list(distractors).to_iterable_dataset()
    streamed = evaluate_triplets(encoder, triplets, tmp_path / "b", stream, options=FEW)
    collection = encode_collection(distractors, encoder, tmp_path / "collection")
    stored = evaluate_triplets(encoder, triplets, tmp_path / "c", collection, options=FEW)
    assert listed.symmetric == streamed.symmetric == stored.symmetric
    alone = evaluate_triplets(encoder, triplets, tmp_path / "d", options=FEW).symmetric[0]
    assert alone.pool == 35 and alone.metrics["precision"] == listed.symmetric[0].metrics["precision"]


def test_an_interrupted_evaluation_keeps_the_encoded_distractors(
    encoder, triplets, distractors, tmp_path, monkeypatch
):
    monkeypatch.setattr(encode, "_BATCHES_AT_ONCE", 1)
    monkeypatch.setattr(encode, "_ROWS_PER_COMMIT", 1)
    encoder.batch_size = 10

    def broken():
        yield from distractors[:25]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_triplets(encoder, triplets, tmp_path, broken(), options=FEW)
    encoded = []
    forward = encoder.model.forward
    encoder.model.forward = lambda features: encoded.append(len(features)) or forward(features)
    evaluate_triplets(encoder, triplets, tmp_path, distractors, options=FEW)
    assert sum(encoded) == 3 * 12 + 4 + 20


def test_items_shared_by_triplets_enter_the_pool_once(encoder, triplets, tmp_path):
    swapped = [
        row
        | {f"{a}_{part}": row[f"{b}_{part}"] for part in ("image", "text") for a, b in roles}
        | {"id": row["id"] + "s"}
        for row in triplets.to_list()
        for roles in [(("query", "positive"), ("positive", "query"))]
    ]
    both = Dataset.from_list(triplets.to_list() + swapped, features=triplets.features)
    assert evaluate_triplets(encoder, both, tmp_path, options=FEW).symmetric[0].pool == 3 * 12 - 1


def test_an_instruction_goes_with_every_item(encoder, triplets, distractors, tmp_path):
    seen = []

    def instructed(items, instruction):
        seen.extend(instruction)
        return processor(items)

    encoder.processor = instructed
    for instruction in ("Represent:", "Other:"):
        seen.clear()
        results = evaluate_triplets(encoder, triplets, tmp_path, distractors, instruction=instruction, options=FEW)
        assert seen == [instruction] * (3 * 12 + 4 + 40)  # distractors are encoded for each instruction
        assert results.config == {"resamples": 50, "instruction": instruction}


def test_mistakes(encoder, triplets, distractors, tmp_path):
    with pytest.raises(ValueError, match="there are no triplets to evaluate"):
        evaluate_triplets(encoder, triplets.select([]), tmp_path)
    other = encode_collection(distractors, ItemEncoder(Projection(1), processor), tmp_path / "other")
    with pytest.raises(ValueError, match=r"was made with model 'Projection' .*cannot be compared"):
        evaluate_triplets(encoder, triplets, tmp_path, other)
    same = triplets.map(lambda row: {f"positive_{part}": row[f"query_{part}"] for part in ("image", "text")})
    with pytest.raises(ValueError, match="triplet 't0': query and positive are the same item"):
        evaluate_triplets(encoder, same, tmp_path / "same", distractors, options=FEW)
    assert not (tmp_path / "same").exists()  # told before a million distractors are encoded
    lost = tmp_path / "4.png"  # the query of triplet 1
    lost.write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"item 't1, query'.*4\.png.*cannot read the image"):
        evaluate_triplets(encoder, triplets, tmp_path)
