"""Encoding of files by `encode_collection` and by plain `SentenceTransformer.encode`, with the same weights.

All weights are random. The pictures are JPEG files of 640 x 480 pixels, the texts have 3 to 60 words. Both sides read
the same files with the same batch size and number of threads, in turns; the order is reversed in every second turn. A
ratio is the median over the turns of (time of sentence-transformers / time of ours), with its range. `cpu` is
processor time: other programs on the machine affect it less than wall time. Ours writes a
collection: its commits, checksums and the digests of the rows are part of its time. The row `array` returns an array
instead, as sentence-transformers does.

`first` is the time until the first batch of vectors is there, in seconds: of ours without a collection.

The models are this package's four, which sentence-transformers runs by the code in their folders, and a stock CLIP,
which it runs by its own. `not model` is the share of ours that is not the model's forward. `input` in --sizes is a
model so small that nearly all time is spent on its inputs, as on a GPU, where `gpu.py --sections encode` measures.

    python benchmarks/encode_throughput.py --json encode_throughput.json
    python benchmarks/encode_throughput.py --size tiny --rows 8 --turns 1          # a quick test of the script
    python benchmarks/encode_throughput.py --size small --models joint_encoder --kinds text --compile
"""

import argparse
import copy
import json
import random
import string
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pruned_mllm
import torch
from PIL import Image, ImageFilter
from sentence_transformers import SentenceTransformer
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
    ViTImageProcessorPil,
)
from turns import median, setup, speed_up, table, take_turns, write_json

from conjoin import JointEncoderModel, TokenFusionModel
from conjoin.hub import export
from conjoin.hub.build import mllm_model, mllm_processor, score_fusion_model, towers_model
from conjoin.processing import ImageTextProcessor
from conjoin.retrieval import ItemEncoder, encode_collection, load_encoder

MODELS = ("joint_encoder", "score_fusion", "token_fusion", "mllm_retriever", "stock_clip")
SIZES: dict[str, dict[str, Any]] = {  # width, layers and heads of the towers; patch and image side; the MLLM's size
    "tiny": {"vision": (32, 1, 2), "text": (32, 1, 2), "patch": 16, "side": 32, "mllm": "tiny"},
    "input": {"vision": (32, 1, 2), "text": (32, 1, 2), "patch": 32, "side": 224, "mllm": "tiny"},
    "small": {"vision": (384, 12, 6), "text": (384, 6, 12), "patch": 32, "side": 224, "mllm": "small"},
    "base": {"vision": (768, 12, 12), "text": (768, 12, 12), "patch": 16, "side": 224, "mllm": "small"},
}
LETTERS = string.ascii_lowercase + string.digits


def write_files(folder: Path, rows: int, pictures: bool = True) -> list[dict[str, str]]:
    """Write `rows` pictures, unless no kind needs them, and make as many texts."""
    folder.mkdir(parents=True)
    numbers, source, found = np.random.default_rng(0), random.Random(0), []
    for number in range(rows):
        path = folder / f"{number}.jpg"
        if pictures:
            colours = Image.fromarray(numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((640, 480))
            grain = numbers.normal(0, 6, (480, 640, 1)) + np.asarray(colours.filter(ImageFilter.SHARPEN))
            Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8)).save(path, quality=90)
        words = source.choices(pruned_mllm.WORDS, k=min(60, 3 + int(source.expovariate(1 / 12))))
        found.append({"id": str(number), "image": str(path), "text": " ".join(words)})
    return found


def bert_tokenizer() -> BertTokenizer:
    """Knows the words of the texts, and letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    words = sorted({*pruned_mllm.WORDS} - {*pieces})
    return BertTokenizer(vocab={piece: place for place, piece in enumerate([*pieces, *words])}, model_max_length=128)


def clip_tokenizer() -> CLIPTokenizer:
    """Knows letters alone: a token for each."""
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def layers(width: int, depth: int, heads: int) -> dict[str, int]:
    """The settings of a tower."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width}
    return sizes | {"num_hidden_layers": depth, "num_attention_heads": heads}


def clip(size: Mapping[str, Any]) -> tuple[CLIPModel, CLIPImageProcessorPil, CLIPTokenizer]:
    """A stock CLIP and what makes its inputs."""
    text = {"vocab_size": 74, "bos_token_id": 72, "eos_token_id": 73, **layers(*size["text"])}
    vision = {"image_size": size["side"], "patch_size": size["patch"], **layers(*size["vision"])}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=size["text"][0]))
    pixels = {"height": size["side"], "width": size["side"]}
    return model, CLIPImageProcessorPil(size={"shortest_edge": size["side"]}, crop_size=pixels), clip_tokenizer()


