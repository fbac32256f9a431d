"""One optimiser step of a large batch: this package's gradient cache and that of sentence-transformers.

Both train the same model, with random weights, on the same pairs of texts of 3 to 60 words: InfoNCE from queries to
all candidates, then AdamW. Theirs is `CachedMultipleNegativesRankingLoss`. The texts are tokenised before. The steps
take turns in one process; the order is reversed in every second turn. A ratio is the median over the turns of (time of
the first variant / time of this one). Memory is the peak of resident memory in one step above that before it, each
variant in a process of its own. On a GPU: `gpu.py --sections train`. The variants:

    sentence-transformers          mini_batch_size=--chunk
    sentence-transformers, tokens  mini_batch_num_tokens, as many as the longest mini-batch of --chunk rows can have
    ours                           gradient_cache_chunk_size=--chunk
    ours, tokens                   gradient_cache_chunk_tokens, the same number: rows sorted by length
    ours, quarter of the tokens    a quarter of it

With `--mllm` the model is the pruned Qwen2-VL of `pruned_mllm.py`, trained by LoRA, and the variants are ours alone.

    python benchmarks/training_step.py --json training_step.json
    python benchmarks/training_step.py --size tiny --rows 16 --chunk 4 --turns 1      # a quick test of the script
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pruned_mllm
import torch
from encode_throughput import bert_tokenizer, layers
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import nn
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model, ViTImageProcessorPil
from turns import median, setup, speed_up, table, take_turns, write_json

from conjoin import JointEncoderModel, load_model
from conjoin.hub import export
from conjoin.hub.build import mllm_model, mllm_processor, towers_model
from conjoin.processing import ImageTextProcessor
from conjoin.trainers import ContrastiveConfig, QueryContrastiveTrainer, add_adapters
from conjoin.trainers.gradient_cache import cached_backward

SIZES = {"tiny": (32, 1, 2), "light": (128, 3, 4), "small": (384, 6, 12), "base": (768, 12, 12)}
"""Width, layers and heads of the text tower."""
VARIANTS = (
    "sentence-transformers",
    "sentence-transformers, tokens",
    "ours",
    "ours, tokens",
    "ours, quarter of the tokens",
)
TEMPERATURE = 0.05
LONGEST = 62
"""Tokens of the longest text."""
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def variants(args: argparse.Namespace) -> Sequence[str]:
    """The variants to measure."""
    return args.variants or (VARIANTS[2:] if args.mllm else VARIANTS)


def save_model(args: argparse.Namespace, folder: Path) -> None:
    """Write a joint encoder whose text tower has the size, or a pruned MLLM; vision towers are not used."""
    torch.manual_seed(0)
    if args.mllm:
        pruned_mllm.save_checkpoint(args.mllm, folder / "mllm")
        processor = mllm_processor(folder / "mllm")
        export(mllm_model(folder / "mllm", pruned_mllm.KEEP), processor, folder)
        return
    width, _, heads = sizes = SIZES[args.size]
    tokenizer = bert_tokenizer()
    text = BertModel(BertConfig(vocab_size=len(tokenizer), **layers(*sizes)))
    vision = Dinov2Model(
        Dinov2Config(image_size=28, patch_size=14, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    model = towers_model(JointEncoderModel, vision, text, hidden_size=width, num_attention_heads=heads)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # the draws of the two sides differ
            module.p = 0.0
    images = ViTImageProcessorPil(size={"height": 28, "width": 28})
    export(model, ImageTextProcessor(images, tokenizer), folder)


def make_texts(rows: int) -> tuple[list[str], list[str]]:
    """Queries and their positives."""
    source = random.Random(0)
    texts = [
        " ".join(source.choices(pruned_mllm.WORDS, k=min(60, 3 + int(source.expovariate(1 / 12)))))
        for _ in range(2 * rows)
    ]
    return texts[:rows], texts[rows:]


def make_step(variant: str, folder: Path, args: argparse.Namespace) -> Callable[[], float]:
    """The step of a variant; it returns the loss."""
    queries, positives = make_texts(args.rows)

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if args.bf16 else nullcontext()

    if variant.startswith("sentence"):
        tokens = args.chunk * LONGEST if "tokens" in variant else 0
        model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
        columns = [model.preprocess(texts) for texts in (queries, positives)]
        loss = CachedMultipleNegativesRankingLoss(
            model, scale=1 / TEMPERATURE, mini_batch_size=args.chunk, mini_batch_num_tokens=tokens or None
        )

        def forward_backward() -> float:
            with autocast():
                value = loss([dict(column) for column in columns], None)
            value.backward()
            return float(value.detach())

        trained: Any = model
    else:
        encoder, processor = load_model(folder)
        if args.mllm:
            add_adapters(encoder, LORA)
        config = ContrastiveConfig(
            "unused", temperature=TEMPERATURE, learn_temperature=False, report_to="none", use_cpu=True
        )
        trained = QueryContrastiveTrainer(encoder, config, processing_class=processor).model
        parts = {"queries": queries, "positives": positives}
        batch = {name: dict(processor(texts)) for name, texts in parts.items()}
        longest = max(part["input_ids"].shape[1] for part in batch.values()) if args.mllm else LONGEST
        tokens = args.chunk * longest if "tokens" in variant else 0
        tokens //= 4 if "quarter" in variant else 1

        def forward_backward() -> float:
            rows = 0 if tokens else args.chunk
            options = {"autocast": autocast, "chunk_tokens": tokens}
            return float(cached_backward(trained, dict(batch), rows, lambda loss: loss.backward(), **options)[LOSS])

    for module in trained.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained.train()
    optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=1e-5)

    def step() -> float:
        value = forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


LOSS = "contrastive_loss"


def resident(name: str) -> int:
    """Resident memory of this process in bytes: now (`VmRSS`) or at its peak (`VmHWM`)."""
    path = Path("/proc/self/status")
    if not path.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(next(line for line in path.read_text().splitlines() if line.startswith(name)).split()[1])


def measure_memory(variant: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """The peak of memory in a step above that before it, and the loss; runs in a process of its own."""
    step = make_step(variant, folder, args)
    before = resident("VmRSS")
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # the peak is that of the step
    return {"loss": step(), "bytes": resident("VmHWM") - before}


def memory_of(variant: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run `measure_memory` in a process of its own."""
    options = {"--rows": args.rows, "--chunk": args.chunk, "--threads": args.threads}
    options |= {"--mllm": args.mllm} if args.mllm else {}
    command = [sys.executable, __file__, "--child", variant, str(folder)]
    command += [str(word) for pair in options.items() for word in pair] + ["--bf16"] * args.bf16
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of the table."""
    save_model(args, folder)
    memory = {variant: memory_of(variant, folder, args) for variant in variants(args)}
    reference, first = next(iter(memory.items()))
    for variant, found in memory.items():
        if abs(found["loss"] - first["loss"]) > (0.05 if args.bf16 else 1e-3):
            raise ValueError(f"{variant}: the loss is {found['loss']}, that of {reference} is {first['loss']}")
    steps = {variant: make_step(variant, folder, args) for variant in memory}
    times = take_turns(steps, args.turns)
    rows = []
    for variant in memory:
        ratio, seconds = speed_up(times[reference], times[variant]), median(times[variant])
        row: dict[str, Any] = {"step": variant, "seconds": seconds.wall, "cpu_seconds": seconds.cpu}
        row |= {"wall": ratio["wall"], "range": f"{ratio['wall_low']:.2f} to {ratio['wall_high']:.2f}"}
        row |= {"cpu": ratio["cpu"], "peak_mib": memory[variant]["bytes"] / 2**20}
        row["memory"] = memory[variant]["bytes"] / first["bytes"]
        rows.append(row)
    return rows


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="light", help="of the text tower")
    parser.add_argument("--mllm", choices=pruned_mllm.SIZES, help="train a pruned MLLM of this size instead, by LoRA")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="only these; the first is the reference")
    parser.add_argument("--rows", type=int, default=4096, help="pairs of a step")
    parser.add_argument("--chunk", type=int, default=32, help="rows of a mini-batch")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16, in both")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(measure_memory(args.child[0], Path(args.child[1]), args)))
        return
    found: dict[str, Any] = {"setup": setup(args)}
    print(json.dumps(found["setup"]))
    with tempfile.TemporaryDirectory() as name:
        found["rows"] = measure(args, Path(name))
    print(f"\n{table(found['rows'])}")
    write_json(args.json, found)


if __name__ == "__main__":
    main()
