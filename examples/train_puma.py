"""Train a pruned MLLM retriever by PUMA: stage 1 on text pairs with a teacher, stage 2 on queries with instructions.

Give the recipes of both stages. Flags `--KEY VALUE` are for both, those behind `--stage1` or `--stage2` for one.

accelerate launch examples/train_puma.py training_args/puma/stage1_qwen2_vl_7b.yaml \
    training_args/puma/stage2_qwen2_vl_7b.yaml --max_steps 10 \
    --stage1 --model_name_or_path Qwen/Qwen2-VL-2B-Instruct --stage2 --temperature 0.05
"""

import sys
from typing import Any

from conjoin import PumaStage1Config, PumaStage1Trainer, PumaStage2Config, PumaStage2Trainer
from conjoin.trainers import parse_recipe, run

OF_ONE = ("--model_name_or_path", "--output_dir")


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
    first, second, *words = sys.argv[1:]
    flags: dict[str, list[str]] = {"both": [], "--stage1": [], "--stage2": []}
    stage = "both"
    for word in words:
        if word in flags:
            stage = word
        else:
            flags[stage].append(word)
    for word in flags["both"]:
        if word.partition("=")[0] in OF_ONE:
            raise SystemExit(f"{word}: of which stage? Put it behind --stage1 or --stage2")
    distilled = train_stage(
        PumaStage1Config, PumaStage1Trainer, ["--config", first, *flags["both"], *flags["--stage1"]]
    )
    words = ["--config", second, "--model_name_or_path", distilled, *flags["both"], *flags["--stage2"]]
    train_stage(PumaStage2Config, PumaStage2Trainer, words)


if __name__ == "__main__":
    main()
