"""What one GPU does, in one command and at most `--minutes`.

    python benchmarks/gpu.py --json runs/gpu.json
    python benchmarks/gpu.py --toy                    # all of it at toy size, on the CPU where there is no GPU

All weights and data are random; the models have the shapes of real ones. The sections, in this order:

    forward  a Qwen3-VL of the 2B shape and its first half of layers, in bfloat16: texts, and images within a text
    train    one step of the whole model with LoRA and the gradient cache: InfoNCE from texts to images, then AdamW
    kernel   GCL forward and backward for N pairs (a matrix of 3N x 3N) in float32, and the same on the whole matrix
    encode   JPEG files of 640 x 480 by a CLIP of the ViT-B/32 shape: by sentence-transformers into an array, by ours
             into a collection, by number of threads (its default first)
    search   `exact_search` of float16 vectors in the memory of the machine, which cross to the GPU in every call but
             for one query; of vectors that the GPU holds; and, not exact, the product and `topk` of torch in float16
    compiled the texts of `forward` by compiled layers, and the seconds until the first batch is there

`ms` is the median of `runs` calls, after one that is not counted, each until the GPU is done. `gb` is the peak of
allocated GPU memory in 10^9 bytes, weights included. `tflops` counts operations as torch does, attention without
regard to its causal mask, both passes of the gradient cache; `share` is that of the dense bfloat16 peak in the data
sheet, for the devices in `PEAKS`.

Each section has its seconds in `SECTIONS`: it is not started where they could pass `--minutes`, and is stopped after
them. A section that fails is recorded with its error, and the next one starts in a new process. The file is written
after each. Without lancedb, `encode` returns an array instead of writing a collection.
"""

import argparse
import gc
import io
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer
from turns import table, write_json

from conjoin.hub.build import score_fusion_model

PEAKS = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989, "NVIDIA L40S": 362}
PEAKS |= dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312)
"""Dense bfloat16 peak by torch's name of the device, in 10^12 operations per second."""
PACKAGES = ("torch", "transformers", "sentence-transformers", "peft", "lancedb", "numpy", "pillow")
Row = dict[str, Any]

