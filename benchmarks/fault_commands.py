"""The commands that are disturbed: what each one finds, how it is called, and what a reader of its output sees."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))  # the tiny models, the pictures and the hub of the tests

State = Mapping[str, str]
"""What a reader found: digests by name."""

RECIPE = """
trainer: contrastive
model_type: joint_encoder
vision_model_name_or_path: {inputs}/dinov2
text_model_name_or_path: {inputs}/bert
model_init_kwargs: {{hidden_size: 16, num_attention_heads: 2}}
dataset_name: {inputs}/pairs
output_dir: {out}
per_device_train_batch_size: 4
max_steps: 3
learning_rate: 1.0e-2
save_strategy: steps
save_steps: 1
save_total_limit: 2
logging_steps: 1
use_cpu: true
disable_tqdm: true
"""
ROWS = 23


@dataclass(frozen=True)
class Place:
    """The folders of a run.

    Attributes:
        inputs: What no command changes.
        out: What the command writes, made new for each attempt.
    """

    inputs: Path
    out: Path


@dataclass(frozen=True)
class Command:
    """A command and its reader.

    Attributes:
        words: Of the command line; those of `again` for running it after an interruption are the same if None.
        read: Returns the state of the output; raises an error if the output is missing or unfinished.
        before: What is in `out` before, made by these commands.
        again: Further words, that depend on what the output folder holds.
        volatile: Names of files with times in them, whose bytes are not compared.
        is_push: Whether the output is a repository of the hub.
    """

    words: Callable[[Place], list[str]]
    read: Callable[[Place], State]
    before: tuple[Callable[[Place], list[str]], ...] = ()
    again: Callable[[Path], list[str]] = lambda out: []
    volatile: tuple[str, ...] = ()
    is_push: bool = False


def make_inputs(inputs: Path) -> None:
    """Write the tiny towers, the recipe and the pairs."""
    import torch

    from tiny_checkpoints import CHECKPOINTS
    from tiny_training import write_pairs

    for name in ("dinov2", "bert", "xlm_roberta"):
        torch.manual_seed(0)
        for part in CHECKPOINTS[name]():
            part.save_pretrained(inputs / name)
    write_pairs(inputs / "pairs", ROWS)
    write_pairs(inputs / "older", ROWS - 4)
    (inputs / "older/row1.txt").write_text("another text")
    (inputs / "recipe.yaml").write_text(RECIPE.format(inputs=inputs, out=inputs.parent / "out"))


def _encode(data: str, *more: str) -> Callable[[Place], list[str]]:
    return lambda place: [
        *("encode", f"{place.inputs}/train", f"{place.inputs}/{data}", "--out", str(place.out), *more),
        *("--batch-size", "4", "--device", "cpu", "--no-bf16", "--quiet"),
    ]


def _index(*more: str) -> Callable[[Place], list[str]]:
    return lambda place: ["index", str(place.out), *more]


def _mine(place: Place) -> list[str]:
    model = f"{place.inputs}/train"
    return [
        *("mine", f"{place.inputs}/pairs", "--out", str(place.out), "-k", "2"),
        *("--miner", "fused", model, "fused", "fused", "--miner", "cross", model, "text", "image"),
        *("--duplicate-above", "1.1", "--device", "cpu", "--quiet"),
    ]


def _push(model: str) -> Callable[[Place], list[str]]:
    return lambda place: ["push", f"{place.inputs}/{model}", "me/model", "--replace"]


def _resume(out: Path) -> list[str]:
    """How training continues: from its last complete checkpoint, or again."""
    return ["--resume"] if any(out.glob("checkpoint-*/SHA256SUMS")) else ["--overwrite"]


def _tensors(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {name: _digest(tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _read_model(place: Place) -> State:
    """Weights by `load_model`; those that `transformers` loads, which compares no checksums, must be the same."""
    from transformers import AutoModel

    from conjoin.hub import load_model

    try:
        stock = AutoModel.from_pretrained(place.out, trust_remote_code=True).state_dict()
    except (OSError, ValueError):
        stock = None
    try:
        own = _tensors(load_model(place.out)[0].state_dict())
    except (OSError, ValueError):
        if stock is not None:
            return {"read by transformers only": ""}
        raise
    if stock is None or _tensors(stock) != own:
        return {"read by conjoin only": ""}
    return own


def _read_collection(place: Place) -> State:
    """Every row with all that is known of it, its vector to the bit; how it is searched, and what a search finds."""
    from conjoin.retrieval import Collection

    collection = Collection(place.out)
    ids = collection.ids
    rows, vectors = collection.rows(ids), collection.vectors()
    state = {
        id_: _digest(vector.tobytes() + repr(row).encode())
        for id_, vector, row in zip(ids, vectors, rows, strict=True)
    }
    if len(state) != len(ids):
        raise RuntimeError("an id is there twice")
    found = collection.rank(_queries(collection.dimension), 10)
    return state | {"searched by": (collection.metadata["index"] or {}).get("kind", ""), "found": _found(found)}


def _read_faiss(place: Place) -> State:
    """The rows, and what FAISS finds; without an index of FAISS, the rows alone."""
    from conjoin.retrieval import open_collection

    state, collection = _read_collection(place), open_collection(place.out)
    if getattr(collection, "faiss", None) is None:
        return state
    return {**state, "found by FAISS": _found(collection.rank(_queries(collection.dimension), 10))}


def _found(result: Any) -> str:  # noqa: ANN401
    """Scores to five decimals: FAISS adds up in another order than numpy."""
    return _digest(repr((result.ids, result.scores.round(5).tolist())).encode())


def _queries(dimension: int) -> Any:  # noqa: ANN401
    import numpy as np

    queries = np.random.default_rng(0).standard_normal((5, dimension)).astype(np.float32)
    return queries / np.linalg.norm(queries, axis=1, keepdims=True)


def _read_mined(place: Place) -> State:
    import pyarrow.parquet as pq

    from conjoin.retrieval import load_mined

    load_mined(place.out)
    rows = pq.read_table(place.out / "negatives.parquet").to_pylist()
    return {row["id"]: repr((row["negatives"], row["found_by"])) for row in rows}


def _read_repository(place: Place) -> State:
    """The files that the hub shows, which `before` a first push are none."""
    files = hub_files()
    shown = {name: _digest(content) for name, content in files.items() if name != ".gitattributes"}
    if not shown:
        raise FileNotFoundError("the hub has no files of the model")
    return shown


_TRAINED = {"read": _read_model, "again": _resume}
_VOLATILE = ("recipe.json", "trainer_state.json", "training_args.bin", "SHA256SUMS")  # times of steps

COMMANDS: dict[str, Command] = {
    "train": Command(lambda place: ["train", f"{place.inputs}/recipe.yaml"], volatile=_VOLATILE, **_TRAINED),
    "encode": Command(_encode("pairs"), _read_collection),
    "encode --sync": Command(_encode("pairs", "--sync"), _read_collection, before=(_encode("older"),)),
    "index": Command(_index("--kind", "ivf_flat"), _read_collection, before=(_encode("pairs"),)),
    "index --faiss": Command(_index("--faiss", "IVF2,Flat"), _read_faiss, before=(_encode("pairs"),)),
    "mine": Command(_mine, _read_mined),
    "push": Command(_push("train"), _read_repository, is_push=True),
    "push, over another": Command(_push("train"), _read_repository, before=(_push("other"),), is_push=True),
}
"""In an order in which each finds what it reads among the outputs of those before."""
SOURCES = {"train"}
"""What all others read."""


def keep_output(name: str, place: Place) -> None:
    """Keep the output of an undisturbed command as the input of others."""
    if place.out.exists():
        shutil.copytree(place.out, place.inputs / name)
    if name == "train":
        other = shutil.copytree(place.out, place.inputs / "other", ignore=shutil.ignore_patterns("checkpoint-*"))
        settings = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(settings | {"an": "older one"}))
        (other / "SHA256SUMS").unlink()


_hub: Connection | None = None


def _run_hub(connection: Connection) -> None:
    import loopback_hub

    sys.stderr = open(os.devnull, "w")  # clients that are killed are no errors
    with loopback_hub.serve() as hub, contextlib.suppress(EOFError):
        connection.send(hub.url)
        while True:
            task, content = connection.recv()
            if task == "set":
                hub.repositories = pickle.loads(content)
                hub.stored.clear()
                connection.send(None)
            else:
                connection.send(pickle.dumps(hub.repositories))


@contextlib.contextmanager
def running_hub() -> Iterator[str]:
    """Run the hub of the tests in a process of its own; yields its address."""
    global _hub
    context = multiprocessing.get_context("fork")
    _hub, other = context.Pipe()
    process = context.Process(target=_run_hub, args=(other,), daemon=True)
    process.start()
    try:
        yield _hub.recv()
    finally:
        process.kill()
        process.join()


def _ask(task: str, content: bytes = b"") -> Any:  # noqa: ANN401
    if _hub is None:
        raise RuntimeError("the hub is not running")
    _hub.send((task, content))
    return _hub.recv()


def hub_state() -> bytes:
    """What the hub holds."""
    return bytes(_ask("get"))


def set_hub(state: bytes) -> None:
    """Make the hub hold this, and no upload beside."""
    _ask("set", state)


def hub_files() -> dict[str, bytes]:
    """The files of the newest commit of the repository; none if there is no repository."""
    repository = pickle.loads(hub_state()).get(("model", "me/model"))
    return {} if repository is None else dict(repository.files())
