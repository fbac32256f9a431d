"""The options that several commands share, and what they stand for: rows and encoders."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conjoin.constants import AUTO
from conjoin.retrieval.options import ComputeOptions, EncodeOptions, MiningOptions

if TYPE_CHECKING:
    import torch

    from conjoin.data.pair_sources import AnyDataset
    from conjoin.retrieval import ItemEncoder, Reranker

_DATA: dict[str, dict[str, Any]] = {
    "--image-column": {"metavar": "NAME", "help": "column of the images, when it cannot be guessed"},
    "--text-column": {"metavar": "NAME", "help": "column of the texts, when it cannot be guessed"},
    "--id-column": {"metavar": "NAME", "help": 'column of the ids, when it cannot be guessed; "" for row numbers'},
    "--group-column": {
        "metavar": "NAME",
        "help": "column of what a row shows: rows of one group are not negatives of one another",
    },
    "--split": {
        "default": "train",
        "metavar": "NAME",
        "help": "split of a dataset that has several (default: %(default)s)",
    },
    "--only": {
        "choices": ("image", "text"),
        "help": "read this part of every row; the data need not have the other (default: image and text as one item)",
    },
    "--streaming": {"action": "store_true", "help": "read while encoding, without loading the data first"},
}


def _flags(kind: type) -> dict[str, dict[str, Any]]:
    """The options that a dataclass declares: `add_argument`'s arguments by flag."""
    declared = {field.name: (field.default, dict(field.metadata)) for field in fields(kind) if field.metadata}
    return {
        settings.pop("flag"): {"dest": name, "default": default} | settings
        for name, (default, settings) in declared.items()
    }


