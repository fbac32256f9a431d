"""Train the rows of the SOLAR claims by the package's trainers on cached features; mine their negatives."""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from filelock import FileLock
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from scene_features import FeatureEncoder, collate_trimmed, embed_features, tower_vectors
from scenes import NEITHER, PRIVATE, SHARED
from solar_rows import MINERS, ROWS, Row, rate_of, samples_per_step, uses_mined
from solar_scenes import Grouped, Scenes, TruthCollator, WithTruth, WithVersions
from torch import Tensor, nn
from transformers import PrinterCallback

from conjoin import JointEncoderModel, SolarStage1Trainer, SolarStage2Trainer
from conjoin.constants import SOLAR_HEADS
from conjoin.data import PairCollator
from conjoin.losses import AlignmentTerms
from conjoin.retrieval import Miner, load_mined, mine_hard_negatives
from conjoin.retrieval.mining import NEGATIVES_FILE, write_mined
from conjoin.storage import atomic_path, write_text
from conjoin.trainers import ContrastiveTrainer, GclTrainer, RetrievalTrainer, merge_lora
from conjoin.trainers.solar import ProjectionHeads, SolarStage2Collator, SolarStage2Rows
from conjoin.trainers.solar_masks import PairTokens, construct_samples

TRAINERS: dict[str, type[RetrievalTrainer]] = {
    "contrastive": ContrastiveTrainer,
    "gcl": GclTrainer,
    "solar_stage1": SolarStage1Trainer,
    "solar_stage2": SolarStage2Trainer,
}
WEIGHTS = "model.safetensors"
MINING = ("mining_seconds", "mining_cpu_seconds")


