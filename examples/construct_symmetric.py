"""Symmetric triplets from photos, each step by an open model: `python examples/construct_symmetric.py PHOTOS.csv OUT`.

A function here returns a step, which loads its model at its first call. A step may be any function of your own.
"""

import sys
import zlib
from functools import cache

import torch

from conjoin.data import EDITS, Edited, ask_with, construct_symmetric, load_pairs

DESCRIBE = "Describe this picture in two or three plain sentences: every object, how many, their colours and where. "
EDIT = "Rewrite this description of a picture so that {} and everything else stays. "
REWRITE = "Say the same in other words, without adding or leaving out anything. "
ANSWER = "Answer with the new text only.\n\n"
CHANGES = ("objects are replaced by others", "one or two objects are added", "one or two objects are removed")


def describe_with(model, **options):
    ask = ask_with(model, **options)
    return lambda image: ask([image], DESCRIBE + ANSWER)


def edit_with(model, **options):
    ask = ask_with(model, task="text-generation", **options)

    def edit(text):
        kind = zlib.crc32(text.encode()) % len(EDITS)
        return Edited(ask((), EDIT.format(CHANGES[kind]) + ANSWER + text), EDITS[kind])

    return edit


def rewrite_with(model, **options):
    ask = ask_with(model, task="text-generation", **options)
    return lambda text: ask((), REWRITE + ANSWER + text)


def synthesise_with(model, *, seed=0, device="cuda", **options):
    @cache
    def load():
        from diffusers import AutoPipelineForText2Image

        return AutoPipelineForText2Image.from_pretrained(model).to(device)

    return lambda text: load()(prompt=text, generator=torch.Generator().manual_seed(seed), **options).images[0]


if __name__ == "__main__":
    construct_symmetric(
        load_pairs(sys.argv[1]),
        sys.argv[2],
        describe=describe_with("Qwen/Qwen2.5-VL-7B-Instruct"),
        edit=edit_with("Qwen/Qwen2.5-7B-Instruct"),
        synthesise=synthesise_with("stabilityai/stable-diffusion-3.5-medium"),
        rewrite=rewrite_with("Qwen/Qwen2.5-7B-Instruct"),  # the variants X′
    )
