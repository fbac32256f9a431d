"""Cost of a step of SOLAR's two stages relative to a contrastive step, and of encoding relative to the two towers.

All models have random weights. Within a run, the measurements take turns. A row shows the median of the ratios of
single turns, which other programs on the machine affect less than wall time. A step is forward, backward and AdamW on
the trainable parameters: the towers by LoRA, as in the paper. The baseline step is symmetric InfoNCE on the same
backbone. `towers` counts the pairs of a step that pass through the towers, with + without gradient: stage 2 adds mined
negatives, and a frozen copy of the stage-1 model scores the anchors.

    python benchmarks/joint_encoder.py --size small --threads 2 --json joint_encoder.json
    python benchmarks/joint_encoder.py --size tiny --mllm          # a quick test of the script

On a GPU, at the sizes of the paper's Table 1 (its FPS: 922 for SOLAR-C, 520 for SOLAR-B+D, 19 for Qwen2-VL-7B).
`--peak-tflops`, the rate of the device, adds a column of MFU (not measured yet). `gpu.py` has pictures per second with
decoding:

    python benchmarks/joint_encoder.py --device cuda --size clip --mllm --peak-tflops 989
    python benchmarks/joint_encoder.py --device cuda --size bge_dino --mllm
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    Dinov2Config,
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen2VLModel,
    XLMRobertaConfig,
)

from conjoin.models.joint_encoder import JointEncoderConfig, JointEncoderModel, JointEncoderOutput
from conjoin.trainers.base import RetrievalTrainer
from conjoin.trainers.contrastive import ContrastiveConfig, ContrastiveTrainer
from conjoin.trainers.gradient_cache import total_loss
from conjoin.trainers.solar import SolarStage1Config, SolarStage1Trainer, SolarStage2Config, SolarStage2Trainer
from conjoin.trainers.solar_teachers import TeacherTargets

TOWERS = ("vision_model", "text_model")


@dataclass
class Size:
    """A joint encoder and its inputs: `image_size` pixels per side, `text_length` tokens with two special ones."""

    vision: PreTrainedConfig
    text: PreTrainedConfig
    encoder: dict[str, Any]
    image_size: int
    text_length: int = 32


def _bert(config: type[PreTrainedConfig], width: int, layers: int, heads: int, vocabulary: int) -> PreTrainedConfig:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return config(num_attention_heads=heads, vocab_size=vocabulary, **sizes)


def _dinov2(width: int, layers: int, heads: int) -> PreTrainedConfig:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return Dinov2Config(patch_size=14, image_size=224, **sizes)


PAPER = {"hidden_size": 768, "num_attention_heads": 12}
SIZES = {
    "tiny": Size(
        _dinov2(32, 2, 2), _bert(BertConfig, 32, 2, 2, 100), {"hidden_size": 32, "num_attention_heads": 2}, 56, 12
    ),
    "small": Size(  # ViT-S and MiniLM with the vision-language encoder of gcl/sample.yaml
        _dinov2(384, 12, 6),
        _bert(BertConfig, 384, 6, 12, 30522),
        {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512},
        98,
        16,
    ),
    "clip": Size(CLIPVisionConfig(patch_size=16), CLIPTextConfig(), PAPER, 224),
    "bge_dino": Size(_dinov2(768, 12, 12), _bert(XLMRobertaConfig, 1024, 24, 16, 250002), PAPER, 224),
}


def build_encoder(size: Size, width: int | None) -> JointEncoderModel:
    torch.manual_seed(0)
    sizes = size.encoder if width is None else {"hidden_size": width, "num_attention_heads": max(1, width // 64)}
    model = JointEncoderModel(JointEncoderConfig(vision_config=size.vision, text_config=size.text, **sizes))
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # its cost is not compared
            module.p = 0.0
    return model.eval()


def pairs(size: Size, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Model inputs of random image-text pairs."""
    length = size.text_length
    ids = torch.randint(5, size.text.vocab_size - 5, (rows, length))
    ids[:, -1] = size.text.eos_token_id or 2
    special = torch.zeros(rows, length, dtype=torch.long)
    special[:, [0, -1]] = 1
    batch = {
        "pixel_values": torch.randn(rows, 3, size.image_size, size.image_size),
        "input_ids": ids,
        "attention_mask": torch.ones(rows, length, dtype=torch.long),
        "special_tokens_mask": special,
    }
    return {name: value.to(device) for name, value in batch.items()}


