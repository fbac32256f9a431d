"""Reading an MLLM at every depth: what is reported is what the model computes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conjoin.evaluation import Curve, Results, render_report
from conjoin.methods.puma.analysis import (
    ATTENDED,
    analyse_mllm,
    depth_advice,
    depth_hits,
    depth_operations,
    depth_parameters,
    readout_attention,
    readout_states,
)
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
            pruned, _ = retriever(name, keep)
            with torch.no_grad():
                expected = pruned(**processor(items)).pooler_output
            assert (states[keep - 1] - expected).abs().max() <= 1e-5


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
    images = torch.eye(3)[None].repeat(2, 1, 1)
    texts = images.clone()
    texts[1, 0] = torch.tensor([0.5, 1.0, 0.0])
    found = depth_hits(images, texts)
    assert found["text → image"].tolist() == [[1, 1, 1], [2, 1, 1]]
    assert found["image → text"].tolist() == [[1, 1, 1], [1, 1, 1]]


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
    assert [cost.rows[-1][place] for place in (2, 4, 6, 8)] == [100.0] * 4
    assert [sum(row[1:]) for row in tables["Attention of the readout token, %"].rows] == pytest.approx(
        [100] * 4, abs=0.3
    )
    page = render_report(results, tmp_path / "page.html").read_text()
    assert page.count("<svg viewBox") == 4 and "Attention of the readout token" in page
    results.save(tmp_path / "a.json")
    assert type(results).load(tmp_path / "a.json") == results


class TestErrors:
    def test_what_cannot_be_analysed(self, retriever, pairs):
        model, processor = retriever("qwen2_vl")
        with pytest.raises(ValueError, match="only an MLLM retriever can be read at every layer, got Linear"):
            linear = torch.nn.Linear(1, 1)
            linear.config = model.config.backbone_config
            analyse_mllm(linear, processor, pairs)
        with pytest.raises(ValueError, match="1 pairs are too few for retrieval; expected at least 2"):
            analyse_mllm(model, processor, pairs[:1])
        with pytest.raises(ValueError, match="every item must have an image and a text; item 1 lacks one"):
            analyse_mllm(model, processor, [pairs[0], {"image": pairs[0]["image"], "text": None}])
        with pytest.raises(ValueError, match="the results 'other' have no curve; expected those of `compress`"):
            analyse_mllm(model, processor, pairs, compressed=Results(title="other", summary="", seed=0))


def test_the_depth_is_the_fewest_layers_with_the_share():
    lines = {"trained": [[4, 0.3], [8, 0.47], [12, 0.49], [30, 0.5]], "untrained": [[4, 0.1], [8, 0.2], [30, 0.5]]}
    curve = Curve("R@10", lines, "layers")
    assert depth_advice(curve, 0.95) == "At 95 % of the whole model's R@10: 12 layers trained."
    assert depth_advice(curve, 0.4) == "At 40 % of the whole model's R@10: 4 layers trained, 8 layers untrained."
    assert depth_advice(curve, 1) == "At 100 % of the whole model's R@10: none of these depths."
