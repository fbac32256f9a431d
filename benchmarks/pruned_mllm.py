"""Cost of a Qwen2-VL pruned to its first 12 of 28 layers, compared with the whole model and a stock forward.

All weights are random. Throughput is measured in one process: the variants take turns on the same batches, and a ratio
is the median of the ratios of single turns. `cpu_` ratios compare processor time, which other programs on the machine
affect less than wall time. The variants, each closer to what an embedding needs:

    stock               forward of transformers: all layers, cache, logits of all tokens, last-token pooling
    no cache            the same with `use_cache=False`
    no logits           the same without the head
    whole, stock vision `MllmRetrieverModel` with all layers, the vision tower of transformers
    whole               patches by a matrix product instead of a convolution; on a CPU few images at once
    pruned              12 layers

Operations are counted (`torch.utils.flop_counter`). Loading is measured in a separate process for each model and
input: seconds, bytes of tensors read, and the peak of resident memory above that of the imports.

    python benchmarks/pruned_mllm.py --size small --threads 1 --json pruned_mllm.json
    python benchmarks/pruned_mllm.py --size tiny                     # a quick test of the script
    python benchmarks/pruned_mllm.py --size 7b --device meta         # counts the operations of Qwen2-VL-7B

`small` has a fourteenth of the 7B model's width and the same 28 layers. The size of its vision tower keeps the share
of operations of an image as in the 7B model (`--device meta` shows both shares). On a GPU: `gpu.py`.
"""

import argparse
import contextlib
import copy
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from conjoin import MllmRetrieverConfig, MllmRetrieverModel
from conjoin.hub.build import mllm_model, mllm_processor
from conjoin.processing import MllmRetrieverProcessor

LAYERS, KEEP = 28, 12
INPUTS = ("text", "image", "image+text")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SIZES: dict[str, dict[str, Any]] = {  # widths of the language model and of the vision tower
    "tiny": {"text": (32, 48, 4, 2, 600), "vision": (16, 1, 2), "rope": [1, 1, 2], "image_side": 112},
    "small": {"text": (256, 1352, 4, 1, 10880), "vision": (96, 12, 2), "rope": [8, 12, 12], "image_side": 476},
    "7b": {"text": (3584, 18944, 28, 4, 152064), "vision": (1280, 32, 16), "rope": [16, 24, 24], "image_side": 476},
}
WORDS = (
    "a the two some old young red blue wooden small large man woman child dog cat horse bird boat train street beach "
    "table window garden market kitchen field river mountain sits stands runs holds looks at near under over behind "
    "with and while people watch it from far away in rain sun snow evening light on of his her their bicycle umbrella"
).split()
SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def make_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer like that of Qwen, with about one token per word."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    frame = "user\n system\nYou are a helpful assistant.\n Summarize above image and sentence in one word: assistant\n"
    trainer = trainers.BpeTrainer(
        vocab_size=560, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS) + " " + " ".join(WORDS), frame], trainer)
    learned = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    made = Qwen2Tokenizer(
        vocab=learned["vocab"], merges=merges, unk_token=None, eos_token=SPECIALS[0], pad_token=SPECIALS[0]
    )
    made.add_tokens(SPECIALS, special_tokens=True)
    return made


def make_config(size: str, tokenizer: Qwen2Tokenizer) -> Qwen2VLConfig:
    width, inner, heads, key_heads, vocabulary = SIZES[size]["text"]
    vision_width, depth, vision_heads = SIZES[size]["vision"]
    names = {"image_token_id": 5, "vision_start_token_id": 3, "vision_end_token_id": 4, "video_token_id": 0}
    ids = {name: tokenizer.convert_tokens_to_ids(SPECIALS[place]) for name, place in names.items()}
    text = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": LAYERS, "vocab_size": vocabulary}
    text |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": 32768}
    text |= {"bos_token_id": None, "eos_token_id": None}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": SIZES[size]["rope"], "rope_theta": 1e6}
    vision = {"embed_dim": vision_width, "depth": depth, "num_heads": vision_heads, "hidden_size": width}
    return Qwen2VLConfig(text_config=text, vision_config=vision, **ids)


