"""Train an MLLM retriever on queries of several images and texts by Coral.

    accelerate launch examples/train_coral.py --config training_args/coral/qwen2_5_vl_3b.yaml

Every key of the recipe is an option, here LoRA on the first 12 layers for ten steps:

    python examples/train_coral.py --config training_args/coral/qwen2_5_vl_3b.yaml \
        --model_init_kwargs '{"readout": "last", "keep_layers": 12}' --use_peft true --lora_r 8 --lora_alpha 16 \
        --lora_target_modules ".*language_model.*_proj" --learning_rate 1e-4 --max_steps 10

The log has the error of each decoder from the state that it should read (`reg_vision_own`) and from another row's
(`reg_vision_other`). Where they stay equal, the decoder does not read the state: raise `decoder_learning_rate`.
"""

from conjoin.trainers import CoralConfig, CoralTrainer, parse_recipe, run


def main() -> None:
    """Train as a recipe says."""
    model_args, data_args, args = parse_recipe(CoralConfig)
    model, processor = model_args.load()
    train, evaluation = data_args.load()
    trainer = CoralTrainer(model, args, train, evaluation, processor, peft_config=model_args.peft_config())
    run(trainer)


if __name__ == "__main__":
    main()
