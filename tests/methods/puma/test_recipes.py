"""PUMA by recipe: both stages on the miniature M-BEIR, the teacher's states on disk, resuming, what is refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import mini_mbeir as mini_module
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoProcessor

from conjoin.cli.main import main
from conjoin.cli.train import parse_overrides
from conjoin.methods.puma import prepare
from conjoin.training import build_model, build_trainer, load_recipe
from tiny_commands import variants
from tiny_merit import write_merit
from tiny_training import move_to_second_machine, small_run

RECIPES = Path(__file__).parents[3] / "training_args"
STAGE_1 = """
method: puma_stage1
model: {{architecture: mllm_retriever, mllm: {mllm}, config: {{keep_layers: 2}}, freeze_towers: true, lora: {lora}}}
teacher: {{cache: {cache}}}
data: {{format: nli, source: {data}, eval_split: train}}
training: {{output_dir: {out}, schedule: dynamic, {training}}}
"""
STAGE_2 = """
method: puma_stage2
model: {{checkpoint: {checkpoint}, freeze_towers: true, lora: {lora}}}
data: {{format: mbeir, source: {data}, hard_negatives: 1, datasets: [cirr, mscoco, webqa]}}
training: {{output_dir: {out}, {training}}}
"""
LORA = "{r: 2, alpha: 4, dropout: 0.05, towers: [text_model]}"
TRAINING = (
    "max_steps: 2, per_device_train_batch_size: 4, use_cpu: true, report_to: none, learning_rate: 1e-2, "
    "logging_steps: 1, disable_tqdm: true"
)


@pytest.fixture(scope="module")
def mini(tmp_path_factory, load_first_emoji):
    """The miniature M-BEIR of the first concepts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_module, "load_emoji", load_first_emoji)
        return mini_module.make_mini_mbeir(
            tmp_path_factory.mktemp("m") / "mini", train_queries=6, val_queries=2, test_queries=2
        )


