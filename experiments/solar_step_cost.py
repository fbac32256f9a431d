"""How long is a step of the SOLAR claims' rows? Steps of both methods alternate, so other programs slow both.

Takes the options of solar.py (scenes, batch size, width). The masks of "GCL, window masks" start after 30 % of the
steps; its ratio is the mean over a whole run.

    python experiments/solar_step_cost.py --data runs/claims/solar/data --objects 100 --train 12000
"""

import statistics
import time
from typing import Any

import torch
from scene_features import collate_trimmed
from solar import parse
from solar_rows import ROWS
from solar_scenes import Scenes

from conjoin.methods.solar.stage1 import SolarStage1Objective
from conjoin.training import METHODS
from conjoin.training.objective import total_loss

ROUNDS = 20
ROW = ROWS["GCL, window masks"]


def main() -> None:
    """Print the ratios."""
    args = parse()
    torch.set_num_threads(args.threads)
    scenes = Scenes(args)
    objectives: dict[str, Any] = {}
    for name, row in (("GCL", ROWS["GCL"]), ("without masks", ROW), ("with masks", ROW)):
        config = METHODS[row.method].config(
            output_dir=str(args.out / "runs"), use_cpu=True, per_device_train_batch_size=args.batch_size,
            temperature=args.temperature, learn_temperature=False, **row.changes,
        )  # fmt: skip
        model = scenes.new_model(0)
        trainer = METHODS[row.method].trainer(model, config, train_dataset=scenes.train, data_collator=collate_trimmed)
        objectives[name] = trainer.objective.train()
    for name, progress in (("without masks", 0.0), ("with masks", 1.0)):
        objective = objectives[name]
        if not isinstance(objective, SolarStage1Objective):
            raise TypeError(name)
        objective.progress = progress
    seconds: dict[str, list[float]] = {name: [] for name in objectives}
    for number in range(ROUNDS + 2):
        start = number * args.batch_size
        batch = collate_trimmed([scenes.train[row] for row in range(start, start + args.batch_size)])
        for name, objective in objectives.items():
            begin = time.process_time()
            with torch.autocast("cpu", scenes.dtype, enabled=args.bf16):
                loss = total_loss(objective(**batch))
            loss.backward()
            if number >= 2:  # the first calls allocate
                seconds[name].append(time.process_time() - begin)
    ratios = {
        name: statistics.median(own / gcl for own, gcl in zip(values, seconds["GCL"], strict=True))
        for name, values in seconds.items()
    }
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values):.2f} CPU s per step, {ratios[name]:.3f} of GCL's")
    early = ROW.changes["mask_start_ratio"]
    print(f"{ROW.name}: {early * ratios['without masks'] + (1 - early) * ratios['with masks']:.3f} of GCL's")


if __name__ == "__main__":
    main()
