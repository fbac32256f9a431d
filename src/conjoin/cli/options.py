"""The options of a command are the fields of a dataclass: its parser, and the fields that several commands share.

A field without a default is an argument, any other a flag; its help is what the docstring or its metadata says of it.
They are parsed by argparse, not by the `HfArgumentParser` of recipes: that takes 1.3 s to import, shows each flag
twice in the help, and lets a flag such as `--quiet` take the argument behind it for its value.
"""

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from accelerate import PartialState

    from conjoin.data.pair_sources import AnyDataset
    from conjoin.retrieval import Reranker

T = TypeVar("T")


def option(default: Any = None, **settings: Any) -> Any:  # noqa: ANN401 - a field of any type
    """A field with settings that its type does not give.

    Args:
        default: Of the field; `MISSING` for an argument without a flag.
        settings: As for `ArgumentParser.add_argument`; and `least`, the smallest number that is taken.
    """
    if default == []:
        return field(default_factory=list, metadata=settings)
    return field(default=default, metadata=settings)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # noqa: ANN401 - it does not return
        raise ValueError(f"{message}; see {self.prog} --help")


def make_parser(kind: type[Any], prog: str) -> argparse.ArgumentParser:
    """The parser of a command.

    Args:
        kind: Its dataclass. The docstring is the help. A class that it inherits from is a group of flags, with its own
            docstring as the heading.
        prog: What a user types for it.
    """
    text, _, example = str(inspect.getdoc(kind)).partition("\n\nExample:\n")
    about = text.partition("\n\nArgs:\n")[0]
    parser = _Parser(prog, description=about, epilog=f"example: {example}", allow_abbrev=False)
    hints, left = get_type_hints(kind), {each.name: each for each in fields(kind)}
    for owner in kind.__mro__:
        doc = str(inspect.getdoc(owner))
        helps = dict(re.findall(r"^    (\w+): (.+(?:\n     +.+)*)", doc.partition("Args:\n")[2], re.MULTILINE))
        helps |= {name: each.metadata["help"] for name, each in left.items() if "help" in each.metadata}
        own = [left.pop(name) for name in inspect.get_annotations(owner) if name in left and name in helps]
        is_own = owner.__module__ == kind.__module__
        group = parser if is_own or not own else parser.add_argument_group(doc.partition(".")[0].lower())
        for each in own:
            _add(group, each, hints[each.name], " ".join(helps[each.name].split()), is_own)
    return parser


