"""SOLAR's trainers: the terms of both stages, what a mask hides, and that chunks change nothing."""

import pytest
import torch
from peft import LoraConfig
from PIL import Image, ImageOps
from safetensors.torch import load_file

from conjoin import SolarStage1Config, SolarStage1Trainer, SolarStage2Config, SolarStage2Trainer
from conjoin.data import load_pairs
from conjoin.hub import load_model
from conjoin.losses import (
    gather_rows,
    gcl,
    global_distillation,
    global_to_local_alignment,
    local_distillation,
    multi_positive,
    symmetric_info_nce,
)
from conjoin.retrieval.mining import write_mined
from conjoin.trainers import solar
from conjoin.trainers.gradient_cache import cached_backward, split_rows, total_loss
from conjoin.trainers.solar import SolarStage2Rows
from conjoin.trainers.solar_masks import (
    align,
    construct_samples,
    fit_threshold,
    pair_tokens,
    segment_patches,
    separation,
    window_scores,
)
from tiny_solar import everything_but_the_first, frozen_encoder, make_stage, mined, move_to, stage1, stage2, texts
from tiny_training import SETTINGS, cached_step, make_encoder, plain_step, without_dropout

FRESH = {"output_dir": "unused", "use_cpu": True}


def masks_of(trainer):
    """A list that grows by the masks of each forward that has some."""
    found = []

    def spy(_module, _args, kwargs):
        masks = {name: kwargs[name] for name in ("image_weights", "text_weights") if name in kwargs}
        found.extend([masks] if masks else [])

    trainer.encoder.register_forward_pre_hook(spy, with_kwargs=True)
    return found


def test_stage_1_terms_are_those_of_the_losses(tiny_checkpoints, tmp_path):
    weights = {"gla_weight": 2.0, "gd_weight": 3.0, "ld_weight": 5.0}
    trainer, batch = make_stage(1, tiny_checkpoints, tmp_path, mask="none", **weights)
    terms, ids = trainer.model(**batch), batch["ids"]
    with torch.no_grad():
        out = trainer.encoder(**batch["pairs"], views=("image", "text"), output_tokens=True)
    image, text = out.pooler_output.chunk(2)
    alignment = global_to_local_alignment(
        out.text_tokens[:, 0], out.image_tokens[:, 1:], out.image_token_mask,
        out.image_tokens[:, 0], out.text_tokens[:, 1:], out.text_token_mask, 0.1,
    )  # fmt: skip
    local = local_distillation(out.image_tokens[:, 1:], out.image_features[:, 1:], out.image_token_mask)
    local = local + local_distillation(out.text_tokens[:, 1:], out.text_features[:, 1:], out.text_token_mask)
    distilled = global_distillation(image, out.image_features[:, 0])
    distilled = distilled + global_distillation(text, out.text_features[:, 0])
    contrast = symmetric_info_nce(image, text, 0.07, gathered=gather_rows(image, text, ids=ids))
    expected = {"gla_loss": 2 * alignment, "ld_loss": 5 * local, "gd_loss": 3 * distilled, "itc_loss": contrast}
    for name, value in expected.items():
        assert value > 1e-3
        assert terms[name].item() == pytest.approx(value.item(), rel=1e-5), name
    assert {name for name in terms if name.endswith("_loss")} == set(expected)
    batch["pairs"]["text_mask"] = torch.tensor([True, True, False, True, True, True])
    with pytest.raises(ValueError, match=r"rows without text tokens: \[2\]"):
        trainer.model(**batch)


def test_the_mask_hides_what_lies_below_the_threshold_and_only_at_the_end(tiny_checkpoints, tmp_path):
    trainer, batch = make_stage(1, tiny_checkpoints, tmp_path)
    masks = masks_of(trainer)
    for progress in (0.0, 0.25, 0.5, 1.0):
        move_to(trainer, progress)
        terms = trainer.model(**batch)
    start, middle, end, last = (mask["image_weights"] for mask in masks)
    assert (start == 1).all()
    assert end.unique().tolist() == [0.0, 1.0]
    assert torch.equal(end, last)
    assert torch.allclose(middle, 0.5 + 0.5 * end)
    assert terms["rho"] == 0
    kept = end.mean() - terms["image_empty_rate"] / end.shape[1]  # a row without a shared patch keeps one
    assert terms["image_shared_rate"].item() == pytest.approx(kept.item())


