"""`conjoin explain`: what a joint encoder finds of a text in an image, and the reverse."""

from dataclasses import dataclass
from typing import Any

from conjoin.cli.options import ColumnOptions, DeviceOptions, ImageOptions, option, pick


@dataclass(kw_only=True)
class Options(ColumnOptions, ImageOptions, DeviceOptions):
    """Draw how much each patch of an image is like a text, and each word like the image.

    By the local scores of a joint encoder; with the segments of the image and, where thresholds are known, the
    intersection and the samples that stage 2 of SOLAR would construct. Thresholds are given, or fitted to pairs
    (--data).

    Args:
        model: Folder or Hub name of a joint encoder.
        image: Path or URL of the image; several are shown as the one picture that input type cat makes of them.
        text: The text.
        out: Where explanation.html goes.
        image_threshold: Patches of a larger cosine are shared.
        text_threshold: Words of a larger cosine are shared.
        data: Pairs to fit thresholds to, as `conjoin encode` reads them.
        pairs: How many of them, from the start.

    Example:
        conjoin explain runs/demo/model --image photo.jpg --text "a dog on the beach" --data photos.csv --out
        runs/explained
    """

    model: str
    image: list[str] = option([], required=True, action="append")
    text: str = option(required=True)
    out: str = option(required=True)
    image_threshold: float | None = None
    text_threshold: float | None = None
    data: str | None = None
    pairs: int = option(64, least=2)


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.data.row_images import plain_text, row_item
    from conjoin.devices import choose_device
    from conjoin.hub import load_model
    from conjoin.trainers.solar_explain import explain_pair, fit_thresholds, render_explanation

    device = choose_device(options.device)
    loaded, processor = load_model(options.model, revision=options.revision)
    model: Any = loaded.to(device)  # type: ignore[arg-type]
    explanation = explain_pair(model, processor, options.image, plain_text(options.image, options.text))
    taus: dict[str, Any] = {}
    if options.data is not None:
        rows: Any = options.load_rows(options.data, only="both")
        chosen = rows.select(range(min(options.pairs, len(rows))))
        pairs = [row_item({"image": row["image"], "text": row["text"]}) for row in chosen]
        taus = {f"{part}_threshold": value for part, value in fit_thresholds(model, processor, pairs).items()}
    given = pick(options, "image_threshold", "text_threshold")
    taus |= {name: value for name, value in given.items() if value is not None}
    print(f"wrote {render_explanation(explanation, options.out, **taus)}")