def save_model(name: str, size: Mapping[str, Any], folder: Path) -> None:
    """Write a model with random weights."""
    torch.manual_seed(0)
    if name == "mllm_retriever":
        pruned_mllm.save_checkpoint(size["mllm"], folder / "mllm")
        model = mllm_model(folder / "mllm", pruned_mllm.KEEP)
        processor = mllm_processor(folder / "mllm", max_pixels=256 * 28 * 28)
        export(model, processor, folder)
        return
    if name in ("score_fusion", "stock_clip"):
        own, images, tokenizer = clip(size)
        if name == "stock_clip":
            for part in (own, images, tokenizer):
                part.save_pretrained(folder)
            return
        export(score_fusion_model(own), ImageTextProcessor(images, tokenizer), folder)
        return
    tokenizer = bert_tokenizer()
    vision = Dinov2Model(
        Dinov2Config(image_size=size["side"], patch_size=size["patch"], **_without_inner(size["vision"]))
    )
    text = BertModel(BertConfig(vocab_size=len(tokenizer), **layers(*size["text"])))
    pixels = {"height": size["side"], "width": size["side"]}
    processor = ImageTextProcessor(ViTImageProcessorPil(size=pixels), tokenizer)
    if name == "joint_encoder":
        width = {"hidden_size": size["text"][0], "num_attention_heads": size["text"][2]}
        model = towers_model(JointEncoderModel, vision, text, **width)
    else:
        ids = {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
        model = towers_model(TokenFusionModel, vision, text, **ids)
    export(model, processor, folder)


def _without_inner(sizes: tuple[int, int, int]) -> dict[str, int]:
    return {name: value for name, value in layers(*sizes).items() if name != "intermediate_size"}


def ours(encoder: ItemEncoder, rows: list[dict[str, str]], folder: Path) -> Callable[[], None]:
    """Encode the rows into a new collection."""

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            encode_collection(rows, encoder, Path(name) / "collection")

    return run


def seconds_of_model(encoder: ItemEncoder, rows: list[dict[str, str]], folder: Path) -> tuple[float, float]:
    """Seconds of the model's forward in an encoding, and of all of it."""
    spent, forward = [0.0], encoder._forward

    def timed(*arguments: Any) -> np.ndarray:  # noqa: ANN401
        start = time.perf_counter()
        found = forward(*arguments)
        spent[0] += time.perf_counter() - start
        return found

    encoder._forward = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    ours(encoder, rows, folder)()
    total = time.perf_counter() - start
    encoder._forward = forward  # type: ignore[method-assign]
    return spent[0], total


def compare(name: str, kind: str, rows: list[dict[str, str]], folder: Path, args: argparse.Namespace) -> list[dict]:
    """The table rows of a model and a kind of item."""
    some = [{"id": row["id"]} | {part: row[part] for part in kind.split("+")} for row in rows]
    items: list[Any] = [row[kind] if "+" not in kind else {k: row[k] for k in kind.split("+")} for row in some]
    path = folder / name
    plain = SentenceTransformer(str(path), device="cpu", trust_remote_code=True)
    precision = torch.bfloat16 if args.bf16 else None
    encoder = load_encoder(path, batch_size=args.batch_size, device="cpu", dtype=precision)

    def theirs() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            plain.encode(items, batch_size=args.batch_size, show_progress_bar=False)

    runs: dict[str, Callable[[], object]] = {"sentence-transformers": theirs}
    encoders = {f"{count} threads": copy.copy(encoder) for count in args.read_threads}
    for count, one in zip(args.read_threads, encoders.values(), strict=True):
        one.threads = count
    if args.compile:
        options: Any = {"batch_size": args.batch_size, "device": "cpu", "dtype": precision, "compile": True}
        encoders["compiled"] = load_encoder(path, **options)
    runs |= {label: ours(one, some, folder) for label, one in encoders.items()}
    runs["array"] = lambda: encoder.encode(items)
    encoders["array"] = encoder
    check_equal(encoder, plain, some, items, name)
    model, total = seconds_of_model(encoder, some, folder)
    found = take_turns(runs, args.turns)
    rows_found = []
    for label in encoders:
        ratio, seconds = speed_up(found["sentence-transformers"], found[label]), median(found[label])
        row = {"model": name, "items": kind, "ours": label, "per_second": len(some) / seconds.wall}
        row |= {"wall": ratio["wall"], "range": f"{ratio['wall_low']:.2f} to {ratio['wall_high']:.2f}"}
        start = time.perf_counter()
        next(encoders[label].encode_batches(items))
        row |= {"cpu": ratio["cpu"], "first": time.perf_counter() - start}
        rows_found.append(row | {"not_model": 1 - model / total})
    return rows_found


def check_equal(
    encoder: ItemEncoder, plain: SentenceTransformer, rows: list[dict[str, str]], items: list[Any], name: str
) -> None:
    """Make sure that both compute the same vectors.

    Raises:
        ValueError: They do not.
    """
    if "text" in rows[0] and "image" in rows[0] and name == "stock_clip":
        return  # sentence-transformers has no vector for both
    mine = encoder.encode(items[:4])
    other = np.asarray(plain.encode(items[:4], normalize_embeddings=True, show_progress_bar=False))
    difference = float(np.abs(mine - other).max())
    if difference > (5e-3 if encoder.dtype is None else 0.05):
        raise ValueError(f"{name}: the vectors differ by {difference}")


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=("image", "text", "image+text"), default=["image", "text"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--read-threads", type=int, nargs="+", default=[1, 2], help="of ours; each is a row")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in both")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16, in both")
    parser.add_argument("--compile", action="store_true", help="also ours with compiled layers")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {"setup": setup(args), "rows": []}
    print(json.dumps(found["setup"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_files(folder / "pictures", args.rows, args.kinds != ["text"])
        for model in args.models:
            save_model(model, SIZES[args.size], folder / model)
            for kind in args.kinds:
                if model == "stock_clip" and "+" in kind:
                    continue
                more = compare(model, kind, rows, folder, args)
                print(f"\n{table(more)}", flush=True)
                found["rows"] += more
                write_json(args.json, found)


if __name__ == "__main__":
    main()