def test_chunks_of_stage_1_contrast_all_rows_and_keep_their_own_statistics(tiny_checkpoints, tmp_path):
    trainer, batch = make_stage(1, tiny_checkpoints, tmp_path)
    model = trainer.model.double()
    move_to(trainer, 0.3)
    whole, expected = plain_step(model, batch)
    terms, found = cached_step(model, batch, 6)
    torch.testing.assert_close(terms, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    halves = cached_backward(model, dict(batch), 3, lambda loss: loss.backward())
    parts = [
        model(ids=batch["ids"][3 * half : 3 * half + 3], **chunk.inputs)
        for half, chunk in enumerate(split_rows(batch, 3))
    ]
    assert halves["gla_loss"].item() == pytest.approx(sum(part["gla_loss"].item() for part in parts) / 2)


def test_stage_2_contrasts_what_it_constructed_and_what_was_mined(tiny_checkpoints, tmp_path, monkeypatch):
    trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, learn_temperature=False)
    drawn = []
    keep = lambda *args: drawn.append(construct_samples(*args)) or drawn[-1]  # noqa: E731
    monkeypatch.setattr(solar, "construct_samples", keep)
    terms = trainer.model(**batch)
    (samples,) = drawn
    encoder, clean = trainer.encoder, batch["pairs"]
    with torch.no_grad():
        anchors = encoder(**clean).pooler_output
        made = [
            encoder(**clean, image_weights=i, text_weights=t).pooler_output
            for i, t in zip(samples.image_weights, samples.text_weights, strict=True)
        ]
        others = encoder(**batch["mined"]).pooler_output.unflatten(0, (6, 2))
    negatives = torch.cat([torch.stack(made[1:], dim=1), others], dim=1)
    mask = torch.cat([samples.valid[1:].T, batch["mined_mask"]], dim=1)
    assert batch["mined_mask"].sum() == 11  # the first anchor has one mined negative only
    assert samples.valid.any(1).all()
    expected = multi_positive(anchors, made[0][:, None], negatives, 0.07, samples.valid[:1].T, mask)
    assert terms["solar_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert terms["positive_rate"].item() == pytest.approx(samples.valid[0].float().mean().item())


@pytest.mark.parametrize(("arguments", "expected"), [({}, set()), ({"trainable_vl_layers": 2}, {"0", "1"})])
def test_some_layers_of_a_frozen_encoder_can_be_trained(tiny_checkpoints, tmp_path, arguments, expected):
    model, processor = frozen_encoder(tiny_checkpoints)
    model.vl_encoder.requires_grad_(False)
    trainer = stage2(tmp_path, model, processor, texts(8), **arguments)
    trained = [name.split(".") for name, p in trainer.encoder.named_parameters() if p.requires_grad]
    assert {name[2] for name in trained if name[:2] == ["vl_encoder", "layers"]} == expected
    assert any(name[0] == "text_adapter" for name in trained)


@pytest.mark.parametrize("source", ["frozen", "online"])
def test_a_frozen_scorer_does_not_follow_and_shares_frozen_towers(tiny_checkpoints, tmp_path, source):
    trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, mask_source=source)
    if source == "frozen":
        assert trainer.scorer.vision_model is trainer.encoder.vision_model
    assert not any("scorer" in name for name, _ in trainer.model.named_parameters())
    before = trainer.model(**batch)["image_threshold"]
    with torch.no_grad():
        for parameter in trainer.encoder.vision_adapter[0].parameters():
            parameter.neg_()
    assert (trainer.model(**batch)["image_threshold"] == before) == (source == "frozen")


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_towers_run_as_if_they_were_cached(tiny_checkpoints, tmp_path, stage):
    """What they teach and score is without dropout; a tower that is trained keeps it."""
    trainer, batch = make_stage(stage, tiny_checkpoints, tmp_path)
    encoder = trainer.model.train().encoder
    trainer.model(**batch)
    assert not any(module.training for module in (*encoder.vision_model.modules(), *encoder.text_model.modules()))
    assert encoder.vl_encoder.training
    encoder.text_model.requires_grad_(True)
    trainer.model.train()(**batch)
    assert all(module.training for module in encoder.text_model.modules())


@pytest.mark.parametrize("arguments", [{}, {"itc_weight": 0.5, "gcl_weight": 0.5}])
def test_gradient_cache_of_stage_2_is_the_plain_step(tiny_checkpoints, tmp_path, arguments, monkeypatch):
    """With the samples held fixed; thresholds are those of a chunk."""
    trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, **arguments)
    monkeypatch.setattr(solar, "construct_samples", everything_but_the_first)
    whole, expected = plain_step(trainer.model.double(), batch)
    terms, found = cached_step(trainer.model, batch, 2)
    assert total_loss(terms).item() == pytest.approx(total_loss(whole).item(), abs=1e-10)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("source", ["frozen", "online"])
