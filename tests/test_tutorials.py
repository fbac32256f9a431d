"""The tutorials run as printed, from top to bottom, in an empty folder, on small models and data at the same paths."""

import contextlib
import csv
import io
import json
import re
import runpy
from pathlib import Path

import pytest

from conjoin import JointEncoderModel
from conjoin.cli import main as cli
from conjoin.data.row_images import ALLOW_ROOTS
from conjoin.hub import export
from conjoin.hub.build import image_text_processor, towers_model
from conjoin.trainers import load_recipe
from test_docs import plain_commands
from tiny_catalogue import products, write_catalogue
from tiny_embedders import save_embedder
from tiny_mllms import save_mllm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_video")]

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'(<!-- test: parse -->\n)?^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NOT_RUN = {"apt-get", "dpkg", "pip", "vllm", "accelerate"}
"""Programs that are not run; `conjoin` behind `accelerate launch` is parsed."""

STAMPS = "stamps/usr/share/tuxpaint/stamps"
"""Where the catalogue's tutorial has the pictures of its package."""
READER = {
    "catalogue": ["photo.jpg", STAMPS],
    "choose": ["photos.csv", "runs/demo/model"],
    "compose": ["captions.jsonl", "other.jpg", "photo.jpg", "runs/small-mllm", "shop.csv"],
    "embedder": ["Qwen/Qwen3-VL-Embedding-2B", "photo.jpg", "shop.csv", "test.csv"],
    "mllm": ["Qwen/Qwen2-VL-2B-Instruct", "blue.jpg", "chair.jpg", "nli.csv", "photos.csv", "sofa.jpg"],
    "solar": ["photo.jpg"],
}
"""What a reader of each page has beside a clone: models, tables and photos that the page says are theirs."""


@pytest.fixture
def folder(page, tmp_path, monkeypatch, tiny_checkpoints, pictures):
    """The folder that a tutorial runs in: empty but for recipes and experiments of a clone and what the reader has."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("training_args", "experiments"):
        (folder / name).symlink_to(ROOT / name)
    for name in READER[page.stem]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jpg":
            pictures[len(name) % 4].save(path)
        elif name in ("runs/small-mllm", "Qwen/Qwen2-VL-2B-Instruct"):
            save_mllm("qwen2_vl", path, depth=16)  # a recipe keeps the first 12 layers
        elif name == "Qwen/Qwen3-VL-Embedding-2B":
            save_embedder(path)
        elif page.stem == "embedder":
            make_products(path, pictures)
        else:
            MAKE[name](path, tiny_checkpoints, pictures)
    monkeypatch.chdir(folder)
    return folder


def make_photos(path, tiny, pictures):
    for number in (0, 1):
        pictures[number].save(path.parent / f"photo{number or ''}.jpg")
    write_table(path, ["image", "text"], [["photo.jpg", "photo"], ["photo1.jpg", "other"]] * 2)


def make_nli(path, tiny, pictures):
    write_table(path, ["sent0", "sent1"], [[f"a man runs {i}", f"a person moves {i}"] for i in range(8)])


def make_products(path, pictures):
    for number, picture in enumerate(pictures):
        picture.save(path.parent / f"{number}.png")
    write_table(path, ["id", "image", "text"], [[f"p{n}", f"{n % 4}.png", f"box {n % 4}"] for n in range(4)])


def make_shop(path, tiny, pictures):
    write_catalogue(path.parent, products(60))


def make_captions(path, tiny, pictures):
    rows = [{"idx": row["sku"], "caption": f"seen {row['sku']}"} for row in products(60)]
    path.write_text("\n".join(map(json.dumps, rows)))


def make_joint_encoder(path, tiny, pictures):
    model = towers_model(JointEncoderModel, tiny["clip"], tiny["clip"], hidden_size=24, num_attention_heads=2)
    export(model, image_text_processor(tiny["clip"], tiny["clip"]), path)


def make_stamps(path, tiny, pictures):
    for number in range(20):
        kind = path / ("animals", "plants")[number % 2] / "inner"
        kind.mkdir(parents=True, exist_ok=True)
        pictures[number % 4].save(kind / f"{number}.png")
        (kind / f"{number}.txt").write_text(f"A stamp {number}.\nde.utf8=Eine Marke.\n")


MAKE = {
    STAMPS: make_stamps,
    "photos.csv": make_photos,
    "nli.csv": make_nli,
    "shop.csv": make_shop,
    "captions.jsonl": make_captions,
    "runs/demo/model": make_joint_encoder,
}


def write_table(path, columns, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_runs(page, folder, monkeypatch):
    namespace = {"__name__": "tutorial"}
    with contextlib.redirect_stdout(io.StringIO()):
        for parse_only, language, title, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            monkeypatch.setenv(ALLOW_ROOTS, "")
            if title:
                Path(title).write_text(code, encoding="utf-8")
            elif language == "bash":
                run_commands(code, bool(parse_only), monkeypatch)
            elif language == "python":
                program = compile(code, page.name, "exec")
                if not parse_only:
                    exec(program, namespace)


def run_commands(code, parse_only, monkeypatch):
    for words in plain_commands(code):
        monkeypatch.setenv(ALLOW_ROOTS, "")  # each command is a process: it has no --root of another
        if words[0] == "conjoin" and not parse_only:
            assert cli.main(words[1:]) == 0, words
            continue
        if words[0] == "python" and not parse_only:
            monkeypatch.setattr("sys.argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
            continue
        assert parse_only or words[0] in NOT_RUN, words
        if "conjoin" in words:
            arguments = words[words.index("conjoin") + 1 :]
            _, options = cli.read_command(arguments)
            if arguments[0] == "train":
                load_recipe(options.recipe, [*options.overrides, "--bf16", "false"])


def test_every_tutorial_has_its_reader():
    assert {page.stem for page in TUTORIALS} == set(READER)
