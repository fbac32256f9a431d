"""SOLAR's trainers: the terms of both stages, what a mask hides, and that chunks and resumed runs change nothing."""

from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import ImageOps
from safetensors.torch import load_file
from tiny_solar import frozen_encoder, stage1, stage1_objective, stage2, stage2_objective, stage2_rows, texts

from conjoin.cli.train import parse_overrides
from conjoin.data import load_pairs
from conjoin.losses import (
    LocalScores,
    gather_rows,
    gcl,
    global_distillation,
    global_to_local_alignment,
    local_distillation,
    multi_positive,
    symmetric_info_nce,
)
from conjoin.losses.alignment import ScoreStatistics
from conjoin.methods.solar import (
    SolarStage1Config,
    SolarStage2Config,
    SolarStage2Rows,
    SolarStage2Trainer,
    stage2 as solar_stage2,
)
from conjoin.methods.solar.masking import ConstructedSamples, segment_patches
from conjoin.methods.solar.prepare import prepare_stage2
from conjoin.methods.solar.scores import align, pair_tokens, score_windows, separation, threshold_of
from conjoin.methods.solar.stage1 import SolarStage1Objective
from conjoin.methods.solar.stage2 import SolarStage2Objective, load_heads
from conjoin.retrieval import load_mined
from conjoin.retrieval.mining.negatives import write_mined
from conjoin.training import Run, build_model, build_trainer, cached_backward, load_recipe, train
from conjoin.training.gradient_cache import split_rows
from conjoin.training.objective import total_loss
from tiny_commands import variants
from tiny_training import SETTINGS, cached_step, make_encoder, plain_step, small_run


def masks_of(objective):
    """A list that grows by the masks of each forward that has some."""
    found = []

    def spy(_module, _args, kwargs):
        masks = {name: kwargs[name] for name in ("image_weights", "text_weights") if name in kwargs}
        found.extend([masks] if masks else [])

    objective.encoder.register_forward_pre_hook(spy, with_kwargs=True)
    return found


def test_stage_1_terms_are_those_of_the_losses(tiny_checkpoints):
    objective, batch = stage1_objective(tiny_checkpoints, gla_weight=2.0, gd_weight=3.0, ld_weight=5.0, mask="none")
    terms = objective(**batch)
    ids = batch.pop("ids")
    with torch.no_grad():
        out = objective.encoder(**batch["pairs"], views=("image", "text"), output_tokens=True)
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


def test_the_mask_hides_what_lies_below_the_threshold_and_only_at_the_end(tiny_checkpoints):
    objective, batch = stage1_objective(tiny_checkpoints)
    masks = masks_of(objective)
    for objective.progress in (0.0, 0.25, 0.5, 1.0):
        terms = objective(**batch)
    start, middle, end, last = (mask["image_weights"] for mask in masks)
    assert (start == 1).all()
    assert end.unique().tolist() == [0.0, 1.0]
    assert torch.equal(end, last)
    assert torch.allclose(middle, 0.5 + 0.5 * end)
    assert terms["rho"] == 0
    kept = end.mean() - terms["image_empty_rate"] / end.shape[1]  # a row without a shared patch keeps one
    assert terms["image_shared_rate"].item() == pytest.approx(kept.item())
    assert terms["image_negative_mean"] != terms["image_positive_mean"]