class Teacher:
    """Teachers: copies of the student's towers.

    Args:
        model: The model to copy.
        live: Run the teachers at every step; otherwise once, as with `teacher_cache`.
    """

    def __init__(self, model: JointEncoderModel, live: bool) -> None:
        self.model, self.live = copy.deepcopy(model).requires_grad_(False), live
        self.targets: TeacherTargets | None = None

    @torch.no_grad()
    def __call__(self, teacher_inputs: dict[str, Any], output: JointEncoderOutput) -> TeacherTargets:
        """Return the targets of the student."""
        if self.targets is None or self.live:
            nn.Module.to(self.model, teacher_inputs["pixel_values"].device)
            image = self.model.run_vision_tower(teacher_inputs["pixel_values"]).float()
            text = self.model.run_text_tower(teacher_inputs["input_ids"], teacher_inputs["attention_mask"]).float()
            mask = output.text_token_mask
            self.targets = TeacherTargets(image[:, 1:], image[:, 0], text[:, 1:], text[:, 0], mask)
        return self.targets


def trainers(model: JointEncoderModel, inputs: dict[str, Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """By name: a trainer, its batch, and the number of pairs through the towers with and without gradient."""
    rows, common = args.rows, {"output_dir": "unused", "report_to": "none", "use_cpu": args.device == "cpu"}

    def options(*extra: str) -> dict[str, Any]:
        own = [name for name in ("vision_adapter", "text_adapter", "vl_encoder") if name not in extra]
        adapted = LoraConfig(
            r=16, lora_alpha=32, target_modules=rf"({'|'.join((*TOWERS, *extra))}).*", modules_to_save=own
        )
        return {"model": copy.deepcopy(model), "peft_config": adapted, "data_collator": list}

    def stage1(live: bool) -> SolarStage1Trainer:
        config = SolarStage1Config(max_steps=1, **common)
        trainer = SolarStage1Trainer(args=config, teacher=Teacher(model, live), **options())
        trainer.state.max_steps = trainer.state.global_step = 1  # the masks are complete
        return trainer

    def stage2(mined: int, constructed: bool = True) -> SolarStage2Trainer:
        config = SolarStage2Config(
            mined_per_anchor=mined, constructed_negatives=constructed, min_separation=0.0, **common
        )
        return SolarStage2Trainer(args=config, **options("vl_encoder"))

    batch = {"pairs": inputs}
    taught = {"pairs": inputs | {"teacher": inputs}}
    mined = {
        "mined": {name: torch.stack([value, value.roll(1, 0)], dim=1).flatten(0, 1) for name, value in inputs.items()},
        "mined_mask": torch.ones(rows, 2, dtype=torch.bool, device=inputs["input_ids"].device),
    }
    return {
        "contrastive": (ContrastiveTrainer(args=ContrastiveConfig(**common), **options()), batch, (rows, 0)),
        "stage 1, cached teachers": (stage1(live=False), taught, (rows, 0)),
        "stage 1, live teachers": (stage1(live=True), taught, (rows, rows)),
        "stage 2 without mined or constructed negatives": (stage2(0, constructed=False), batch, (rows, rows)),
        "stage 2 without mined negatives": (stage2(0), batch, (rows, rows)),
        "stage 2": (stage2(2), batch | mined, (3 * rows, rows)),
    }


def timed(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_turns(functions: dict[str, Callable[[], object]], device: torch.device, turns: int) -> dict[str, list[float]]:
    """Seconds of each function in each turn, after one warm call."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            seconds[name].append(timed(function, device))
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def mfu(function: Callable[[], object], seconds: float, args: argparse.Namespace) -> dict[str, float]:
    """The share of the device's operations that a call uses, if `--peak-tflops` is given."""
    if not args.peak_tflops:
        return {}
    with FlopCounterMode(display=False) as counter:
        function()
    return {"mfu": counter.get_total_flops() / (args.peak_tflops * 1e12) / seconds}


def stepper(trainer: RetrievalTrainer, batch: dict[str, Any], device: torch.device) -> Callable[[], None]:
    model = trainer.model.to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = total_loss(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_steps(model: JointEncoderModel, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    made = trainers(model, pairs(SIZES[args.size], args.rows, device), args)
    steps = {name: stepper(trainer, batch, device) for name, (trainer, batch, _) in made.items()}
    seconds = take_turns(steps, device, args.turns)
    rows = []
    for name, (_, _, (trained, frozen)) in made.items():
        found = {"step": name, "towers": f"{trained} + {frozen}", "seconds": statistics.median(seconds[name])}
        found |= {"ratio": ratio(seconds[name], seconds["contrastive"])}
        rows.append(found | mfu(steps[name], found["seconds"], args))
    return rows


def measure_encoding(model: JointEncoderModel, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    size = SIZES[args.size]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    encoder = copy.deepcopy(model).to(device, dtype).eval()
    batch = pairs(size, args.encode_rows, device)

    def towers() -> None:
        encoder.run_vision_tower(batch["pixel_values"])
        encoder.run_text_tower(batch["input_ids"], batch["attention_mask"])

    functions: dict[str, Callable[[], object]] = {"towers alone": towers, "joint encoder": lambda: encoder(**batch)}
    counts = dict.fromkeys(functions, args.encode_rows)
    if args.mllm:
        functions["Qwen2-VL"], counts["Qwen2-VL"] = mllm(size, args, device), args.mllm_rows
    with torch.inference_mode():
        seconds = take_turns(functions, device, args.turns)
        used = {name: mfu(function, statistics.median(seconds[name]), args) for name, function in functions.items()}
    each = {name: [value / counts[name] for value in values] for name, values in seconds.items()}
    return [
        {"encode": name, "per_second": 1 / statistics.median(values), "ratio": 1 / ratio(values, each["towers alone"])}
        | used[name]
        for name, values in each.items()
    ]


def mllm(size: Size, args: argparse.Namespace, device: torch.device) -> Callable[[], Tensor]:
    """Encode the same pairs by Qwen2-VL-7B (two small layers at the tiny size), read at the last token."""
    if args.size == "tiny":
        text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        vision, sections = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}, [1, 1, 2]
    else:
        text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
        text |= {"num_attention_heads": 28, "num_key_value_heads": 4}
        vision, sections = {}, [16, 24, 24]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    image_token, last = text["vocab_size"] - 5, text["vocab_size"] - 1
    names = {"image_token_id": image_token, "vision_start_token_id": last - 1, "vision_end_token_id": last}
    config = Qwen2VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **names)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2VLModel(config).eval()
        torch.set_default_dtype(default)
    rows, side = args.mllm_rows, size.image_size // 28 * 2  # patches of 14 pixels, merged two by two
    words = torch.randint(5, image_token, (rows, size.text_length), device=device)
    image = torch.full((rows, (side // 2) ** 2), image_token, device=device)
    edges = torch.tensor([[last - 1, last]], device=device).expand(rows, 2)
    inputs = {
        "input_ids": torch.cat([edges[:, :1], image, edges[:, 1:], words], dim=1),
        "pixel_values": torch.randn(rows * side**2, 3 * 2 * 14 * 14, device=device, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, side, side]], device=device).expand(rows, 3),
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_token).int()
    return lambda: model(**inputs, use_cache=False).last_hidden_state[:, -1]


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    cells = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--width", type=int, help="width of the shared space (default: that of --size)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="pairs per step")
    parser.add_argument("--encode-rows", type=int, default=32, help="pairs per batch in encoding")
    parser.add_argument("--mllm", action="store_true", help="also encode with a Qwen2-VL of 7B parameters in bfloat16")
    parser.add_argument("--mllm-rows", type=int, default=8, help="pairs per batch of the MLLM")
    parser.add_argument("--only", choices=["steps", "encoding"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, help="of the device, for a column of MFU")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    model = build_encoder(SIZES[args.size], args.width)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    width = model.config.hidden_size
    print(f"{args.size}, {millions:.0f}M parameters, width {width}, {args.device}, {args.turns} turns")
    found: dict[str, Any] = {"setup": {k: str(v) for k, v in vars(args).items()} | {"torch": torch.__version__}}
    if args.only != "encoding":
        found["steps"] = measure_steps(model, args, device)
        print(f"\n{table(found['steps'])}", flush=True)
    if args.only != "steps":
        found["encoding"] = measure_encoding(model, args, device)
        print(f"\n{table(found['encoding'])}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
