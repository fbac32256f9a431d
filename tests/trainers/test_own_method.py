"""A stranger's files, those of docs/own_method.md as printed, in a folder of their own."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from conjoin import GclConfig, QueryCandidateConfig, QueryCandidateTrainer, RetrievalConfig, RetrievalTrainer
from tiny_training import make_encoder, make_rows

PAGE = Path(__file__).parents[2] / "docs/own_method.md"
FILES = dict(re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL))
CLIP = "openai/clip-vit-base-patch32"


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_checkpoints, pictures):
    """The files, four photos with their captions, and queries with two negatives and a reranker's scores."""
    shutil.copytree(tiny_checkpoints["clip"], tmp_path / CLIP)
    captions = ["a red box", "a blue box", "a green chair", "a sofa"]
    for name, code in FILES.items():
        (tmp_path / name).write_text(code.replace("max_steps=100", "max_steps=2, logging_steps=1, use_cpu=True"))
    for number, picture in enumerate(pictures[:4]):
        picture.save(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{caption}" for number, caption in enumerate(captions)]
    (tmp_path / "photos.csv").write_text("\n".join(["image,text", *lines]) + "\n")
    rows = [
        {"query": f"find {text}", "positive": text, "negatives": ["a dog", "a cat"], "teacher_scores": [9.5, 1.0, 0.0]}
        for text in captions
    ]
    (tmp_path / "triplets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["sigmoid.py", "triplet.py"])
def test_a_loss_of_ones_own_trains(name, folder):
    trainer = runpy.run_path(name)["trainer"]
    first, second = (entry["loss"] for entry in trainer.state.log_history[:2])
    term = f"{Path(name).stem}_loss"
    assert trainer.state.log_history[0][term] == pytest.approx(first, abs=1e-3)
    assert first > 0 and second != first
    trainer.save_model()
    record = json.loads((folder / "runs" / Path(name).stem / "recipe.json").read_text())
    assert (record["model_name_or_path"], len(record["log"])) == (CLIP, len(trainer.state.log_history))
    assert "Widths to train the embeddings at" in RetrievalConfig.__doc__ and "Widths" in GclConfig.__doc__


def test_a_trainer_of_ones_own_has_flags_and_a_record(folder, monkeypatch):
    words = ["--model_name_or_path", CLIP, "--output_dir", "out", "--max_steps", "2", "--distil_weight", "0.5"]
    words += ["--per_device_train_batch_size", "4", "--logging_steps", "1", "--use_cpu", "--report_to", "none"]
    monkeypatch.setattr(sys, "argv", ["distil.py", *words])
    runpy.run_path("distil.py", run_name="__main__")
    record = json.loads(Path("out/recipe.json").read_text())
    first = record["log"][0]
    assert (record["trainer"], record["distil_weight"], record["model_name_or_path"]) == ("Distil", 0.5, CLIP)
    assert first["distil_loss"] + first["contrastive_loss"] == pytest.approx(first["loss"], abs=1e-3)
    monkeypatch.setattr(sys, "argv", ["distil.py", *words, "--overwrite", "--distil_wait", "1"])
    with pytest.raises(ValueError, match="unknown key 'distil_wait'; did you mean 'distil_weight'"):
        runpy.run_path("distil.py", run_name="__main__")


class Named(torch.nn.Module):
    """Keeps what it is given."""

    def forward(self, text, price, ids=None):
        self.given = {"price": price, "ids": ids}
        return text.mean()


class Vector(torch.nn.Module):
    def forward(self, image, **others):
        self.given = {"image": image, **others}
        return {"row_loss": image.mean(1)}


def test_a_loss_gets_what_it_names(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = [
        row | {"price": 2.5 + number, "sizes": [number] * 3, "note": "x"} for number, row in enumerate(make_rows(4))
    ]

    def trainer(loss, chosen=rows):
        args = RetrievalConfig(str(tmp_path), per_device_train_batch_size=4, max_steps=1, use_cpu=True)
        return RetrievalTrainer(model, args, chosen, processing_class=processor, loss=loss)

    named, vector = Named(), Vector()
    trainer(named).train()
    assert named.given["price"].sort().values.tolist() == [2.5, 3.5, 4.5, 5.5] and named.given["ids"] is not None
    with pytest.raises(ValueError, match=r"the term 'row_loss' of the loss has shape \(4,\)"):
        trainer(vector).train()
    assert vector.given["sizes"].shape == (4, 3) and "note" not in vector.given
    with pytest.raises(ValueError, match="Named takes 'price', which the batch lacks; it has image, text, ids"):
        trainer(named, make_rows(4)).train()


class Counts(torch.nn.Module):
    def forward(self, queries, negatives, num_negatives):
        self.counts = num_negatives
        return (queries.sum() + negatives.sum()) * 0


def test_negatives_are_counted(tiny_checkpoints, tmp_path):
    model, processor = make_encoder(tiny_checkpoints)
    rows = Dataset.from_list([{"query": f"q{n}", "positive": f"p{n}", "negatives": ["x"] * n} for n in range(4)])
    args = QueryCandidateConfig(str(tmp_path), per_device_train_batch_size=4, max_steps=1, use_cpu=True)
    loss = Counts()
    QueryCandidateTrainer(model, args, rows, processing_class=processor, loss=loss).train()
    assert sorted(loss.counts.tolist()) == [0, 1, 2, 3]