def test_gradient_cache_constructs_once_and_leaves_the_draws_as_they_were(
    tiny_checkpoints, tmp_path, source, monkeypatch
):
    """With one chunk it is the plain step, though dropout draws after the samples are drawn."""
    trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, mask_source=source)
    for layer in trainer.encoder.vl_encoder.layers:
        layer.dropout = 0.5
    model, calls = trainer.model.double().train(), []
    counted = lambda tokens: calls.append(len(tokens)) or segment_patches(tokens)  # noqa: E731
    monkeypatch.setattr(solar, "segment_patches", counted)
    torch.manual_seed(5)
    _, expected = plain_step(model, batch)
    torch.manual_seed(5)
    _, found = cached_step(model, batch, 12)  # one chunk of pairs, one of mined
    assert calls == [6, 6]
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    cached_step(model, batch, 4)
    assert calls[2:] == [4, 2]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gcl_term_is_that_loss_without_heads(tiny_checkpoints, tmp_path, stage):
    arguments = {"gcl_weight": 0.5, "itc_weight": 1.0, "learn_temperature": False}
    trainer, batch = make_stage(stage, tiny_checkpoints, tmp_path, **arguments)
    batch.pop("ids")
    move_to(trainer, 1.0)
    for parameter in trainer.loss["heads"].parameters():
        torch.nn.init.normal_(parameter)
    seen = masks_of(trainer)
    with torch.no_grad():
        terms = trainer.model(**batch)
        masks = seen[0] if stage == 1 else {}
        image, text = trainer.encoder(**batch["pairs"], **masks, views=("image", "text")).pooler_output.chunk(2)
        fused = trainer.encoder(**batch["pairs"], views=("fused",)).pooler_output
    assert stage == 2 or (masks["image_weights"] == 0).any()
    assert terms["gcl_loss"].item() == pytest.approx(0.5 * gcl(image, text, fused, 0.07).item(), rel=1e-5)


def test_a_share_of_the_rows_is_masked(tiny_checkpoints, tmp_path):
    found = []
    for share in (0.5, 1.0):
        trainer, batch = make_stage(1, tiny_checkpoints, tmp_path, texts(16), mask="hard", mask_share=share)
        seen = masks_of(trainer)
        trainer.model(**batch)
        found.append(seen[0]["image_weights"])
    masked = (found[0] < 1).any(1)
    assert 1 <= masked.sum() <= 8  # 0.5 of 16, of which a row can be shared wholly
    assert torch.equal(found[1][masked], found[0][masked])


@pytest.mark.parametrize("positive", ["intersection", "augmented"])
def test_stage_2_trains_the_fused_embedding_whatever_the_readout(tiny_checkpoints, tmp_path, positive):
    constructed = {"positive": positive, "constructed_negatives": positive == "intersection"}
    trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, **constructed)
    assert (trainer.scorer is None) == (positive == "augmented")
    found = []
    for readout in ("fused", "sum"):
        trainer.encoder.config.readout = readout
        torch.manual_seed(0)  # of the samples
        with torch.no_grad():
            found.append(trainer.embed(trainer.encoder, dict(batch)))
    assert "mined" in found[0]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("stage", [1, 2])
