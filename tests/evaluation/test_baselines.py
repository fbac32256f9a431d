"""Baselines: parts of the items, and the towers of a joint encoder, on the same task."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from conjoin import JointEncoderModel, explain_pair
from conjoin.evaluation import Cell, EvaluateOptions, Rows, evaluate_cells
from conjoin.evaluation.benchmark import baseline_table
from conjoin.evaluation.readouts import other_encoders
from conjoin.hub.build import image_text_processor, towers_model
from conjoin.retrieval import ItemEncoder, load_encoder
from tiny_encoder import tiny_encoder, tiny_rows
from tiny_letters import count_letters_and_red, letters_encoder


def items(name, count, shift=0):
    pictures = [Image.new("RGB", (5, 5), (n * 40, shift, 9)) for n in range(count)]
    rows = [{"id": f"{name}{n}", "image": image, "text": f"thing {n * 7 + shift}"} for n, image in enumerate(pictures)]
    return Rows(name, rows)


def scores_of(encoder, tmp_path, options):
    queries, corpus = items("q", 4, 3), items("c", 6)
    both = Cell("both", queries, corpus, {f"q{n}": [f"c{n}"] for n in range(4)})
    words = Rows("words", [{"id": f"w{n}", "text": f"a thing {n}"} for n in range(4)])
    pictures = Rows("pictures", [{"id": f"p{n}", "image": Image.new("RGB", (5, 5), (n, 9, 9))} for n in range(4)])
    across = Cell("across", words, pictures, {f"w{n}": [f"p{n}"] for n in range(4)})
    return evaluate_cells(encoder, [both, across], tmp_path, options)


def test_a_table_of_views_of_the_tasks_that_have_them(tmp_path):
    encoder = tiny_encoder()
    scores = scores_of(encoder, tmp_path, EvaluateOptions(baselines=True))
    table = baseline_table(scores)
    labels = ("this model", "text alone", "picture alone", "sum of views", "random order")
    assert [row[:4] for row in table.rows] == [["both", label, 4, 6] for label in labels]
    queries, corpus = items("q", 4, 3).rows, items("c", 6).rows
    vectors = {
        part: [encoder.encode([row[part] for row in rows]) for rows in (queries, corpus)] for part in ("text", "image")
    }
    summed = [sum(parts) for parts in zip(*vectors.values(), strict=True)]
    vectors["sum"] = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in summed]
    for row, view in zip(table.rows[1:4], ("text", "image", "sum"), strict=True):
        found = vectors[view][0] @ vectors[view][1].T
        ranks = (found >= np.diagonal(found)[:, None] - 1e-6).sum(1)
        assert row[4].value == (ranks == 1).mean() and row[7].value == pytest.approx((1 / ranks).mean())


def test_a_view_leaves_out_rows_without_the_part(tmp_path):
    red = Image.new("RGB", (2, 2), (250, 0, 0))
    queries = Rows("q", [{"id": "q", "image": red, "text": "a"}])
    corpus = Rows("c", [{"id": "1", "image": red, "text": "b"}, {"id": "2", "text": "a"}])
    scores = evaluate_cells(
        letters_encoder(count_letters_and_red), [Cell("c", queries, corpus, {"q": ["1"]})], tmp_path
    )
    rows = {row[1]: (row[3], row[4].value) for row in baseline_table(scores).rows}
    # the sum has unit vectors: red + a is nearer to a than to red + b
    assert (rows["text alone"], rows["picture alone"], rows["sum of views"]) == ((2, 0), (1, 1), (2, 0))


def test_a_gallery_of_several_kinds_is_scored_without_their_means(tmp_path):
    encoder, rows = tiny_encoder(), tiny_rows(30)
    kinds = np.array(["both" if row["image"] and row["text"] else "image" if row["image"] else "text" for row in rows])
    asked = [{"id": f"q{n}", "text": f"thing {n}"} for n in range(30)]
    queries, corpus, right = Rows("q", asked), Rows("c", rows), {f"q{n}": [f"row/{n}"] for n in range(30)}
    texts = Cell("texts", queries, corpus, {"q0": ["row/0"]}, [f"row/{n}" for n in range(0, 30, 3)])
    cells = [Cell("mixed", queries, corpus, right), texts]
    scores = evaluate_cells(encoder, cells, tmp_path)
    table = {tuple(row[:2]): row for row in baseline_table(scores).rows}
    assert ("mixed", "centered by kind") in table and ("texts", "centered by kind") not in table
    vectors, queries = (
        encoder.encode([{key: row[key] for key in ("image", "text") if row[key]} for row in rows]),
        encoder.encode([row["text"] for row in asked]),
    )
    means = {kind: vectors[kinds == kind].mean(0) for kind in ("image", "text", "both")}
    moved, asked = (
        each - means_of
        for each, means_of in ((vectors, np.stack([means[kind] for kind in kinds])), (queries, means["text"]))
    )
    found = (asked / np.linalg.norm(asked, axis=1, keepdims=True)) @ (
        moved / np.linalg.norm(moved, axis=1, keepdims=True)
    ).T
    ranks = (found >= np.diagonal(found)[:, None] - 1e-6).sum(1)
    plain = queries @ vectors.T
    assert not np.array_equal(ranks, (plain >= np.diagonal(plain)[:, None] - 1e-6).sum(1))
    row = table["mixed", "centered by kind"]
    assert [row[4].value, row[5].value] == pytest.approx([(ranks <= k).mean() for k in (1, 5)])


def test_a_text_alone_is_without_the_marks_of_images(tmp_path):
    red = Image.new("RGB", (2, 2), (250, 0, 0))
    queries = Rows("q", [{"id": "q", "image": [red, red], "text": "b <image> <image>"}])
    corpus = Rows("c", [{"id": text, "image": red, "text": text} for text in ("b", "image")])
    scores = evaluate_cells(
        letters_encoder(count_letters_and_red), [Cell("c", queries, corpus, {"q": ["b"]})], tmp_path
    )
    assert {row[1]: row[4].value for row in baseline_table(scores).rows}["text alone"] == 1


@pytest.mark.parametrize(("baselines", "most", "scored"), [(None, 18, True), (None, 17, False), (False, 99, False)])
def test_small_tasks_have_baselines(tmp_path, monkeypatch, baselines, most, scored):
    monkeypatch.setattr("conjoin.evaluation.benchmark.MOST_ROWS", most)
    table = baseline_table(scores_of(tiny_encoder(), tmp_path, EvaluateOptions(baselines=baselines)))
    assert (table is not None) == scored


def test_towers_alone(own_export, tmp_path):
    _, model, processor = own_export
    encoder = ItemEncoder(model, processor, 4)
    towers, red = other_encoders(encoder)["towers alone"], Image.new("RGB", (9, 9), "red")
    picture, word, both = towers.encode([red, "red", {"image": red, "text": "red"}])
    assert picture @ word == pytest.approx(0, abs=1e-6)  # towers share no space
    assert both @ picture == pytest.approx(np.sqrt(0.5), abs=1e-5) == both @ word
    inputs = encoder.processor(["red"])
    states = model.text_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    expected = torch.nn.functional.normalize(states.mean(1), dim=1)[0]
    width = model.config.vision_config.hidden_size
    torch.testing.assert_close(torch.from_numpy(word[width:]), expected.detach(), atol=1e-5, rtol=0)
    assert towers.fingerprint != encoder.fingerprint
    table = baseline_table(scores_of(encoder, tmp_path, EvaluateOptions(baselines=True)))
    assert ["both", "towers alone"] in [row[:2] for row in table.rows]
    assert ["across", "towers alone"] not in [row[:2] for row in table.rows]


def test_heads_of_solar_in_the_folder_project_what_is_alone(own_export, tmp_path):
    shutil.copytree(own_export[0], tmp_path / "model")
    encoder = load_encoder(tmp_path / "model", device="cpu")
    assert "with W" not in other_encoders(encoder)
    width = encoder.dimension
    heads = {f"heads.{part}.weight": torch.randn(width, width) for part in ("image", "text")}
    save_file(heads, str(tmp_path / "model/solar_loss.safetensors"))
    red = Image.new("RGB", (9, 9), "red")
    items = [red, "red", {"image": red, "text": "red"}]
    plain, projected = (each.encode(items) for each in (encoder, other_encoders(encoder)["with W"]))
    for row, head in enumerate(heads.values()):
        expected = head.numpy() @ plain[row]
        np.testing.assert_allclose(projected[row], expected / np.linalg.norm(expected), atol=1e-5)
    np.testing.assert_allclose(projected[2], plain[2], atol=1e-6)
    np.testing.assert_allclose(other_encoders(encoder)["with W"].encode(items[1:2])[0], projected[1], atol=1e-5)
    table = baseline_table(scores_of(encoder, tmp_path, EvaluateOptions(baselines=True)))
    assert {("both", "with W"), ("across", "with W")} <= {tuple(row[:2]) for row in table.rows}


def test_towers_of_an_encoder_of_pooled_states(tiny_checkpoints):
    folders = tiny_checkpoints["dinov2"], tiny_checkpoints["bert"]
    model = towers_model(JointEncoderModel, *folders, num_vl_layers=0, hidden_size=24, num_attention_heads=1)
    processor = image_text_processor(*folders)
    word = other_encoders(ItemEncoder(model.eval(), processor, 4))["towers alone"].encode(["red"])[0]
    inputs = processor(["red"])
    states = model.run_text_tower(inputs["input_ids"], inputs["attention_mask"])[0, 1:]
    expected = torch.nn.functional.normalize(states.mean(0), dim=0).detach()
    torch.testing.assert_close(torch.from_numpy(word[-len(expected) :]), expected, atol=1e-5, rtol=0)
    shown = explain_pair(model, processor, Image.new("RGB", (32, 32), "red"), "red")
    assert len(shown.image_scores) == shown.grid[0] * shown.grid[1] and shown.image_scores.abs().max() > 0
