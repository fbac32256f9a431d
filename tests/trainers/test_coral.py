"""Coral: the loss over queries and their targets, its gradients, its runs."""

import pytest
import torch
import torch.nn.functional as F

from conjoin import CoralConfig, CoralTrainer
from conjoin.losses import info_nce
from conjoin.trainers.coral import IMAGE, choose_masked
from conjoin.trainers.gradient_cache import total_loss
from tiny_coral import Products, make_model, make_trainer

TERMS = ["rec_language_loss", "rec_vision_loss", "reg_language_loss", "reg_vision_loss"]


@pytest.fixture(scope="module")
def folder(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


def make_step(model, processor, out, count=6, partial=False, **arguments):
    """A trainer in float64 and a batch of `count` rows."""
    torch.manual_seed(1)
    trainer = make_trainer(model, processor, out, Products(count, partial), **arguments)
    trainer.model.double()
    return trainer, trainer.data_collator([trainer.train_dataset[i] for i in range(count)])


def naive_terms(trainer, embeddings, seeds, count=6, shift=0):
    """The four terms of `count` rows, each from the state of the row `shift` before it, by a loop over rows."""
    found, args = {}, trainer.args
    lengths = embeddings["target_lengths"].tolist()
    targets = [embeddings[name].split(lengths) for name in ("target_ids", "target_tokens")]
    for name, decoder in trainer.loss.items():
        for term, part in (("reg", "queries"), ("rec", "positives")):
            errors = []
            for row in range(count):
                state, (ids, tokens) = embeddings[part][row - shift], (values[row] for values in targets)
                kind = (ids == IMAGE if name == "vision" else ids >= 0)[None]
                masked = choose_masked(kind, [int(seeds[row])], 0.5)
                places = (masked if args.masked_only else kind)[0].nonzero().flatten()
                if not len(places):
                    continue
                predicted = decoder(state[None], tokens[None], ~masked, places[None])[0]
                if name == "vision":
                    wanted = tokens[places]
                    if args.normalize_targets:
                        variance = wanted.var(1, correction=0, keepdim=True)
                        wanted = (wanted - wanted.mean(1, keepdim=True)) / (variance + 1e-5).sqrt()
                    error = (predicted - wanted).square()
                    errors.append(error.sum(1).mean() if args.kind == "squared_norm" else error.mean())
                else:
                    head = trainer.language_head
                    table = trainer.encoder.get_input_embeddings().weight if head is None else head.double()
                    errors.append(F.cross_entropy(predicted @ table.T, ids[places]))
            found[f"{term}_{name}"] = torch.stack(errors).mean()
    return found


@pytest.mark.parametrize(
    ("keep_layers", "readout", "partial", "options"),
    [
        (2, "token", False, {}),
        (2, "last", True, {}),
        (2, "token", True, {"masked_only": True}),
        (2, "last", False, {"masked_only": True}),
        (2, "token", False, {"normalize_targets": True}),
        (2, "token", False, {"kind": "squared_norm"}),
        (None, "last", False, {}),  # the head of its own is in float32
    ],
)
def test_the_terms_are_a_loop_over_targets(folder, tmp_path, keep_layers, readout, partial, options):
    weights = {"reg_weight": 0.5, "rec_weight": 0.25, "temperature": 0.02}
    model, processor = make_model(folder, keep_layers, readout)
    trainer, batch = make_step(model, processor, tmp_path, partial=partial, **options, **weights)
    with torch.no_grad():
        terms = trainer.model(**batch)
        embeddings = trainer.embed(trainer.encoder, batch)
        seeds = batch["mask_seed"]
        expected = naive_terms(trainer, embeddings, seeds)
        own, other = (naive_terms(trainer, embeddings, seeds, 4, shift) for shift in (0, 1))
        queries, positives = (trainer.encoder(**batch[part]).pooler_output for part in ("queries", "positives"))
    assert sorted(name for name in terms if name.endswith("_loss")) == ["contrastive_loss", *TERMS]
    exact = {"rtol": 1e-12 if keep_layers else 1e-6, "atol": 0, "check_dtype": False}
    for name, value in expected.items():
        weight = 0.5 if name.startswith("reg") else 0.25
        torch.testing.assert_close(terms[f"{name}_loss"], weight * value, **exact)
        torch.testing.assert_close(terms[f"{name}_own"], own[name], **exact)
        torch.testing.assert_close(terms[f"{name}_other"], other[name], **exact)
    torch.testing.assert_close(terms["contrastive_loss"], info_nce(queries, positives, 0.02))
    assert len({round(terms[name].item(), 6) for name in TERMS}) == 4


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
    trainer, batch = make_step(*make_model(folder), tmp_path, 4, **arguments)
    assert sorted(name for name in trainer.model(**batch) if name.endswith("_loss")) == ["contrastive_loss", *kept]
    assert set(trainer.loss) == {name.split("_")[1] for name in kept}


def test_the_state_alone_carries_the_gradient(folder, tmp_path):
    trainer, batch = make_step(*make_model(folder), tmp_path, 4, reconstruct=["vision"])
    for part, touched in (("reg", "queries"), ("rec", "positives")):
        leaves = trainer.embed(trainer.encoder, batch)
        leaves |= {name: v.detach().requires_grad_() for name, v in leaves.items() if v.is_floating_point()}
        trainer.loss_terms(leaves, batch)[f"{part}_vision_loss"].backward()
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [touched]


def test_a_batch_without_pictures_has_no_vision_loss_but_all_gradients(folder, tmp_path):
    model, processor = make_model(folder)
    trainer, batch = make_step(model, processor, tmp_path, 4)
    batch["positives"] = processor(["one", "two", "three", "four"])
    terms = trainer.model(**batch)
    assert terms["reg_vision_loss"] == terms["rec_vision_loss"] == 0
    assert terms["reg_language_loss"] > 0
    total_loss(terms).backward()
    for name, parameter in trainer.loss.named_parameters():
        assert parameter.grad.isfinite().all(), name  # DDP waits for all of them


def test_decoders_have_a_rate_of_their_own(folder, tmp_path):
    for given, expected in (({}, 1e-3), ({"decoder_learning_rate": None}, 1e-2)):
        trainer = make_trainer(*make_model(folder), tmp_path, None, weight_decay=0.1, **given)
        groups = trainer.create_optimizer().param_groups
        found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert len(found) == sum(len(group["params"]) for group in groups) == len(trained)
        for name, p in trained.items():
            assert found[id(p)] == (expected if name.startswith("loss.") else 1e-2, 0.1 if p.ndim > 1 else 0.0)


@pytest.mark.parametrize(
    ("keep_layers", "arguments", "has_head"),
    [(None, {}, True), (3, {}, False), (3, {"language_head": True}, True), (None, {"reconstruct": ["vision"]}, False)],
)
def test_an_untied_whole_model_has_a_head(keep_layers, arguments, has_head, folder, mllm_checkpoints, tmp_path):
    arguments |= {"language_head": folder} if "language_head" in arguments else {}
    trainer = make_trainer(*make_model(folder, keep_layers), tmp_path, None, **arguments)
    found = trainer.language_head
    assert torch.equal(found, mllm_checkpoints("qwen2_vl")[1].lm_head.weight) if has_head else found is None
    assert not any("head" in name for name in trainer.sharding.weights())  # not trained, not saved


def test_options_and_models_are_checked(folder, tmp_path):
    for arguments, message in (
        ({"reconstruct": ["audio"]}, r"reconstruct=\['audio'\]; expected a list of some of \('vision', 'language'\)"),
        ({"reconstruct": "vision"}, "reconstruct='vision'; expected a list of some of"),
        ({"reg_weight": -1.0}, "reg_weight=-1.0 must not be negative"),
        ({"kind": "sum"}, r"kind='sum'; expected one of \('mean', 'squared_norm'\)"),
        ({"mask_ratio": 0.0}, r"mask_ratio=0.0 must lie in \(0, 1\]"),
        ({"decoded_rows": 0}, "decoded_rows=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            CoralConfig(output_dir=str(tmp_path), use_cpu=True, **arguments)
    model, processor = make_model(folder)
    with pytest.raises(ValueError, match="pass processing_class"):
        CoralTrainer(model, CoralConfig(output_dir=str(tmp_path), use_cpu=True))
    processor.sentence_files = {}  # those of a published embedder
    with pytest.raises(ValueError, match=r"reconstruct=\['vision'\], but the prompts of this published embedder"):
        make_trainer(model, processor, tmp_path, Products(4), reconstruct=["vision"])
    make_trainer(model, processor, tmp_path, Products(4), reconstruct=[])