@pytest.fixture(scope="module")
def mllm(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


@pytest.fixture
def recipe_1(mllm, tmp_path):
    """The path of a recipe of stage 1 over twelve sentences."""
    lines = [f"a man runs {i},a person moves {i},nobody is {chr(97 + i)}" for i in range(12)]
    (tmp_path / "nli.csv").write_text("\n".join(["sent0,sent1,hard_neg", *lines]))
    return write(
        tmp_path / "1.yaml", STAGE_1, mllm=mllm, cache="null", data=tmp_path / "nli.csv", out=tmp_path / "one"
    )


def write(path, text, **values):
    path.write_text(text.format(lora=LORA, training=TRAINING, **values))
    return path


def losses(folder):
    log = json.loads((folder / "recipe.json").read_text())["log"]
    return [entry["loss"] for entry in log if "loss" in entry]


def assert_only_linears_differ(before, after):
    differing = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert differing == {name for name in after if "language_model.layers." in name and "_proj.weight" in name}


@pytest.mark.slow
def test_both_stages_run_and_give_a_model_that_loads(mllm, mini, recipe_1, tmp_path):
    assert main(["train", str(recipe_1)]) == 0
    log = json.loads((tmp_path / "one/recipe.json").read_text())["log"]
    assert log[0]["distillation_loss"] > 0
    assert [entry["distill_weight"] for entry in log[:2]] == pytest.approx([0.5, 0.3])
    before = build_model(load_recipe(recipe_1, {"model.lora": "null"}).model)[0].state_dict()
    first = load_file(tmp_path / "one/model.safetensors")
    assert first.keys() == before.keys()
    assert_only_linears_differ(before, first)

    out = tmp_path / "two"
    second = write(tmp_path / "2.yaml", STAGE_2, checkpoint=tmp_path / "one", data=mini, out=out)
    assert main(["train", str(second)]) == 0
    assert_only_linears_differ(first, load_file(out / "model.safetensors"))
    model = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(out, trust_remote_code=True)
    items = ["a man", Image.new("RGB", (16, 16)), {"image": Image.new("RGB", (9, 20), "red"), "text": "but green"}]
    assert model.config.keep_layers == 2
    assert model(**processor(items, instruction="Find it.")).embeddings.shape == (3, 32)


def test_stage_2_trains_on_queries_of_several_images(mllm, tmp_path):
    write_merit(tmp_path / "merit")
    data = "{format: merit, source: %s, hard_negatives: 1, eval_split: test}" % (tmp_path / "merit")
    text = STAGE_2.replace("checkpoint: {checkpoint}", "mllm: {mllm}, config: {{keep_layers: 2}}")
    text = text.replace("model: {{", "model: {{architecture: mllm_retriever, ")
    text = re.sub("data: .*", lambda _: "data: {data}", text)
    recipe = write(tmp_path / "m.yaml", text, mllm=mllm, data=data, out=tmp_path / "m")
    batch = ["--training.per_device_train_batch_size=2", "--training.eval_strategy=steps", "--training.eval_steps=2"]
    assert main(["train", str(recipe), *batch]) == 0
    log = json.loads((tmp_path / "m/recipe.json").read_text())["log"]
    assert len(losses(tmp_path / "m")) == 2 and any("eval_query_to_candidate_hit_rate@1" in entry for entry in log)
    with pytest.raises(ValueError, match="test of language leaves no query"):
        load_recipe(recipe, {"data.ood": "language"}).data.load()
    with pytest.raises(ValueError, match="ood='language' is for format merit, not mbeir"):
        load_recipe(recipe, {"data.ood": "language", "data.format": "mbeir"})


@pytest.mark.parametrize(
    ("name", "family"), [("qwen2_vl_7b", "qwen2_vl"), ("qwen2_vl_7b", "llava"), (None, "internvl")]
)
@pytest.mark.slow
def test_the_recipes_of_the_paper_run_on_small_models(name, family, mllm_checkpoints, mini, recipe_1, tmp_path):
    first = ["--model.config.keep_layers=2", f"--model.mllm={mllm_checkpoints(family)[0]}"]
    first += [f"--data.source={recipe_1.parent / 'nli.csv'}", *small_run(tmp_path / "one")]
    limits = (64, 576) if family == "qwen2_vl" else ("null", "null")
    first += [f"--model.min_pixels={limits[0]}", f"--model.max_pixels={limits[1]}"]
    first += [f"--teacher.cache={tmp_path / 'states'}"]
    paths = [f"puma/stage{i}_{name}.yaml" if name else f"puma/sample_stage{i}.yaml" for i in (1, 2)]
    assert main(["train", str(RECIPES / paths[0]), *first]) == 0
    second = [f"--model.checkpoint={tmp_path / 'one'}", f"--data.source={mini}", *small_run(tmp_path / "two")]
    assert main(["train", str(RECIPES / paths[1]), *second]) == 0
    assert len(losses(tmp_path / "two")) == 2
    settings = json.loads((tmp_path / "two/processor_config.json").read_text())
    assert settings.get("max_text_length") == (480 if name else None)


def test_stage_1_takes_hard_negatives_only_if_told(recipe_1):
    for overrides, expected in (({}, []), ({"data.hard_negatives": "1"}, ["nobody is a"])):
        rows, _ = load_recipe(recipe_1, overrides).data.load()
        assert rows[0]["negatives"] == expected


def test_no_teacher_is_loaded_without_distillation(recipe_1, monkeypatch):
    monkeypatch.setattr(prepare, "_load_teacher", lambda *_: pytest.fail("a teacher is loaded"))
    recipe = load_recipe(recipe_1, {"training.distill_weight": "0", "training.schedule": "fixed"})
    trainer = build_trainer(recipe, *build_model(recipe.model))
    trainer.train()
    assert "contrastive_loss" in (log := trainer.state.log_history[0]) and "distillation_loss" not in log


def test_the_table_of_ablations_names_switches_and_values_that_exist():
    text = (RECIPES.parent / "docs/recipes.md").read_text(encoding="utf-8")
    table = text.split("Switches for the paper's ablations")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| `training\.(\w+)`(?:, `training\.(\w+)`)?(?: \(stage (\d)\))? \| (.+?) \|", table, re.MULTILINE
    )
    assert len(rows) == 9
    for first, second, stage, values in rows:
        path = RECIPES / f"puma/stage{stage or 2}_qwen2_vl_7b.yaml"
        assert {first, second} - {""} <= vars(load_recipe(path).training).keys()
        for value in re.findall(r"`(\w+)`", values):
            assert vars(load_recipe(path, {f"training.{first}": value}).training)[first] == value


