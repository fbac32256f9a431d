"""The options of encoders, collections and mining, for functions and for the program; importing them loads nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from conjoin.constants import DTYPES, INPUT_TYPES, ON_ERROR, POOLINGS, option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a model is loaded as an encoder, and computes.

    Args:
        batch_size: Items per forward pass.
        device: Where to run; `None` takes a GPU when there is one.
        dtype: Run under autocast to this type, e.g. `torch.bfloat16`; `None` computes as the weights are,
            `"auto"` in bfloat16 if `conjoin.devices.choose_bf16` finds it faster here.
        num_workers: Processes that decode images and tokenise ahead of the model; 0 does it in this one.
        input_type: How an item with several images is embedded, `"seq"`, `"cat"` or `"avg"`; see `ItemEncoder`.
        dims: Keep this many leading numbers of each vector, L2-normalised again (Matryoshka); all when None.
        pooling: Of a bare checkpoint that does not say how it pools: `"mean"`, `"cls"` or `"last"`.
        preset: Load an MLLM as a published embedder, one of `conjoin.hub.embedder.PRESETS`.
        trust_remote_code: Run Python code from the folder where a model of another package needs it.
        revision: Branch, tag or commit of a repository on the Hub; a commit never changes.
    """

    batch_size: int = option(
        32, "--batch-size", type=int, metavar="N", help="items per forward pass (default: %(default)s)"
    )
    device: "str | torch.device | None" = option(
        None, "--device", help="cpu, cuda, cuda:1, ... (default: a GPU when there is one)"
    )
    dtype: "torch.dtype | str | None" = None
    num_workers: int = option(
        0, "--workers", type=int, metavar="N", help="processes that decode images ahead (default: %(default)s)"
    )
    input_type: str | None = option(
        None,
        "--input",
        choices=INPUT_TYPES,
        help="how an item with several images is embedded: seq: images and texts in their order; cat: its images "
        "as one picture, its texts joined; avg: the mean of the embeddings of each image with its text (default: as "
        "the model was saved, else seq)",
    )
    dims: int | None = option(
        None,
        "--dims",
        type=int,
        metavar="N",
        help="keep the N leading numbers of each vector, normalised again, for models trained so (Matryoshka)",
    )
    pooling: str | None = option(
        None,
        "--pooling",
        choices=POOLINGS,
        help="how a bare checkpoint such as BERT or DINOv2 becomes one vector: the mean of its tokens, the CLS token "
        "or the last token (models that say it themselves take none)",
    )
    preset: str | None = option(
        None,
        "--preset",
        metavar="NAME",
        help="load an MLLM as the published embedder NAME: qwen3_vl_embedding, gme_qwen2_vl or vlm2vec",
    )
    trust_remote_code: bool = option(
        False,
        "--trust-remote-code",
        action="store_true",
        help="run Python code from the model's folder, if it needs any; models of this package need none",
    )
    revision: str | None = option(
        None,
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the Hub (default: its main branch)",
    )


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How rows become a collection.

    Args:
        sync: Remove the rows of the collection that are not among those given.
        prompt: Given to the model with every row, in place of its own prompt for documents.
        prompt_name: The name of one of the model's prompts, likewise.
        role: What the rows are: `"document"`, or `"query"` for queries whose vectors are stored.
        dtype: Type of the stored numbers, `"float32"` or `"float16"`.
        on_error: `"skip"` leaves out the rows that cannot be used: whose image or text cannot be read, or that have a
            `problem` (see `load_pairs`); `Collection.skipped` lists them, and they are removed if they were there.
        keep_pictures: Also store a JPEG thumbnail of each row's picture, at most this many pixels wide and high.
        settings: What else the vectors are made from (plain values, as JSON holds them); recorded, and compared.

    Raises:
        ValueError: An unknown `dtype`.
    """

    sync: bool = option(
        False, "--sync", action="store_true", help="also remove the rows of the collection that are no longer in DATA"
    )
    prompt: str | None = option(
        None,
        "--prompt",
        metavar="TEXT",
        help="text before each item, or the instruction of a model that follows instructions (default: the model's "
        "own prompt for documents, if it has one)",
    )
    prompt_name: str | None = option(
        None, "--prompt-name", metavar="NAME", help="one of the prompts that the model has by name"
    )
    role: Literal["query", "document"] = "document"
    dtype: str = option("float32", "--dtype", choices=DTYPES, help="type of the stored numbers (default: %(default)s)")
    on_error: str = option(
        "raise",
        "--on-error",
        choices=ON_ERROR,
        help="what to do with a row that cannot be used: stop, or skip it and list it in skipped.jsonl in --out "
        "(default: %(default)s)",
    )
    keep_pictures: int | None = option(
        None,
        "--keep-pictures",
        type=int,
        nargs="?",
        const=256,
        metavar="PX",
        help="also keep a JPEG thumbnail of each picture, at most PX pixels wide and high (256 if not given)",
    )
    settings: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; expected 'float32' or 'float16'")


@dataclass(frozen=True, kw_only=True)
class MiningOptions:
    """How hard negatives are searched.

    Args:
        k: Negatives per miner.
        index: How to search: `"exact"`, or a factory string of FAISS such as `"IVF4096,PQ64"`.
        device: Where `"exact"` ranks, such as `"cuda"`.
        block: Anchors that are searched at once.
        dtype: Type of the stored embeddings, `"float32"` or `"float16"`.
        prompt: Of the anchors, in place of each model's own prompt for queries.
        prompt_name: The name of one of the model's prompts, likewise.
    """

    k: int = option(10, "-k", type=int, help="negatives per row and miner (default: %(default)s)")
    index: str = option(
        "exact",
        "--index",
        metavar="FACTORY",
        help='exact, or an index of FAISS by its factory string, such as "IVF4096,PQ64" (default: %(default)s)',
    )
    device: str = "cpu"
    block: int = 4096
    dtype: str = option("float32", "--dtype", choices=DTYPES, help="type of the stored numbers (default: %(default)s)")
    prompt: str | None = None
    prompt_name: str | None = None