def test_chunks_of_stage_1_contrast_all_rows_and_keep_their_own_statistics(tiny_checkpoints):
    objective, batch = stage1_objective(tiny_checkpoints)
    objective.double()
    objective.progress = 0.3
    whole, expected = plain_step(objective, batch)
    terms, found = cached_step(objective, batch, 6)
    torch.testing.assert_close(terms, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    halves = cached_backward(objective, dict(batch), 3, lambda loss: loss.backward())
    parts = [
        objective(ids=batch["ids"][3 * half : 3 * half + 3], **chunk.inputs)
        for half, chunk in enumerate(split_rows(batch, 3))
    ]
    assert halves["gla_loss"].item() == pytest.approx(sum(part["gla_loss"].item() for part in parts) / 2)


def test_stage_1_names_rows_that_are_no_pairs(tiny_checkpoints):
    objective, batch = stage1_objective(tiny_checkpoints)
    batch["pairs"]["text_mask"] = torch.tensor([True, True, False, True, True, True])
    with pytest.raises(ValueError, match=r"rows without text tokens: \[2\]"):
        objective(**batch)


def test_towers_in_training_are_no_teachers(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    with pytest.raises(ValueError, match="vision_model is being trained"):
        stage1(tmp_path, model, processor, texts(8))


def test_stage_2_contrasts_what_it_constructed_and_what_was_mined(tiny_checkpoints, tmp_path, monkeypatch):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, learn_temperature=False)
    drawn = []

    def construct(*args, **kwargs):
        from conjoin.methods.solar.masking import construct_samples

        drawn.append(construct_samples(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr("conjoin.methods.solar.stage2.construct_samples", construct)
    terms = objective(**batch)
    (samples,) = drawn
    encoder, clean = objective.encoder, batch["pairs"]
    with torch.no_grad():
        anchors = encoder(**clean).pooler_output
        made = [
            encoder(**clean, image_weights=i, text_weights=t).pooler_output
            for i, t in zip(samples.image_weights, samples.text_weights, strict=True)
        ]
        mined = encoder(**batch["mined"]).pooler_output.unflatten(0, (6, 2))
    negatives = torch.cat([torch.stack(made[1:], dim=1), mined], dim=1)
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
    trainer = stage2(tmp_path, model, processor, stage2_rows(tmp_path, texts(8)), **arguments)
    trained = [name.split(".") for name, p in trainer.encoder.named_parameters() if p.requires_grad]
    assert {name[2] for name in trained if name[:2] == ["vl_encoder", "layers"]} == expected
    assert any(name[0] == "text_adapter" for name in trained)


def test_a_frozen_scorer_does_not_follow_and_shares_frozen_towers(tiny_checkpoints, tmp_path):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path)
    (scorer,) = objective._scorer
    assert scorer.vision_model is objective.encoder.vision_model
    assert scorer.vision_adapter is not objective.encoder.vision_adapter
    assert not any("scorer" in name for name, _ in objective.named_parameters())
    before = objective(**batch)["image_threshold"]
    with torch.no_grad():
        for parameter in objective.encoder.vision_adapter[0].parameters():
            parameter.neg_()
    assert objective(**batch)["image_threshold"] == before
    online, batch = stage2_objective(tiny_checkpoints, tmp_path, mask_source="online")
    before = online(**batch)["image_threshold"]
    with torch.no_grad():
        for parameter in online.encoder.vision_adapter[0].parameters():
            parameter.neg_()
    assert online(**batch)["image_threshold"] != before


def test_the_scorer_follows_the_model_to_its_device(tiny_checkpoints, tmp_path):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path)
    anchors = batch["pairs"]
    output = objective.encoder(**anchors, output_tokens=True)
    objective.to("meta")
    elsewhere = [{name: value.to("meta") for name, value in tensors.items()} for tensors in (anchors, output)]
    scored = objective._scored(elsewhere[0], type(output)(**elsewhere[1]))
    assert scored.image_tokens.device.type == scored.text_tokens.device.type == "meta"


def test_frozen_towers_run_as_if_they_were_cached(tiny_checkpoints, tmp_path):
    """What they teach and score is without dropout; a tower that is trained keeps it."""
    objectives = [stage1_objective(tiny_checkpoints)[0], stage2_objective(tiny_checkpoints, tmp_path)[0]]
    for objective in objectives:
        encoder = objective.train().encoder
        assert not any(module.training for module in (*encoder.vision_model.modules(), *encoder.text_model.modules()))
        assert encoder.vl_encoder.training
        encoder.text_model.requires_grad_(True)
        objective.train()
        assert all(module.training for module in encoder.text_model.modules())
        assert not any(module.training for module in objective.eval().modules())


@pytest.mark.parametrize("positive", ["random", "augmented"])
def test_positives_without_scores_need_no_scorer(tiny_checkpoints, tmp_path, positive, monkeypatch):
    arguments = {"positive": positive, "constructed_negatives": False}
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, **arguments)
    monkeypatch.setattr(objective, "_scored", None)
    assert objective(**batch)["solar_loss"] > 0


