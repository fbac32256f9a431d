"""Compress a small real embedder: 20, 12 and 6 of 30 layers, with the whole model as teacher and without.

The model is SmolLM2-135M with the sample ViT (`small_mllm.py`). It is first trained to be an embedder, by InfoNCE
between pictures and names of the training concepts. Then, for each depth: the first layers as they are; the same,
distilled; and the same depth of the untrained model, trained by InfoNCE for as many steps as both trainings together.
Measured are R@10 between unseen names and pictures of one style, hit rates at 5 on five cells of the miniature M-BEIR
without instructions, agreement with the whole model, and the processor's time.

    python experiments/compress.py --seeds 0 1 2
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Record
from peft import LoraConfig
from puma import make_data, measure
from small_mllm import DEVICE, PictureFeatures, load_processor, load_retriever, make_mllm

from conjoin import MllmRetrieverModel, PumaStage1Config, PumaStage1Trainer
from conjoin.data import load_emoji
from conjoin.evaluation.layers import hit_rates
from conjoin.hub.build import prune
from conjoin.trainers import merge_lora
from conjoin.trainers.compress import DistillationRows, Measured, agreement, measure_pairs

WORK = ROOT / "runs/claims-compress"
DEPTH = 30
LORA = LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model\..*_proj")
COLUMNS = ["text → image, R@10", "image → text, R@10", "local", "global", "cosine, text", "cosine, image"]


def train(
    model: MllmRetrieverModel,
    teacher: MllmRetrieverModel | None,
    processor: Any,  # noqa: ANN401
    rows: DistillationRows,
    args: argparse.Namespace,
    steps: int,
    seed: int,
) -> MllmRetrieverModel:
    """Train adapters by InfoNCE, or mostly by the states of a teacher, and merge them."""
    weight = 0.0 if teacher is None else args.distill_weight
    settings: dict[str, Any] = {
        "output_dir": str(WORK / "trainer"),
        "max_steps": steps,
        "per_device_train_batch_size": args.batch_size,
        "learning_rate": args.rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, steps // 10),
        "weight_decay": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": seed,
        "use_cpu": DEVICE.type == "cpu",
    }
    config = PumaStage1Config(**settings, kind="cosine", distill_weight=weight, contrastive_weight=1 - weight)
    torch.manual_seed(seed)
    trainer = PumaStage1Trainer(model, config, rows, None, processor, teacher=teacher, peft_config=LORA)
    trainer.train()
    merged: MllmRetrieverModel = merge_lora(model).requires_grad_(False)
    return merged


def scores(measured: Measured, whole: Measured) -> dict[str, float]:
    """Hit rates and agreement."""
    found = {name: metric.value for name, metric in hit_rates(measured.vectors).items()}
    costs = {"gflop": measured.costs["GFLOP per pair"], "ms": measured.costs["ms per item"]}
    return found | agreement(measured, whole) | costs


def main() -> None:
    """Run what the record does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 6, 20])
    parser.add_argument("--projector-steps", type=int, default=450)
    parser.add_argument("--steps-whole", type=int, default=120, help="steps that make the MLLM an embedder")
    parser.add_argument("--steps", type=int, default=120, help="steps of distillation")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--distill-weight", type=float, default=0.9)
    parser.add_argument("--held-out", type=int, help="number of unseen pairs (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/compress.json")
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name not in ("seeds", "layers", "out")}
    record = Record(args.out, settings)
    pictures = PictureFeatures(WORK / "pictures.safetensors")
    pictures.prepare_images(row["image"] for split in ("train", "validation") for row in load_emoji(split))
    cells = make_data("test")
    pictures.prepare(cells)
    mllm = WORK / "mllm"
    make_mllm(mllm, pictures, args.projector_steps)
    processor = load_processor(mllm, pictures)
    training, unseen = load_emoji("train"), load_emoji("validation")
    unseen = unseen.select([place for place, style in enumerate(unseen["style"]) if style == "twemoji"])
    rows = DistillationRows(training, len(training))
    held_out = [{"image": row["image"], "text": row["text"]} for row in unseen][: args.held_out]
    last = "{} layers, from the start"
    for seed in args.seeds:
        if all(record.has(last.format(kept), seed) for kept in args.layers):
            continue
        begin = time.process_time()

        def add(name: str, model: MllmRetrieverModel, whole: Measured | None = None) -> Measured:
            seconds = time.process_time() - begin  # noqa: B023
            measured = measure_pairs(model, processor, held_out, 64, DEVICE)
            found = scores(measured, whole or measured)
            if not record.has(name, seed):  # noqa: B023
                found |= measure(model, processor, cells, split="test", instructions=False)
                record.add(name, seed, **found, cpu_seconds=round(seconds))  # noqa: B023
                print(time.strftime("%H:%M"), name, seed, {key: round(found[key], 3) for key in COLUMNS}, flush=True)  # noqa: B023
            return measured

        model = load_retriever(mllm, DEPTH, seed)
        model = train(model, None, processor, rows, args, args.steps_whole, seed)
        whole = add(f"{DEPTH} layers", model)
        for kept in args.layers:
            if record.has(last.format(kept), seed):
                continue
            begin = time.process_time()
            student = prune(model, kept)
            add(f"{kept} layers, first layers of the whole", student, whole)
            begin = time.process_time()
            add(f"{kept} layers, distilled", train(student, model, processor, rows, args, args.steps, seed), whole)
            begin = time.process_time()
            alone = load_retriever(mllm, kept, seed)
            steps = args.steps_whole + args.steps
            add(last.format(kept), train(alone, None, processor, rows, args, steps, seed), whole)
    print(record.table(COLUMNS))


if __name__ == "__main__":
    main()