def read_options(kind: type, args: argparse.Namespace, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """The fields of a dataclass that a command's options set.

    Args:
        kind: The dataclass.
        args: What was parsed.
        changes: Fields to set otherwise.
    """
    names = [field.name for field in fields(kind) if field.metadata]
    return {name: vars(args)[name] for name in names if name in vars(args)} | changes


_COMPUTE: dict[str, dict[str, Any]] = _flags(ComputeOptions) | {
    "--bf16": {
        "action": argparse.BooleanOptionalAction,
        "default": False,
        "help": "compute in bfloat16: faster where the hardware has it, slightly less exact (default: %(default)s)",
    },
    "--quiet": {"action": "store_true", "help": "no progress bars"},
}
_URLS: dict[str, dict[str, Any]] = {
    "--allow-urls": {"help": "fetch images from http and https URLs, within limits of bytes and seconds"},
    "--allow-private-urls": {"help": "also from private and local addresses, and through the environment's proxies"},
}
_ROOT: dict[str, Any] = {
    "metavar": "FOLDER",
    "help": "also read images of this folder; a table may otherwise name only images in its own folder (repeatable)",
}
_HELD = {
    "config.json": "a model",
    "modules.json": "a model",
    "adapter_config.json": "the adapters of a model",
    "cache.json": "a cache",
    "data/train.lance": "a collection",
}
_PROMPT_HELP = (
    "text before each query, or the instruction of a model that follows instructions (default: the model's own prompt "
    "for queries, if it has one)"
)
_OPTIONS = _DATA | _COMPUTE | _flags(MiningOptions) | _flags(EncodeOptions)

DATA_OPTIONS = tuple(name for name in _DATA if name != "--group-column")
COMPUTE_OPTIONS = tuple(name for name in _COMPUTE if name != "--revision")
URL_OPTIONS = tuple(_URLS)
COLUMN_OPTIONS = ("--image-column", "--text-column", "--id-column", "--split")
"""The data options of commands that read all parts of every row, more than once."""

COLLECTION_HELP = (
    "the collection: a folder that `conjoin encode` wrote, s3://, gs:// or az://, hf://datasets/OWNER/NAME, or "
    "http://HOST:PORT/NAME in Milvus"
)

DATA_HELP = (
    "a folder of images with captions or labels, a CSV, TSV, JSONL or Parquet file, webdataset tar shards, a dataset "
    'on the Hub, or "emoji", the embedded sample'
)
MODEL_HELP = (
    "folder or Hub name of a model: of this package, of sentence-transformers, or a text encoder, vision transformer "
    'or two-tower model of transformers; or "sample", the towers of the embedded sample as they are'
)


def add_options(
    parser: argparse.ArgumentParser, title: str, names: tuple[str, ...], **changes: dict[str, Any]
) -> argparse._ArgumentGroup:
    """Add shared options to a command.

    Args:
        parser: The command's parser.
        title: Heading of the options in the help.
        names: Which, e.g. `("--split", "--device")`.
        changes: By an option's name in Python what this command has otherwise, e.g. `batch_size={"default": 8}`.

    Returns:
        The group, for options of the command's own.
    """
    group = parser.add_argument_group(title)
    for name in names:
        group.add_argument(name, **_OPTIONS[name] | changes.get(name.strip("-").replace("-", "_"), {}))
    return group


def add_data_options(
    parser: argparse.ArgumentParser, names: tuple[str, ...] = DATA_OPTIONS
) -> argparse._ArgumentGroup:
    """Add the options of `load_rows`, all or those named."""
    return add_options(parser, "what to read", names)


def add_compute_options(
    parser: argparse.ArgumentParser, names: tuple[str, ...] = COMPUTE_OPTIONS, **changes: dict[str, Any]
) -> argparse._ArgumentGroup:
    """Add the options of `make_encoder`, all or those named."""
    return add_options(parser, "how to compute", names, **changes)


def add_url_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that allow images to be fetched from URLs; returns their group."""
    group = parser.add_argument_group("which images to read")
    for name, settings in _URLS.items():
        group.add_argument(name, action=_AllowUrls, **settings)
    return group


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that allow images outside of the data: from URLs, and from other folders."""
    add_url_options(parser).add_argument("--root", action=_AllowRoot, **_ROOT)


class _AllowRoot(argparse.Action):
    """Allows images of a folder in this process and in those it starts."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(option_strings, argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, *args: Any) -> None:  # noqa: ANN401
        """Allow it."""
        from conjoin.data.row_images import allow_root

        try:
            allow_root(values)
        except NotADirectoryError as error:
            raise argparse.ArgumentError(self, str(error)) from error


class _AllowUrls(argparse.Action):
    """Allows URLs in this process and in those it starts."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Allow them."""
        from conjoin.processing import allow_urls

        allow_urls(private="--allow-private-urls" in self.option_strings)


def load_rows(args: argparse.Namespace, source: str, **changes: Any) -> "AnyDataset":  # noqa: ANN401
    """Load the rows of a source by the data options that the command has.

    Args:
        args: What was parsed.
        source: As for `load_pairs`.
        changes: Arguments of `load_pairs` that override the options.
    """
    from conjoin.data import load_pairs

    names = [name.strip("-").replace("-", "_") for name in _DATA]
    return load_pairs(source, **{name: vars(args)[name] for name in names if name in vars(args)} | changes)


def encoder_options(args: argparse.Namespace, device: "str | torch.device | None" = None) -> dict[str, Any]:
    """The arguments of `load_encoder` by the compute options that the command has.

    Args:
        args: What was parsed.
        device: In place of `--device`.
    """
    import torch

    options = read_options(ComputeOptions, args)
    if vars(args).get("bf16"):
        options["dtype"] = AUTO if args.bf16 == AUTO else torch.bfloat16
    return options if device is None else options | {"device": device}


def encoder_loader(
    args: argparse.Namespace, device: "str | torch.device | None" = None
) -> "Callable[[str], ItemEncoder]":
    """A function that loads the encoder of a model by the compute options that the command has.

    Args:
        args: What was parsed.
        device: In place of `--device`.
    """
    from conjoin.retrieval import load_encoder

    options = encoder_options(args, device)

    def load(model: str) -> "ItemEncoder":
        return load_encoder(model, **options)

    return load


def make_encoder(args: argparse.Namespace, model: str, device: "str | None" = None) -> "ItemEncoder":
    """Load the encoder of a model by the compute options that the command has; `device` as for `encoder_loader`."""
    return encoder_loader(args, device)(model)


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Add the option for one version of the command's model."""
    parser.add_argument("--revision", **_COMPUTE["--revision"])


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add which prompt queries get."""
    group = parser.add_argument_group("what queries get")
    group.add_argument("--prompt", **_OPTIONS["--prompt"] | {"help": _PROMPT_HELP})
    group.add_argument("--prompt-name", **_OPTIONS["--prompt-name"])


def add_ranking_options(parser: argparse.ArgumentParser) -> None:
    """Add how the parts of a query are weighed, and which rows are results."""
    group = parser.add_argument_group("how to rank")
    group.add_argument(
        "--weight",
        nargs="+",
        type=_weight,
        default=[],
        metavar="PART=W",
        help="image=0.3 text=0.7: search for the weighted sum of the vectors of the query's parts, in place of the "
        "model's vector of both",
    )
    group.add_argument(
        "--group-by", metavar="COLUMN", help="show only the best row of each value of a kept column, such as a product"
    )
    group.add_argument(
        "--min-score",
        type=float,
        metavar="X",
        help="do not show rows with a score below; `conjoin evaluate --benchmark pairs` suggests one",
    )


def _weight(text: str) -> tuple[str, float]:
    part, _, weight = text.partition("=")
    if part not in ("image", "text"):
        raise argparse.ArgumentTypeError(f"expected image=NUMBER or text=NUMBER, got {text!r}")
    try:
        return part, float(weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {part}=NUMBER, got {text!r}") from None


def add_rerank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `make_reranker`."""
    group = parser.add_argument_group("how to rerank")
    group.add_argument(
        "--rerank", metavar="MODEL", help="a CrossEncoder of sentence-transformers that sorts the first results again"
    )
    group.add_argument(
        "--rerank-top", type=int, default=100, metavar="N", help="results that it sorts (default: %(default)s)"
    )


def make_reranker(args: argparse.Namespace) -> "Reranker | None":
    """Load the reranker that the command names, if any."""
    from conjoin.retrieval import load_reranker

    check_counts(args, rerank_top=1)
    if args.rerank is None:
        return None
    names = ("device", "batch_size", "trust_remote_code")
    return load_reranker(args.rerank, **{name: vars(args)[name] for name in names if name in vars(args)})


def check_counts(args: argparse.Namespace, **least: int) -> None:
    """Refuse numbers that are too small.

    Args:
        args: What was parsed.
        least: By an option's name in Python the least number it may be.

    Raises:
        ValueError: One is below that.
    """
    for name, number in least.items():
        if vars(args)[name] < number:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be at least {number}, got {vars(args)[name]}")


def check_out(out: str) -> Path:
    """Refuse an output folder that holds a model, or the files of another command; other files may lie there.

    Args:
        out: The folder; it need not exist.

    Returns:
        Its path.

    Raises:
        ValueError: The message names what it holds.
    """
    folder = Path(out)
    for name, held in _HELD.items():
        if (folder / name).exists():
            raise ValueError(f"--out {out!r} holds {held} ({name}); choose another folder")
    return folder
