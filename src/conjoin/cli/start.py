"""`conjoin start`: from a table of products to the search app."""

from dataclasses import dataclass
from typing import Literal

from conjoin.cli.options import ImageOptions


@dataclass(kw_only=True)
class Options(ImageOptions):
    """Make TABLE searchable, and open the search app.

    Looks at which columns are the pictures, the titles, the ids, the prices and the categories, encodes the table into
    a collection, and opens the app. Each step is a command of its own, printed as such. Run it again after a change of
    TABLE: only what is new is encoded.

    Args:
        table: A CSV, TSV, JSONL or Parquet file, a row for each product.
        model: Folder or Hub name of a model (default: that of --out if it is there, else a CLIP model from the Hub,
            else "sample", the towers of the embedded sample).
        out: The collection (default: runs/NAME of TABLE).
        no_app: Stop before the app.
        image_column: Column of the pictures, when it is not guessed right.
        text_column: Column of the titles, when it is not guessed right.
        id_column: Column of the ids, when it is not guessed right; "" for row numbers.
        pooling: Literal["mean", "cls", "last"] | None = None
        preset: Of an MLLM, as for `conjoin encode`.

    Example:
        conjoin start catalogue.csv --no-app
    """

    table: str
    model: str | None = None
    out: str | None = None
    no_app: bool = False
    image_column: str | None = None
    text_column: str | None = None
    id_column: str | None = None
    pooling: Literal["mean", "cls", "last"] | None = None
    preset: str | None = None


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.cli.main import run_command
    from conjoin.demo.products import find_products
    from conjoin.demo.start import ABOUT, choose_model, command_line, default_out, describe, has_app, start_commands

    products = find_products(options.table, options.image_column, options.text_column, options.id_column)
    print(f"{options.table}: " + "\n".join(describe(products)))
    out = options.out or default_out(options.table)
    model, reason = choose_model(out, options.model)
    print(f"Model: {model}, {reason}.", ABOUT.get(model, ""))
    loading = {"--pooling": options.pooling, "--preset": options.preset}
    steps = start_commands(options.table, products, out, model, loading)
    for number, words in enumerate(steps, 1):
        if number == len(steps) and (options.no_app or not has_app()):
            needs = "" if has_app() else ', which needs pip install "conjoin[app]"'
            print(f"\nThe app{needs}:\n{command_line(words)}")
            return
        print(f"\n{number}/{len(steps)}  {command_line(words)}", flush=True)
        run_command(words)