class TrueMasks(SolarStage1Trainer):
    """Stage 1 with the true masks of scenes."""

    def masks(
        self,
        model: JointEncoderModel,
        alignment: AlignmentTerms | None,
        tokens: PairTokens,
        teacher_inputs: dict[str, Any],
        rows: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The learned masks' metrics, with masks that keep what is shared."""
        _, _, metrics = super().masks(model, alignment, tokens, teacher_inputs, rows)
        rho = self.rho()
        image, text = (rho + (1 - rho) * (teacher_inputs[name][rows] == SHARED).float() for name in ("image", "text"))
        return image, text, metrics


class ShuffledMasks(SolarStage1Trainer):
    """Stage 1 with as many masked tokens in every row, at random places."""

    def masks(
        self,
        model: JointEncoderModel,
        alignment: AlignmentTerms | None,
        tokens: PairTokens,
        teacher_inputs: dict[str, Any],
        rows: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The learned masks, shuffled within each row."""
        image, text, metrics = super().masks(model, alignment, tokens, teacher_inputs, rows)
        return shuffled(image, tokens.image_mask[rows]), shuffled(text, tokens.text_mask[rows]), metrics


def shuffled(mask: Tensor, exists: Tensor, random: torch.Generator | None = None) -> Tensor:
    """Exchange the weights of the tokens that exist."""
    anywhere = torch.rand(mask.shape, generator=random).masked_fill(~exists, 2.0).argsort(1)
    in_order = (~exists).long().argsort(dim=1, stable=True)
    return mask.scatter(1, in_order, mask.gather(1, anywhere))


def degraded(truth: Sequence[dict[str, Tensor]], auroc: float) -> list[dict[str, Tensor]]:
    """True masks with the errors that a threshold makes on scores of this AUROC, fixed for each scene.

    The scores of shared and private parts are two Gaussians of one deviation, so both are mistaken with the same
    probability. An object of a picture is right or wrong as a whole, a token of a text by itself.
    """
    chance = 1 - NormalDist().cdf(NormalDist().inv_cdf(auroc) / 2**0.5) if auroc < 1 else 0.0
    rows = []
    for number, row in enumerate(truth):
        draw = np.random.default_rng([1, number])
        wrong = torch.from_numpy(draw.random(int(row["segments"].max()) + 1) < chance)[row["segments"]]
        flips = {"image": wrong, "text": torch.from_numpy(draw.random(len(row["text"])) < chance)}
        swapped = {name: torch.where(row[name] == SHARED, PRIVATE, SHARED).to(row[name].dtype) for name in flips}
        rows.append(row | {
            name: torch.where(flip & (row[name] != NEITHER), swapped[name], row[name]) for name, flip in flips.items()
        })  # fmt: skip
    return rows


class TrueSamples(SolarStage2Trainer):
    """Stage 2 with samples constructed from the true intersection: segments are objects, the background stays."""

    def prepare_rows(self, rows: Any, args: Any) -> Any:  # noqa: ANN401
        """The rows as they are: `Laboratory` has joined them with the truth."""
        return rows

    @torch.no_grad()
    def construct(self, model: Any, anchors: Any, output: Any, teacher_inputs: Any) -> Any:  # noqa: ANN401
        """Mask shared or private objects and their names."""
        parts = [
            part
            for name in ("image", "text")
            for part in ((teacher_inputs[name] == SHARED).float(), teacher_inputs[name] != NEITHER, 0.5)
        ]
        samples = construct_samples(*parts, teacher_inputs["segments"])
        return samples, {"positive_rate": samples.valid[0].float().mean()}


@dataclass
class Trained:
    """A trained row.

    Attributes:
        model: The model; its towers are shared.
        heads: The projection heads, if it has any.
        record: Steps, samples, seconds and the log.
    """

    model: JointEncoderModel
    heads: ProjectionHeads | None
    record: dict[str, Any]


class Laboratory:
    """Trains rows of one seed and keeps the models that other rows start from in the folder `--out`."""

    def __init__(self, scenes: Scenes, args: argparse.Namespace, seed: int) -> None:
        self.scenes, self.args, self.seed = scenes, args, seed

    def folder(self, name: str) -> Path:
        """Where the model of a row lies."""
        return self.args.out / "models" / f"{slug(name)}-{self.seed}"

    def save(self, name: str, trained: Trained) -> None:
        """Write what was trained: the model without its towers, and the heads."""
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.contiguous() for name, value in trained.model.state_dict().items() if not _of_tower(name)}
        parts = {WEIGHTS: state}
        if trained.heads is not None:
            parts[SOLAR_HEADS] = {f"heads.{name}": value for name, value in trained.heads.state_dict().items()}
        for file, tensors in reversed(parts.items()):  # the weights last
            with atomic_path(folder / file) as path:
                save_file(tensors, str(path))

    def load(self, name: str) -> JointEncoderModel:
        """Read the model of a row."""
        model = self.scenes.new_model(self.seed)
        found = model.load_state_dict(load_file(self.folder(name) / WEIGHTS), strict=False)
        wrong = [key for key in found.missing_keys if not _of_tower(key)] + found.unexpected_keys
        if wrong:
            raise ValueError(f"{str(self.folder(name))!r} is not a model of these rows: {wrong[:3]}")
        return model

    def train(self, row: Row, steps: int) -> Trained:
        """Train a row; its start must be there."""
        mined, mining = self.mined(row) if uses_mined(row) else (None, dict.fromkeys(MINING, 0.0))
        model = self.scenes.new_model(self.seed) if row.start is None else self.load(row.start)
        trainer = self._trainer(row, model, self._settings(row, steps), mined)
        trainer.remove_callback(PrinterCallback)
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        record = {
            "steps": steps,
            "samples": steps * samples_per_step(row, self.args),
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "log": trainer.state.log_history,
        } | mining
        heads = trainer.loss["heads"] if isinstance(trainer.loss, nn.ModuleDict) and "heads" in trainer.loss else None
        return Trained(merge_lora(model) if row.lora else model, heads, record)

    def _settings(self, row: Row, steps: int) -> dict[str, Any]:
        args, stage2 = self.args, row.method == "solar_stage2"
        return {
            "output_dir": str(args.out / "runs"),
            "max_steps": steps,
            "per_device_train_batch_size": args.stage2_batch_size if stage2 else args.batch_size,
            "learning_rate": rate_of(row, args),
            "warmup_steps": round(args.warmup * steps),
            "weight_decay": args.weight_decay,
            "adam_beta2": args.adam_beta2,
            "temperature": args.temperature,
            "learn_temperature": args.learn_temperature,
            "bf16": args.bf16,
            "use_cpu": True,
            "mask_false_negatives": False,  # all scenes differ
            "save_strategy": "no",
            "logging_steps": max(1, steps // 10),
            "report_to": "none",
            "disable_tqdm": True,
            "seed": self.seed,
            "train_sampling_strategy": "sequential" if row.grouped else "random",
        } | ({"min_separation": args.min_separation, "mined_per_anchor": args.mined} if stage2 else {})

    def _trainer(
        self, row: Row, model: JointEncoderModel, settings: dict[str, Any], mined: Path | None
    ) -> RetrievalTrainer:
        kind = TRAINERS[str(row.method)]
        if row.method == "solar_stage1" and (row.truth or row.shuffled):
            kind = TrueMasks if row.truth else ShuffledMasks
        elif row.truth:
            kind = TrueSamples
        config = kind.config_class(**(settings | self.args.set.get(row.method, {}) | dict(row.changes)))
        rows, collator = self._rows(row, config, mined)
        options: dict[str, Any] = {
            "train_dataset": rows,
            "data_collator": collator,
            "processing_class": self.scenes.processor,
        }
        if row.lora:
            options["peft_config"] = LoraConfig(
                r=16, lora_alpha=32, target_modules=r"vl_encoder\..*",
                modules_to_save=["vision_adapter", "text_adapter"],
            )  # fmt: skip
        file = None if row.start is None else self.folder(row.start) / SOLAR_HEADS
        if file is not None:
            model.name_or_path = str(file.parent)  # where stage 2 finds the heads
        trainer = kind(model, config, **options)
        if row.method == "solar_stage1" and file is not None and file.is_file():  # it continues
            trainer.loss.load_state_dict(load_file(file), strict=False)
        return trainer

    def _rows(self, row: Row, config: Any, mined: Path | None) -> tuple[Any, Any]:  # noqa: ANN401
        """The rows to train on and their collator."""
        ids: list[str] = self.scenes.pairs["id"][:]
        rows: Any = self.scenes.train
        collator: Any = collate_trimmed
        if row.live:
            rows, collator = (
                self.scenes.pairs.select_columns(["id", "image", "text"]),
                PairCollator(self.scenes.processor),
            )
        if row.versions:
            rows = WithVersions(rows, self.scenes.versions)
        if row.grouped and mined is not None:
            count = config.max_steps * config.per_device_train_batch_size
            rows = Grouped(rows, ids, load_mined(mined), row.grouped, count, self.seed)
        elif row.method == "solar_stage2":
            negatives = load_mined(mined) if mined is not None and config.mined_per_anchor else None
            augment = (lambda image: image) if row.versions else None
            rows = SolarStage2Rows(rows, negatives, config.mined_per_anchor, augment, self.seed)
        if not row.truth:
            return rows, collator
        inner = SolarStage2Collator(collator) if row.method == "solar_stage2" else collator
        return WithTruth(rows, degraded(self.scenes.truth, row.auroc)), TruthCollator(inner)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.scenes.pairs["id"][:])}

    @cached_property
    def _towers(self) -> dict[str, Tensor]:
        found = tower_vectors(self.scenes.train)
        return {"image": found["global"], "text": found["words"]}

    def mined(self, row: Row) -> tuple[Path, dict[str, float]]:
        """Mine with all seven miners of the row's start; returns the folder of the row's negatives, and the cost."""
        folder = self.args.out / "mined" / f"{slug(row.start or 'untrained')}-{self.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # rows in other processes may need the same
            if not (folder / "cost.json").is_file():
                wall, cpu = time.perf_counter(), time.process_time()
                self._mine(folder, self.scenes.new_model(self.seed) if row.start is None else self.load(row.start))
                spent = (time.perf_counter() - wall, time.process_time() - cpu)
                write_text(folder / "cost.json", json.dumps(dict(zip(MINING, spent, strict=True))))
            cost = json.loads((folder / "cost.json").read_text(encoding="utf-8"))
            return folder if set(row.miners) == set(MINERS) else _with_fewer(folder, row.miners), cost

    def _mine(self, folder: Path, model: JointEncoderModel) -> None:
        dtype = self.scenes.dtype

        def encoder(name: str) -> Any:  # noqa: ANN401 - what mining takes for an encoder
            def own(view: str, places: list[int]) -> Tensor:
                return embed_features(model, self.scenes.train, dtype, places, (view,))[view]

            def towers(view: str, places: list[int]) -> Tensor:
                return self._towers[view][places]

            return FeatureEncoder(name, self._places, towers if name == "towers" else own)

        miners = [Miner(name, *described) for name, described in MINERS.items()]
        mine_hard_negatives(
            self.scenes.pairs.select_columns(["id", "image", "text"]), miners, folder, k=self.args.mined_per_miner,
            load_encoder=encoder,
        )  # fmt: skip
        for part in ("embeddings", "miners"):
            shutil.rmtree(folder / part, ignore_errors=True)


def slug(name: str) -> str:
    """A name for files."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.replace("w/o", "without").lower())


def starts(row: Row) -> list[Row]:
    """The rows that a row starts from, the first first."""
    return [] if row.start is None else [*starts(ROWS[row.start]), ROWS[row.start]]


def _of_tower(name: str) -> bool:
    return name.startswith(("vision_model.", "text_model."))


def _with_fewer(folder: Path, miners: Sequence[str]) -> Path:
    """Write the negatives that some of the miners found to a folder beside the whole; returns it."""
    fewer = folder.with_name(f"{folder.name}-{'-'.join(miners)}")
    if (fewer / NEGATIVES_FILE).is_file():
        return fewer
    fewer.mkdir(exist_ok=True)
    rows = []
    for row in pq.read_table(folder / NEGATIVES_FILE).to_pylist():
        found = [
            (name, [entry for entry in entries if entry["miner"] in miners])
            for name, entries in zip(row["negatives"], row["found_by"], strict=True)
        ]
        kept = [(name, entries) for name, entries in found if entries]
        rows.append({"id": row["id"], "negatives": [n for n, _ in kept], "found_by": [entries for _, entries in kept]})
    write_mined(fewer / NEGATIVES_FILE, [rows])
    return fewer
