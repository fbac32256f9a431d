"""Compress an MLLM retriever: its first layers learn to embed as the whole model (stage 1 of PUMA)."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Dataset
from transformers import ProcessorMixin

from conjoin.data import QueryTable
from conjoin.evaluation.metrics import best_ranks, chance_hit_rate
from conjoin.evaluation.results import Curve, Metric, Results, Table
from conjoin.hub import load_model
from conjoin.methods.puma.analysis import depth_advice, depth_operations
from conjoin.methods.puma.compress_options import CompressOptions
from conjoin.methods.puma.stage1 import PumaStage1Config, PumaStage1Trainer
from conjoin.methods.puma.stage2 import PumaStage2Config, PumaStage2Trainer
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.retrieval import ItemEncoder
from conjoin.training import LoraArguments, RetrievalTrainer, add_lora

CUTOFFS = (1, 5, 10)
OVERLAP = 10
DIRECTIONS = {"text → image": ("text", "image"), "image → text": ("image", "text")}
KINDS = ("text", "image", "both")
COSTS = {"operations": "operations", "bytes": "size", "seconds": "seconds"}


class Embedded(NamedTuple):
    """The embeddings of the held-out pairs, and what they cost.

    Args:
        vectors: `(N, D)` for each of `KINDS`.
        seconds: Per item.
        operations: For a pair as one item.
        size: Bytes of the weights.
    """

    vectors: dict[str, Tensor]
    seconds: float
    operations: float
    size: int


class DistillationRows(Dataset[dict[str, Any]]):
    """Three rows per pair, so that a model distils on all kinds of items: text, image, and both.

    Args:
        pairs: Items `{"image", "text"}`.
        count: Number of first pairs to use.
        instruction: Of the rows whose query has a text.
    """

    def __init__(self, pairs: Sequence[Mapping[str, Any]], count: int, instruction: str | None = None) -> None:
        self.pairs = pairs
        self.count = count
        self.instruction = instruction
        self.positives = [[str(index // len(KINDS))] for index in range(len(self))]
        self.sources = [""] * len(self)

    def __len__(self) -> int:
        return self.count * len(KINDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, kind = divmod(index, len(KINDS))
        both = item_of(self.pairs[number])
        text, image = {"text": both["text"]}, {"image": both["image"]}
        query, positive = ((text, both), (image, text), (both, image))[kind]
        instruction = self.instruction if "text" in query else None
        return {"id": f"{number}-{KINDS[kind]}", "query": query, "positive": positive, "positive_id": str(number),
                "instruction": instruction}  # fmt: skip


def item_of(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image and the text of a pair as one item."""
    return {"image": pair["image"], "text": pair["text"]}


def compress(
    model: MllmRetrieverModel,
    processor: ProcessorMixin,
    pairs: Sequence[Mapping[str, Any]],
    out: str | Path,
    options: CompressOptions,
) -> Results:
    """Train pruned copies of a model with the model as their teacher, save each, and compare them with it.

    The copies are saved as `layers-N` in `out`: those of a published embedder as what it was.

    Args:
        model: The model, with all its layers.
        processor: Its processor.
        pairs: Items `{"image", "text"}`; the last `held_out` measure, the others train.
        out: Where to write.
        options: How to compress.

    Returns:
        Scores, agreement and cost of every depth, before and after training, as tables and curves.

    Raises:
        ValueError: There are too few pairs, or a depth is not less than the model's.
    """
    out, depth = Path(out), model.config.keep_layers
    split = len(pairs) - options.held_out
    if split < options.batch_size:
        raise ValueError(
            f"{len(pairs)} pairs, of which {options.held_out} are held out; a batch takes {options.batch_size}"
        )
    if max(options.layers) >= depth:
        raise ValueError(f"layers={options.layers}; expected fewer than the model's {depth}")
    held_out = [item_of(pairs[number]) for number in range(split, len(pairs))]
    prompts = processor.prompts or {}  # type: ignore[attr-defined]
    rows = DistillationRows(pairs, split, options.instruction or prompts.get("query") or None)
    model = model.to(options.device).eval().requires_grad_(False)  # type: ignore[arg-type]
    whole = embed_pairs(model, processor, held_out, options)
    embedded = {f"{depth}, whole": (depth, whole)}
    if options.int8:
        embedded[f"{depth}, int8"] = (depth, embed_pairs(in_8_bits(model), processor, held_out, options))
    for kept in sorted(options.layers):
        student = model.pruned(kept)
        embedded[f"{kept}, untrained"] = (kept, embed_pairs(student, processor, held_out, options))
        folder = out / f"layers-{kept}"
        _distill(student, model, processor, rows, options, folder)
        loaded: Any = load_model(folder)
        trained, reader = loaded[0].to(options.device), loaded[1]
        embedded[f"{kept}, trained"] = (kept, embed_pairs(trained, reader, held_out, options))
        if options.int8:
            embedded[f"{kept}, int8"] = (kept, embed_pairs(in_8_bits(trained), reader, held_out, options))
    return _report(embedded, whole, options, split)


