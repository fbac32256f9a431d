"""`conjoin compress`: fewer layers at nearly the quality, with the model as its own teacher."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conjoin.cli.options import ColumnOptions, ImageOptions, option, pick
from conjoin.trainers.compress_options import CompressOptions


@dataclass(kw_only=True)
class Options(CompressOptions, ColumnOptions, ImageOptions):
    """Keep the first layers of an embedder around a language model, and train them to embed as the whole.

    Stage 1 of PUMA with the model as its own teacher, on texts, images and both. For each depth of --layers, --out
    gets a model of the same kind (layers-N); results.json and report.html compare them with the whole model on
    held-out pairs: retrieval, agreement of vectors and rankings, operations, bytes, seconds.

    Args:
        model: Folder or Hub name of the model.
        data: Pairs of image and text, as `conjoin encode` reads them.
        out: Where models and report go.
        preset: How an embedder embeds whose files do not say it, such as gme_qwen2_vl.
        revision: Branch, tag or commit of a model on the Hub (default: its main branch).

    Example:
        conjoin compress Qwen/Qwen3-VL-Embedding-2B --layers 14 20 --data pairs.csv --out runs/half
    """

    model: str
    data: str = option(required=True)
    out: str = option(required=True)
    preset: str | None = None
    revision: str | None = None


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.evaluation import format_results
    from conjoin.hub import load_trainable
    from conjoin.hub.sentence_model import SentenceModel
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.processing.sentence_files import write_json_file
    from conjoin.trainers.compress import compress

    rows: Any = options.load_rows(options.data, only="both")
    model, processor = load_trainable(options.model, None, options.preset, revision=options.revision)
    if not isinstance(model, MllmRetrieverModel | SentenceModel):
        raise ValueError(f"{options.model!r} has no layers of an MLLM; expected an embedder or an MLLM retriever")
    results = compress(model, processor, rows, options.out, options)
    results.model |= {"name": options.model}
    results.dataset |= {"name": options.data, "split": options.split}
    out = Path(options.out)
    recipe = pick(options, "learning_rate", "seed", "preset") | {"trainer": "compress", "max_steps": options.steps}
    recipe |= {"model_name_or_path": options.model, "dataset_name": options.data}
    for kept in options.layers:  # for the card of `conjoin push`
        write_json_file(out / f"layers-{kept}" / "recipe.json", recipe)
    print(f"{format_results(results)}\n\n{results.summary}\nwrote {results.save(out)}")
