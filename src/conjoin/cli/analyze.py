"""`conjoin analyze`: what each layer of an MLLM contributes and costs."""

from dataclasses import dataclass
from typing import Any

from conjoin.cli.options import ColumnOptions, ImageOptions, check_out, load_rows, option


@dataclass(kw_only=True)
class Options(ColumnOptions, ImageOptions):
    """Read a multimodal language model at every depth, to see where it can be pruned.

    How its readout token spreads its attention over image, text and prompt, how well its state after each layer
    retrieves, and how many parameters and operations each number of layers takes. MODEL is an MLLM retriever, or an
    image-text MLLM that has not been made one yet (Qwen-VL, LLaVA, InternVL), or a published embedder.

    Args:
        model: Folder or Hub name of the model.
        data: Pairs of image and text, as `conjoin encode` reads them.
        out: Where analysis.json and analysis.html go.
        pairs: How many pairs, from the start.
        share: Name the smallest depth with this share of the whole model's R@k.
        compressed: compress.json of `conjoin compress` for this model: also choose among its trained copies.
        revision: Branch, tag or commit of a model on the Hub (default: its main branch).
        batch_size: Items per forward pass.
        device: cpu, cuda, cuda:1, ... (default: a GPU when there is one).
        quiet: No progress bars.

    Example:
        conjoin analyze Qwen/Qwen2-VL-2B-Instruct photos.csv --out runs/layers
    """

    model: str
    data: str
    out: str = option(required=True)
    pairs: int = option(200, least=1)
    share: float = 0.95
    compressed: str | None = None
    revision: str | None = None
    batch_size: int = option(8, least=1)
    device: str | None = None
    quiet: bool = False


def run(options: Options) -> None:
    """Run the command."""
    out = check_out(options.out)

    from conjoin.devices import choose_device
    from conjoin.evaluation import Results
    from conjoin.evaluation.report.page import render_report
    from conjoin.hub import is_embedder, load_model, loading, model_type
    from conjoin.models.mllm_retriever import MllmRetrieverModel
    from conjoin.models.mllm_retriever.configuration_mllm_retriever import ARCHITECTURES
    from conjoin.processing import MllmRetrieverProcessor
    from conjoin.trainers.compress import analyse_mllm

    device = choose_device(options.device)
    rows: Any = load_rows(options, options.data)
    rows = rows.select(range(min(options.pairs, len(rows))))
    name, revision = options.model, options.revision
    model: Any
    if model_type(name, revision) not in ARCHITECTURES or is_embedder(name, revision):
        model, processor = load_model(name, revision=revision)
    else:  # an MLLM, with all its layers
        with loading(name, revision):
            model = MllmRetrieverModel.from_mllm(name, revision=revision)
            processor = MllmRetrieverProcessor.from_mllm(name, revision=revision)
    results = analyse_mllm(
        model.to(device).eval(),
        processor,
        [{"image": row["image"], "text": row["text"]} for row in rows],
        batch_size=options.batch_size,
        share=options.share,
        compressed=None if options.compressed is None else Results.load(options.compressed),
        show_progress=not options.quiet,
    )
    results.model |= {"name": name}
    results.dataset |= {"name": options.data, "split": options.split}
    out.mkdir(parents=True, exist_ok=True)
    results.save(out / "analysis.json")
    page = render_report(results, out / "analysis.html")
    print(f"{results.summary}\nwrote {out / 'analysis.json'} and {page}")
