"""A tiny MLLM and interleaved queries, used by the tests of Coral and by the ranks they start."""

import torch
from peft import LoraConfig
from PIL import Image as PilImage
from torch.utils.data import Dataset

from conjoin import CoralConfig, CoralTrainer
from conjoin.hub.build import mllm_model, mllm_processor
from conjoin.trainers import add_adapters
from tiny_training import SETTINGS, built_once

LANGUAGE_MODEL = r".*language_model\..*_proj"


@built_once
def make_model(folder, keep_layers=2, readout="token", lora=True):
    """A retriever of which only adapters on the language model are trained, and its processor."""
    torch.manual_seed(0)
    model = mllm_model(folder, keep_layers, readout=readout)
    model.requires_grad_(False)
    if lora:
        add_adapters(model, LoraConfig(r=2, lora_alpha=4, target_modules=LANGUAGE_MODEL))
    else:
        model.text_model.requires_grad_(True)
        model.norm.requires_grad_(True)
    return model, mllm_processor(folder, ret_token=None if readout == "last" else "[RET]")


def picture(number, size=12):
    colour = (60 * number % 256, 90 * number % 256, 255 - 40 * number % 256)
    image = PilImage.new("RGB", (size, size), colour)
    image.paste(colour[::-1], (0, 0, size // 2, size))
    return image


class Products(Dataset):
    """Queries with two pictures and texts between; targets have a picture and a title, or one of them."""

    def __init__(self, count, partial=False):
        self.count, self.partial = count, partial

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        parts = [
            {"type": "text", "text": f"like {index}"},
            {"type": "image", "image": picture(index)},
            {"type": "text", "text": "and"},
            {"type": "image", "image": picture(index + 7)},
        ]
        target = {"image": picture(2 * index, 8 + 4 * (index % 3)), "text": f"title {index} of {'x' * (index % 5)}"}
        if self.partial:  # every third target lacks its picture, every third its title
            target.pop("image" if index % 3 == 0 else "text" if index % 3 == 1 else "nothing", None)
        return {
            "id": f"q{index}",
            "query": [{"role": "user", "content": parts}],
            "instruction": "Find it.",
            "positive": target,
            "positive_id": f"p{index}",
        }


def make_trainer(model, processor, folder, rows, eval_rows=None, **arguments):
    settings = {"decoder_dropout": 0.0, "temperature": 0.05, "reg_weight": 1.0, "rec_weight": 1.0}
    config = CoralConfig(**(SETTINGS | settings | {"output_dir": str(folder)} | arguments))
    return CoralTrainer(model, config, rows, eval_rows, processor)