@pytest.mark.parametrize("arguments", [{}, {"itc_weight": 0.5, "gcl_weight": 0.5}])
def test_gradient_cache_of_stage_2_is_the_plain_step(tiny_checkpoints, tmp_path, arguments, monkeypatch):
    """With the samples held fixed; thresholds are those of a chunk."""
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, **arguments)

    def everything_but_the_first(image_scores, image_mask, _t, text_scores, text_mask, *_):
        image, text = torch.ones(4, *image_scores.shape), torch.ones(4, *text_scores.shape)
        image[:, :, 0] = text[2:, :, 1] = 0
        return ConstructedSamples(image.double(), text.double(), torch.ones(4, len(text_mask), dtype=torch.bool))

    monkeypatch.setattr("conjoin.methods.solar.stage2.construct_samples", everything_but_the_first)
    whole, expected = plain_step(objective.double(), batch)
    terms, found = cached_step(objective, batch, 2)
    assert total_loss(terms).item() == pytest.approx(total_loss(whole).item(), abs=1e-10)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("source", ["frozen", "online"])
def test_gradient_cache_of_stage_2_constructs_once_and_leaves_the_draws_as_they_were(
    tiny_checkpoints, tmp_path, source, monkeypatch
):
    """With one chunk it is the plain step, though dropout draws after the samples are drawn."""
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, mask_source=source)
    for layer in objective.encoder.vl_encoder.layers:
        layer.dropout = 0.5
    objective.double().train()
    calls = []

    def counted(*args):
        calls.append(len(args[0]))
        return segment_patches(*args)

    monkeypatch.setattr("conjoin.methods.solar.stage2.segment_patches", counted)
    torch.manual_seed(5)
    _, expected = plain_step(objective, batch)
    torch.manual_seed(5)
    _, found = cached_step(objective, batch, 12)  # one chunk of pairs, one of mined
    assert calls == [6, 6]
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    cached_step(objective, batch, 4)
    assert calls[2:] == [4, 2]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gcl_term_is_that_loss_without_heads(tiny_checkpoints, tmp_path, stage):
    make = stage1_objective if stage == 1 else partial(stage2_objective, folder=tmp_path)
    objective, batch = make(tiny_checkpoints, gcl_weight=0.5, itc_weight=1.0, learn_temperature=False)
    batch.pop("ids")
    objective.progress = 1.0
    torch.manual_seed(1)
    for parameter in objective.heads.parameters():
        torch.nn.init.normal_(parameter)
    seen = masks_of(objective)
    with torch.no_grad():
        terms = objective(**batch)
        masks = seen[0] if stage == 1 else {}
        image, text = objective.encoder(**batch["pairs"], **masks, views=("image", "text")).pooler_output.chunk(2)
        fused = objective.encoder(**batch["pairs"], views=("fused",)).pooler_output
        expected = gcl(image, text, fused, objective.args.temperature)
    assert stage == 2 or (masks["image_weights"] == 0).any()
    assert terms["gcl_loss"].item() == pytest.approx(0.5 * expected.item(), rel=1e-5)
    torch.manual_seed(1)
    without, _ = make(tiny_checkpoints, itc_weight=1.0, learn_temperature=False)
    assert "gcl_loss" not in without(**batch)


