"""Coral: the loss over queries and their targets, its gradients, its memory, its runs."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_coral import Products, make_model, make_trainer

from conjoin.data import RetrievalCollator
from conjoin.data.training_rows import NamedCandidates
from conjoin.losses import info_nce
from conjoin.methods.coral import CoralConfig, CoralObjective, CoralTrainer, load_language_head
from conjoin.methods.coral.targets import PromptFrame, choose_masked, draw_noise, unpack_targets
from conjoin.methods.coral.trainer import SeedCollator, SeededRows
from two_ranks import run_two_ranks

TERMS = ["rec_language_loss", "rec_vision_loss", "reg_language_loss", "reg_vision_loss"]
PLAIN = {"optim": "sgd", "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


def make_batch(processor, count=6, partial=False):
    rows = SeededRows(Products(count, partial))
    return SeedCollator(NamedCandidates(RetrievalCollator(processor)))([rows[i] for i in range(count)])


def make_objective(model, processor, tmp_path, head=None, **arguments):
    args = CoralConfig(**({"output_dir": str(tmp_path), "use_cpu": True, "decoder_dropout": 0.0} | arguments))
    torch.manual_seed(1)
    return CoralObjective(model, args, PromptFrame.of(processor), head).double()


def naive_terms(objective, embeddings, seeds, masked_only=False, normalized=False):
    """The four terms by a loop over rows, decoders and terms."""
    found = {}
    for name, decoder in objective.decoders.items():
        for term, part in (("reg", "queries"), ("rec", "positives")):
            errors = []
            for row, state in enumerate(embeddings[part]):
                target = unpack_targets(embeddings, slice(row, row + 1))
                kind = target.kinds[name]
                masked = choose_masked(kind, draw_noise([int(seeds[row])], kind.shape[1]), 0.5)
                places = (masked if masked_only else kind)[0].nonzero().flatten()
                if not len(places):
                    continue
                predicted = decoder(state[None], target.embeddings, ~masked, places[None])[0]
                if name == "vision":
                    wanted = target.embeddings[0, places]
                    if normalized:
                        variance = wanted.var(1, correction=0, keepdim=True)
                        wanted = (wanted - wanted.mean(1, keepdim=True)) / (variance + 1e-5).sqrt()
                    errors.append((predicted - wanted).square().mean())
                else:
                    table = objective.encoder.get_input_embeddings().weight
                    errors.append(F.cross_entropy(predicted @ table.T, target.ids[0, places]))
            found[f"{term}_{name}_loss"] = torch.stack(errors).mean()
    return found


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("options", [{}, {"masked_only": True}])
@pytest.mark.parametrize("readout", ["token", "last"])
def test_the_terms_are_a_loop_over_targets(folder, tmp_path, partial, options, readout):
    model, processor = make_model(folder, readout=readout)
    objective = make_objective(model, processor, tmp_path, **options, reg_weight=0.5, rec_weight=0.25)
    batch = make_batch(processor, partial=partial)
    with torch.no_grad():
        terms = objective(**batch)
        embeddings = objective.embed(**batch)
        expected = naive_terms(objective, embeddings, batch["mask_seeds"], options.get("masked_only", False))
        queries, positives = (model(**batch[part]).pooler_output for part in ("queries", "positives"))
    assert sorted(terms) == ["contrastive_loss", *TERMS]
    for name in TERMS:
        weight = 0.5 if name.startswith("reg") else 0.25
        torch.testing.assert_close(terms[name], weight * expected[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms["contrastive_loss"], info_nce(queries, positives, 0.02))
    assert len({round(terms[name].item(), 6) for name in TERMS}) == 4


def test_normalized_targets_are_those_of_the_vision_decoder_alone(folder, tmp_path):
    model, processor = make_model(folder)
    objective = make_objective(model, processor, tmp_path, normalize_targets=True, reg_weight=1, rec_weight=1)
    batch = make_batch(processor)
    with torch.no_grad():
        terms, embeddings = objective(**batch), objective.embed(**batch)
        expected, plain = (
            naive_terms(objective, embeddings, batch["mask_seeds"], normalized=on) for on in (True, False)
        )
    for name in TERMS:
        torch.testing.assert_close(terms[name], expected[name], rtol=1e-12, atol=1e-12)
        assert torch.equal(expected[name], plain[name]) is ("language" in name)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"reconstruct": []}, []),
        ({"reg_weight": 0.0, "rec_weight": 0.0}, []),
        ({"reconstruct": ["vision"]}, ["rec_vision_loss", "reg_vision_loss"]),
        ({"reconstruct": ["language"]}, ["rec_language_loss", "reg_language_loss"]),
        ({"reg_weight": 0.0}, ["rec_language_loss", "rec_vision_loss"]),
    ],
)
def test_each_part_can_be_left_out(folder, tmp_path, arguments, kept):
    model, processor = make_model(folder)
    objective = make_objective(model, processor, tmp_path, **arguments)
    assert sorted(objective(**make_batch(processor, 4))) == ["contrastive_loss", *kept]
    decoders = {name.split("_")[1] for name in kept}
    assert set(objective.decoders) == decoders
    assert all(decoders or "decoder" not in name for name, _ in objective.named_parameters())


def test_the_state_alone_carries_the_gradient(folder, tmp_path):
    model, processor = make_model(folder, lora=False)
    model.requires_grad_(True)
    objective = make_objective(model, processor, tmp_path, reconstruct=["vision"])
    batch = make_batch(processor, 4)
    for part, touched in (("reg", "queries"), ("rec", "positives")):
        leaves = objective.embed(**batch)
        for name in ("queries", "positives", "target_tokens"):
            leaves[name] = leaves[name].detach().requires_grad_()
        objective._reconstruct(leaves, batch["mask_seeds"])[f"{part}_vision_loss"].backward()
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [touched]


def test_a_batch_without_pictures_has_no_vision_loss_but_all_gradients(folder, tmp_path):
    model, processor = make_model(folder)
    objective = make_objective(model, processor, tmp_path)
    batch = make_batch(processor, 4)
    batch["positives"] = processor(["one", "two", "three", "four"])
    terms = objective(**batch)
    assert terms["reg_vision_loss"] == terms["rec_vision_loss"] == 0
    assert terms["reg_language_loss"] > 0
    sum(terms.values()).backward()
    for name, parameter in objective.decoders.named_parameters():
        assert parameter.grad is not None, name  # DDP waits for all of them
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "keep_layers"), [("qwen2_5_vl", None), ("qwen3_vl", 3), ("llava", None), ("internvl", 2)]
)
def test_any_mllm_is_trained(name, keep_layers, mllm_checkpoints, tmp_path):
    model, processor = make_model(mllm_checkpoints(name)[0], keep_layers)
    trainer = make_trainer(
        model, processor, tmp_path, Products(8), gradient_cache_chunk_size=3, activation_checkpointing=True,
        dataloader_num_workers=2 * (name == "llava"),
    )  # fmt: skip
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, value in before.items() if not torch.equal(value, trainer.model.state_dict()[name])}
    assert moved == {name for name in before if "lora_" in name or "decoders." in name}


@pytest.mark.slow
def test_one_batch_is_learned_by_heart(folder, tmp_path):
    model, processor = make_model(folder, lora=False)
    processor.template = processor.template | {"start": "", "ask": ":", "end": ""}  # short prompts are fast
    weights = {"reg_weight": 1.0, "rec_weight": 1.0, "temperature": 0.05, "decoded_rows": 8}
    objective = make_objective(model, processor, tmp_path, **weights).float().train()
    batch = make_batch(processor, 8)
    trained = {part: [p for p in part.parameters() if p.requires_grad] for part in (model, objective.decoders)}
    groups = [
        {"params": parameters, "lr": rate} for parameters, rate in zip(trained.values(), (5e-3, 2e-2), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0)
    losses = []
    for _ in range(80):
        terms = objective(**batch)
        losses.append(sum(terms.values()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.02 * losses[0], {name: term.item() for name, term in terms.items()}
    assert max(terms.values()) < 0.1


def test_the_head_of_an_untied_model_is_read_and_stays_as_it_is(folder, mllm_checkpoints, tmp_path):
    head = load_language_head(folder)
    assert torch.equal(head, mllm_checkpoints("qwen2_vl")[1].lm_head.weight)
    model, processor = make_model(folder, keep_layers=4)
    batch = make_batch(processor, 4)
    own, tied = (make_objective(model, processor, tmp_path, given) for given in (head.double(), None))
    own.decoders.load_state_dict(tied.decoders.state_dict())
    with torch.no_grad():
        found, other = own(**batch), tied(**batch)
        model.set_input_embeddings(torch.nn.Embedding.from_pretrained(head.double()))
    assert found["reg_language_loss"] != other["reg_language_loss"]
    assert found["reg_vision_loss"] == other["reg_vision_loss"]
    assert not any("head" in name for name in own.state_dict())
    with pytest.raises(ValueError, match=r"the language head has shape \(300, 31\), the model the width 32"):
        make_objective(model, processor, tmp_path, torch.zeros(300, 31))


def test_options_and_models_are_checked(folder, tmp_path, tiny_checkpoints):
    for arguments, message in (
        ({"reconstruct": ["audio"]}, r"reconstruct=\('audio',\); expected some of \('vision', 'language'\)"),
        ({"reconstruct": ["vision", "vision"]}, "each once"),
        ({"reconstruct": "vision"}, "reconstruct='vision'; expected a list of some of"),
        ({"reg_weight": -1.0}, "reg_weight=-1.0, rec_weight=0.1: must not be negative"),
        ({"mask_ratio": 0.0}, r"mask_ratio=0.0 must lie in \(0, 1\]"),
        ({"decoded_rows": 0}, "'decoded_rows': 0"),
        ({"decoder_dropout": 1.0}, "a rate below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            CoralConfig(output_dir=str(tmp_path), use_cpu=True, **arguments)
    model, processor = make_model(folder)
    with pytest.raises(ValueError, match="expected such a model and its processor"):
        make_trainer(torch.nn.Linear(1, 1), processor, tmp_path, Products(4))
    with pytest.raises(ValueError, match="got MllmRetrieverModel and NoneType"):
        CoralTrainer(model, CoralConfig(output_dir=str(tmp_path), use_cpu=True))
    processor.sentence_files = {}  # those of a published embedder
    with pytest.raises(ValueError, match=r"reconstruct=\['vision'\], but the prompts of this published embedder"):
        make_trainer(model, processor, tmp_path, Products(4), reconstruct=["vision"])
    make_trainer(model, processor, tmp_path, Products(4), reconstruct=[])


def run_case(folder, out, chunk, batch_size):
    """Weights and logs of two float64 SGD steps without dropout; some targets lack a part."""
    model, processor = make_model(folder)
    torch.manual_seed(2)
    trainer = make_trainer(
        model, processor, out, Products(16, partial=True), per_device_train_batch_size=batch_size,
        gradient_cache_chunk_size=chunk, decoded_rows=3, **PLAIN,
    )  # fmt: skip
    trainer.model.double()
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    log = [{key: value for key, value in entry.items() if key.endswith("_loss")}
           for entry in trainer.state.log_history[:-1]]  # fmt: skip
    return weights, log


def main(folder, out):
    """What each rank runs."""
    rank = int(os.environ["RANK"])
    for chunk in (0, 2):
        weights, log = run_case(folder, out, chunk, batch_size=4)
        if rank == 0:
            save_file(weights, f"{out}/{chunk}.safetensors")
        Path(f"{out}/{chunk}-{rank}.json").write_text(json.dumps(log))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one_process(folder, tmp_path):
    run_two_ranks("test_coral", tmp_path, folder, str(tmp_path))
    expected, log = run_case(folder, tmp_path / "alone", 0, batch_size=8)
    start = {name: p.detach().double() for name, p in make_model(folder)[0].named_parameters()}
    changes = [(expected[f"encoder.{name}"] - p).abs().max() for name, p in start.items() if "lora_" in name]
    assert max(changes) > 1e-4
    for chunk in (0, 2):
        found = load_file(tmp_path / f"{chunk}.safetensors")
        for name, weight in expected.items():
            assert torch.allclose(found[name], weight, atol=1e-9), name
        for rank in range(2):
            entries = json.loads((tmp_path / f"{chunk}-{rank}.json").read_text())
            for entry, wanted in zip(entries, log, strict=True):
                assert entry == pytest.approx(wanted, abs=1e-5)
