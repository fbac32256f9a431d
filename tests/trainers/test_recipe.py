"""Recipes: files, flags and Python arguments are one thing; a mistake names the key and the remedy."""

import json
import shutil

import pytest
import torch
import yaml
from peft import LoraConfig

from conjoin import ContrastiveConfig, GclConfig, GclTrainer, load_recipe
from conjoin.cli.main import main
from conjoin.trainers import build_trainer, parse_recipe, recipe_folder, run
from tiny_any import save_any
from tiny_training import small_run, write_pairs, write_recipe

PAIRS = "THE PAIRS"


@pytest.fixture
def path(tiny_checkpoints, tmp_path):
    write_pairs(tmp_path / "pairs", 8)
    settings = {"freeze_towers": True, "matryoshka_dims": [4, 16], "learning_rate": "1e-3", "eval_steps": 2}
    settings["mask_false_negatives"] = False
    return write_recipe(tmp_path, tiny_checkpoints, "gcl", tmp_path / "pairs", save_strategy=False, **settings)


def values(recipe):
    return {key: value for part in recipe[1:] for key, value in vars(part).items()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"matryoshka_dims": [4, 16], "learning_rate": 1e-3, "save_strategy": "no", "eval_steps": 2}),
        ([], {"mask_false_negatives": False}),
        (["--mask_false_negatives", "true"], {"mask_false_negatives": True}),
        (["--matryoshka_dims", "8", "16", "--bf16"], {"matryoshka_dims": [8, 16], "bf16": True}),
        (["--matryoshka_dims", "null", "--eval_steps", "null"], {"matryoshka_dims": [], "eval_steps": None}),
        (["--model_init_kwargs", "null", "--temperature=0.1"], {"model_init_kwargs": None, "temperature": 0.1}),
        (["--columns", "image=p", "text=a,b"], {"columns": {"image": "p", "text": "a,b"}}),
        (["--freeze", "a"], {"freeze": ["a"]}),
        (["--model_init_kwargs", "{x: 1e-6, y: 2.E+3, z: 4, s: e5}"],
         {"model_init_kwargs": {"x": 1e-6, "y": 2000.0, "z": 4, "s": "e5"}}),
        (["--resume"], {"resume_from_checkpoint": "true", "overwrite_output_dir": False}),
        (["--overwrite", "--no_learn_temperature"], {"overwrite_output_dir": True, "learn_temperature": False}),
    ],
)  # fmt: skip
def test_flags_replace_the_values_of_the_file(path, words, expected):
    found = values(load_recipe(path, words))
    assert {key: str(found[key].value) if hasattr(found[key], "value") else found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learnig_rate": 1}, "unknown key 'learnig_rate'; did you mean 'learning_rate'?"),
        ({"training": {"max_steps": 1}}, "unknown key 'training'"),
        ({"trainer": "glc"}, "trainer='glc'; expected one of contrastive, gcl"),
        ({"trainer": None}, "trainer=None; expected one of"),
        ({"max_steps": "many"}, "--max_steps: invalid int value: 'many'"),
        ({"use_cpu": "maybe"}, "--use_cpu: Truthy value expected"),
        ({"columns": "image"}, "columns: 'image'; expected ROLE=COLUMN"),
        ({"on_error": "ignore"}, r"--on_error: invalid choice: 'ignore' \(choose from"),
        ({"dataset_format": "querys"}, "dataset_format='querys'; expected one of pairs, queries"),
        ({"dataset_format": "mmeb", "instruction": "x"}, "instruction='x' has no effect on rows of format mmeb"),
        ({"dataset_format": "merit", "datasets": ["A"]}, r"datasets=\['A'\] has no effect on rows of format merit"),
        ({"dataset_format": "queries", "dataset_streaming": True}, "dataset_streaming=True has no effect on rows of"),
        ({"dataset_mixture": [{"path": "a"}, {"path": "b"}]}, "set dataset_streaming: true"),
        ({"dataset_mixture": [{"sources": "a"}]}, "expected path, split, weight"),
        ({"dataset_mixture": [{"split": "a"}], "dataset_streaming": True}, "expected path, split, weight"),
        ({"dataset_mixture": [{"path": PAIRS}] * 2, "dataset_streaming": True}, "two sources are called"),
        ({"dataset_mixture": [{"path": "a"}], "dataset_test_split": "b"}, "Name the evaluation rows by dataset_test"),
        ({"columns": {"query": "a"}}, r"columns: unknown role 'query'; expected one of image, text"),
        ({"": "- 1"}, "a recipe is a mapping of keys to values, got list"),
    ],
)
def test_a_bad_recipe_names_the_key_and_the_remedy(path, changes, message):
    recipe = yaml.safe_load(path.read_text()) | changes
    text = recipe.get("", yaml.safe_dump(recipe))
    path.write_text(text.replace(PAIRS, recipe["dataset_name"]))
    with pytest.raises(ValueError, match=message):
        load_recipe(path).data.load()


def test_a_missing_recipe_names_where_there_are_some():
    with pytest.raises(FileNotFoundError, match=r"no recipe at .*sampel.yaml'; those of the package are in .*train"):
        load_recipe(recipe_folder() / "gcl/sampel.yaml")