def test_variants_of_stage_2_start_from_variants_of_stage_1():
    """The commands in both headers; those of Tables 3, 4, 5 and 12 are there."""
    runs = {}
    for stage in (1, 2):
        path = RECIPES / f"puma/stage{stage}_qwen2_vl_7b.yaml"
        runs[stage] = [load_recipe(path), *(load_recipe(path, parse_overrides(words[3:])) for words in variants(path))]
    folders = {run.training.output_dir: run.training for run in runs[1]}
    assert all(run.model.checkpoint in folders for run in runs[2])
    assert {"fixed", "dynamic", "reverse"} == {run.training.schedule for run in runs[1]}
    found = {
        (bool(folders[run.model.checkpoint].distill_weight), run.training.decay, run.training.reverse,
         run.training.per_device_train_batch_size)
        for run in runs[2]
    }  # fmt: skip
    table_3 = {(distilled, decay, False, 150) for distilled in (True, False) for decay in (0.2, 0)}
    table_5 = {(True, 0, False, 90), (True, 0.2, True, 90), (True, 0.2, False, 90)}
    assert found == table_3 | table_5 | {(True, 0.5, False, 150), (True, 0.7, False, 150)}


def test_states_of_the_teacher_are_computed_once(recipe_1, tmp_path, monkeypatch):
    def first_loss(*words):
        overrides = {"training.output_dir": str(tmp_path / "x"), "model.lora.dropout": "0.0"}
        recipe = load_recipe(recipe_1, overrides | dict(words))
        torch.manual_seed(0)
        trainer = build_trainer(recipe, *build_model(recipe.model))
        trainer.train()
        return trainer.state.log_history[0]["distillation_loss"]

    live = first_loss()
    cached = first_loss(("teacher.cache", str(tmp_path / "states")))
    assert cached == pytest.approx(live, rel=1e-4)
    monkeypatch.setattr(prepare, "_load_teacher", None)
    assert first_loss(("teacher.cache", str(tmp_path / "states"))) == cached
    with pytest.raises(ValueError, match=r"of 4 layers with readout 'token' and positions 'mrope'; the student has 2"):
        first_loss(("teacher.cache", str(tmp_path / "states")), ("model.config.position_mode", "1d"))


def test_states_of_another_teacher_or_processor_are_refused(recipe_1, mllm, tmp_path, monkeypatch):
    for name in ("same", "other"):
        shutil.copytree(mllm, tmp_path / name)
    for path in (tmp_path / "other").glob("*.safetensors"):
        save_file({name: value + 1 for name, value in load_file(path).items()}, path, {"format": "pt"})

    def prepared(**overrides):
        names = {key.replace("__", "."): value for key, value in overrides.items()}
        recipe = load_recipe(recipe_1, {"teacher.cache": str(tmp_path / "states")} | names)
        return build_trainer(recipe, *build_model(recipe.model))

    prepared()
    prepared(teacher__mllm=str(tmp_path / "same"))  # a copy
    with pytest.raises(ValueError, match=r"states' are not of the recipe's teacher .*: they were made with teacher "):
        prepared(teacher__mllm=str(tmp_path / "other"))
    monkeypatch.setattr(prepare, "_load_teacher", None)
    (tmp_path / "link").symlink_to(mllm)
    prepared(teacher__mllm=str(tmp_path / "link"))
    with pytest.raises(ValueError, match="made with processor "):
        prepared(model__max_text_length="5")


def test_a_second_machine_waits_for_the_states_of_the_first(recipe_1, tmp_path, monkeypatch):
    recipe = load_recipe(recipe_1, {"teacher.cache": str(tmp_path / "states")})
    model, processor = build_model(recipe.model)
    build_trainer(recipe, model, processor)  # of the first machine
    events, is_complete = move_to_second_machine(recipe.training, monkeypatch), prepare.TeacherStates.is_complete
    monkeypatch.setattr(prepare.TeacherStates, "is_complete", lambda path: events.append("open") or is_complete(path))
    prepare.prepare_stage1(SimpleNamespace(recipe=recipe, processor=processor))
    assert events == ["wait", "open"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.mllm": "null"}, r"name the MLLM \(mllm\) or a checkpoint"),
        ({"data.columns.negative": "hard_neg"}, "hard_negatives=0; set it to 1"),
        ({"teacher.cache": "x", "training.teacher": "shared"}, '"shared" change with the student'),
        ({"data.format": "mbeir"}, "evaluated after training, by `conjoin evaluate --benchmark mbeir`"),
        (
            {"data.format": "mbeir", "data.source": "MINI", "data.eval_split": "null", "teacher.cache": "x"},
            "only the rows of format nli are the same in every epoch",
        ),
        ({"teacher.mllm": "absent/folder/x"}, "absent"),
    ],
)
def test_a_recipe_that_cannot_run_says_why(recipe_1, mini, overrides, message):
    overrides = {name: value.replace("MINI", str(mini)) for name, value in overrides.items()}
    with pytest.raises((ValueError, OSError), match=message):
        recipe = load_recipe(recipe_1, overrides)
        build_trainer(recipe, *build_model(recipe.model))


