"""A tiny trainer of each method and its variants; a new method adds a row to `TRAINERS`."""

from peft import LoraConfig
from PIL import Image

import tiny_coral
import tiny_puma
import tiny_solar
from conjoin.hub.build import mllm_model
from tiny_training import make_encoder, make_rows, make_trainer, without_dropout

ADAPTED = r"(vision|text)_model\..*"
PARTS = ["vision_adapter", "text_adapter", "vl_encoder"]


def joint(checkpoints, folder, method, rows=4, **arguments):
    model, processor = make_encoder(checkpoints)
    return make_trainer(method, model, processor, folder, make_rows(rows), **arguments)


def queries(checkpoints, folder, rows=4, **arguments):
    """Queries of texts and of images, so that one rank may have texts alone; some rows have negatives."""
    model, processor = make_encoder(checkpoints)
    table = []
    for i in range(rows):
        colour = (40 * i % 256, 90 * i % 256, 255 - 30 * i % 256)
        query = {"image": Image.new("RGB", (16, 16), colour)} if i % 3 == 0 else f"{chr(97 + i)} {i}"
        table.append({"query": query, "positive": f"p {i}", "positive_id": f"p{i}"})
        table[-1] |= {"negatives": [f"n {i}"], "negative_ids": [f"n{i}"]} if i % 4 == 0 else {}
    return make_trainer("queries", model, processor, folder, table, **arguments)


def gcl_lora(checkpoints, folder, rows=4, **arguments):
    model, processor = make_encoder(checkpoints)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=ADAPTED, modules_to_save=PARTS)
    return make_trainer("gcl", model, processor, folder, make_rows(rows), peft_config=lora, **arguments)


def solar_stage1(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_solar.frozen_encoder(checkpoints)
    return tiny_solar.stage1(folder, model, processor, tiny_solar.texts(rows), **arguments)


def solar_stage2(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_solar.frozen_encoder(checkpoints)
    return tiny_solar.stage2(folder, model, processor, tiny_solar.texts(rows), **arguments)


def puma_stage1(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_puma.make_student(checkpoints)
    teacher = mllm_model(checkpoints)
    sentences = tiny_puma.sentences(rows)
    return tiny_puma.make_trainer("puma_stage1", model, processor, folder, sentences, teacher=teacher, **arguments)


def puma_stage2(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_puma.make_student(checkpoints)
    return tiny_puma.make_trainer("puma_stage2", model, processor, folder, tiny_puma.Instructed(rows), **arguments)


def coral(checkpoints, folder, rows=4, readout="token", partial=False, **arguments):
    model, processor = tiny_coral.make_model(checkpoints, readout=readout)
    return tiny_coral.make_trainer(model, processor, folder, tiny_coral.Products(rows, partial), **arguments)


def gcl_mllm(checkpoints, folder, rows=4, **arguments):
    model, processor = tiny_coral.make_model(checkpoints)
    return make_trainer("gcl", model, processor, folder, make_rows(rows), **arguments)


TRAINERS = {
    "contrastive": (joint, {"method": "contrastive"}),
    "queries": (queries, {}),
    "GCL": (joint, {"method": "gcl"}),
    "GCL, Matryoshka": (joint, {"method": "gcl", "matryoshka_dims": [4, 16]}),
    "GCL, LoRA": (gcl_lora, {}),
    "GCL, MLLM": (gcl_mllm, {}),
    "SOLAR 1": (solar_stage1, {}),
    "SOLAR 1, windows": (solar_stage1, {"scores": "windows", "gla_weight": 0.0, "mask_share": 0.5}),
    "SOLAR 1, ITC only": (solar_stage1, {"gla_weight": 0.0, "gd_weight": 0.0, "ld_weight": 0.0, "mask": "none"}),
    "SOLAR 1, hard masks": (solar_stage1, {"mask": "hard", "gcl_weight": 1.0}),
    "SOLAR 2": (solar_stage2, {}),
    "SOLAR 2, windows": (solar_stage2, {"scores": "windows", "itc_weight": 1.0}),
    "SOLAR 2, pixels": (solar_stage2, {"mask_level": "input"}),
    "SOLAR 2, random": (solar_stage2, {"positive": "random", "constructed_negatives": False}),
    "SOLAR 2, augmented": (solar_stage2, {"positive": "augmented", "constructed_negatives": False}),
    "PUMA 1": (puma_stage1, {}),
    "PUMA 1, shared": (puma_stage1, {"mode": "shared", "kind": "kl"}),
    "PUMA 2": (puma_stage2, {}),
    "Coral": (coral, {}),
    "Coral, partial": (coral, {"readout": "last", "partial": True, "masked_only": True}),
}
OF_JOINT_ENCODER = (joint, queries, gcl_lora, solar_stage1, solar_stage2)


def make_any(name, checkpoints, mllm, folder, dropout=False, **arguments):
    """The trainer of a variant.

    Args:
        name: Of `TRAINERS`.
        checkpoints: Of tiny backbones.
        mllm: A tiny MLLM.
        folder: Of the run.
        dropout: Whether there is any.
        arguments: Of training, and `rows`, their number.
    """
    make, own = TRAINERS[name]
    trainer = make(checkpoints if make in OF_JOINT_ENCODER else mllm, folder, **(own | arguments))
    if not dropout:
        without_dropout(trainer.model)
    return trainer
