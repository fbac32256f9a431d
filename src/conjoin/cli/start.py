"""`conjoin start`: from a table of products to the search app."""

import os
import shlex
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from conjoin.cli.options import ImageOptions, option


@dataclass(kw_only=True)
class Options(ImageOptions):
    """Make TABLE searchable, and open the search app.

    Looks at which columns are the pictures, the titles, the ids, the prices and the categories, encodes the table into
    a collection, and opens the app. Each step is a command of its own, printed as such. Run it again after a change of
    TABLE: only what is new is encoded.

    Args:
        table: A CSV, TSV, JSONL or Parquet file, a row for each product; or a folder of pictures.
        model: Folder or Hub name of a model (default: that of --out if it is there, else a CLIP model from the Hub,
            else "sample", the towers of the embedded sample).
        out: The collection (default: runs/NAME of TABLE, runs/NAME-folder of a folder).
        no_app: Stop before the app.
        port: Of the app; 0 for a free one.
        columns: Columns that are not guessed right, such as image=photo text=name,brand id=sku group=product; the
            texts of several columns are joined, and id= stands for row numbers.
        keep: Columns for filters and results, in place of those that are guessed; price:number as for
            `conjoin encode`.
        encoding: Of a CSV file, such as cp1250 (default: UTF-8, else Windows-1252).

    Example:
        conjoin start catalogue.csv --no-app
    """

    table: str
    model: str | None = None
    out: str | None = None
    no_app: bool = False
    port: int | None = None
    columns: list[str] = option([], metavar="ROLE=COLUMN")
    keep: list[str] = field(default_factory=list)
    encoding: str | None = None


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.cli.main import run_command
    from conjoin.data.csv_files import ENCODING
    from conjoin.start.commands import ABOUT, check_table, choose_model, start_commands

    if options.encoding is not None:
        os.environ[ENCODING] = options.encoding
    check_table(options.table)
    from conjoin.start.products import find_products

    products = find_products(options.table, options.columns, options.keep)
    print(f"{options.table}: " + "\n".join(products.lines))
    path = Path(options.table).resolve()
    name = f"{path.name}-folder" if path.is_dir() else path.name.partition(".")[0]
    out = options.out or f"runs/{name}"
    model, reason = choose_model(out, options.model)
    print(f"Model: {model}, {reason}.", ABOUT.get(model, ""))
    encode, app = start_commands(options.table, products, out, model, options.encoding)
    print(f"\n1/2  {shlex.join(['conjoin', *encode])}", flush=True)
    run_command(encode)
    app += [] if options.port is None else ["--port", str(options.port)]
    line = shlex.join(["conjoin", *app])
    if find_spec("fastapi") is None:
        print(f'\nThe app, which needs pip install "conjoin[serve]":\n{line}')
    elif options.no_app:
        print(f"\nThe app:\n{line}")
    else:
        print(f"\n2/2  {line}", flush=True)
        run_command(app)