def test_windows_can_score_in_place_of_global_tokens(tiny_checkpoints, tmp_path, stage):
    trainer, batch = make_stage(stage, tiny_checkpoints, tmp_path, scores="windows")
    move_to(trainer, 1.0)
    with torch.no_grad():
        terms = trainer.model(**batch)
        tokens = pair_tokens(trainer.encoder(**batch["pairs"], views=(), output_tokens=True))
        image, _ = window_scores(trainer.encoder.vl_encoder, tokens)
    assert terms["image_threshold"].item() == pytest.approx(fit_threshold(image).threshold.item(), abs=1e-6)
    assert terms["image_separation"].item() == pytest.approx(separation(image).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (SolarStage1Config, {"scores": "words"}, "scores='words'; expected one of"),
        (SolarStage1Config, {"mask_share": 0.0}, "mask_share=0.0 must lie"),
        (SolarStage1Config, {"mask_schedule": "step"}, "mask_schedule='step'; expected one of"),
        (SolarStage1Config, {"mask_start_ratio": 0.6}, "mask_start_ratio=0.6, mask_warmup_ratio=0.5: expected 0 <="),
        (SolarStage1Config, {"gla_weight": -1.0}, "gla_weight=-1.0 must not be negative"),
        (SolarStage1Config, {"vision_teacher": "x"}, "set both of vision_teacher and text_teacher"),
        (SolarStage2Config, {"scores": "windows", "reduce_scores_across_devices": True}, 'got scores="windows"'),
        (SolarStage2Config, {"mask_source": "other"}, "mask_source='other'"),
        (SolarStage2Config, {"positive": "random"}, "goes with constructed_negatives=False"),
    ],
)
def test_bad_settings_are_named(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        config(**FRESH, **arguments)


@pytest.mark.parametrize(
    ("kind", "changed", "arguments", "message"),
    [
        (SolarStage1Trainer, {"token_dropout": 0.5}, {}, "without token_dropout, got .*0.5"),
        (SolarStage2Trainer, {"num_vl_layers": 0}, {}, "with num_vl_layers"),
        (SolarStage2Trainer, {"text_attends_padding": True}, {"mask_level": "input"}, r"\(bert\) attends to all"),
        (SolarStage2Trainer, {}, {}, "mined_per_anchor=2 needs mined, the output of `conjoin mine`"),
    ],
)
def test_models_and_rows_that_do_not_fit_are_refused(tiny_checkpoints, kind, changed, arguments, message):
    model, processor = frozen_encoder(tiny_checkpoints, **changed)
    more = {} if "needs mined" in message or kind is SolarStage1Trainer else {"mined_per_anchor": 0}
    with pytest.raises(ValueError, match=message):
        kind(model, kind.config_class(**FRESH, **more, **arguments), texts(4), processing_class=processor)


def test_a_learned_temperature_moves_at_its_own_rate_and_stage_2_goes_on_with_it(tiny_checkpoints, tmp_path):
    first, processor = frozen_encoder(tiny_checkpoints)
    rates = {"learning_rate": 1e-5, "temperature_learning_rate": 0.05}
    trainer = stage1(tmp_path, first, processor, texts(8), **rates)
    trainer.loss["heads"].text.weight.data.mul_(2)
    trainer.train()
    temperature = trainer.state.log_history[1]["temperature"]
    assert abs(temperature - 0.07) > 0.002 and trainer.state.log_history[1]["learning_rate"] == 1e-5
    trainer.save_model()
    saved = load_model(tmp_path)[0]
    for mixed, learn in ((1.0, True), (0.0, True), (1.0, False)):
        arguments = {"itc_weight": mixed, "learn_temperature": learn, "mined_per_anchor": 0}
        second = stage2(tmp_path / "b", saved, processor, texts(8), **arguments)
        expected = trainer.loss["contrastive"].temperature() if learn else torch.tensor(0.07)
        assert second.loss["temperature"]().item() == pytest.approx(expected.item())
        if mixed:
            assert torch.equal(second.loss["heads"].text.weight, trainer.loss["heads"].text.weight)


def test_draws_of_mined_negatives_differ_by_epoch_and_repeat():
    rows = texts(8)
    ids = rows["id"][:]
    dataset = SolarStage2Rows(rows, {name: [other for other in ids if other != name] for name in ids})
    drawn = lambda: [[other["id"] for other in dataset[i]["mined"]] for i in range(8)]  # noqa: E731
    first = drawn()
    assert first == drawn()
    assert all(len(set(found)) == 2 and ids[i] not in found for i, found in enumerate(first))
    dataset.epoch = 1
    assert first != drawn()


def test_a_missing_negative_is_marked_and_one_of_other_rows_is_refused():
    found = {"row0": ["row1"], "row1": ["row2"], "row2": ["other"]}
    rows = SolarStage2Rows(texts(3), found)
    assert [each["id"] for each in rows[1]["mined"]] == ["row2", "row1"] and rows[1]["exists"] == [True, False]
    with pytest.raises(ValueError, match=r"row 2 \('row2'\): its mined negative 'other' is not in the training rows"):
        rows[2]
    with pytest.raises(ValueError, match="nothing was mined for the row 'row3'"):
        SolarStage2Rows(texts(4), found)


def test_augmented_rows_may_have_undecoded_images(tmp_path):
    row = texts(1)[0]
    row["image"].save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(row["text"])
    rows = load_pairs(tmp_path)
    assert isinstance(rows[0]["image"], dict)
    found = SolarStage2Rows(rows, augment=lambda image, random: ImageOps.invert(image))[0]["augmented"][0]
    assert found["image"].tobytes() == ImageOps.invert(row["image"]).tobytes() and found["text"] == row["text"]
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"row 0 \('a.png'\).*cannot read the image"):
        SolarStage2Rows(rows, augment=lambda image, random: ImageOps.invert(image))[0]


