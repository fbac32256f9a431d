"""Train with GCL on pairs of an image and a text.

accelerate launch examples/train_gcl.py --config training_args/gcl/clip_sf.yaml --max_steps 10

python examples/train_gcl.py --model_name_or_path openai/clip-vit-base-patch32 --dataset_name photos.csv \
    --output_dir runs/gcl --per_device_train_batch_size 256
"""

from conjoin import GclConfig, GclTrainer
from conjoin.trainers import parse_recipe, run


def main() -> None:
    """Load the model and the rows, train, save, and push if `--push_to_hub` is set."""
    model_args, data_args, args = parse_recipe(GclConfig)
    model, processor = model_args.load()
    train, evaluation = data_args.load()
    trainer = GclTrainer(model, args, train, evaluation, processor, peft_config=model_args.peft_config())
    run(trainer)


if __name__ == "__main__":
    main()
