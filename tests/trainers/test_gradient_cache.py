"""The gradient-cached step is the plain step."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from conjoin import GclTrainer
from conjoin.data import PairCollator
from conjoin.trainers.gradient_cache import RandomState, split_rows, total_loss
from tiny_training import cached_step, make_encoder, make_rows, make_trainer, plain_step, without_dropout

CHUNKS = [(1, 0), (3, 0), (8, 0), (100, 0), (0, 20), (2, 40), (0, 1), (0, 1000)]
"""Rows and tokens of a chunk; 0 for any number."""


@pytest.fixture
def make_step(tiny_checkpoints, tmp_path):
    def make(method, **config):
        """The step of a trainer in float64, and its processor."""
        model, processor = make_encoder(tiny_checkpoints, **config)
        return make_trainer(method, model, processor, tmp_path, None).model.double(), processor

    return make


def varied_batch(processor):
    """Eight pairs whose texts have 3 to 17 tokens; two show the same item."""
    rows = [dict(row) for row in make_rows(8, groups=7)]
    for row, letters in zip(rows, (4, 15, 1, 9, 2, 15, 7, 3), strict=True):
        row["text"] = " ".join("abcdefghijklmno"[:letters])
    return PairCollator(processor)(rows)


@pytest.mark.parametrize("method", ["contrastive", "gcl"])
@pytest.mark.parametrize(("chunk_size", "chunk_tokens"), CHUNKS)
def test_gradients_equal_the_plain_step(make_step, method, chunk_size, chunk_tokens):
    step, processor = make_step(method)
    step.eval()  # no dropout: chunks draw other numbers
    batch = varied_batch(processor)
    assert len(set(batch["ids"].tolist())) == 7
    plain, expected = plain_step(step, batch)
    terms, found = cached_step(step, batch, chunk_size, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(terms, plain, rtol=0, atol=1e-12)
    assert expected["loss.temperature.log_value"].abs() > 1e-6
    assert expected["encoder.vl_encoder.cls_token"].abs().max() > 1e-6
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_chunks_by_tokens_are_full_and_hold_no_common_padding(tiny_checkpoints):
    batch = varied_batch(make_encoder(tiny_checkpoints)[1])
    lengths = batch["pairs"]["attention_mask"].sum(1)
    assert lengths.tolist() == [6, 17, 3, 11, 4, 17, 9, 5]
    chunks = list(split_rows(batch, 0, 20))
    assert [chunk.indices.tolist() for chunk in chunks] == [[1], [5], [3], [6, 0], [7, 4, 2]]
    for chunk in chunks:
        pairs, width = chunk.inputs["pairs"], int(lengths[chunk.indices].max())
        for part in ("input_ids", "attention_mask", "special_tokens_mask"):
            assert torch.equal(pairs[part], batch["pairs"][part][chunk.indices, :width])
        assert torch.equal(pairs["pixel_values"], batch["pairs"]["pixel_values"][chunk.indices])
    assert [len(chunk.indices) for chunk in split_rows(batch, 2, 1000)] == [2, 2, 2, 2]


def test_parts_are_cut_one_after_another_with_what_belongs_to_their_rows():
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]])  # padding in front is dropped too
    queries = {"input_ids": mask * 7, "attention_mask": mask, "kind": "x"}
    batch = {
        "queries": queries,
        "positives": {"a": torch.arange(2), "teacher": {"b": torch.arange(2) * 10}},
        "ids": mask,
    }
    found = [(chunk.indices.tolist(), chunk.inputs) for chunk in split_rows(batch, 0, 4)]
    assert [places for places, _ in found] == [[1], [0, 2], [3, 4]]
    assert found[1][1]["queries"]["input_ids"].tolist() == [[7, 7], [0, 7]]
    (one, two, three), places = (chunks := list(split_rows(batch, 2))), [chunk.indices.tolist() for chunk in chunks]
    assert places == [[0, 1], [2], [3, 4]] and two.inputs["queries"]["kind"] == "x"
    assert torch.equal(one.inputs["queries"]["input_ids"], mask[:2] * 7)
    assert three.inputs["positives"]["teacher"]["b"].tolist() == [0, 10]


def test_padding_with_a_meaning_is_not_dropped(tiny_checkpoints, tmp_path, monkeypatch):
    model, processor = make_encoder(tiny_checkpoints)
    needs = ((GclTrainer, "supports_token_chunks", False), (processor, "text_padding", "max_length"))
    for owner, name, value in needs:
        with (
            monkeypatch.context() as patch,
            pytest.raises(ValueError, match=r"chunk_tokens sorts rows and drops padding, which GclTrainer or the"),
        ):
            patch.setattr(owner, name, value)
            make_trainer("gcl", model, processor, tmp_path, make_rows(4), gradient_cache_chunk_tokens=8)


def test_chunks_may_lack_a_modality(make_step):
    step, processor = make_step("gcl")
    rows = [dict(row) for row in make_rows(6)]
    rows[0]["image"] = rows[1]["image"] = rows[2]["text"] = rows[3]["text"] = None
    batch = PairCollator(processor)(rows)
    _, expected = plain_step(step.eval(), batch)
    torch.testing.assert_close(cached_step(step, batch, 2)[1], expected, rtol=0, atol=1e-10)


def test_a_chunk_that_is_embedded_again_adds_no_gradient(make_step):
    """As a device does that has fewer chunks than another one with the same shards."""
    step, processor = make_step("gcl")
    batch = varied_batch(processor)
    _, expected = plain_step(step.eval(), batch)
    _, found = cached_step(step, batch, 3, max_over_devices=lambda count: count + 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_dropout_draws_the_same_numbers_in_both_passes(make_step):
    """With one chunk the cached step must equal the plain one even with dropout, for the draws are replayed."""
    step, processor = make_step("gcl", token_dropout=0.5, attention_dropout=0.2)
    batch = PairCollator(processor)([make_rows(6)[i] for i in range(6)])
    gradients = []
    for take in (plain_step, partial(cached_step, chunk_size=6)):
        torch.manual_seed(3)
        gradients.append(take(step.train(), batch)[1])
        gradients[-1]["the next draw"] = torch.rand(3)  # the random state too is where the plain step leaves it
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("device", "arguments"), [("mps", ()), ("xpu", (torch.device("xpu"),))])
def test_dropout_is_replayed_on_other_accelerators(monkeypatch, device, arguments):
    """MPS has one generator, whose functions take no device; those of XPU do."""
    states, calls = [3], []
    module = SimpleNamespace(
        get_rng_state=lambda *given: calls.append(given) or states[-1],
        set_rng_state=lambda state, *given: calls.append(given) or states.append(state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    before = RandomState(torch.device(device))
    states.append(8)
    drawn = torch.rand(2)
    before.restore()
    assert states == [3, 8, 3] and torch.equal(torch.rand(2), drawn) and calls == [arguments] * 2


def test_two_chunks_with_dropout_are_consistent_between_passes(make_step):
    """Gradients of the replayed chunks match finite differences of the loss with the draws held fixed."""
    step, processor = make_step("gcl", token_dropout=0.5)
    token, batch = step.encoder.vl_encoder.cls_token, PairCollator(processor)([make_rows(6)[i] for i in range(6)])

    def loss_at(shift):
        with torch.no_grad():
            token[0] += shift
        torch.manual_seed(5)
        terms, gradients = cached_step(step.train(), batch, 3)
        with torch.no_grad():
            token[0] -= shift
        return total_loss(terms).item(), gradients["encoder.vl_encoder.cls_token"][0].item()

    gradient = loss_at(0.0)[1]
    numeric = (loss_at(1e-5)[0] - loss_at(-1e-5)[0]) / 2e-5
    assert abs(gradient) > 1e-6
    assert gradient == pytest.approx(numeric, rel=1e-4)


@pytest.mark.parametrize("chunk_size", [0, 3])
def test_mixed_precision_reaches_the_encoder_and_its_gradient(tiny_checkpoints, tmp_path, chunk_size):
    """The gradient in bfloat16 is that in float32 up to rounding, for every weight matrix."""
    gradients = []
    for bf16 in (False, True):
        model, processor = make_encoder(tiny_checkpoints)
        without_dropout(model)
        trainer = make_trainer(
            "gcl", model, processor, tmp_path, make_rows(4), max_steps=1, bf16=bf16, optim="sgd", learning_rate=1.0,
            gradient_cache_chunk_size=chunk_size, max_grad_norm=0.0,
        )  # fmt: skip
        computed_in = set()
        model.vision_adapter[0].register_forward_hook(
            lambda *arguments, seen=computed_in: seen.add(arguments[-1].dtype)
        )
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer.train()
        trainer.evaluate(trainer.train_dataset)
        assert computed_in == {torch.bfloat16 if bf16 else torch.float32}
        gradients.append({name: before[name] - p.detach() for name, p in model.named_parameters() if p.ndim > 1})
    largest = max(gradient.norm() for gradient in gradients[0].values())
    compared = {name: gradient for name, gradient in gradients[0].items() if gradient.norm() > 0.01 * largest}
    assert len(compared) > 10
    for name, gradient in compared.items():
        assert torch.cosine_similarity(gradient.flatten(), gradients[1][name].flatten(), dim=0) > 0.97, name


@pytest.mark.parametrize(("rows", "chunk_size"), [({"a": 4, "b": 3}, 2), ({"a": 4}, 0)])
def test_batches_that_cannot_be_cut_are_refused(rows, chunk_size):
    with pytest.raises(ValueError, match="cannot cut"):
        list(split_rows({"pairs": {name: torch.zeros(count) for name, count in rows.items()}}, chunk_size))