def _add(group: argparse._ActionsContainer, each: "Field[Any]", hint: Any, help: str, is_own: bool) -> None:  # noqa: ANN401
    """Add a field to a parser."""
    default = each.default_factory() if each.default_factory is not MISSING else each.default
    settings: dict[str, Any] = {"help": help.rstrip(".").replace("%", "%%")}
    hint = next((of for of in get_args(hint) if NoneType in get_args(hint) and of is not NoneType), hint)
    if get_origin(hint) is list:
        hint = get_args(hint)[0]
        settings |= {} if "action" in each.metadata else {"nargs": "+"}
    if hint is bool:
        settings["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
    elif get_origin(hint) is Literal:
        settings["choices"] = get_args(hint)
    else:
        settings |= {"type": hint} | ({"metavar": "N"} if hint in (int, float) else {})
    settings |= {name: value for name, value in each.metadata.items() if name not in ("help", "least")}
    if default is MISSING and is_own:
        group.add_argument(each.name, **{"metavar": each.name.upper()} | settings)
        return
    if default is MISSING:
        settings["required"] = True
    elif default not in (None, []) and hint is not bool:
        settings["help"] += " (default: %(default)s)"
    flag = f"-{each.name}" if len(each.name) == 1 else f"--{each.name.replace('_', '-')}"
    group.add_argument(flag, default=default, **settings)


def parse(kind: type[T], words: Sequence[str], prog: str) -> T:
    """The options of a command. Unknown flags are the field `overrides`, if the dataclass has it.

    Args:
        kind: Its dataclass.
        words: What stands behind `prog`.
        prog: What a user types for it.

    Raises:
        ValueError: A flag is unknown, which names the nearest, or a value is wrong or missing.
    """
    parser = make_parser(kind, prog)
    args, rest = parser.parse_known_args(words)
    if "overrides" in inspect.get_annotations(kind):
        return kind(**vars(args) | {"overrides": rest})
    if rest:
        known = ["--help", *re.findall(r"--[\w-]+", parser.format_usage())]
        is_text = "text" in vars(args) and not rest[0].startswith("-")
        hint = f"did you mean --text {rest[0]!r}?" if is_text else remedy(rest[0], known, prog)
        raise ValueError(f"unrecognized arguments: {' '.join(rest)}; {hint}")
    options = kind(**vars(args))
    for each in fields(kind):  # type: ignore[arg-type]
        least, value = each.metadata.get("least"), vars(options)[each.name]
        if least is not None and value is not None and value < least:
            raise ValueError(f"--{each.name.replace('_', '-')} must be at least {least}, got {value}")
    return options


def remedy(word: str, known: Iterable[str], prog: str) -> str:
    """What to do about an unknown word: write the nearest known one, or read the help."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"see {prog} --help"


def name_equals_number(word: str) -> tuple[str, float]:
    """Read `NAME=NUMBER`; argparse names this function where a word is something else."""
    name, _, number = word.partition("=")
    return name, float(number)


@dataclass(kw_only=True)
class ImageOptions:
    """Which images to read.

    Args:
        allow_urls: Fetch images from http and https URLs, within limits of bytes and seconds.
        allow_private_urls: Also from private and local addresses, and through the environment's proxies.
        root: Also read images of this folder; a table may otherwise name only images in its own folder (repeatable).
    """

    allow_urls: bool = False
    allow_private_urls: bool = False
    root: list[str] = option([], action="append")

    def allow(self) -> None:
        """Allow them in this process and in those it starts."""
        if self.allow_urls or self.allow_private_urls:
            from conjoin.processing import allow_urls

            allow_urls(private=self.allow_private_urls)
        for folder in self.root:
            from conjoin.data.row_images import allow_root

            allow_root(folder)


@dataclass(kw_only=True)
class ColumnOptions:
    """What to read.

    Args:
        columns: Columns that are not guessed right, such as image=photo text=name,brand id=sku group=product; the
            texts of several columns are joined, and id= stands for row numbers.
        split: Split of a dataset that has several.
    """

    columns: list[str] = option([], metavar="ROLE=COLUMN")
    split: str = "train"

    def load_rows(self, source: str, **further: Any) -> "AnyDataset":  # noqa: ANN401
        """Load rows by the options that are arguments of `load_pairs`; `further` are others."""
        from conjoin.data import load_pairs

        return load_pairs(source, **pick(self, "columns", "split", "only", "streaming") | further)


@dataclass(kw_only=True)
class PromptOptions:
    """What stands before items.

    Args:
        prompt: Text before each query, or of `conjoin encode` before each row; or the instruction of a model that
            follows instructions (default: the model's own prompt for queries, or for documents, if it has one).
        prompt_name: One of the prompts that the model has by name.
    """

    prompt: str | None = None
    prompt_name: str | None = None


@dataclass(kw_only=True)
class RankingOptions:
    """How to rank.

    Args:
        weight: image=0.3 text=0.7: search for the weighted sum of the vectors of the query's parts, in place of the
            model's vector of both.
        group_by: Show only the best row of each value of this kept column, such as a product.
        min_score: Do not show rows with a score below; `conjoin evaluate --benchmark pairs` suggests one.
    """

    weight: list[tuple[str, float]] = option([], type=name_equals_number, metavar="PART=W")
    group_by: str | None = None
    min_score: float | None = None


@dataclass(kw_only=True)
class RerankOptions:
    """How to rerank.

    Args:
        rerank: A CrossEncoder of sentence-transformers that sorts the first results again.
        rerank_top: Results that it sorts.
    """

    rerank: str | None = None
    rerank_top: int = option(100, least=1)

    def load_reranker(self) -> "Reranker | None":
        """Load the reranker, if any."""
        if self.rerank is None:
            return None
        from conjoin.retrieval import load_reranker

        return load_reranker(self.rerank, **pick(self, "device", "batch_size", "trust_remote_code"))


@dataclass(kw_only=True)
class DeviceOptions:
    """How to load the model.

    Args:
        revision: Branch, tag or commit of a model on the Hub (default: its main branch).
        device: cpu, cuda, cuda:1, ... (default: a GPU when there is one).
        quiet: No progress bars.
    """

    revision: str | None = None
    device: str | None = None
    quiet: bool = False


@dataclass(kw_only=True)
class EncoderOptions(DeviceOptions):
    """How to read the model.

    Args:
        input: How an item with several images is embedded: seq: images and texts in their order; cat: its images as
            one picture, its texts joined; avg: the mean of the embeddings of each image with its text (default: as the
            model was saved, else seq; avg if it takes one image).
        pooling: How a bare checkpoint such as BERT or DINOv2 becomes one vector: the mean of its tokens, the CLS token
            or the last token (models that say it themselves take none).
        preset: Load an MLLM as the published embedder of this name: qwen3_vl_embedding, gme_qwen2_vl or vlm2vec.
        trust_remote_code: Run Python code from the model's folder, if it needs any; models of this package need none.
    """

    input: Literal["seq", "cat", "avg"] | None = None
    pooling: Literal["mean", "cls", "last"] | None = None
    preset: str | None = None
    trust_remote_code: bool = False

    def encoder_options(self) -> dict[str, Any]:
        """The arguments of `load_encoder` beside the model."""
        names = ("batch_size", "threads", "device", "truncate_dim", "pooling", "preset", "compile")
        found = pick(self, *names, "trust_remote_code", "revision") | {"input_type": self.input}
        if getattr(self, "bf16", False):
            found["dtype"] = "bfloat16"
        return found


@dataclass(kw_only=True)
class ComputeOptions(EncoderOptions):
    """How to compute.

    Args:
        batch_size: Items per forward pass.
        threads: Threads that decode images ahead (default: as many as there are cores).
        truncate_dim: Keep the N leading numbers of each vector, normalised again, for models trained so (Matryoshka).
        bf16: Compute in bfloat16: faster where the hardware has it, slightly less exact.
        compile: Compile the layers of the model: a minute at the start, then faster, above all on a GPU.
    """

    batch_size: int = option(32, least=1)
    threads: int | None = option(least=1)
    truncate_dim: int | None = option(least=1)
    bf16: bool | None = False
    compile: bool = False

    def launched(self) -> "PartialState | None":
        """Connect to the other processes of `accelerate launch` or `torchrun`, if any, and take a GPU for this one."""
        from conjoin.retrieval import launched_processes

        processes = launched_processes()
        if processes is not None:
            import torch

            if self.device is None and (gpus := torch.cuda.device_count()):
                self.device = f"cuda:{processes.local_process_index % gpus}"
            self.quiet |= not processes.is_main_process
        return processes


def pick(options: Any, *names: str) -> dict[str, Any]:  # noqa: ANN401 - a command's options
    """The options of these names that the command has."""
    return {name: vars(options)[name] for name in names if name in vars(options)}