def test_stage_2_can_fit_thresholds_to_all_devices(tiny_checkpoints, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(solar, "align", lambda tokens, **options: asked.append(options) or align(tokens, **options))
    for reduce in (False, True):
        trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, reduce_scores_across_devices=reduce)
        trainer.model(**batch)
    assert asked == [{"reduce_scores_across_devices": reduce} for reduce in (False, True)]


def test_stage_2_stops_at_scores_that_hardly_separate(tiny_checkpoints, tmp_path):
    trainer, batch = make_stage(2, tiny_checkpoints, tmp_path, min_separation=0.999)
    with pytest.raises(ValueError, match=r"'image_separation': 0\.\d+.*min_separation=0.999.*train stage 1 for more"):
        trainer.model(**batch)
    move_to(trainer, 0.5)  # only the first step is checked, the others are logged
    assert 0 < trainer.model(**batch)["text_separation"] < 1


def test_stage_2_starts_from_a_folder_with_lora_and_mined_negatives(tiny_checkpoints, tmp_path):
    rows, (model, processor) = texts(8), make_encoder(tiny_checkpoints)
    teachers = {"vision_teacher": tiny_checkpoints["dinov2"], "text_teacher": tiny_checkpoints["bert"]}
    stage1(tmp_path / "first", model, processor, rows, **teachers).save_model()
    blocks = [{"id": name, "negatives": each, "found_by": [[]] * len(each)} for name, each in mined(rows).items()]
    (tmp_path / "mined").mkdir()
    write_mined(tmp_path / "mined/negatives.parquet", [blocks])
    given = {"itc_weight": 1.0, "min_separation": 0.0, "mined": str(tmp_path / "mined")}
    config = SolarStage2Config(str(tmp_path / "second"), **SETTINGS, **given)
    everywhere = LoraConfig(r=2, target_modules="all-linear", modules_to_save=["vision_adapter", "text_adapter"])
    second = SolarStage2Trainer(tmp_path / "first", config, rows, peft_config=everywhere)
    second.train()
    second.save_model()
    assert "itc_loss" in second.state.log_history[0]
    before, after = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("first", "second"))
    for part in ("vision_model", "text_model", "vl_encoder", "text_adapter"):
        assert any(not torch.equal(after[name], before[name]) for name in after if name.startswith(part)), part


# Batches of which little is left

CASES = ("one-token texts", "blank images", "identical pairs", "identical but named apart", "two pairs", "one pair")


def degenerate(case):
    rows = texts({"one pair": 1, "two pairs": 2}.get(case, 6))
    blank, first = Image.new("RGB", (16, 16), "white"), rows[0]
    change = {
        "one-token texts": lambda row: {"text": "a"},
        "blank images": lambda row: {"image": blank},
        "identical pairs": lambda row: {"image": first["image"], "text": first["text"], "group": "g"},
        "identical but named apart": lambda row: {"image": first["image"], "text": first["text"]},
    }.get(case)
    return rows if change is None else rows.map(change)


def check(trainer, batch):
    """One forward and backward in training mode."""
    without_dropout(trainer.model)
    trainer.model.train().zero_grad()
    terms = trainer.model(**batch)
    total_loss(terms).backward()
    assert all(term.isfinite() for term in terms.values()), terms
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert not [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    assert gradients


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mask": "hard"},
        {"min_separation": 0.0},
        {"itc_weight": 1.0, "mask_source": "online", "segments": False},
        {"mask_level": "input"},
        {"positive": "random", "constructed_negatives": False},
        {"positive": "augmented", "constructed_negatives": False},
    ],
    ids=["evolutionary", "hard", "stage 2", "mixed", "input level", "random", "augmented"],
)
def test_losses_and_gradients_stay_finite(tiny_checkpoints, tmp_path, case, arguments):
    stage = 1 if not arguments or "mask" in arguments else 2
    trainer, batch = make_stage(stage, tiny_checkpoints, tmp_path, degenerate(case), **arguments)
    for progress in (0.25, 1.0):
        move_to(trainer, progress)
        check(trainer, batch)