def test_a_checkpoint_needs_the_name_of_its_teacher(recipe_1, tmp_path):
    assert main(["train", str(recipe_1)]) == 0
    overrides = {"model.checkpoint": str(tmp_path / "one"), "training.output_dir": str(tmp_path / "two")}
    recipe = load_recipe(recipe_1, overrides)
    trainer = build_trainer(recipe, *build_model(recipe.model))  # trained on, with the teacher that model.mllm names
    assert trainer.encoder.config.keep_layers == 2
    recipe.model.mllm = None
    with pytest.raises(ValueError, match=r"name the un-pruned model \(model\.mllm or teacher\.mllm\)"):
        build_trainer(recipe, *build_model(recipe.model))


def test_what_is_trained_does_not_depend_on_where_a_model_comes_from(recipe_1, tmp_path):
    def trained(**overrides):
        names = {"model.lora": "null"} | {key.replace("__", "."): value for key, value in overrides.items()}
        model, processor = build_model(load_recipe(recipe_1, names).model)
        model.save_pretrained(tmp_path / "saved")
        processor.save_pretrained(tmp_path / "saved")
        again, _ = build_model(load_recipe(recipe_1, names | {"model.checkpoint": str(tmp_path / "saved")}).model)
        found = [{name for name, p in each.named_parameters() if p.requires_grad} for each in (model, again)]
        assert found[0] == found[1]
        return found[0]

    assert trained() == set()
    half, _ = build_model(load_recipe(recipe_1, {"model.config.dtype": "bfloat16"}).model)
    assert {p.dtype for name, p in half.named_parameters() if "lora_" in name} == {torch.float32}
    assert {p.dtype for name, p in half.named_parameters() if "lora_" not in name} == {torch.bfloat16}
    assert trained(model__config__train_ret_token="true") == {"ret_embedding"}
    everything = trained(model__freeze_towers="false")
    assert any("embed_tokens" in name for name in everything) and "ret_embedding" not in everything
    with_ret = trained(model__freeze_towers="false", model__config__train_ret_token="true")
    assert everything ^ with_ret == {"ret_embedding", "backbone.language_model.embed_tokens.weight"}


@pytest.mark.slow
def test_adapted_layers_may_be_held_in_four_bits(recipe_1, tmp_path):
    pytest.importorskip("bitsandbytes")
    words = ["train", str(recipe_1), "--model.lora.quantize", "true", "--training.save_steps", "1"]
    assert main([*words, "--training.save_strategy", "steps"]) == 0
    found, model = losses(tmp_path / "one"), load_file(tmp_path / "one/model.safetensors")
    original = build_model(load_recipe(recipe_1, {"model.lora": "null"}).model)[0].state_dict()
    assert model.keys() == original.keys()
    assert_only_linears_differ(original, model)
    for name, value in model.items():  # by no more than rounding and two steps
        torch.testing.assert_close(value, original[name], rtol=0.2, atol=0.4)
    (tmp_path / "one/checkpoint-2").rename(tmp_path / "checkpoint-2")
    assert main([*words, "--training.save_strategy", "steps", "--resume"]) == 0
    assert losses(tmp_path / "one") == pytest.approx(found)


def test_four_bits_need_bitsandbytes(recipe_1, monkeypatch, capsys):
    for name in ("bitsandbytes", "bitsandbytes.nn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", str(recipe_1), "--model.lora.quantize", "true"]) == 2
    assert "lora.quantize needs bitsandbytes: pip install bitsandbytes" in capsys.readouterr().err


@pytest.mark.slow
def test_accelerate_launch_trains_on_two_processes(recipe_1, tmp_path, launch):
    words = ["--training.save_strategy=no", "--training.per_device_train_batch_size=3"]
    launch("train", recipe_1, *words, f"--teacher.cache={tmp_path / 'states'}")
    assert len(losses(tmp_path / "one")) == 2
