"""The README and the documents are run: their commands parse, their Python runs, their links and recipes exist."""

import contextlib
import csv
import importlib
import importlib.util
import io
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from conjoin import JointEncoderModel
from conjoin.cli import main as cli
from conjoin.hub import export
from conjoin.hub.build import image_text_processor, towers_model
from conjoin.retrieval import encode_collection, load_encoder
from conjoin.trainers import load_recipe
from tiny_commands import variants

ROOT = Path(__file__).parents[1]
LOG = ROOT / "experiments/LOG.md"
"""Its commands are those of their day."""
FOLDERS = [ROOT, ROOT / "experiments", ROOT / "benchmarks"]
PAGES = sorted({*(ROOT / "docs").rglob("*.md"), *(page for folder in FOLDERS for page in folder.glob("*.md"))} - {LOG})
BLOCK = re.compile(r"(<!-- test: compile -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPES = sorted(path for path in (ROOT / "training_args").rglob("*.yaml") if path.parent.name != "accelerate")
RUN_HERE = ("encode", "index", "search", "verify")
PATHS = re.compile(r"`((?:training_args|docs|src|hub_upload|model_cards|experiments)/[\w./-]+)`")


def blocks(page, language):
    """`(only compile?, code)` of each block of a language."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [(match[1] is not None, match[3]) for match in found if match[2] == language]


def commands(page, program):
    """The arguments of every call of `program` in the bash blocks, what stands before it left out."""
    lines = [words for _, code in blocks(page, "bash") for words in plain_commands(code)]
    return [words[words.index(program) + 1 :] for words in lines if program in words[:-1]]


def plain_commands(code):
    """The words of each command in a bash block, without redirection."""
    lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    return [words[: words.index(">")] if ">" in words else words for words in lines if words]


def retrieval(page):
    """The commands that encode and search `photos.csv` on this machine."""
    calls = commands(page, "conjoin")
    return [call for call in calls if call[0] in RUN_HERE and "runs/photos" in " ".join(call)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_checkpoints, pictures):
    """A folder as the documents assume it: trained models, photos and their table."""
    folder = tmp_path_factory.mktemp("docs")
    clip = tiny_checkpoints["clip"]
    for path, layers in (("model", 0), ("baselines/joint-encoder", 3)):
        sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_vl_layers": layers}
        model = towers_model(JointEncoderModel, clip, clip, **sizes)
        export(model, image_text_processor(clip, clip), folder / "runs/demo" / path)
    rows = []
    for number in range(64):
        pictures[number % len(pictures)].save(folder / f"p{number}.png")
        rows.append({"image": f"p{number}.png", "text": f"a picture number {number}"})
    (folder / "openai").mkdir()
    (folder / "openai/clip-vit-base-patch32").symlink_to(clip)
    pictures[0].save(folder / "photo.jpg")
    pictures[1].save(folder / "other.jpg")
    with (folder / "photos.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "text"])
        writer.writeheader()
        writer.writerows(rows)
    words = [{"id": word, "text": word} for word in ("red", "green", "blue")]
    encode_collection(words, load_encoder(str(folder / "runs/demo/model")), folder / "runs/demo/gallery")
    (folder / "training_args").symlink_to(ROOT / "training_args")
    return folder


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "tutorials" and (blocks(page, "python") or retrieval(page))],
    ids=lambda page: page.name,
)
def test_python_runs(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    namespace = {"__name__": "snippet"}
    with contextlib.redirect_stdout(io.StringIO()):
        run_retrieval(page)
        for number, (compile_only, code) in enumerate(blocks(page, "python")):
            program = compile(code, f"{page.name}, python block {number}", "exec")
            if not compile_only:
                exec(program, namespace)


def run_retrieval(page):
    for arguments in retrieval(page):
        assert cli.main(arguments) == 0, arguments


def test_commands_parse(monkeypatch):
    monkeypatch.chdir(ROOT)
    for page in PAGES:
        for arguments in commands(page, "conjoin"):
            try:
                read(arguments)
            except ValueError as error:
                raise AssertionError(f"{page.name}: conjoin {shlex.join(arguments)}") from error


def read(arguments):
    """Parse a command, the options of its benchmark and the keys of its recipe."""
    _, options = cli.read_command(arguments)
    if arguments[0] == "train":
        rest = [word for word in options.overrides if word not in ("--keys", "--dry-run")]
        if not torch.cuda.is_available() and "--bf16" in rest:  # refused without a GPU
            place = rest.index("--bf16")
            del rest[place : place + 2]
        load_recipe(options.recipe, rest)


def test_links_and_named_files_exist():
    for page in [*PAGES, LOG]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        for named in PATHS.findall(text):
            is_pattern = "NAME" in named
            assert is_pattern or (ROOT / named).exists(), f"{page.name} names {named}"


def test_no_section_is_empty():
    """Text stands between a heading and the next, of whatever level."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "code", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in text.splitlines() if line.strip()]
        for line, after in pairwise([*lines, "# the end"]):
            assert not (line.startswith("#") and after.startswith("#")), f"{page.name}: nothing under {line!r}"


def test_named_functions_exist():
    """Every dotted name of the package in the documents can be imported."""
    for page in PAGES:
        for dotted in re.findall(r"`(conjoin(?:\.\w+)+)", page.read_text(encoding="utf-8")):
            module, _, name = dotted.rpartition(".")
            found = importlib.util.find_spec(dotted) if name.islower() and is_module(dotted) else None
            assert found or hasattr(importlib.import_module(module), name), f"{page.name} names {dotted}"


def is_module(dotted):
    try:
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:
        return False


def test_recipes_parse_and_say_where_they_come_from():
    for path in RECIPES:
        recipe = load_recipe(path)  # an error names the file
        assert path.read_text(encoding="utf-8").startswith("# "), path
        assert str(recipe.training.output_dir).startswith("runs/"), path


def test_variants_of_recipes_parse(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {path: variants(path) for path in RECIPES}
    assert sum(map(len, found.values())) > 5
    for path, calls in found.items():
        for program, command, recipe, *words in calls:
            assert (program, command, ROOT / recipe) == ("conjoin", "train", path)
            parts = load_recipe(recipe, words)[1:]
            fields = {key: value for part in parts for key, value in vars(part).items()}
            for flag, value in zip(words[::2], words[1::2], strict=True):
                own = fields.get(flag.removeprefix("--"))
                is_plain = isinstance(own, bool | int | float | str)
                assert not is_plain or own == type(own)(yaml.safe_load(value)), (path, flag)


def test_recipes_write_to_different_folders(monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = [load_recipe(path).training.output_dir for path in RECIPES]
    flags = [call[3:] for path in RECIPES for call in variants(path)]
    folders += [words[words.index("--output_dir") + 1] for words in flags]
    assert len(set(folders)) == len(folders)


def test_launch_configurations_load():
    from accelerate.commands.config.config_args import load_config_from_file

    paths = sorted((ROOT / "training_args" / "accelerate").glob("*.yaml"))
    assert len(paths) > 1
    for path in paths:
        config = load_config_from_file(str(path))
        assert config.num_processes == yaml.safe_load(path.read_text(encoding="utf-8"))["num_processes"], path


def test_recipes_say_what_differs_from_the_paper_and_why():
    """`sources`: the recipe's value of each key is the paper's or the authors', or has a reason; both can be set."""
    files = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in RECIPES}
    of_papers = {path: content["sources"] for path, content in files.items() if "sources" in content}
    assert {"clip_sf", "clip_base", "stage2_qwen2_vl_7b", "internvl3_1b"} <= {path.stem for path in of_papers}
    for path, sources in of_papers.items():
        ours = values_of(load_recipe(path))
        assert COMPLETE <= sources.keys() <= ours.keys(), path
        columns = {"paper": "--as_published", "authors": "--as_authors"}
        for key, cell in sources.items():
            assert cell.keys() <= {*columns, "reason"}, (path, key)
            is_theirs = any(agrees(ours[key], cell[column]) for column in columns if column in cell)
            assert is_theirs or cell.get("reason"), f"{path.name}: why is {key} {ours[key]!r}?"
        for column, flag in columns.items():
            wanted = {key: cell[column] for key, cell in sources.items() if column in cell}
            if not wanted:
                with pytest.raises(ValueError, match=f"{flag}: its `sources` name no value of the {column}"):
                    load_recipe(path, [flag])
                continue
            found = values_of(load_recipe(path, [flag, "--max_steps", "3"]))
            wrong = {key: found[key] for key, value in wanted.items() if not agrees(found[key], value)}
            assert wrong.keys() <= {"max_steps"} and found["max_steps"] == 3, (path, wrong)


COMPLETE = {"learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "mask_false_negatives"} | {
    "global_batch_size"
}


def values_of(recipe):
    return recipe.training.recipe | vars(recipe.training)


def agrees(value, wanted):
    """Whether a run has a value; of a mapping, these keys."""
    if isinstance(wanted, dict):
        return wanted.items() <= value.items()
    value = getattr(value, "value", value)
    return value == (type(value)(wanted) if isinstance(value, int | float) else wanted)
