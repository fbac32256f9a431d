"""Fine-tune a published embedder on your own queries: LoRA, hard negatives, a gradient cache.

`queries.jsonl` has a line for each query; an item is a text, or a dictionary with `image`, `text` or both:

    {"query": "a red shoe", "positive": {"image": "7.png"}, "negatives": [{"image": "8.png"}], "instruction": "Find"}

    accelerate launch examples/train_embedder.py --config training_args/finetune/qwen3_vl_embedding.yaml \
        --dataset_name queries.jsonl --output_dir runs/embedder

The batch has 128 queries, and `gradient_cache_chunk_size` of them are in memory with their graph. The adapters are
merged: `SentenceTransformer("runs/embedder")` loads what is saved.
"""

from conjoin.trainers import ContrastiveConfig, QueryContrastiveTrainer, parse_recipe, run


def main() -> None:
    """Train as a recipe says."""
    model_args, data_args, args = parse_recipe(ContrastiveConfig)
    model, processor = model_args.load()
    train, evaluation = data_args.load()
    trainer = QueryContrastiveTrainer(model, args, train, evaluation, processor, peft_config=model_args.peft_config())
    run(trainer)


if __name__ == "__main__":
    main()
