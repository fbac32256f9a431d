"""The tutorials run from top to bottom, with tiny models, data and settings in place of those that they name."""

import contextlib
import csv
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import constants

from conjoin.cli import main as cli
from conjoin.cli.train import parse_overrides
from conjoin.hub import export
from conjoin.models.joint_encoder import JointEncoderModel
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor
from conjoin.training import load_recipe
from loopback_hub import ENVIRONMENT
from test_docs import parse, plain_commands
from tiny_catalogue import products, write_catalogue

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'(<!-- test: parse -->\n)?^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NOT_RUN = {"pip", "sudo", "vllm", "accelerate"}
"""Programs that are not run; `conjoin` behind `accelerate launch` is parsed."""

STEP = "--training.max_steps 1 --training.per_device_train_batch_size 4 --training.per_device_eval_batch_size 8 "
STEP += "--training.use_cpu true --training.bf16 false --training.disable_tqdm true --training.report_to none "
STEP += "--training.dataloader_num_workers 0 --training.gradient_cache_chunk_size 2 --training.warmup_steps 0"
TOWERS = "--model.vision tiny/clip --model.text tiny/clip --model.image_size 16 --model.config.hidden_size 24 "
TOWERS += "--model.config.num_attention_heads 2 --model.config.intermediate_size 32 "
TOWERS += "--model.config.vision_hidden_layer null"
MLLM = "--model.mllm tiny/mllm --model.config.keep_layers 2"
FEATURES = "--features.copies 1 --features.bf16 false"
SMALLER = {
    "train": STEP,
    "train training_args/gcl/sample.yaml": f"{TOWERS} {FEATURES}",
    "train training_args/solar/sample_stage1.yaml": f"{TOWERS} {FEATURES}",
    "train training_args/solar/sample_stage2.yaml": f"{FEATURES} --training.min_separation 0",
    "train training_args/puma/stage1_qwen2_vl_7b.yaml": f"{MLLM} --model.min_pixels 64 --model.max_pixels 576",
    "train training_args/puma/stage2_qwen2_vl_7b.yaml": "--training.per_device_train_batch_size 2",
    "train training_args/coral/sample.yaml": "--model.config.keep_layers 2",
    "data make-scenes": "--objects 24 --train 8 --distractors 2 --triplets 2",
    "data compose-queries": "--queries 8 --test-queries 2 --test-share 0.3 --max-positive-share 0.3",
}
"""By the first words of a command: options that make it small. Of an option given twice, the last counts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_checkpoints, mllm_checkpoints, pictures):
    """The folder that the tutorials run in: a clone with models, photos and tables."""
    folder = tmp_path_factory.mktemp("tutorials")
    clip, mllm = tiny_checkpoints["clip"], mllm_checkpoints("qwen2_vl")[0]
    (folder / "tiny").mkdir()
    (folder / "runs").mkdir()
    for link, target in (("tiny/clip", clip), ("tiny/mllm", mllm), ("runs/small-mllm", mllm)):
        (folder / link).symlink_to(target)
    (folder / "training_args").symlink_to(ROOT / "training_args")
    model = JointEncoderModel.from_backbones(clip, clip, hidden_size=24, num_attention_heads=2)
    export(model, ImageTextProcessor.from_backbones(clip, clip), folder / "runs/demo/model")
    llava = mllm_checkpoints("llava")[
        0
    ]  # transformers loads the stock format of Qwen and InternVL with torchvision only
    retriever = MllmRetrieverModel.from_mllm(llava, keep_layers=2)
    export(retriever, MllmRetrieverProcessor.from_mllm(llava), folder / "runs/puma")
    for number, name in enumerate(("photo.jpg", "other.jpg", "chair.jpg", "sofa.jpg", "blue.jpg")):
        pictures[number % 4].save(folder / name)
    write_table(folder / "photos.csv", ["image", "text"], [[f"{name}.jpg", name] for name in ("photo", "other")] * 2)
    write_table(folder / "nli.csv", ["sent0", "sent1"], [[f"a man runs {i}", f"a person moves {i}"] for i in range(8)])
    rows = products(60)
    write_catalogue(folder, rows)
    captions = [json.dumps({"idx": row["sku"], "caption": f"seen {row['sku']}"}) for row in rows]
    (folder / "captions.jsonl").write_text("\n".join(captions))
    for number in range(20):
        kind = folder / "stamps" / ("animals", "plants")[number % 2]
        kind.mkdir(parents=True, exist_ok=True)
        pictures[number % 4].save(kind / f"{number}.png")
        (kind / f"{number}.txt").write_text(f"A stamp {number}.\nde.utf8=Eine Marke.\n")
    return folder


def write_table(path, columns, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def hub_here(hub, monkeypatch, tmp_path):
    """The hub on this machine as the one that every client uses."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    patches = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    }
    patches |= {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    for name, value in patches.items():
        monkeypatch.setattr(constants, name, value)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_runs(page, folder, hub_here, monkeypatch):
    monkeypatch.chdir(folder)
    namespace = {"__name__": "tutorial"}
    with contextlib.redirect_stdout(io.StringIO()):
        for parse_only, language, title, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if title:
                Path(title).write_text(code, encoding="utf-8")
            elif language == "bash":
                run_commands(code, bool(parse_only))
            elif language == "python":
                exec(compile(code.replace("/usr/share/tuxpaint/stamps", "stamps"), page.name, "exec"), namespace)


def run_commands(code, parse_only):
    for words in plain_commands(code):
        if words[0] == "conjoin" and not parse_only:
            assert cli.main([*words[1:], *smaller(words[1:])]) == 0, words
            continue
        assert parse_only or words[0] in NOT_RUN, words
        if "conjoin" in words:
            arguments = words[words.index("conjoin") + 1 :]
            parsed, rest = parse(arguments)
            if arguments[0] == "train":
                load_recipe(parsed.recipe, parse_overrides([*rest, "--training.bf16", "false"]))


def smaller(arguments):
    """What makes a command small."""
    command = " ".join(arguments)
    more = [options for start, options in SMALLER.items() if f"{command} ".startswith(f"{start} ")]
    return shlex.split(" ".join(more))


def test_every_replacement_is_used():
    text = "".join(page.read_text(encoding="utf-8").replace("\\\n", "") for page in TUTORIALS)
    assert all(f"conjoin {start}" in re.sub(" +", " ", text) for start in SMALLER)
    assert len(TUTORIALS) == 6
