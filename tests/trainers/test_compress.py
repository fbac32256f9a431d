"""Compression of an embedder by its own states; the analysis of layers reports what the model computes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from torch.utils.flop_counter import FlopCounterMode

from conjoin.cli.main import main
from conjoin.evaluation import Curve, render_report
from conjoin.hub import load_embedder, load_model
from conjoin.hub.build import prune
from conjoin.models.shortcuts import use_shortcuts
from conjoin.push import model_upload
from conjoin.trainers.compress import (
    ATTENDED,
    CompressOptions,
    DistillationRows,
    analyse_mllm,
    compress,
    depth_advice,
    depth_operations,
    depth_parameters,
    hit_rates,
    readout_attention,
    readout_states,
)
from tiny_embedders import drop_video, save_embedder
from tiny_mllms import DEPTH, MLLMS

every_mllm = pytest.mark.parametrize("name", MLLMS)


@pytest.fixture(autouse=True)
def without_video(monkeypatch):
    drop_video(monkeypatch)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    save_embedder(folder, "qwen2_vl", prompts={"query": "Find it."})
    return folder


def colours(count):
    for number in range(count):
        colour = (number * 20 % 256, number * 67 % 256, number * 111 % 256)
        yield {"image": Image.new("RGB", (16, 16 + 4 * (number % 3)), colour), "text": f"box {number}, {colour}"}


@pytest.mark.slow
def test_distillation_brings_the_copy_to_the_whole(embedder, tmp_path):
    model, processor = load_embedder(embedder)
    options = CompressOptions([3], steps=60, batch_size=8, learning_rate=1e-2, held_out=12, device="cpu")
    results = compress(model, processor, list(colours(60)), tmp_path, options)
    cells = {row[0]: row[1:] for row in results.tables[1].rows}
    whole, before, after = (cells[name][:3] for name in ("4, whole", "3, untrained", "3, trained"))
    assert whole == pytest.approx([1, 1, 1], abs=1e-4)
    assert min(np.subtract(after, before)) > 0 and np.mean(np.subtract(1, after)) < 0.7 * np.mean(
        np.subtract(1, before)
    )
    small = load_model(tmp_path / "layers-3")[0]
    assert small.config.keep_layers == 3
    frozen = {name: value for name, value in small.state_dict().items() if ".layers." not in name}
    whole_weights = load_embedder(embedder)[0].state_dict()
    changed = [name for name, value in frozen.items() if not torch.equal(value, whole_weights[name])]
    assert not changed
    costs = {row[0]: row[1:] for row in results.tables[2].rows}
    assert costs["3, trained"][0] < costs["4, whole"][0] and costs["3, trained"][1] < costs["4, whole"][1]
    assert {name for curve in results.curves for name in curve.series} >= {"trained", "untrained", "operations"}


def test_from_the_command_line(embedder, tmp_path, capsys):
    table = []
    for number, pair in enumerate(colours(16)):
        pair["image"].save(tmp_path / f"{number}.png")
        table.append({"image": f"{number}.png", "text": pair["text"]})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    out = tmp_path / "out"
    words = ["--layers", "1", "2", "--data", str(tmp_path / "pairs.jsonl"), "--steps", "2"]
    words += "--share 0.5 --held-out 4 --batch-size 4 --device cpu --lora-rank 2 --chunk-size 2".split()
    assert main(["compress", str(embedder), *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Agreement with the whole model" in printed and "At 50 % of the whole model's R@1" in printed
    found = json.loads((out / "compress.json").read_text())
    assert [row[0] for row in found["tables"][0]["rows"]] == [
        "4, whole", "1, untrained", "1, trained", "2, untrained", "2, trained",
    ]  # fmt: skip
    assert "<svg" in (out / "compress.html").read_text()
    for kept in (1, 2):
        folder = out / f"layers-{kept}"
        assert json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"] == kept
        assert SentenceTransformer(str(folder), device="cpu").prompts["query"] == "Find it."
        card = model_upload(folder, "me/half").card
        assert "of 32 dimensions" in card and "trained with conjoin" in card and "| max_steps | 2 |" in card
    assert main(["compress", str(embedder), *words, "--layers", "4", "--out", str(tmp_path / "no")]) == 2
    assert "expected fewer than the model's 4" in capsys.readouterr().err
    assert main(["compress", str(embedder), *words, "--preset", "gme", "--out", str(tmp_path / "no")]) == 2
    assert "preset='gme'; expected one of ['gme_qwen2_vl'" in capsys.readouterr().err
    data = [str(embedder), str(tmp_path / "pairs.jsonl"), "--pairs", "4", "--device", "cpu", "--share", "0.01"]
    assert main(["analyze", *data, "--out", str(tmp_path / "layers")]) == 0
    assert "At 1 % of the whole model's R@1, mean of both directions: " in capsys.readouterr().out
    for command in (["analyze", *data], ["compress", str(embedder), *words]):
        assert main([*command, "--share", "0", "--out", str(tmp_path / "no")]) == 2
        assert "share=0.0; expected more than 0 and at most 1" in capsys.readouterr().err


def test_rows_distil_every_kind_of_item():
    rows = DistillationRows(list(colours(2)), 2, "Find it.")
    kinds = {(tuple(sorted(row["query"])), tuple(sorted(row["positive"])), row["instruction"]) for row in rows}
    text, image, both = ("text",), ("image",), ("image", "text")
    assert kinds == {(text, both, "Find it."), (image, text, None), (both, image, "Find it.")}
    assert len(rows) == 6 and [row["positive_id"] for row in rows] == ["0"] * 3 + ["1"] * 3


# The analysis of layers


@pytest.fixture
def pairs(pictures):
    return [
        {"image": picture, "text": text} for picture, text in zip(pictures, ["a", "bcd", "7 1", "xy"], strict=True)
    ]


@every_mllm
def test_states_are_those_of_models_pruned_there(name, retriever, pairs):
    """At every depth that the architecture can be cut at, to the vector."""
    model, processor = retriever(name)
    for items in ([pair["image"] for pair in pairs], [pair["text"] for pair in pairs]):
        states = readout_states(model, processor, items)
        assert states.shape[:2] == (DEPTH, len(items))
        for keep in range(2, DEPTH + 1):
            copied, loaded = prune(model, keep), retriever(name, keep)[0]
            assert copied.config.to_dict() == loaded.config.to_dict()
            with torch.no_grad():
                for pruned in (copied, loaded):
                    expected = pruned(**processor(items)).pooler_output
                    assert (states[keep - 1] - expected).abs().max() <= 1e-5
                for parameter in copied.parameters():  # which shares no weights
                    parameter.requires_grad_(False).zero_()


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_position_before_the_token(name, side, retriever):
    model, processor = retriever(name, readout="before_token")
    processor.tokenizer.padding_side = side
    items = ["a", "more words"]
    with torch.no_grad():
        expected = model(**processor(items)).pooler_output
    assert (readout_states(model, processor, items)[-1] - expected).abs().max() <= 1e-5


@every_mllm
def test_attention_is_a_distribution_and_sees_what_there_is(name, retriever, pairs):
    model, processor = retriever(name)
    use_shortcuts(model)
    before, shortcuts = model.text_model.config._attn_implementation, model.shortcuts
    found = readout_attention(model, processor, pairs)
    assert found.shape == (DEPTH, len(ATTENDED)) and (found > 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(DEPTH, dtype=torch.float64))
    assert (model.text_model.config._attn_implementation, model.shortcuts) == (before, shortcuts)
    longer = [{**pair, "text": pair["text"] + " and many more words" * 4} for pair in pairs]
    assert (readout_attention(model, processor, longer)[:, 1] > found[:, 1]).all()


def test_attention_that_is_even_counts_tokens(retriever, pairs):
    """With queries of zero every token gets the same: the shares are those of the kinds of tokens."""
    model, processor = retriever("llava")
    with torch.no_grad():
        for layer in model.text_model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = readout_attention(model, processor, pairs[:1])
    length = int(processor(pairs[:1])["attention_mask"].sum())
    expected = torch.tensor([4, 1, length - 6, 1], dtype=torch.float64) / length  # the text is "a"
    torch.testing.assert_close(found, expected.expand(DEPTH, -1), rtol=1e-5, atol=1e-7)


def test_hits_are_ranks_of_partners():
    images, texts = torch.eye(6), torch.eye(6)
    texts[0, :2] = torch.tensor([0.5, 1.0])
    found = hit_rates({"image": images, "text": texts})
    values = {name: (round(metric.value, 3), round(metric.chance, 3)) for name, metric in found.items()}
    assert values == {
        "image → text, R@1": (1, 0.167), "image → text, R@5": (1, 0.833),
        "text → image, R@1": (0.833, 0.167), "text → image, R@5": (1, 0.833),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_costs_are_those_of_pruned_models(name, retriever, pairs):
    model, processor = retriever(name)
    parameters, operations = depth_parameters(model), depth_operations(model, processor, pairs[3])
    for keep in range(2, DEPTH + 1):
        pruned, _ = retriever(name, keep)
        assert parameters[keep - 1] == pruned.num_parameters()
        assert operations[keep - 1] == depth_operations(pruned, processor, pairs[3])[-1]
    model.set_attn_implementation("eager")  # whose products the counter knows by itself
    with FlopCounterMode(display=False) as counter:
        model(**processor([pairs[3]]))
    assert operations[-1] == counter.get_total_flops()


def test_the_report(retriever, pairs, tmp_path):
    model, processor = retriever("qwen2_vl")
    results = analyse_mllm(model.train(), processor, pairs, batch_size=3, attention_pairs=2)
    assert model.training
    tables = {table.title: table for table in results.tables}
    retrieval = tables["Retrieval by layers kept"]
    assert retrieval.columns == ["layers", *(f"{d}, R@{k}" for d in ("image → text", "text → image") for k in (1,))]
    assert [row[0] for row in retrieval.rows] == [1, 2, 3, 4]
    assert retrieval.rows[0][1].chance == pytest.approx(0.25)
    cost = tables["Cost by layers kept"]
    assert [cost.rows[-1][cost.columns.index(f"{name}, %")] for name in ("parameters", "text")] == [100.0] * 2
    assert [sum(row[1:]) for row in tables["Attention of the readout token, %"].rows] == pytest.approx(
        [100] * 4, abs=0.3
    )
    page = render_report(results, tmp_path / "page.html").read_text()
    assert page.count('role="img"') == 4 and "Attention of the readout token" in page
    results.save(tmp_path / "a.json")
    assert type(results).load(tmp_path / "a.json") == results


def test_only_a_retriever_is_analysed():
    joint = SimpleNamespace(config=SimpleNamespace(model_type="joint_encoder"))
    with pytest.raises(ValueError, match="only an MLLM retriever can be read at every layer"):
        analyse_mllm(joint, None, [])


def test_the_depth_is_the_fewest_layers_with_the_share():
    lines = {"trained": [[4, 0.3], [8, 0.47], [12, 0.49], [30, 0.5]], "untrained": [[4, 0.1], [8, 0.2], [30, 0.5]]}
    curve = Curve("R@10", lines, "layers")
    assert depth_advice(curve, 0.95) == "At 95 % of the whole model's R@10: 12 layers trained."
    assert depth_advice(curve, 0.4) == "At 40 % of the whole model's R@10: 4 layers trained, 8 layers untrained."
    assert depth_advice(curve, 1) == "At 100 % of the whole model's R@10: none of these depths."