def test_keys_are_explained(path, capsys):
    assert main(["train", str(path), "--keys"]) == 0
    short = capsys.readouterr().out
    assert "exclude_self: True\n    Exclude the anchor" in short and "lora_r" not in short
    assert main(["train", str(path), "--keys", "all"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("--lora_r", "Rank.", "--exclude_self", "Exclude the anchor from its own denominator.",
                  "Rows embedded at once.", "Training split.", "--per_device_train_batch_size"):  # fmt: skip
        assert words in printed


def test_a_script_reads_the_same_recipe(path, tmp_path):
    words = ["--config", str(path), *small_run(tmp_path / "out"), "--freeze_towers", "false", "--use_peft"]
    model_args, data, args = parse_recipe(GclConfig, words)
    torch.manual_seed(args.seed)
    model, processor = model_args.load()
    rows, evaluation = data.load()
    assert evaluation is None and isinstance(model_args.peft_config(), LoraConfig)
    script = GclTrainer(model, args, rows, processing_class=processor, peft_config=model_args.peft_config())
    command = build_trainer(load_recipe(path, words[2:]))
    for trainer in (script, command):
        torch.manual_seed(0)
        trainer.train()
    assert all(map(torch.equal, script.model.parameters(), command.model.parameters()))
    with pytest.raises(ValueError, match="is a recipe of the trainer gcl; this script trains by contrastive"):
        parse_recipe(ContrastiveConfig, words)
    assert parse_recipe(GclConfig, ["--output_dir", "x", "--lora_r=3"])[0].lora_r == 3


def test_a_global_batch_is_divided_and_replaces_rows_per_device(path):
    recipe = yaml.safe_load(path.read_text())
    recipe.pop("per_device_train_batch_size", None)
    path.write_text(yaml.safe_dump(recipe | {"global_batch_size": 12}))
    for words, expected in ((), 12), (["--per_device_train_batch_size", "3"], 3), (["--global_batch_size=6"], 6):
        assert load_recipe(path, words).training.per_device_train_batch_size == expected
    with pytest.raises(ValueError, match="global_batch_size=0 does not divide among 1 processes"):
        load_recipe(path, ["--global_batch_size", "0"])
    with pytest.raises(ValueError, match="global_batch_size and per_device_train_batch_size exclude each other"):
        GclConfig("out", global_batch_size=8, per_device_train_batch_size=8)


def test_a_dry_run_counts_without_weights(path, mllm_checkpoints, tmp_path, capsys):
    words = ["--global_batch_size=4", "--num_train_epochs=3", "--max_steps=-1", "--warmup_steps=0.5", "--use_peft"]
    mllm = shutil.copytree(mllm_checkpoints("qwen2_vl")[0], tmp_path / "mllm")
    save_any("gemma3", tmp_path / "gemma3")
    for file in (*mllm.glob("*.safetensors"), *tmp_path.glob("gemma3/*.safetensors")):
        file.unlink()
    of_mllm = ["--model_name_or_path", str(mllm), "--model_init_kwargs={keep_layers: 2}"]
    of_any = ["--model_name_or_path", str(tmp_path / "gemma3"), of_mllm[-1], "--freeze_towers=false"]
    for more, kind in (([], "joint_encoder"), (of_mllm, "mllm_retriever"), (of_any, "gemma3")):
        assert main(["train", str(path), *words, *more, "--dry-run"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "rows: 8 batch: 4 (1 x 4), 4 rows per step steps: 6 (3 epochs), of which 3 of warm-up" in printed
        assert f"model: {kind}, " in printed and "M trained" in printed


def test_a_missing_stage_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(recipe_folder() / "puma/stage2_qwen2_vl_7b.yaml")
    with pytest.raises(FileNotFoundError, match="cannot load the model 'runs/puma-qwen2-vl-7b-stage1'"):
        recipe.model.load()


def test_features_of_frozen_towers_are_used_and_what_is_frozen_stays(path, tmp_path):
    words = [*small_run(tmp_path / "out"), "--feature_copies=2", f"--features_dir={tmp_path / 'features'}"]
    trainer = build_trainer(load_recipe(path, [*words, "--freeze", "text_adapter", "--dataset_test_split=train"]))
    assert trainer.train_dataset.images["image_features"].shape[:2] == (8, 2) and any(
        (tmp_path / "features").iterdir()
    )
    before = {name: value.clone() for name, value in trainer.encoder.state_dict().items()}
    trainer.train()
    moved = {
        name.split(".")[0] for name, value in trainer.encoder.state_dict().items() if not value.equal(before[name])
    }
    assert moved == {"vision_adapter", "vl_encoder"} and "eval_mean_hit_rate@1" in trainer.evaluate()


def test_what_a_run_was_is_recorded(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(build_trainer(load_recipe(path, small_run("out", gradient_accumulation_steps=2, dataset_name="pairs"))))
    record = json.loads((tmp_path / "out/recipe.json").read_text())
    expected = {"world_size": 1, "contrastive_batch": 4, "effective_batch": 8}
    assert record["ran"].items() >= expected.items() and record["ran"]["versions"]["torch"] in torch.__version__
    assert (record["trainer"], record["dataset_name"], record["matryoshka_dims"]) == ("gcl", "pairs", [4, 16])
    assert json.loads((tmp_path / "out/config.json").read_text())["matryoshka_dimensions"] == [4, 16]
    assert [entry["step"] for entry in record["log"] if "gcl_loss" in entry] == [1, 2]
    path.write_text(json.dumps({key: record[key] for key in yaml.safe_load(path.read_text())}))
    assert load_recipe(path).training.recipe.items() <= record.items()