def test_a_share_of_the_rows_is_masked(tiny_checkpoints):
    objective, batch = stage1_objective(tiny_checkpoints, texts(16), mask="hard", mask_share=0.5)
    seen = masks_of(objective)
    objective(**batch)
    found = seen[0]["image_weights"]
    masked = (found < 1).any(1)
    assert 1 <= masked.sum() <= 8  # 0.5 of 16, of which a row can be shared wholly
    everywhere, _ = stage1_objective(tiny_checkpoints, texts(16), mask="hard")
    seen = masks_of(everywhere)
    everywhere(**batch)
    assert torch.equal(seen[0]["image_weights"][masked], found[masked])


@pytest.mark.parametrize("positive", ["intersection", "augmented"])
def test_stage_2_trains_the_fused_embedding_whatever_the_readout(tiny_checkpoints, tmp_path, positive):
    objective, batch = stage2_objective(
        tiny_checkpoints, tmp_path, positive=positive, constructed_negatives=positive == "intersection"
    )
    found = []
    for readout in ("fused", "sum"):
        objective.encoder.config.readout = readout
        torch.manual_seed(0)  # of the samples
        with torch.no_grad():
            found.append(objective.embed(**batch))
    assert "mined" in found[0]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("stage", [1, 2])
def test_windows_can_score_in_place_of_global_tokens(tiny_checkpoints, tmp_path, stage):
    make = stage1_objective if stage == 1 else partial(stage2_objective, folder=tmp_path)
    objective, batch = make(tiny_checkpoints, scores="windows")
    objective.progress = 1.0
    with torch.no_grad():
        terms = objective(**batch)
        tokens = pair_tokens(objective.encoder(**batch["pairs"], views=(), output_tokens=True))
        image, _ = score_windows(objective.encoder, tokens)
    assert terms["image_threshold"].item() == pytest.approx(threshold_of(image).threshold.item(), abs=1e-6)
    assert terms["image_separation"].item() == pytest.approx(separation(image).item(), abs=1e-5)


