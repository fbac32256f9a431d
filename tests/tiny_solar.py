"""Tiny rows and trainers of SOLAR's two stages."""

import torch
from PIL import ImageOps

from conjoin import SolarStage1Config, SolarStage1Trainer, SolarStage2Config, SolarStage2Trainer
from conjoin.trainers.solar import SolarStage2Rows
from conjoin.trainers.solar_masks import ConstructedSamples
from tiny_training import SETTINGS, make_encoder, make_rows, without_dropout


def frozen_encoder(checkpoints, **config):
    model, processor = make_encoder(checkpoints, vl_init="normal", **config)
    for tower in (model.vision_model, model.text_model):
        tower.requires_grad_(False)
    without_dropout(model)
    return model, processor


def _inverted(image, random):
    return ImageOps.invert(image)


def texts(count):
    rows = make_rows(count)
    words = "red dog and blue cat on a big old tree by the sea".split()
    return rows.map(lambda row, i: {"text": " ".join(words[i % 5 : i % 5 + 4 + i % 3])}, with_indices=True)


def mined(rows):
    """Two negatives of every row but the first, which has one."""
    ids = list(rows["id"])
    found = {name: [ids[i - 1], ids[(i - 2) % len(ids)]] for i, name in enumerate(ids)}
    return found | {ids[0]: [ids[1 % len(ids)]]}


def stage1(folder, model, processor, rows, kind=SolarStage1Trainer, **arguments):
    options = {name: arguments.pop(name) for name in ("teacher", "peft_config") if name in arguments}
    config = SolarStage1Config(output_dir=str(folder), **(SETTINGS | arguments))
    return kind(model, config, rows, processing_class=processor, **options)


def stage2(folder, model, processor, rows, kind=SolarStage2Trainer, **arguments):
    config = SolarStage2Config(output_dir=str(folder), **(SETTINGS | {"min_separation": 0.0} | arguments))
    augment = _inverted if config.positive == "augmented" else None
    if config.mined_per_anchor or augment:
        rows = SolarStage2Rows(rows, mined(rows) if config.mined_per_anchor else None, augment=augment)
    return kind(model, config, rows, processing_class=processor)


def make_stage(stage, checkpoints, folder, rows=None, **arguments):
    """A trainer in evaluation mode, and a batch of all its rows."""
    rows = texts(6) if rows is None else rows
    trainer = {1: stage1, 2: stage2}[stage](folder, *frozen_encoder(checkpoints), rows, **arguments)
    trainer.model.eval()
    return trainer, trainer.data_collator([trainer.train_dataset[index] for index in range(len(rows))])


def everything_but_the_first(image_scores, image_mask, _t, text_scores, text_mask, *_):
    """Samples that are not drawn, in place of `construct_samples`."""
    image, text = torch.ones(4, *image_scores.shape), torch.ones(4, *text_scores.shape)
    image[:, :, 0] = text[2:, :, 1] = 0
    return ConstructedSamples(image.double(), text.double(), torch.ones(4, len(text_mask), dtype=torch.bool))


def move_to(trainer, progress):
    """Set the completed share of training."""
    trainer.state.max_steps, trainer.state.global_step = 1000, round(1000 * progress)
