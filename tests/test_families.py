"""The table of image-text families in docs/models.md is what a run of each of them shows.

A new family of transformers needs no change of code. `python tests/test_families.py` writes the table where
there is torchvision; the tests compare its families with those of transformers, and run a sample of them.
"""

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from conjoin.hub import load_trainable, model_kind
from conjoin.hub.folder import is_two_towers
from conjoin.retrieval import load_encoder
from conjoin.trainers import GclConfig, GclTrainer
from tiny_any import DEPTH, drop_videos, save_any
from tiny_mllms import MLLMS, save_mllm
from tiny_training import SETTINGS, make_rows

PAGE = Path(__file__).parents[1] / "docs/models.md"
FAMILIES = sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "embedding_gemma2"})
STARTS = ("| family | embeds | trains | cuts | saved and served | the first that failed |", "Not tried")
KEPT = DEPTH - 1
SAMPLE = ("gemma3", "idefics2", "llava_next", "qwen3_5", "qwen3_vl_moe", "gemma4", "ovis2")
"""Families of other processors, positions and layers than each other, none of which needs torchvision."""
STEPS = ("embeds", "trains", "cuts", "saved and served")


def reason(error):
    """Why a tiny model of a family cannot be made."""
    package = re.search(r"requires the (\w+) library|Package `(\w+)`", str(error))
    if "video_processor" in str(error):
        return "needs torchvision"
    if package:
        return f"needs {(package[1] or package[2]).lower()}"
    if isinstance(error, MemoryError):
        return "too large even if tiny"
    if isinstance(error, KeyError) and "configuration_" in str(error):
        return "no processor of their own in `AutoProcessor`"
    if "Unrecognized configuration class" in str(error):
        return "no `AutoModel`"
    return "sizes of a tiny model not found by rule"


def shown(error):
    """The beginning of a message."""
    text = re.sub(r"^cannot load the model '.*?': ", "", " ".join(str(error).split()))
    return re.sub(r"[^\w .,:()=-]", "", text)[:80].strip()


def try_family(name, folder):
    """The steps that worked: an item alone has the vector that it has in a batch, and so on."""
    torch.manual_seed(0)
    is_own = is_two_towers(AutoConfig.from_pretrained(folder))  # of a class of this package
    is_bare = model_kind(folder) == "tower" and not is_own
    options = {"pooling": "last"} if is_bare else {}
    done, items = {}, ["a text", Image.effect_noise((48, 48), 90).convert("RGB")]
    items.append({"text": "more words", "image": items[1]})
    try:
        with torch.no_grad():
            model, processor = load_trainable(folder, **options)
            together = model(**processor(items)).embeddings
            alone = torch.cat([model(**processor([item])).embeddings for item in items])
        done["embeds"] = float((together - alone).abs().max()) <= 1e-4
        args = GclConfig(str(folder / "out"), **SETTINGS | {"max_steps": 1, "per_device_train_batch_size": 2})
        trainer = GclTrainer(model, args, make_rows(2), processing_class=processor)
        trainer.train()
        with torch.no_grad():
            trained = trainer.model.eval()(**processor(items)).embeddings
        done["trains"] = bool(trained.isfinite().all()) and float((trained - together).abs().max()) > 0
        trainer.save_model()
        stock = SentenceTransformer(str(folder / "out"), device="cpu", trust_remote_code=True)
        stock = np.concatenate([stock.encode([item]) for item in items])
        served = load_encoder(folder / "out", device="cpu").encode(items)
        far = max(np.abs(each - trained.numpy()).max() for each in (stock, served))
        done["saved and served"] = bool(far <= 1e-5)
    except Exception as error:
        done["error"] = shown(error)
    try:
        cut, processor = load_trainable(folder, keep_layers=KEPT, **options)
        with torch.no_grad():
            found = cut(**processor(items)).embeddings
        done["cuts"] = bool(found.isfinite().all()) and cut.config.get_text_config().num_hidden_layers == KEPT
    except Exception as error:
        done.setdefault("error", shown(error))
    return done


def row(name):
    """The row of a family, and why there is none."""
    with tempfile.TemporaryDirectory() as work:
        try:
            (save_mllm if name in MLLMS else save_any)(name, Path(work))
        except Exception as error:
            return None, reason(error)
        done = try_family(name, Path(work))
    cells = [name, *("yes" if done.get(step) else "no" for step in STEPS), done.get("error", "")]
    return f"| {' | '.join(cells)} |", None


def make_table():
    """The table, and the families that were not tried by reason, as Markdown."""
    rows, untried = [], {}
    for name in FAMILIES:
        shown_row, why = row(name)
        rows += [shown_row] if shown_row else []
        if why:
            untried.setdefault(why, []).append(name)
    lines = [STARTS[0], "|---|---|---|---|---|---|", *rows, ""]
    lines += [f"{STARTS[1]}, {len(FAMILIES) - len(rows)} families:", ""]
    return "\n".join([*lines, *(f"* {why}: {', '.join(names)}" for why, names in sorted(untried.items()))]) + "\n"


def page_with(table):
    """The page with another table, which ends it."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(STARTS[0])] + table


same_libraries = pytest.mark.skipif(
    transformers.__version__.rpartition(".")[0] not in PAGE.read_text(encoding="utf-8"),
    reason="the table is of another version of transformers",
)


@same_libraries
def test_the_table_has_every_family_of_transformers():
    table = PAGE.read_text(encoding="utf-8").partition(STARTS[0])[2]
    untried = [name for line in re.findall(r"^\* .*: (.*)$", table, re.M) for name in line.split(", ")]
    assert sorted([*re.findall(r"^\| ([\w.-]+) \|", table, re.M), *untried]) == FAMILIES, (
        "run: python tests/test_families.py"
    )


@pytest.mark.slow
@same_libraries
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_what_a_run_shows(name, monkeypatch):
    drop_videos(monkeypatch)
    found, why = row(name)
    assert found is not None and f"\n{found}\n" in PAGE.read_text(encoding="utf-8"), why or found


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        drop_videos(patch)
        PAGE.write_text(page_with(make_table()), encoding="utf-8")
