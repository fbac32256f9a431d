"""The analysis of layers reports what the model computes."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conjoin.evaluation import Curve, analyse_mllm
from conjoin.evaluation.layers import (
    ATTENDED,
    depth_advice,
    depth_operations,
    depth_parameters,
    hit_rates,
    readout_attention,
    readout_states,
)
from conjoin.hub.build import prune
from conjoin.models.shortcuts import use_shortcuts
from tiny_mllms import DEPTH, MLLMS

every_mllm = pytest.mark.parametrize("name", MLLMS)


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
    (shares,) = (curve.series for curve in results.curves if "parameters" in curve.title)
    assert [line[-1] for line in shares.values()] == [[4, 1]] * 4 and shares["parameters"][0][1] < 1
    sums = [sum(row[1:]) for row in tables["Attention of the readout token"].rows]
    assert sums == pytest.approx([1] * 4, abs=0.003)
    page = results.save(tmp_path).read_text()
    assert page.count('role="img"') == 3 and "Attention of the readout token" in page
    assert type(results).load(tmp_path / "results.json") == results


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