def save_checkpoint(size: str, folder: Path) -> None:
    """Write a checkpoint with random weights, as it would be published."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    Qwen2VLForConditionalGeneration(make_config(size, tokenizer)).save_pretrained(folder, max_shard_size="20MB")
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=4 * 28 * 28, max_pixels=1000 * 28 * 28).save_pretrained(folder)


def make_items(kind: str, count: int, size: str) -> list[Any]:
    """Captions of 8 to 40 words, square pictures of about 300 image tokens, or both."""
    source, side = random.Random(0), SIZES[size]["image_side"]
    texts = [" ".join(source.choices(WORDS, k=source.randint(8, 40))) for _ in range(count)]
    if kind == "text":
        return texts
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    images = [Image.fromarray(picture) for picture in pixels]
    if kind == "image":
        return images
    return [{"image": image, "text": text} for image, text in zip(images, texts, strict=True)]


class StockForward:
    """The whole model of transformers: the state of the last token after the final norm, L2-normalised."""

    def __init__(self, model: Qwen2VLForConditionalGeneration, cache: bool = False, logits: bool = False) -> None:
        self.model, self.cache, self.logits = model, cache, logits

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Embeddings `(N, D)`."""
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        prompts = [row[kept] for row, kept in rows]  # without the tokens of other views
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "pixel_values" in batch:
            inputs["pixel_values"] = batch["pixel_values"][batch["pixel_attention_mask"]].to(self.model.dtype)
            inputs["image_grid_thw"] = batch["image_grids"].flatten(0, 1)
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        if self.logits:
            states = self.model(**inputs, use_cache=self.cache, output_hidden_states=True).hidden_states[-1]
        else:
            states = self.model.model(**inputs, use_cache=self.cache).last_hidden_state
        last = states[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
        return torch.nn.functional.normalize(last.float(), dim=-1)


class Retriever:
    """`MllmRetrieverModel`, with its own way to run the vision tower or that of transformers."""

    def __init__(self, model: MllmRetrieverModel, vision: bool = True) -> None:
        self.model, self.vision = model, vision

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Embeddings `(N, D)`."""
        with contextlib.ExitStack() as stack:
            if not self.vision:
                self.enter_stock_vision(stack)
            return self.model(**batch).embeddings

    def enter_stock_vision(self, stack: contextlib.ExitStack) -> None:
        """Within `stack`, run the vision tower as transformers does."""
        convolution = self.model.vision_model.patch_embed.proj
        stack.enter_context(mock.patch.object(self.model, "run_vision_tower", self.model._image_tokens))
        stack.enter_context(mock.patch.object(convolution, "forward", partial(type(convolution).forward, convolution)))


Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]
Variants = dict[str, Forward]


def make_variants(folder: Path) -> Variants:
    """All variants of a checkpoint."""
    stock = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    whole, pruned = (mllm_model(folder, keep) for keep in (None, KEEP))
    return {
        "stock": StockForward(stock, cache=True, logits=True),
        "no cache": StockForward(stock, logits=True),
        "no logits": StockForward(stock),
        "whole, stock vision": Retriever(whole, vision=False),
        "whole": Retriever(whole),
        "pruned": Retriever(pruned),
    }


def seconds(function: Callable[[], Any]) -> tuple[float, float]:
    """Wall time and processor time of a call."""
    start, cpu_start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - cpu_start


def operations(function: Callable[[], Any]) -> tuple[int, int]:
    """Counted operations: in total, and outside the vision tower."""

    def sdpa(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
        return sdpa_flop_count(query, key, value)

    with FlopCounterMode(display=False, custom_mapping={SDPA_ON_CPU: sdpa}) as counter:
        function()
    total = counter.get_total_flops()
    towers = {name: counts for name, counts in counter.get_flop_counts().items() if name.endswith(".visual")}
    return total, total - sum(sum(counts.values()) for counts in towers.values())


def compare(kind: str, variants: Variants, processor: MllmRetrieverProcessor, args: argparse.Namespace) -> list[dict]:
    """The table rows of one kind of input, one per variant."""
    batch = dict(processor(make_items(kind, args.batch_size, args.size)))
    runs: dict[str, Callable[[], Any]] = {
        name: lambda forward=forward: forward(batch) for name, forward in variants.items()
    }
    for run in runs.values():
        run()  # the warm-up
    counted = {name: operations(run) for name, run in runs.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.turns):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return [
        {
            "input": kind,
            "variant": name,
            "tokens": int(batch["attention_mask"].sum(1).max()),
            "samples_per_second": args.batch_size / statistics.median(wall for wall, _ in times[name]),
            "over_stock": ratio(times["stock"], times[name]),
            "over_whole": ratio(times["whole"], times[name]),
            "cpu_over_stock": ratio(times["stock"], times[name], 1),
            "cpu_over_whole": ratio(times["whole"], times[name], 1),
            "gflop_per_sample": counted[name][0] / args.batch_size / 1e9,
            "flops_of_stock": counted[name][0] / counted["stock"][0],
            "flops_of_whole": counted[name][0] / counted["whole"][0],
            "language_flops_of_whole": counted[name][1] / counted["whole"][1],
            "language_flops_of_stock": counted[name][1] / counted["stock"][1],
        }
        for name in runs
    ]


def ratio(slower: list[tuple[float, float]], faster: list[tuple[float, float]], clock: int = 0) -> float:
    """Speed-up: the median over the turns of the ratio of times. `clock` 0 is wall time, 1 is processor time."""
    return statistics.median(first[clock] / second[clock] for first, second in zip(slower, faster, strict=True))


def resident_bytes(name: str) -> int:
    """Resident memory of this process, now (`VmRSS`) or at its peak (`VmHWM`), as Linux reports it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def measure_loading(model: str, kind: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds and bytes of loading, then the peak memory of one forward; runs in a separate process."""
    torch.set_num_threads(args.threads)
    processor = mllm_processor(folder)
    batch = dict(processor(make_items(kind, args.batch_size, args.size)))
    held = resident_bytes("VmRSS")
    start = time.perf_counter()
    if model == "stock":
        forward: Forward = StockForward(Qwen2VLForConditionalGeneration.from_pretrained(folder).eval(), True, True)
        read = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    else:
        retriever = mllm_model(folder, KEEP if model == "pruned" else None)
        forward = Retriever(retriever)
        read = sum(each.numel() * each.element_size() for each in retriever.parameters())  # no other tensor is read
    loaded = time.perf_counter() - start
    with torch.no_grad():
        forward(batch)
    peak = resident_bytes("VmHWM") - held
    return {"load_seconds": loaded, "bytes_read": read, "peak_bytes": peak}


def loading_in_children(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure loading of each model for each kind of input; the models take turns; medians over the turns."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(min(args.turns, 3)):
        for kind in INPUTS:
            for model in ("stock", "whole", "pruned"):
                command = [sys.executable, __file__, "--child", model, kind, str(folder), "--size", args.size]
                command += ["--threads", str(args.threads), "--batch-size", str(args.batch_size)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found.setdefault((kind, model), []).append(json.loads(output.splitlines()[-1]))
    return [
        {"input": kind, "model": model} | {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for (kind, model), runs in found.items()
    ]


def vision_operations(config: Qwen2VLConfig, side: int) -> int:
    """Operations of one picture with `side` patches per side, at full width; extrapolated from one and two layers."""
    counted = []
    for depth in (1, 2):
        vision = copy.deepcopy(config.vision_config)
        vision.depth = depth
        tower = Qwen2VisionTransformerPretrainedModel(vision)
        pixels, grid = torch.zeros(side**2, 3 * 2 * 14 * 14), torch.tensor([[1, side, side]])
        counted.append(operations(lambda tower=tower, pixels=pixels, grid=grid: tower(pixels, grid))[0])
    return counted[0] + (config.vision_config.depth - 1) * (counted[1] - counted[0])


def count_on_meta(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Operations per item and part of the model, without weights; prompts have 14 + item + 16 tokens."""
    config, count = make_config(args.size, make_tokenizer()), args.batch_size
    side = SIZES[args.size]["image_side"] // 14
    vision = vision_operations(config, side)
    width, vocabulary = config.text_config.hidden_size, config.text_config.vocab_size
    rows = []
    for kind, item in {"text": 24, "image": side**2 // 4 + 2, "image+text": side**2 // 4 + 26}.items():
        length = 14 + item + 16
        row: dict[str, Any] = {"input": kind, "tokens": length, "vision": 0 if kind == "text" else vision}
        row["head"] = 2 * length * width * vocabulary
        for keep in (LAYERS, KEEP):
            with torch.device("meta"):
                kept = MllmRetrieverConfig(backbone_config=config, keep_layers=keep, ret_token_id=1)
                language = MllmRetrieverModel(kept).eval().text_model
                tokens = torch.empty(count, length, width)
            inputs = {"inputs_embeds": tokens, "use_cache": False}

            row[f"{keep} layers"] = operations(partial(language, **inputs))[0] // count
        rows.append(row)
    return rows


COLUMNS = {
    "input": "{}",
    "variant": "{}",
    "tokens": "{}",
    "samples_per_second": "{:.2f}",
    "over_stock": "{:.2f}",
    "over_whole": "{:.2f}",
    "cpu_over_stock": "{:.2f}",
    "cpu_over_whole": "{:.2f}",
    "gflop_per_sample": "{:.2f}",
    "flops_of_stock": "{:.3f}",
    "flops_of_whole": "{:.3f}",
    "language_flops_of_whole": "{:.3f}",
    "language_flops_of_stock": "{:.3f}",
}
LOAD_COLUMNS = {
    "input": "{}",
    "model": "{}",
    "load_seconds": "{:.2f}",
    "bytes_read": "{:,.0f}",
    "peak_bytes": "{:,.0f}",
}


def show(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    columns = {name: form for name, form in columns.items() if rows[0].get(name) is not None}
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(form.format(row[name]) for name, form in columns.items()) + " |", flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the arguments select and print each table when it is done."""
    if args.device == "meta":
        rows = count_on_meta(args)
        show(rows, {name: "{}" if isinstance(value, str) else "{:,}" for name, value in rows[0].items()})
        return {"operations": rows}
    found: dict[str, Any] = {"throughput": []}
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        save_checkpoint(args.size, folder)
        processor = mllm_processor(folder)  # the same at every size
        variants = make_variants(folder)
        for kind in args.inputs:
            rows = compare(kind, variants, processor, args)
            show(rows, COLUMNS)
            found["throughput"] += rows
        if not args.no_loading:
            del variants
            found["loading"] = loading_in_children(folder, args)
            show(found["loading"], LOAD_COLUMNS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=["cpu", "meta"], default="cpu", help="meta: count operations only")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-loading", action="store_true", help="skip the loading measurement")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "INPUT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        model, kind, folder = args.child
        print(json.dumps(measure_loading(model, kind, Path(folder), args)))
        return
    setup = {name: str(value) for name, value in vars(args).items()} | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": platform.processor(),
    }
    print(", ".join(f"{name} {value}" for name, value in setup.items() if name not in ("json", "child")))
    found = {"setup": setup} | measure(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
