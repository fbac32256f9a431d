"""Tiny rows, trainers and objectives of SOLAR's two stages."""

from PIL import ImageOps

from conjoin.data import PairCollator
from conjoin.methods.solar import (
    SolarStage1Config,
    SolarStage1Trainer,
    SolarStage2Collator,
    SolarStage2Config,
    SolarStage2Rows,
    SolarStage2Trainer,
)
from conjoin.methods.solar.stage1 import SolarStage1Objective
from conjoin.methods.solar.stage2 import SolarStage2Objective
from conjoin.methods.solar.teachers import TowerTeacher
from conjoin.retrieval import load_mined
from conjoin.retrieval.mining.negatives import write_mined
from tiny_training import SETTINGS, make_encoder, make_rows, without_dropout


def frozen_encoder(checkpoints, **config):
    model, processor = make_encoder(checkpoints, vl_init="normal", **config)
    for tower in (model.vision_model, model.text_model):
        tower.requires_grad_(False)
    without_dropout(model)
    return model, processor


def texts(count):
    rows = make_rows(count)
    words = "red dog and blue cat on a big old tree by the sea".split()
    return rows.map(lambda row, i: {"text": " ".join(words[i % 5 : i % 5 + 4 + i % 3])}, with_indices=True)


def stage1(folder, model, processor, rows, **arguments):
    config = SolarStage1Config(output_dir=str(folder), **(SETTINGS | arguments))
    return SolarStage1Trainer(model, config, train_dataset=rows, processing_class=processor)


def stage2_rows(folder, rows, **arguments):
    ids = rows["id"]
    blocks = [
        {"id": name, "negatives": [ids[i - 1], ids[(i - 2) % len(ids)]], "found_by": [[], []]}
        for i, name in enumerate(ids)
    ]
    blocks[0]["negatives"], blocks[0]["found_by"] = [ids[1 % len(ids)]], [[]]
    write_mined(folder / "negatives.parquet", [blocks])
    return SolarStage2Rows(rows, ids, load_mined(folder), **arguments)


def stage2(folder, model, processor, rows, **arguments):
    config = SolarStage2Config(output_dir=str(folder), **(SETTINGS | {"min_separation": 0.0} | arguments))
    return SolarStage2Trainer(model, config, train_dataset=rows, processing_class=processor)


def stage1_objective(checkpoints, rows=None, **arguments):
    model, processor = frozen_encoder(checkpoints)
    config = SolarStage1Config(output_dir="unused", use_cpu=True, report_to="none", **arguments)
    objective = SolarStage1Objective(model, config, TowerTeacher(model)).eval()
    rows = texts(6) if rows is None else rows
    return objective, PairCollator(processor)(list(rows))


def stage2_objective(checkpoints, folder, rows=None, **arguments):
    model, processor = frozen_encoder(checkpoints)
    arguments = {"min_separation": 0.0} | arguments
    config = SolarStage2Config(output_dir="unused", use_cpu=True, report_to="none", **arguments)
    augmented = {"augment": ImageOps.invert, "augmented": True} if config.positive == "augmented" else {}
    rows = stage2_rows(folder, texts(6) if rows is None else rows, **augmented)
    batch = SolarStage2Collator(PairCollator(processor))([rows[i] for i in range(len(rows))])
    return SolarStage2Objective(model, config).eval(), batch