TEXT: Row = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
TEXT["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
VISION: Row = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
VISION |= {"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]}


class Full:
    """What is measured."""

    text, vision = TEXT, VISION  # of Qwen3-VL-2B
    side, tokens = 512, 64  # of an image in pixels; of a text, and of the text around an image
    texts, images = 512, 128  # of a batch
    train_rows, chunk_tokens = 256, 8192
    pairs: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    clip: Row = {}  # noqa: RUF012 - the library's defaults are ViT-B/32
    pictures, batch = 4096, 64
    threads: tuple[int | None, ...] = (None, 4)
    vectors, width = 10_000_000, 512  # the width is also that of the embeddings of `kernel`
    queries: tuple[int, ...] = (1, 100, 1000)
    backend = "inductor"


TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TOY_TEXT = TEXT | TOWER | {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}
TOY_TEXT["rope_parameters"] = TEXT["rope_parameters"] | {"mrope_section": [4, 2, 2]}
TOY_VISION = VISION | {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
TOY_VISION |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


class Toy(Full):
    """A quick test of the script."""

    text, vision = TOY_TEXT, TOY_VISION
    side, tokens, texts, images, train_rows, chunk_tokens = 64, 8, 4, 2, 6, 32
    pairs = (16, 64)
    clip: Row = {"vision_config": TOWER | {"image_size": 32, "patch_size": 16}}  # noqa: RUF012
    pictures, batch, threads = 24, 4, (1, 2)
    vectors, width, queries = 50_000, 16, (1, 10)
    backend = "eager"  # compiling takes a minute


Size = type[Full]


def timed(call: Callable[[], Any], device: str, runs: int = 5, seconds: float = 8, warm_up: Any = None) -> Row:  # noqa: ANN401
    """Time a call `runs` times; twice, if these take more than some seconds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found: list[float] = []
    while len(found) < 3 or (len(found) <= runs and sum(found[1:]) < seconds):
        start = time.perf_counter()
        (call if found or warm_up is None else warm_up)()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return {"ms": 1e3 * statistics.median(found[1:]), "runs": len(found) - 1, "gb": peak}


def operations(call: Callable[[], Any]) -> int:
    """Floating-point operations of a call, whose attention runs as matrix products so that all are counted."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def rates(items: int, count: int, found: Row, device: str) -> Row:
    """Items and operations per second, and the share of the peak."""
    tflops = count / found["ms"] / 1e9
    peak = PEAKS.get(torch.cuda.get_device_name()) if device == "cuda" else None
    return found | {
        "per_second": 1e3 * items / found["ms"],
        "tflops": tflops,
        "share": tflops / peak if peak else None,
    }


def mllm(size: Size, layers: int, device: str) -> Any:  # noqa: ANN401
    """A retriever on the first layers of a Qwen3-VL, read at the last token."""
    from transformers import Qwen3VLConfig

    from conjoin import MllmRetrieverConfig, MllmRetrieverModel

    names = ("video_token_id", "image_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: size.text["vocab_size"] - 4 + place for place, name in enumerate(names)}
    config = Qwen3VLConfig(text_config=size.text, vision_config=size.vision, **ids)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = MllmRetrieverModel(MllmRetrieverConfig(backbone_config=config, keep_layers=layers, readout="last"))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def inputs(kind: str, rows: int, size: Size, device: str) -> dict[str, Tensor]:
    """What the processor would make of texts, or of images within a text."""
    end = size.text["vocab_size"]
    ids = torch.randint(0, end - 4, (rows, size.tokens), device=device)
    found = {"input_ids": ids}
    if kind == "image":
        patches, half = size.side // 16, size.tokens // 2
        image = torch.tensor([end - 2] + (patches // 2) ** 2 * [end - 3] + [end - 1], device=device).expand(rows, -1)
        found["input_ids"] = torch.cat([ids[:, :half], image, ids[:, half:]], dim=1)
        found["pixel_values"] = torch.randn(rows, patches**2, 3 * 2 * 16 * 16, device=device, dtype=torch.bfloat16)
        found["image_grids"] = torch.tensor([[[1, patches, patches]]], device=device).expand(rows, 1, 3)
    return found | {"attention_mask": torch.ones_like(found["input_ids"])}


def forward(size: Size, device: str) -> Iterator[Row]:
    depth = size.text["num_hidden_layers"]
    for layers in (depth, depth // 2):
        model = mllm(size, layers, device)
        for kind, rows in {"text": size.texts, "image": size.images}.items():
            batch = inputs(kind, rows, size, device)
            with torch.inference_mode():
                count = rows * operations(partial(model, **inputs(kind, 1, size, device)))
                found = timed(partial(model, **batch), device)
            row = {"layers": layers, "items": kind, "batch": rows, "tokens": batch["input_ids"].shape[1]}
            yield row | rates(rows, count, found, device)


def compiled(size: Size, device: str) -> Iterator[Row]:
    model = mllm(size, size.text["num_hidden_layers"], device)
    batch = inputs("text", size.texts, size, device)
    for way in ("plain", "compiled"):
        start = time.perf_counter()
        if way == "compiled":
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.compile(dynamic=True, backend=size.backend)
        with torch.inference_mode():
            model(**batch)
            first = time.perf_counter() - start
            found = timed(partial(model, **batch), device)
        found |= {"per_second": 1e3 * size.texts / found["ms"]}
        yield {"way": way, "batch": size.texts, "first_s": first} | found


def train(size: Size, device: str) -> Iterator[Row]:
    from peft import LoraConfig
    from peft.helpers import disable_input_dtype_casting

    from conjoin.losses import info_nce
    from conjoin.trainers import RetrievalConfig, RetrievalTrainer
    from conjoin.trainers.gradient_cache import cached_backward

    class TextsToImages(RetrievalTrainer):
        def embed(self, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:  # noqa: ANN401
            return {kind: model(**values).pooler_output for kind, values in inputs.items()}

        def loss_terms(self, embeddings: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, Tensor]:
            return {"contrastive_loss": info_nce(embeddings["text"], embeddings["image"], 0.05)}

    targets = "q_proj|k_proj|v_proj|up_proj|down_proj|gate_proj"  # as in qwen3_vl_embedding.yaml
    lora = LoraConfig(r=32, lora_alpha=32, target_modules=rf".*language_model.*({targets})")
    model = mllm(size, size.text["num_hidden_layers"], device)
    config = RetrievalConfig("unused", report_to="none", use_cpu=device == "cpu")
    objective = TextsToImages(model, config, data_collator=list, peft_config=lora).model.train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    autocast = partial(torch.autocast, device, torch.bfloat16)
    losses = []

    def step(batch: dict[str, Any]) -> None:
        with disable_input_dtype_casting(objective):  # as the trainer's step does
            terms = cached_backward(objective, batch, 0, Tensor.backward, autocast, chunk_tokens=size.chunk_tokens)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(terms["contrastive_loss"]))

    rows = size.train_rows
    batch, two = ({kind: inputs(kind, count, size, device) for kind in ("text", "image")} for count in (rows, 2))
    count = operations(partial(step, two)) * rows // 2
    found = timed(partial(step, batch), device, seconds=30)
    row = {"rows": rows, "chunk_tokens": size.chunk_tokens, "loss": losses[-1]}
    yield row | rates(rows, count, found, device)


def kernel(size: Size, device: str) -> Iterator[Row]:
    from contrastive_kernel import naive_gcl

    from conjoin.losses import gcl

    def step(loss: Callable[..., Tensor], views: list[Tensor], temperature: Tensor) -> float:
        for leaf in (*views, temperature):
            leaf.grad = None
        value = loss(views, [temperature])
        value.backward()
        return value.item()

    ways: dict[str, Any] = {
        "kernel": lambda views, temperatures: gcl(views[0], views[1], views[2], temperatures[0]),
        "naive": naive_gcl,
    }
    for pairs in size.pairs:
        for way, loss in ways.items():
            torch.manual_seed(0)
            views = [torch.randn(pairs, size.width, device=device, requires_grad=True) for _ in range(3)]
            call = partial(step, loss, views, torch.tensor(0.05, device=device, requires_grad=True))
            row: Row = {"pairs": pairs, "way": way}
            try:
                row |= timed(call, device) | {"loss": call(), "note": ""}
            except torch.OutOfMemoryError:
                row |= {"ms": None, "runs": 0, "gb": None, "loss": None, "note": "out of memory"}
            yield row
            if device == "cuda":
                torch.cuda.empty_cache()


def encode(size: Size, device: str) -> Iterator[Row]:
    from PIL import Image
    from sentence_transformers import SentenceTransformer
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    from conjoin.processing import ImageTextProcessor
    from conjoin.retrieval import ItemEncoder

    try:
        from conjoin.retrieval import encode_collection

        write: Any = encode_collection
        target = "collection"
    except ModuleNotFoundError as error:
        write, target = None, f"array ({error})"

    def run(encoder: ItemEncoder, rows: list[dict[str, str]]) -> None:
        if write is None:
            encoder.encode([{"image": row["image"]} for row in rows])
            return
        with tempfile.TemporaryDirectory() as name:
            write(rows, encoder, Path(name) / "collection")

    torch.manual_seed(0)
    config: Any = CLIPConfig(**size.clip)
    model, side = score_fusion_model(CLIPModel(config)), config.vision_config.image_size
    words = {word: place for place, word in enumerate(("a", "a</w>", "<|startoftext|>", "<|endoftext|>"))}
    images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    tokenizer = CLIPTokenizer(vocab=words, merges=[], model_max_length=77)
    processor = ImageTextProcessor(images, tokenizer, torch_resize=True)
    numbers, files = np.random.default_rng(0), []
    for _ in range(64):
        colours = Image.fromarray(numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((640, 480))
        grain = Image.effect_noise((640, 480), 40).convert("RGB")
        files.append(io.BytesIO())
        Image.blend(colours, grain, 0.2).save(files[-1], "JPEG", quality=90)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"id": str(place), "image": f"{name}/{place}.jpg"} for place in range(size.pictures)]
        for place, row in enumerate(rows):
            Path(row["image"]).write_bytes(files[place % len(files)].getvalue())
        backbone = folder / "clip"
        for part in (model.backbone, images, tokenizer):
            part.save_pretrained(backbone)
        theirs = SentenceTransformer(str(backbone), device=device)
        paths = [row["image"] for row in rows]
        for place, some in enumerate((rows[: 4 * size.batch], rows)):
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                theirs.encode(paths[: len(some)], batch_size=size.batch, show_progress_bar=False)
            if place:
                ms = 1e3 * (time.perf_counter() - start)
                found = {"ms": ms, "runs": 1, "gb": None, "per_second": 1e3 * len(rows) / ms, "to": "array"}
                yield {"threads": "sentence-transformers", "images": len(rows), "batch": size.batch} | found
        for threads in size.threads:
            dtype = torch.bfloat16 if device == "cuda" else None
            encoder = ItemEncoder(model, processor, size.batch, device, dtype, threads=threads)
            few = partial(run, encoder, rows[: 4 * size.batch])
            found = timed(partial(run, encoder, rows), device, runs=3, seconds=20, warm_up=few)
            found |= {"per_second": 1e3 * len(rows) / found["ms"], "to": target}
            yield {"threads": encoder.threads, "images": len(rows), "batch": size.batch} | found


def search(size: Size, device: str) -> Iterator[Row]:
    from conjoin.retrieval import exact_search

    def unit(rows: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(rows, size.width, device=device), dim=1)

    def product(queries: Tensor, vectors: Tensor) -> Tensor:
        best = [(queries @ part.T).topk(min(10, len(part))) for part in vectors.split(block)]
        order = torch.cat([found.values for found in best], dim=1).topk(10).indices
        places = torch.cat([found.indices + block * number for number, found in enumerate(best)], dim=1)
        return places.gather(1, order).cpu()

    torch.manual_seed(0)
    block, every = 2**18, unit(max(size.queries))
    vectors = np.empty((size.vectors, size.width), dtype=np.float16)
    for start in range(0, size.vectors, block):
        part = vectors[start : start + block]
        part[:] = unit(len(part)).half().cpu().numpy()
    for way in ("exact_search", "exact_search, held", "torch"):
        dtype = torch.float16 if device == "cuda" else torch.float32  # a CPU's product is slow in float16
        resident = None if way == "exact_search" else torch.from_numpy(vectors).to(device, dtype)
        for count in size.queries:
            if way != "torch":
                ranked, given = partial(exact_search, every[:count].cpu().numpy(), k=10, device=device), resident
                given = vectors if given is None else given
                found = timed(partial(ranked, given), device, 3, 5, partial(ranked, given[:block]))
            else:
                found = timed(partial(product, every[:count].to(dtype), resident), device)
            row = {"way": way, "vectors": size.vectors, "width": size.width, "queries": count}
            yield row | found | {"per_second": 1e3 * count / found["ms"]}


SECTIONS: dict[str, tuple[Callable[[Size, str], Iterator[Row]], int]] = {
    "forward": (forward, 80),
    "train": (train, 100),
    "kernel": (kernel, 70),
    "encode": (encode, 120),
    "search": (search, 100),
    "compiled": (compiled, 90),
}
"""By name: what it measures, and the most seconds that it may take."""


def serve(requests: Connection, toy: bool) -> None:
    """Run the sections that are asked for, in a process of its own; end after one that fails: it may break CUDA."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    setup = {"device": machine, "peak_tflops": PEAKS.get(machine), "cuda": torch.version.cuda, "cores": os.cpu_count()}
    setup |= {"python": platform.python_version()}
    setup |= {each.name.lower(): each.version for each in distributions() if each.name.lower() in PACKAGES}
    try:
        while True:
            name = requests.recv()
            if device == "cpu" and not toy:
                raise RuntimeError("torch sees no GPU: only --toy runs on a CPU")
            for row in SECTIONS[name][0](Toy if toy else Full, device):
                requests.send(row)
            requests.send({"problem": None, "setup": setup})
            if device == "cuda":
                torch.cuda.empty_cache()
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        requests.send({"problem": line, "setup": setup})


def ask(requests: Connection, name: str) -> Row:
    """Have a section run; return its rows, its seconds, and what went wrong, or None."""
    start, limit = time.perf_counter(), SECTIONS[name][1]
    found: Row = {"rows": [], "problem": f"stopped after {limit} seconds"}
    try:
        requests.send(name)
        while requests.poll(max(0.0, start + limit - time.perf_counter())):
            row = requests.recv()
            if "problem" in row:
                found |= row
                break
            print(f"{name}: {row}", flush=True)
            found["rows"].append(row)
    except (EOFError, OSError):
        found["problem"] = "its process died"
    return found | {"seconds": time.perf_counter() - start}


def main() -> None:
    """Run the sections, print their tables, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of these, separated by commas")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all sections together")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on the GPU if there is one")
    parser.add_argument("--json", type=Path, default=Path("runs/gpu.json"), help="write the results to this file")
    args = parser.parse_args()
    chosen = args.sections.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"--sections: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    start, spawn, process = time.perf_counter(), multiprocessing.get_context("spawn"), None
    found: Row = {"setup": {"date": time.strftime("%Y-%m-%d"), "toy": args.toy, "minutes": args.minutes}}
    for name in chosen:
        limit = SECTIONS[name][1]
        if time.perf_counter() - start + limit > 60 * args.minutes:
            found[name] = {"rows": [], "problem": f"skipped: {limit} seconds could pass --minutes {args.minutes:g}"}
        else:
            if process is None:
                requests, theirs = spawn.Pipe()
                process = spawn.Process(target=serve, args=(theirs, args.toy))
                process.start()
                theirs.close()
            found[name] = ask(requests, name)
            found["setup"] |= found[name].pop("setup", {})
        if process is not None and (found[name]["problem"] or name == chosen[-1]):
            requests.close()
            process.join(3)
            process.kill()
            process = None
        write_json(args.json, found)
    print(f"\n{json.dumps(found['setup'])}")
    for name in chosen:
        rows = [{key: "-" if value is None else value for key, value in row.items()} for row in found[name]["rows"]]
        print(f"\n## {name}\n\n{table(rows) if rows else ''}\n{found[name]['problem'] or ''}")


if __name__ == "__main__":
    main()
