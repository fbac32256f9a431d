"""Train a joint encoder on pairs by both stages of SOLAR, with hard negatives that the model of stage 1 finds.

accelerate launch examples/train_solar.py --config training_args/solar/stage1_clip.yaml --dataset_name photos.csv

`--max_steps 10` and the other flags are of stage 1. Stage 2 has the settings of training_args/solar/stage2_clip.yaml.
"""

from pathlib import Path

from conjoin import SolarStage1Config, SolarStage1Trainer, SolarStage2Config, SolarStage2Trainer, mine_hard_negatives
from conjoin.retrieval import Miner
from conjoin.trainers import parse_recipe, run


def main() -> None:
    """Train stage 1, mine by its model, and train stage 2; each stage in a folder of its own."""
    model_args, data_args, args = parse_recipe(SolarStage1Config)
    model, processor = model_args.load()
    train, evaluation = data_args.load()
    trainer = SolarStage1Trainer(model, args, train, evaluation, processor, peft_config=model_args.peft_config())
    run(trainer)

    first = Path(args.output_dir)
    mined = first / "mined"
    with args.main_process_first(desc="mining"):
        if args.should_save:
            miners = [Miner("fused", str(first), "fused", "fused"), Miner("images", str(first), "image", "image")]
            mine_hard_negatives(train, miners, mined)

    steps = max(1, trainer.state.max_steps // 10)
    second = SolarStage2Config(
        output_dir=str(first / "stage2"),
        mined=str(mined),
        max_steps=steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_cache_chunk_size=args.gradient_cache_chunk_size,
        learning_rate=args.learning_rate,
        itc_weight=1.0,  # the Mixed variant, which keeps text -> image search
        trainable_vl_layers=2,
        min_separation=0.55 if steps > 10 else 0.0,  # a trial run learns no scores
        use_cpu=args.use_cpu,
        bf16=str(args.bf16),
        overwrite_output_dir=args.overwrite_output_dir,
    )
    model_args.model_name_or_path, model_args.model_init_kwargs = str(first), None
    model, processor = model_args.load()
    run(SolarStage2Trainer(model, second, train, evaluation, processor, peft_config=model_args.peft_config()))


if __name__ == "__main__":
    main()
