"""Train a pruned MLLM retriever by PUMA: stage 1 on text pairs with a teacher, stage 2 on queries with instructions.

Give the recipes of both stages. Further flags are for both: `--KEY VALUE`.

accelerate launch examples/train_puma.py training_args/puma/stage1_qwen2_vl_7b.yaml \
    training_args/puma/stage2_qwen2_vl_7b.yaml --max_steps 10
"""

import sys
from typing import Any

from conjoin import PumaStage1Config, PumaStage1Trainer, PumaStage2Config, PumaStage2Trainer
from conjoin.trainers import parse_recipe, run


def train_stage(config_class: type[Any], trainer_class: type[Any], words: list[str]) -> str:
    """Load the model and the rows, train, save; return the folder of the model."""
    model_args, data_args, args = parse_recipe(config_class, words)
    model, processor = model_args.load()
    train, evaluation = data_args.load()
    trainer = trainer_class(model, args, train, evaluation, processor, peft_config=model_args.peft_config())
    run(trainer)
    return args.output_dir


def main() -> None:
    """Distil the whole model into its first layers, then tune these by the MAC loss."""
    first, second, *flags = sys.argv[1:]
    distilled = train_stage(PumaStage1Config, PumaStage1Trainer, ["--config", first, *flags])
    words = ["--config", second, "--model_name_or_path", distilled, *flags]
    train_stage(PumaStage2Config, PumaStage2Trainer, words)


if __name__ == "__main__":
    main()