def test_windows_cost_nothing_before_the_masks_start(tiny_checkpoints, monkeypatch):
    objective, batch = stage1_objective(tiny_checkpoints, scores="windows", mask_start_ratio=0.3)
    calls = []
    monkeypatch.setattr(
        "conjoin.methods.solar.stage1.score_windows",
        lambda *arguments: calls.append(objective.progress) or score_windows(*arguments),
    )
    for objective.progress in (0.0, 0.3, 0.4, 1.0):
        terms = objective(**batch)
    assert calls == [0.4, 1.0]
    assert terms["rho"] == 0


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (SolarStage1Config, {"scores": "words"}, "scores='words'"),
        (SolarStage1Config, {"mask_share": 0.0}, "mask_share=0.0 must lie"),
        (SolarStage2Config, {"scores": "words"}, "scores='words'"),
        (SolarStage1Config, {"scores": "windows", "reduce_scores_across_devices": True}, 'got scores="windows"'),
        (SolarStage2Config, {"scores": "windows", "reduce_scores_across_devices": True}, 'got scores="windows"'),
    ],
)
def test_unknown_scores_and_shares_are_refused(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        config(output_dir="unused", use_cpu=True, **arguments)


def test_mixed_goes_on_with_the_heads_of_stage_1(tiny_checkpoints, tmp_path):
    model, processor = frozen_encoder(tiny_checkpoints)
    first = stage1(tmp_path, model, processor, texts(8))
    first.train()
    first.save_model()
    assert not torch.equal(first.model.heads.text.weight, torch.eye(16))
    config = SolarStage2Config(
        output_dir=str(tmp_path / "b"), itc_weight=1.0, mined_per_anchor=0, min_separation=0, **SETTINGS
    )
    trainer = SolarStage2Trainer(model, config, train_dataset=texts(8), processing_class=processor, heads=tmp_path)
    assert torch.equal(trainer.model.heads.text.weight, first.model.heads.text.weight)


def test_draws_of_mined_negatives_differ_by_epoch_and_repeat(tiny_checkpoints, tmp_path):
    rows = texts(8)
    ids = rows["id"]
    blocks = [{"id": name, "negatives": [o for o in ids if o != name], "found_by": [[]] * 7} for name in ids]
    write_mined(tmp_path / "negatives.parquet", [blocks])
    dataset = SolarStage2Rows(rows, ids, load_mined(tmp_path), per_anchor=2)

    def drawn():
        return [[other["id"] for other in dataset[i]["mined"]] for i in range(8)]

    first = drawn()
    assert first == drawn()
    assert all(len(set(found)) == 2 and ids[i] not in found for i, found in enumerate(first))
    dataset.epoch = 1
    assert first != drawn()


def test_mined_negatives_may_come_from_another_corpus(tmp_path):
    rows, corpus = texts(3), texts(9).map(lambda row: {"id": f"other-{row['id']}"})
    block = [{"id": name, "negatives": [f"other-row{i + 5}"], "found_by": [[]]} for i, name in enumerate(rows["id"])]
    write_mined(tmp_path / "m.parquet", [block])
    mined = load_mined(tmp_path / "m.parquet")
    row = SolarStage2Rows(rows, rows["id"], mined, per_anchor=2, candidates=corpus)[1]
    assert [found["id"] for found in row["mined"]] == ["other-row6", "row1"]
    assert row["exists"] == [True, False]
    with pytest.raises(ValueError, match=r"its mined negative 'other-row6' is not in the data"):
        SolarStage2Rows(rows, rows["id"], mined, per_anchor=1)[1]
    with pytest.raises(ValueError, match=r"nothing was mined for 'row3': .* is of other rows"):
        SolarStage2Rows(texts(4), texts(4)["id"], mined, candidates=corpus)


def test_stage_2_can_fit_thresholds_to_all_devices(tiny_checkpoints, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        solar_stage2, "align", lambda tokens, **kwargs: asked.append(kwargs) or align(tokens, **kwargs)
    )
    for reduce in (False, True):
        model, processor = frozen_encoder(tiny_checkpoints)
        rows = stage2_rows(tmp_path, texts(4))
        stage2(tmp_path, model, processor, rows, reduce_scores_across_devices=reduce, max_steps=1).train()
    assert asked == [{"reduce_scores_across_devices": False}, {"reduce_scores_across_devices": True}]


def test_bad_input_of_stage_2_is_named(tiny_checkpoints, tmp_path):
    model, processor = frozen_encoder(tiny_checkpoints)
    with pytest.raises(ValueError, match=r"mined_per_anchor=2 .* need SolarStage2Rows, got Dataset"):
        stage2(tmp_path, model, processor, texts(8))
    with pytest.raises(ValueError, match="goes with constructed_negatives=False"):
        SolarStage2Config(output_dir="x", positive="random", use_cpu=True)
    with pytest.raises(ValueError, match="mask_source='other'"):
        SolarStage2Config(output_dir="x", mask_source="other", use_cpu=True)
    with pytest.raises(FileNotFoundError, match="no projection heads"):
        load_heads(tmp_path)
    rows = texts(4)
    write_mined(tmp_path / "m.parquet", [[{"id": i, "negatives": ["gone"], "found_by": [[]]} for i in rows["id"]]])
    with pytest.raises(ValueError, match=r"row 1 \('row1'\): its mined negative 'gone' is not in the data"):
        SolarStage2Rows(rows, rows["id"], load_mined(tmp_path / "m.parquet"))[1]
    with pytest.raises(ValueError, match="3 ids for 4 rows"):
        SolarStage2Rows(rows, ["a", "b", "c"])


def test_augmented_rows_may_have_undecoded_images(tmp_path):
    row = texts(1)[0]
    row["image"].save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(row["text"])
    rows = load_pairs(tmp_path)
    assert isinstance(rows[0]["image"], dict)
    found = SolarStage2Rows(rows, rows["id"], augment=ImageOps.invert, augmented=True)[0]["augmented"][0]
    assert found["image"].tobytes() == ImageOps.invert(row["image"]).tobytes() and found["text"] == row["text"]
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"row 0 \('a.png'\).*cannot read the image"):
        SolarStage2Rows(rows, rows["id"], augment=ImageOps.invert, augmented=True)[0]


