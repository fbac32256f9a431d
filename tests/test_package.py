"""The package as a whole: importing it, and its recipes."""

import subprocess
import sys
from pathlib import Path

import pytest

import conjoin
from conjoin.training import GclConfig, load_recipe

RECIPES = Path(__file__).parents[1] / "training_args"
DEMO = RECIPES / "sample/demo.yaml"


def test_importing_the_package_does_not_import_torch():
    code = "import sys, conjoin; print('torch' in sys.modules, conjoin.__version__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", conjoin.__version__]


@pytest.mark.parametrize("name", sorted(set(conjoin.__all__)))
def test_public_names_resolve(name):
    assert getattr(conjoin, name) is not None
    assert name in dir(conjoin)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="JointEncoder2"):
        conjoin.JointEncoder2  # noqa: B018


@pytest.mark.parametrize(
    "path", sorted(p for p in RECIPES.rglob("*.yaml") if p.parent.name != "accelerate"), ids=lambda path: path.stem
)
def test_every_recipe_parses(path, tmp_path):
    recipe = load_recipe(path, {"training.output_dir": str(tmp_path)})
    assert recipe.training.output_dir == str(tmp_path)


def test_overrides_reach_their_section_and_numbers_are_numbers(tmp_path):
    recipe = load_recipe(
        DEMO,
        {
            "training.learning_rate": "1e-4",
            "training.output_dir": str(tmp_path),
            "model.config.hidden_size": "64",
            "training.save_strategy": "no",
            "training.pairs": "[[image, text]]",
        },
    )
    assert isinstance(recipe.training, GclConfig)
    assert recipe.training.learning_rate == 1e-4
    assert recipe.model.config["hidden_size"] == 64
    assert recipe.training.save_strategy == "no"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("training.learning_rat", "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ("model.visoin", "did you mean 'vision'"),
        ("trainig", "did you mean 'training'"),
        ("data.zzz", "unknown key 'zzz'; expected one of"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(DEMO, {key: "1"})


def test_an_unknown_method_and_a_missing_file_are_errors(tmp_path):
    with pytest.raises(ValueError, match="method 'gcll'; expected one of"):
        load_recipe(DEMO, {"method": "gcll"})
    with pytest.raises(FileNotFoundError, match="no recipe at"):
        load_recipe(tmp_path / "absent.yaml")
