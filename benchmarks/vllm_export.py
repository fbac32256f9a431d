"""Vectors of stock exports in vLLM: equal to those of this package?

Tiny random models of each architecture, and embedders in the form of Qwen3-VL-Embedding, are pruned, exported as
`conjoin export --format stock` does, and loaded by vLLM's pooling runner. Texts, images, both, and two images between
texts, with and without an instruction, are embedded in one call and one by one. The table has the largest difference
of a component from the vectors of `MllmRetrieverModel` in float32; 1e-4 in float32, 1e-2 in bfloat16 are allowed.

Each embedder is also loaded whole, as its publisher has it, with adapters that `conjoin train` saves for it; ours has
them merged.

    python benchmarks/vllm_export.py --json vllm.json      # in an environment with vLLM: see docs/serving.md

vLLM's attention on a CPU takes heads of 32 components and more, so the models are wider than those of the tests.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from conjoin import MllmRetrieverModel
from conjoin.hub import export_stock, load_embedder
from conjoin.hub.build import mllm_model, mllm_processor
from conjoin.processing import MllmRetrieverProcessor
from conjoin.trainers import add_adapters, merge_lora
from conjoin.trainers.peft import save_adapter

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))  # the tiny models
from tiny_embedders import save_embedder  # noqa: E402
from tiny_mllms import MLLMS, save_mllm  # noqa: E402

HEADS, HEAD_DIM, KEPT = 4, 32, 2
ALLOWED = {"float32": 1e-4, "bfloat16": 1e-2}
INSTRUCTION = "Find an image that matches the text."
EMBEDDERS = {"Qwen3-VL embedder": ("qwen3_vl", "lasttoken"), "Qwen2-VL embedder, mean": ("qwen2_vl", "mean")}


def widen(folder: Path) -> None:
    """Replace a tiny MLLM by one with the heads and the tokens that vLLM expects."""
    config = AutoConfig.from_pretrained(folder)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.head_dim, text.num_attention_heads = HEADS * HEAD_DIM, HEAD_DIM, HEADS
    if config.model_type.startswith("qwen"):
        text.rope_parameters["mrope_section"] = [4, 6, 6]
        setattr(vision, "hidden_size" if config.model_type == "qwen2_vl" else "out_hidden_size", text.hidden_size)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<|video_pad|>"], special_tokens=True)
        tokenizer.save_pretrained(folder)
        config.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for shard in folder.glob("model*"):
        shard.unlink()
    model.save_pretrained(folder)


def build(name: str, folder: Path) -> tuple[MllmRetrieverModel, MllmRetrieverProcessor]:
    """A pruned retriever or embedder."""
    if name in EMBEDDERS:
        architecture, pooling = EMBEDDERS[name]
        save_embedder(folder, architecture, pooling)
        pooled = json.loads((folder / "1_Pooling/config.json").read_text())
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooled | {"embedding_dimension": HEADS * HEAD_DIM}))
        widen(folder)
        if architecture == "qwen3_vl":
            config = json.loads((folder / "config.json").read_text())
            config["text_config"]["rope_parameters"]["mrope_interleaved"] = True  # as its publisher writes it
            (folder / "config.json").write_text(json.dumps(config))
        return load_embedder(folder, KEPT)
    save_mllm(name, folder)
    widen(folder)
    model = mllm_model(str(folder), KEPT)
    torch.nn.init.normal_(model.ret_embedding)
    return model, mllm_processor(str(folder))


def make_items() -> list[Any]:
    """Items of each kind; conversations hold two images."""
    noise = np.random.default_rng(0)
    sizes = ((16, 16), (8, 24), (24, 16), (40, 56))
    images = [Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    content: list[dict[str, Any]] = [{"type": "image", "image": images[0]}, {"type": "text", "text": "then"}]
    content += [{"type": "image", "image": images[2]}, {"type": "text", "text": "more"}]
    items = ["a b", "x" * 60, *images, {"image": images[2], "text": "red box"}, {"image": images[3], "text": "two"}]
    return [*items, [{"role": "user", "content": content}]]


def prompt_of(item: Any, instruction: str | None, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """An item as vLLM takes it: the prompt that the chat template writes, and the images."""
    if isinstance(item, list):
        content = item[0]["content"]
    else:
        parts = item if isinstance(item, dict) else {"text" if isinstance(item, str) else "image": item}
        content = [{"type": kind, kind: part} for kind, part in parts.items()]
    messages = [{"role": "user", "content": content}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": instruction}]})
    options = {"add_generation_prompt": True, "tokenize": False}
    prompt = {"prompt": tokenizer.apply_chat_template(messages, **options)}
    images = [part["image"] for part in content if part["type"] == "image"]
    return prompt | ({"multi_modal_data": {"image": images}} if images else {})


def compare(name: str, dtypes: list[str], folder: Path) -> list[dict[str, Any]]:
    """The largest difference of each precision; for texts and for items with images."""
    model, processor = build(name, folder / "source")
    stock = export_stock(model, processor, folder / "stock")
    rows = differences(name, stock, model, processor, dtypes)
    if name in EMBEDDERS:
        adapted: Any = load_embedder(folder / "source")[0]
        add_adapters(adapted, LoraConfig(r=8, lora_alpha=16, target_modules=r".*language_model.*"))
        for parameter in (each for path, each in adapted.named_parameters() if "lora_B" in path):
            torch.nn.init.normal_(parameter, std=0.1)
        save_adapter(adapted, folder / "adapter", str(folder / "source"))
        rows += differences(
            f"{name}, adapters", folder / "source", merge_lora(adapted), processor, dtypes, folder / "adapter"
        )
    return rows


def differences(
    name: str,
    stock: Path,
    model: MllmRetrieverModel,
    processor: MllmRetrieverProcessor,
    dtypes: list[str],
    adapter: Path | None = None,
) -> list[dict[str, Any]]:
    """The largest difference of each precision between a model in vLLM and ours."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    items = make_items()
    with torch.no_grad():
        expected = [
            model.eval()(**processor([item], instruction=told)).embeddings[0].numpy()
            for told in (None, INSTRUCTION)
            for item in items
        ]
    options: dict[str, Any] = {"mm_processor_kwargs": {"crop_to_patches": False}} if name == "internvl" else {}
    chosen: dict[str, Any] = {"use_tqdm": False}
    if adapter is not None:
        options |= {"enable_lora": True, "max_lora_rank": 8}
        chosen["lora_request"] = LoRARequest("adapter", 1, str(adapter))
    rows = []
    for dtype in dtypes:
        llm = LLM(
            str(stock),
            runner="pooling",
            dtype=dtype,
            enforce_eager=True,
            max_model_len=512,
            limit_mm_per_prompt={"image": 4, "video": 0},
            **options,
        )
        prompts = [prompt_of(item, told, llm.get_tokenizer()) for told in (None, INSTRUCTION) for item in items]
        together = llm.embed(prompts, **chosen)
        alone = [llm.embed([prompt], **chosen)[0] for prompt in prompts]
        apart: dict[str, float] = {"texts": 0.0, "images": 0.0}
        for prompt, vector, *found in zip(prompts, expected, together, alone, strict=True):
            kind = "images" if "multi_modal_data" in prompt else "texts"
            difference = max(np.abs(np.array(each.outputs.embedding) - vector).max() for each in found)
            apart[kind] = max(apart[kind], float(difference))
        rows.append({"model": name, "dtype": dtype} | {kind: float(f"{each:.2g}") for kind, each in apart.items()})
        print(f"{name:32} {dtype:9} texts {apart['texts']:.1e}, images {apart['images']:.1e}", flush=True)
        del llm
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MLLMS, *EMBEDDERS], help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=ALLOWED, default=[*ALLOWED])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for key, value in options.items():
        os.environ.setdefault(key, value)
    rows = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(name, args.dtypes, Path(folder))
    packages = [each for each in ("vllm", "vllm-cpu", "transformers", "torch", "torchvision") if installed(each)]
    if args.json is not None:
        content = {"versions": {name: version(name) for name in packages}, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    wrong = [row for row in rows if max(row["texts"], row["images"]) > ALLOWED[row["dtype"]]]
    sys.exit(f"other vectors: {wrong}" if wrong else 0)


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