def write_recipe(path, text, **values):
    path.write_text(text.format(**values))
    return load_recipe(path)


STAGE_1 = """
method: solar_stage1
model: {{vision: {dinov2}, text: {bert}, config: {{hidden_size: 16, num_attention_heads: 2}}, lora: {{r: 2}}}}
teacher: {{vision: {dinov2}, text: {clip_text}, max_text_length: 12, cache: {cache}}}
data: {{source: {data}}}
training: {{output_dir: {out}, max_steps: 2, per_device_train_batch_size: 4, use_cpu: true, report_to: none,
  save_strategy: "no", learning_rate: 1e-3, logging_steps: 1, disable_tqdm: true}}
"""
STAGE_2 = """
method: solar_stage2
model: {{checkpoint: {checkpoint}, lora: {{r: 2, towers: [vision_model, text_model, vl_encoder]}}}}
data: {{source: {data}, mined: {mined}}}
training: {{output_dir: {out}, max_steps: 2, per_device_train_batch_size: 4, gradient_cache_chunk_size: 2,
  use_cpu: true, report_to: none, save_strategy: "no", learning_rate: 1e-2, itc_weight: {itc},
  logging_steps: 1, disable_tqdm: true}}
"""


def mined_pairs(folder):
    """The paths of eight pairs, and of two negatives of each."""
    data, mined = folder / "data", folder / "mined"
    data.mkdir()
    mined.mkdir()
    for row in texts(8):
        row["image"].save(data / f"{row['id']}.png")
        (data / f"{row['id']}.txt").write_text(row["text"])
    ids = load_pairs(data)["id"]
    blocks = [{"id": ids[i], "negatives": [ids[i - 1], ids[i - 2]], "found_by": [[], []]} for i in range(8)]
    write_mined(mined / "negatives.parquet", [blocks])
    return {"data": data, "mined": mined}


def test_stage_2_alone_trains_new_layers_from_scratch(tiny_checkpoints, tmp_path):
    """Table 7: the command in the recipe's header, with small sizes."""
    path = Path(__file__).parents[3] / "training_args/solar/stage2_clip.yaml"
    (command,) = (words for words in variants(path) if "runs/solar-clip-stage2-alone" in words)
    clip, pairs = tiny_checkpoints["clip"], mined_pairs(tmp_path)
    small = [f"--model.vision={clip}", f"--model.text={clip}", *small_run(tmp_path / "alone")]
    small += ["--model.config={hidden_size: 16, num_attention_heads: 2}", f"--data.source={pairs['data']}"]
    recipe = load_recipe(path, parse_overrides([*command[3:], *small, f"--data.mined={pairs['mined']}"]))
    torch.manual_seed(0)
    trainer = build_trainer(recipe, *build_model(recipe.model))
    before = {name: value.clone() for name, value in trainer.encoder.state_dict().items()}
    trainer.train()
    moved = {name for name, value in trainer.encoder.state_dict().items() if not torch.equal(value, before[name])}
    towers = {name for name in before if name.startswith(("vision_model", "text_model"))}
    assert {name for name, _ in trainer.encoder.named_parameters()} - towers <= moved
    assert moved & towers and all("lora_" in name for name in moved & towers)


