"""`conjoin compress`: fewer layers at nearly the quality, with the model as its own teacher."""

from dataclasses import dataclass, fields
from typing import Any

from conjoin.cli.options import ColumnOptions, ImageOptions, check_out, load_rows, option, pick


@dataclass(kw_only=True)
class Options(ColumnOptions, ImageOptions):
    """Keep the first layers of a published embedder or of an MLLM retriever, and train them to embed as the whole.

    Stage 1 of PUMA with the model as its own teacher, on texts, images and both. For each depth of --layers, --out
    gets a model of the same kind (layers-N); compress.json and compress.html compare them with the whole model on
    held-out pairs: retrieval, agreement of vectors and rankings, operations, bytes, seconds.

    Args:
        model: Folder or Hub name of the model.
        data: Pairs of image and text, as `conjoin encode` reads them.
        out: Where models and report go.
        layers: Numbers of layers to keep, each trained from the whole model.
        steps: Steps of distillation for each depth.
        batch_size: Rows of a step, each with two items; items of a forward pass when measuring.
        chunk_size: Rows with their graph in memory at once, 0 for all; the result is the same.
        learning_rate: Peak learning rate, which decays to zero.
        lora_rank: Rank of the adapters on the kept layers.
        instruction: Instruction of queries with a text, in place of the model's query prompt.
        tune: Then tune on these queries (JSONL or Parquet) with the MAC loss, PUMA's stage 2.
        tune_steps: Steps of that tuning.
        held_out: Last pairs, which measure instead of train.
        share: Name the smallest depth with this share of the whole model's R@k.
        int8: Measure each model with the weights of its linear layers in 8 bits, too.
        seed: Seed of order, adapters and bootstrap.
        bf16: Train in bfloat16.
        device: cpu, cuda, cuda:1, ... (default: a GPU when there is one).
        preset: How an embedder embeds whose files do not say it, such as gme_qwen2_vl.
        revision: Branch, tag or commit of a model on the Hub (default: its main branch).
        quiet: No progress bars.

    Example:
        conjoin compress Qwen/Qwen3-VL-Embedding-2B --layers 14 20 --data pairs.csv --out runs/half
    """

    model: str
    data: str = option(required=True)
    out: str = option(required=True)
    layers: list[int] = option([], required=True)
    steps: int = 1000
    batch_size: int = 32
    chunk_size: int = 0
    learning_rate: float = 0.0001
    lora_rank: int = 64
    instruction: str | None = None
    tune: str | None = None
    tune_steps: int = 500
    held_out: int = 200
    share: float = 0.95
    int8: bool = False
    seed: int = 0
    bf16: bool = False
    device: str | None = None
    preset: str | None = None
    revision: str | None = None
    quiet: bool = False


def run(options: Options) -> None:
    """Run the command."""
    out = check_out(options.out)

    from conjoin.evaluation import format_results, render_report
    from conjoin.hub import load_embedder, load_model
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.processing.sentence_files import write_json_file
    from conjoin.trainers.compress import CompressOptions, compress

    how = CompressOptions(**pick(options, *(each.name for each in fields(CompressOptions))))
    rows: Any = load_rows(options, options.data)
    if options.preset is not None:
        loaded: tuple[Any, Any] = load_embedder(options.model, preset=options.preset, revision=options.revision)
    else:
        loaded = load_model(options.model, revision=options.revision)
    model, processor = loaded
    if not isinstance(model, MllmRetrieverModel):
        raise ValueError(f"{options.model!r} has no layers of an MLLM; expected an embedder or an MLLM retriever")
    results = compress(model, processor, rows, out, how)
    results.model |= {"name": options.model}
    results.dataset |= {"name": options.data, "split": options.split}
    recipe = {  # for the card of `conjoin push`
        "trainer": "compress",
        "model_name_or_path": options.model,
        "preset": options.preset,
        "dataset_name": options.data,
        "max_steps": how.steps,
        "per_device_train_batch_size": how.batch_size,
        **pick(options, "learning_rate", "seed"),
    }
    for kept in how.layers:
        write_json_file(out / f"layers-{kept}" / "recipe.json", recipe)
    results.save(out / "compress.json")
    page = render_report(results, out / "compress.html")
    print(f"{format_results(results)}\n\n{results.summary}\nwrote {out / 'compress.json'} and {page}")
