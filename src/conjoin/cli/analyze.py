"""`conjoin analyze`: what each layer of an MLLM contributes and costs."""

from dataclasses import dataclass
from typing import Any

from conjoin.cli.options import ColumnOptions, DeviceOptions, ImageOptions, option


@dataclass(kw_only=True)
class Options(ColumnOptions, ImageOptions, DeviceOptions):
    """Read a multimodal language model at every depth, to see where it can be pruned.

    How its readout token spreads its attention over image, text and prompt, how well its state after each layer
    retrieves, and how many parameters and operations each number of layers takes. MODEL is an MLLM retriever, or an
    image-text MLLM that has not been made one yet (Qwen-VL, LLaVA, InternVL), or a published embedder.

    Args:
        model: Folder or Hub name of the model.
        data: Pairs of image and text, as `conjoin encode` reads them.
        out: Where results.json and report.html go.
        pairs: How many pairs, from the start.
        share: Name the smallest depth with this share of the whole model's R@k.

    Example:
        conjoin analyze Qwen/Qwen2-VL-2B-Instruct photos.csv --out runs/layers
    """

    model: str
    data: str
    out: str = option(required=True)
    pairs: int = option(200, least=1)
    share: float = 0.95


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.devices import choose_device
    from conjoin.evaluation import analyse_mllm
    from conjoin.hub import load_trainable

    device = choose_device(options.device)
    rows: Any = options.load_rows(options.data, only="both")
    rows = rows.select(range(min(options.pairs, len(rows))))
    model, processor = load_trainable(options.model, revision=options.revision)
    results = analyse_mllm(
        model.to(device).eval(),
        processor,
        [{"image": row["image"], "text": row["text"]} for row in rows],
        share=options.share,
        show_progress=not options.quiet,
    )
    results.model |= {"name": options.model}
    results.dataset |= {"name": options.data, "split": options.split}
    print(f"{results.summary}\nwrote {results.save(options.out)}")
