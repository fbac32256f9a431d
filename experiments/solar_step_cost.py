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
from solar_training import TRAINERS

from conjoin.trainers.gradient_cache import total_loss

ROUNDS = 20
ROW = ROWS["GCL, window masks"]


def main() -> None:
    """Print the ratios."""
    args = parse()
    torch.set_num_threads(args.threads)
    scenes = Scenes(args)
    trainers: dict[str, Any] = {}
    for name, row in (("GCL", ROWS["GCL"]), ("without masks", ROW), ("with masks", ROW)):
        kind = TRAINERS[str(row.method)]
        config = kind.config_class(
            output_dir=str(args.out / "runs"), use_cpu=True, per_device_train_batch_size=args.batch_size,
            temperature=args.temperature, learn_temperature=False, max_steps=1, **row.changes,
        )  # fmt: skip
        trainers[name] = kind(scenes.new_model(0), config, scenes.train, data_collator=collate_trimmed)
        trainers[name].model.train()
        trainers[name].state.max_steps = trainers[name].state.global_step = 1
    trainers["without masks"].state.global_step = 0
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(ROUNDS + 2):
        start = number * args.batch_size
        batch = collate_trimmed([scenes.train[row] for row in range(start, start + args.batch_size)])
        for name, trainer in trainers.items():
            begin = time.process_time()
            with torch.autocast("cpu", scenes.dtype, enabled=args.bf16):
                loss = total_loss(trainer.model(**batch))
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