def in_8_bits(model: MllmRetrieverModel) -> MllmRetrieverModel:
    """Return a copy whose linear layers have weights in 8 bits, with a scale for each row.

    Raises:
        ImportError: torchao is not installed.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ImportError("weights in 8 bits need torchao; run: pip install torchao") from error
    model = copy.deepcopy(model)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _distill(
    student: MllmRetrieverModel,
    teacher: MllmRetrieverModel,
    processor: ProcessorMixin,
    rows: DistillationRows,
    options: CompressOptions,
    folder: Path,
) -> None:
    """Train a pruned copy by stage 1, perhaps by stage 2, and save it."""
    torch.manual_seed(options.seed)
    _choose_trained(student, options)
    shared: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": options.batch_size,
        "gradient_cache_chunk_size": options.chunk_size,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "weight_decay": 0.0,
        "bf16": options.bf16,
        "use_cpu": torch.device(options.device).type == "cpu",
        "save_strategy": "no",
        "logging_steps": 10,
        "seed": options.seed,
    }
    stage1 = PumaStage1Config(
        **shared,
        max_steps=options.steps,
        kind=options.kind,
        distill_weight=options.distill_weight,
        contrastive_weight=1 - options.distill_weight,
    )
    trainer: RetrievalTrainer = PumaStage1Trainer(student, stage1, teacher, rows, processing_class=processor)
    trainer.train()
    if options.tune_source is not None:
        stage2 = PumaStage2Config(**shared, max_steps=options.tune_steps)
        table = QueryTable(options.tune_source)
        trainer = PumaStage2Trainer(student, stage2, train_dataset=table, processing_class=processor)
        trainer.train()
    trainer.save_model()


def _choose_trained(student: MllmRetrieverModel, options: CompressOptions) -> None:
    """Train the kept layers, or adapters on them; the vision tower and the tokens stay those of the teacher."""
    student.requires_grad_(False)
    if options.lora_rank:
        rank = options.lora_rank
        add_lora(student, LoraArguments(r=rank, alpha=2 * rank, towers=("text_model",)))
    else:
        language_model: Any = student.text_model
        language_model.layers.requires_grad_(True)
        student.norm.requires_grad_(True)


def embed_pairs(
    model: MllmRetrieverModel, processor: ProcessorMixin, pairs: Sequence[Mapping[str, Any]], options: CompressOptions
) -> Embedded:
    """Embed the texts, the images, and both of each pair."""
    encoder = ItemEncoder(model.eval(), processor, options.batch_size, options.device)
    items = {"text": [{"text": pair["text"]} for pair in pairs], "image": [pair["image"] for pair in pairs]}
    start = time.perf_counter()
    vectors = {name: torch.as_tensor(encoder.encode(some)) for name, some in (items | {"both": list(pairs)}).items()}
    seconds = (time.perf_counter() - start) / (len(KINDS) * len(pairs))
    operations = float(depth_operations(model, processor, pairs[0])[-1])
    size = sum(stored_bytes(weight) for weight in model.parameters())
    return Embedded(vectors, seconds, operations, size)


def stored_bytes(weight: Tensor) -> int:
    """Return the bytes of a weight; a quantised one consists of several tensors."""
    if not is_traceable_wrapper_subclass(weight):
        return weight.numel() * weight.element_size()
    return sum(stored_bytes(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])


def agreement(student: Embedded, teacher: Embedded) -> dict[str, float]:
    """Return the mean cosine of the embeddings of each kind, and the overlap of the first ten of each direction."""
    scores = {
        f"cosine, {kind}": (student.vectors[kind] * teacher.vectors[kind]).sum(1).mean().item()
        for kind in KINDS
        if student.vectors[kind].shape == teacher.vectors[kind].shape
    }
    for name, (query, candidate) in DIRECTIONS.items():
        tops = [(each.vectors[query] @ each.vectors[candidate].T) for each in (student, teacher)]
        count = min(OVERLAP, tops[0].shape[1])
        first, second = (top.topk(count, dim=1).indices for top in tops)
        shared = (first[:, :, None] == second[:, None]).any(2).float().mean().item()
        scores[f"top-{count} overlap, {name}"] = shared
    return scores


def hits(embedded: Embedded, direction: str) -> Tensor:
    """Return the rank `(N,)` of the right candidate of each query, from 1."""
    query, candidate = (embedded.vectors[kind] for kind in DIRECTIONS[direction])
    labels = torch.arange(len(query))
    return best_ranks(query, candidate, labels, labels)


def _report(
    embedded: dict[str, tuple[int, Embedded]], whole: Embedded, options: CompressOptions, trained: int
) -> Results:
    count = len(next(iter(whole.vectors.values())))
    cutoffs = [k for k in CUTOFFS if k <= count]
    scores = {
        name: {
            f"{direction}, R@{k}": Metric.from_values(
                (hits(each, direction) <= k).double(), chance_hit_rate(1, count, k), seed=options.seed
            )
            for direction in DIRECTIONS
            for k in cutoffs
        }
        for name, (_, each) in embedded.items()
    }
    shared = {name: agreement(each, whole) for name, (_, each) in embedded.items()}
    costs = {
        name: [float(f"{each.operations / 1e9:.4g}"), each.size, float(f"{1000 * each.seconds:.4g}")]
        for name, (_, each) in embedded.items()
    }
    first = next(iter(embedded))
    curves = _curves(embedded, scores, shared, cutoffs[-1])
    tables = [
        Table("Retrieval", ["layers", *scores[first]], [[name, *row.values()] for name, row in scores.items()]),
        Table(
            "Agreement with the whole model",
            ["layers", *shared[first]],
            [[name, *(round(value, 4) for value in row.values())] for name, row in shared.items()],
        ),
        Table("Cost", ["layers", "GFLOP per pair", "bytes", "ms per item"], [[n, *row] for n, row in costs.items()]),
    ]
    settings = asdict(options) | {"device": str(options.device), "layers": list(options.layers)}
    return Results(
        title="Compression of a multimodal embedder",
        summary=f"Each depth was trained on {trained} pairs with the whole model as its teacher and measured on "
        f"{count} others. {depth_advice(curves[0], options.share)}",
        seed=options.seed,
        config=settings,
        dataset={"pairs for training": trained, "pairs held out": count},
        tables=tables,
        curves=curves,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _mean_score(scores: dict[str, Metric], k: int) -> float:
    values = [scores[f"{direction}, R@{k}"].value for direction in DIRECTIONS]
    return sum(values) / len(values)


def _curves(
    embedded: dict[str, tuple[int, Embedded]],
    scores: dict[str, dict[str, Metric]],
    shared: dict[str, dict[str, float]],
    k: int,
) -> list[Curve]:
    """Draw scores, agreement and cost by depth; the whole model ends every line."""

    def line(kind: str, value: Callable[[str], float]) -> list[list[float]]:
        names = [
            name for name in embedded if name.endswith(f", {kind}") or (kind != "int8" and name.endswith("whole"))
        ]
        return sorted([embedded[name][0], value(name)] for name in names)

    def cost(kind: str, field: str) -> list[list[float]]:
        return line(kind, lambda name: getattr(embedded[name][1], field) / getattr(whole, field))

    whole = next(iter(embedded.values()))[1]
    kinds = [kind for kind in ("trained", "untrained", "int8") if any(name.endswith(f", {kind}") for name in embedded)]
    costs = {name: cost("trained", field) for name, field in COSTS.items()}
    if "int8" in kinds:
        costs["bytes, int8"] = cost("int8", "size")

    def agreed(score: str) -> list[list[float]]:
        return line("trained", lambda name: shared[name][score])

    return [
        Curve(
            f"R@{k}, mean of both directions",
            {kind: line(kind, lambda name: _mean_score(scores[name], k)) for kind in kinds},
            "layers",
        ),
        Curve(
            "Agreement with the whole model", {score: agreed(score) for score in next(iter(shared.values()))}, "layers"
        ),
        Curve("Cost, share of the whole model's", costs, "layers"),
    ]
