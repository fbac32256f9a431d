"""A tiny pruned MLLM, sentences and instructed queries, used by the tests of PUMA and by the ranks they start."""

import functools

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image as PilImage
from torch.utils.data import Dataset as TorchDataset

from conjoin import PumaStage1Config, PumaStage1Trainer, PumaStage2Config, PumaStage2Trainer
from conjoin.hub.build import mllm_model, mllm_processor
from conjoin.trainers import add_adapters
from tiny_training import built_once, make_trainer as make_any_trainer

METHODS = {"puma_stage2": (PumaStage2Config, PumaStage2Trainer), "puma_stage1": (PumaStage1Config, PumaStage1Trainer)}
TARGETS = r".*language_model\..*_proj"
"""All linear layers of the language model."""


@built_once
def make_student(folder, keep_layers=2, lora=True):
    """A pruned model of which only adapters on the language model's linears are trained."""
    torch.manual_seed(0)
    model = mllm_model(folder, keep_layers).requires_grad_(False)
    if lora:
        add_adapters(model, LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS))
        with torch.no_grad():  # B starts as zero, which would hide whether A moves
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return model, mllm_processor(folder)


def sentences(count):
    """Rows as `QueryTable.texts` makes them."""
    rows = [
        {
            "id": str(i),
            "query": f"{chr(97 + i % 26)} man {i}",
            "positive": f"{chr(122 - i % 26)} person {i}",
            "negatives": [f"nobody {i}"],
            "target_modality": "text",
        }
        for i in range(count)
    ]
    return Dataset.from_list(rows)


class Instructed(TorchDataset):
    """Rows as `MbeirTraining` makes them, whose prompt and negatives are drawn; targets are images or texts."""

    def __init__(self, count, negatives=1):
        self.count, self.negatives = count, negatives

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        picture = PilImage.new("RGB", (12, 12), (60 * index % 256, 90 * index % 256, 255 - 40 * index % 256))
        to_image = index % 2 == 0
        prompts = ["Find it.", "Find a thing that fits.", "What fits?"]
        number = int(torch.randint(3, ()))
        return {
            "id": f"q{index}",
            "query": {"text": f"words {index}"} if to_image else {"image": picture},
            "instruction": prompts[number],
            "positive": {"image": picture} if to_image else {"text": f"title {index}"},
            "positive_id": f"c{index}",
            "negatives": [{"text": f"other {index} {number}"}] * self.negatives,
            "negative_ids": [f"n{index}"] * self.negatives,
            "target_modality": "image" if to_image else "text",
            "negative_modalities": ["text"] * self.negatives,
            "dataset": "even" if index % 4 < 2 else "odd",
        }


def make_trainer(method, model, processor, folder, rows, eval_rows=None, mode=None, **arguments):
    """A trainer; `mode` is the field `teacher` of its arguments, and `teacher` the model."""
    config_class, trainer_class = METHODS[method]
    own = {name: arguments.pop(name) for name in ("teacher", "peft_config") if name in arguments}
    methods = {method: (config_class, functools.partial(trainer_class, **own))}
    if mode is not None:
        arguments["teacher"] = mode
    return make_any_trainer(method, model, processor, folder, rows, eval_rows, methods=methods, **arguments)
