"""Both stages of SOLAR on scenes, beside the same loss without masks and the towers, with a report.

    python experiments/solar_demo.py --no-bf16

`--KEY VALUE` changes a key of both recipes. It takes about ten minutes of processor time.
"""

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from scene_features import FeatureEncoder, SceneTriplets, embed_features
from scenes import TEST_SETS, make_scenes
from solar_demo_results import BASELINE, STAGE1, STAGE2, DemoRuns, demo_results
from torch import Tensor
from transformers.utils import logging

from conjoin import JointEncoderModel
from conjoin.data import DataArguments, load_pairs
from conjoin.evaluation import Results, format_table
from conjoin.retrieval import Miner, mine_hard_negatives
from conjoin.retrieval.collection import check_place
from conjoin.trainers import CachedFeatures, RetrievalTrainer, load_recipe, recipe_folder, train

SCENES: dict[str, Any] = {"objects": 60, "train": 4000, "triplets": 200, "distractors": 1000}
"""The header of the sample recipes has the command that makes the same."""
_EMBEDDINGS, _MINERS = "embeddings", "miners"
"""The sub-folders of `mined` that the demo removes."""


def run_solar(out: Path, flags: Sequence[str], say: Callable[[str], None]) -> Results:
    """Make scenes, train both stages of SOLAR and the baseline on them, and compare all with the towers.

    Args:
        out: Folder of the demo.
        flags: Of both recipes.
        say: Announces a step.

    Raises:
        ValueError: The folder `mined` holds something else than an earlier demo wrote; and as training.
    """
    for folder in (out / "mined" / _EMBEDDINGS).glob("[!.]*"):
        check_place(folder)
    say("1/5  Scenes")
    scenes = make_scenes(out / "scenes", **SCENES, show_progress=True)
    source = str(scenes / "train.parquet")
    flags = ["--dataset_name", source, "--features_dir", str(out / "features"), *flags]
    say(f"2/5  Features and {BASELINE}")
    trainers = {BASELINE: _train("solar/sample_stage1.yaml", out / "baseline", *flags, "--mask", "none")}
    say(f"3/5  {STAGE1}")
    trainers[STAGE1] = _train("solar/sample_stage1.yaml", out / "stage1", *flags)
    say("4/5  Mining and stage 2")
    _mine(trainers[STAGE1], source, out / "mined")
    flags += ["--model_name_or_path", str(out / "stage1"), "--mined", str(out / "mined"), "--mined_per_anchor", "2"]
    trainers[STAGE2] = _train("solar/sample_stage2.yaml", out / "stage2", *flags)
    say("5/5  Results")
    runs = _read(trainers, scenes, Path(trainers[STAGE1].args.features_dir))
    return demo_results(runs, SCENES, out / "stage1")


def _train(recipe: str, folder: Path, *flags: str) -> RetrievalTrainer:
    words = [*flags, "--output_dir", str(folder), "--overwrite"]
    return train(load_recipe(recipe_folder() / recipe, words))


def _mine(trainer: RetrievalTrainer, source: str, folder: Path) -> None:
    """Mine the nearest scenes by the fused embedding of stage 1, from the cached features."""
    rows, features = DataArguments(dataset_name=source).load()[0], cast(CachedFeatures, trainer.train_dataset)
    model, dtype = cast(JointEncoderModel, trainer.encoder), _dtype(trainer)

    def vectors(view: str, places: list[int]) -> Tensor:
        return embed_features(model, features, dtype, places, (view,))[view]

    for part in (_EMBEDDINGS, _MINERS):
        shutil.rmtree(folder / part, ignore_errors=True)  # may be from another model
    encoder: Any = FeatureEncoder(STAGE1, {name: index for index, name in enumerate(rows["id"])}, vectors)
    mine_hard_negatives(rows, [Miner("fused", STAGE1, "fused", "fused")], folder, load_encoder=lambda name: encoder)


def _read(trainers: dict[str, RetrievalTrainer], scenes: Path, folder: Path) -> DemoRuns:
    """Compute the features of the test triplets and of the distractors, once for all models."""
    trainer = trainers[STAGE1]
    model, processor = cast(JointEncoderModel, trainer.encoder), cast(Any, trainer.processing_class)

    def cache(name: str, rows: Any) -> CachedFeatures:  # noqa: ANN401 - any rows
        return CachedFeatures(model, processor, rows, folder / name, dtype=_dtype(trainer), first_only=True)

    distractors = load_pairs(scenes / "distractors.parquet")
    features = cache("distractors", distractors)
    sets = {name: SceneTriplets.read(scenes / f"test_{name}.jsonl", cache) for name in TEST_SETS}
    models = {run: cast(JointEncoderModel, each.encoder) for run, each in trainers.items()}
    return DemoRuns(trainers, models, processor, _dtype(trainer), sets, features, distractors)


def _dtype(trainer: RetrievalTrainer) -> torch.dtype:
    return torch.bfloat16 if trainer.args.bf16 else torch.float32


def main() -> None:
    """Run the demo, and write `results.json` and `report.html`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-solar"), help="folder (default: %(default)s)")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="(default: what is faster here)")
    args, rest = parser.parse_known_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    flags = ["--use_cpu", str(not torch.cuda.is_available()).lower()]
    if args.bf16 is not None:
        flags += ["--bf16", str(args.bf16).lower()]
    results = run_solar(args.out, [*flags, *rest], lambda text: print(f"\n{text}", flush=True))
    report = results.save(args.out)
    for table in results.tables:
        print(f"\n{format_table(table)}")
    print(f"\nReport:     {report.resolve().as_uri()}")


if __name__ == "__main__":
    main()