def test_both_stages_run_by_recipe(tiny_checkpoints, tmp_path):
    settings = mined_pairs(tmp_path) | {"itc": 1}
    towers = {"dinov2": tiny_checkpoints["dinov2"], "bert": tiny_checkpoints["bert"]}
    towers["clip_text"] = tiny_checkpoints["bert"]
    first = tmp_path / "first"
    recipe = write_recipe(tmp_path / "1.yaml", STAGE_1, data=settings["data"], out=first, cache="null", **towers)
    log = train(recipe).state.log_history
    assert log[0]["ld_loss"] > 0
    second = write_recipe(tmp_path / "2.yaml", STAGE_2, checkpoint=first, out=tmp_path / "second", **settings)
    second.data.mined_source = str(settings["data"])
    second.training.min_separation = 0.0
    assert "itc_loss" in train(second).state.log_history[0]
    saved = load_file(str(tmp_path / "second" / "model.safetensors"))
    before = load_file(str(first / "model.safetensors"))
    for part in ("vision_model", "text_model", "vl_encoder"):  # by adapters
        assert any(not torch.equal(saved[name], before[name]) for name in saved if name.startswith(part)), part


def test_sections_that_do_not_fit_a_method_are_named(tiny_checkpoints, tmp_path):
    towers = {"dinov2": tiny_checkpoints["dinov2"], "bert": tiny_checkpoints["bert"], "clip_text": "x"}
    with pytest.raises(ValueError, match="unknown key 'teacher'"):
        write_recipe(tmp_path / "1.yaml", STAGE_1.replace("solar_stage1", "gcl"), data="x", out=tmp_path,
                     cache="null", **towers)  # fmt: skip
    model, processor = frozen_encoder(tiny_checkpoints)
    settings = {"data": "x", "itc": 0, "checkpoint": "x", "out": tmp_path}
    recipe = write_recipe(tmp_path / "2.yaml", STAGE_2, mined="null", **settings)
    with pytest.raises(ValueError, match=r"needs data\.mined, the output of `conjoin mine`"):
        prepare_stage2(Run(recipe, model, processor, texts(4), texts(4), None))


def test_solar_refuses_token_dropout(tiny_checkpoints, tmp_path):
    model, _ = frozen_encoder(tiny_checkpoints, token_dropout=0.5)
    for config in (SolarStage1Config, SolarStage2Config):
        objective = SolarStage1Objective if config is SolarStage1Config else SolarStage2Objective
        with pytest.raises(ValueError, match=r"token_dropout=0.5: SOLAR needs 0"):
            objective(model, config(output_dir=str(tmp_path), use_cpu=True))


def test_words_are_not_masked_before_a_tower_that_attends_to_them(tiny_checkpoints):
    model, _ = frozen_encoder(tiny_checkpoints, text_attends_padding=True)
    with pytest.raises(ValueError, match=r'mask_level="input" masks words .* \(\w+\) attends to all'):
        SolarStage2Objective(model, SolarStage2Config(output_dir="unused", use_cpu=True, mask_level="input"))


def test_separation_is_the_chance_that_a_positive_score_is_higher():
    torch.manual_seed(0)
    high, low = 0.3 + 0.2 * torch.randn(4000), 0.1 + 0.3 * torch.randn(4000)
    populations = [ScoreStatistics(torch.tensor(4000), x.mean(), (x - x.mean()).square().sum()) for x in (high, low)]
    found = separation(LocalScores(high[None], *populations))
    assert found.item() == pytest.approx((high[:, None] > low).float().mean().item(), abs=0.01)
    assert separation(LocalScores(high[None], populations[0], populations[0])).item() == pytest.approx(0.5)


def test_stage_2_stops_at_scores_that_hardly_separate(tiny_checkpoints, tmp_path):
    objective, batch = stage2_objective(tiny_checkpoints, tmp_path, min_separation=0.999)
    with pytest.raises(ValueError, match=r"'image_separation': 0\.\d+.*min_separation=0.999.*train stage 1 for more"):
        objective(**batch)
    objective.progress = 0.5  # only the first step is checked, the others are logged
    assert 0 < objective(**batch)["text_separation"] < 1
    with pytest.raises(ValueError, match="min_separation=-1 must not be negative"):
        SolarStage2Config(output_dir="x", min_separation=-1, use_cpu=True)
