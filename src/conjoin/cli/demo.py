"""`conjoin demo`: the main job on the embedded sample, from raw pictures to a report."""

import argparse
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.evaluation import Example, Results
    from conjoin.evaluation.emoji_benchmark import EmojiBenchmark
    from conjoin.retrieval import ItemEncoder
    from conjoin.training import RetrievalTrainer

DEMO = "sample/demo.yaml"
TITLE = "A joint encoder for pictures and words"
SUMMARY = (
    "A small joint image-text encoder on two frozen towers, trained for {steps} steps on pictures of emoji by two "
    "artists and their names. Everything here is measured on {test} concepts that it never saw: the gallery holds one "
    "artist's picture of each; queries are names, the other artist's pictures, or both."
)
NAMES = {"image": "image", "text": "text", "image,text": "image + text"}


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "demo",
        help="train, index, search and evaluate on the embedded sample",
        description="Build the emoji sample, train a joint encoder on it, encode and index a held-out gallery, search "
        "it, evaluate all nine modality combinations, and write a report. About five minutes on two CPU cores; needs "
        'pip install "conjoin[sample]" and no network.',
    )
    parser.add_argument("--out", metavar="DIR", help="output folder (default: runs/demo, for solar runs/demo-solar)")
    parser.add_argument(
        "--recipe",
        metavar="YAML",
        help="another recipe than training_args/sample/demo.yaml; `solar` trains both stages of SOLAR instead",
    )
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Run the whole demo."""
    import torch
    from transformers.utils import logging

    from conjoin.cli.train import parse_overrides, usage
    from conjoin.evaluation import format_combinations, format_table, render_report
    from conjoin.evaluation.emoji_benchmark import evaluate_emoji
    from conjoin.hub import add_sentence_transformers_files
    from conjoin.retrieval import ItemEncoder, build_index
    from conjoin.training import CachedFeatures, load_recipe, train
    from conjoin.training.run import fastest_dtype

    from .demo_baseline import compare_heads
    from .demo_solar import add_solar, train_solar

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    out = Path(args.out or ("runs/demo-solar" if args.recipe == "solar" else "runs/demo"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = fastest_dtype(device) == torch.bfloat16
    overrides = {"training.output_dir": str(out / "model"), "training.use_cpu": str(device.type == "cpu").lower()}
    overrides |= {"training.bf16": str(bf16).lower()} | parse_overrides(args.overrides)
    _say("1/4  Data and training")
    solar = train_solar(out, recipe_folder(), overrides, _say) if args.recipe == "solar" else None
    trainer = solar.trainer if solar else train(load_recipe(args.recipe or recipe_folder() / DEMO, overrides))
    seed = trainer.args.seed
    add_sentence_transformers_files(out / "model")

    _say("2/4  Encoding and evaluating the held-out gallery")
    encoder = ItemEncoder.from_pretrained(
        str(out / "model"), batch_size=64, device=device, dtype=torch.bfloat16 if bf16 else None
    )
    shutil.rmtree(out / "gallery", ignore_errors=True)  # another model's vectors
    benchmark = evaluate_emoji(encoder, out / "gallery", seed=seed)

    _say("3/4  Indexing and searching")
    index = build_index(benchmark.stores["image"])
    index.save(out / "index")
    examples = _examples(encoder, index, benchmark, seed)
    _print_examples(examples)

    _say("4/4  Results")
    results = _results(trainer, benchmark, examples, usage(str(out / "model")))
    if solar:
        add_solar(results, solar, seed)
    if isinstance(trainer.train_dataset, CachedFeatures):
        results.tables.append(compare_heads(trainer, encoder.processor, benchmark, results))
    results.save(out / "results.json")
    report = render_report(results, out / "report.html")
    print(format_combinations(benchmark.combinations))
    for table in results.tables:
        print(f"\n{format_table(table)}")
    print(f"\nThe model, wherever sentence-transformers is installed:\n\n{usage(str(out / 'model'))}")
    print(f"Search it:  conjoin search {out / 'index'} --text 'red apple'")
    print(f"Report:     {report.resolve().as_uri()}")
    print(f"Done in {time.perf_counter() - started:.0f} s.")


def recipe_folder() -> Path:
    """Where the recipes are: beside the sources, or inside an installed package."""
    import conjoin

    package = Path(conjoin.__file__).parent
    beside = package.parents[1] / "training_args"
    return beside if beside.is_dir() else package / "_recipes"


def _say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if _in_terminal() else f"\n{text}", flush=True)


def _in_terminal() -> bool:
    import sys

    return sys.stdout.isatty()


def _examples(encoder: "ItemEncoder", index: Any, benchmark: "EmojiBenchmark", seed: int) -> list["Example"]:  # noqa: ANN401
    """Nine searches drawn at random: three each by text, by picture and by both."""
    import numpy as np

    from conjoin.evaluation import Example, Hit, Shown, picture
    from conjoin.retrieval import search_items

    generator = np.random.default_rng(seed)
    gallery = {row["id"]: row for row in benchmark.candidates}
    examples = []
    for modality in NAMES:
        for place in generator.choice(len(benchmark.queries), size=3, replace=False).tolist():
            row = benchmark.queries[place]
            item = {part: row[part] for part in modality.split(",")}
            found = search_items(index, encoder, [item], k=len(gallery))
            ranked = [gallery[id_] for id_ in found.ids[0]]
            rank = 1 + next(i for i, hit in enumerate(ranked) if hit["concept"] == row["concept"])
            hits = [
                Hit(Shown(hit["text"], picture(hit["image"])), float(score), hit["concept"] == row["concept"])
                for hit, score in zip(ranked[:5], found.scores[0], strict=False)
            ]
            shown = Shown(item.get("text"), picture(item["image"]) if "image" in item else None)
            examples.append(Example(shown, hits, rank, len(gallery), title=f"{NAMES[modality]} → image"))
    return examples


def _print_examples(examples: list["Example"]) -> None:
    for example in examples:
        asked = example.query.text or "a picture"
        found = ", ".join(("*" if hit.correct else "") + str(hit.item.text) for hit in example.results[:3])
        print(f"  {example.title:22s} {asked:28.28s} → {found}   (correct: rank {example.rank})")


def _results(
    trainer: "RetrievalTrainer", benchmark: "EmojiBenchmark", examples: list["Example"], loading: str
) -> "Results":
    from datetime import date

    from conjoin.evaluation import Curve, Headline, Results

    log = trainer.state.log_history
    losses = [[entry["step"], entry["loss"]] for entry in log if "loss" in entry]
    validation = {
        f"{query} → {candidate}": [[entry["step"], 100 * entry[key]] for entry in log if key in entry]
        for query, candidate, key in (
            ("text", "image", "eval_text_to_image_hit_rate@10"),
            ("image", "text", "eval_image_to_text_hit_rate@10"),
        )
    }
    model = trainer.encoder
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    test = len(benchmark.queries)
    results = Results(
        title=TITLE,
        summary=SUMMARY.format(steps=trainer.state.max_steps, test=test),
        seed=trainer.args.seed,
        model={
            "architecture": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "trained parameters": trained,
            "dimension": model.config.hidden_size,
        },
        dataset={
            "name": "emoji sample: Twemoji (CC BY 4.0), OpenMoji (CC BY-SA 4.0), names of the emoji package",
            "test concepts": test,
            "gallery": "Twemoji pictures",
            "queries": "English names, OpenMoji pictures",
        },
        config={
            "steps": trainer.state.max_steps,
            "batch size": trainer.args.per_device_train_batch_size,
            "learning rate": trainer.args.learning_rate,
        },
        combinations=benchmark.combinations,
        symmetric=[benchmark.symmetric],
        curves=[Curve("Training loss", {"training": losses}), Curve("Validation R@10, %", validation)],
        examples=examples,
        examples_note=f"Drawn at random with seed {trainer.args.seed}, not chosen.",
        usage=loading,
        created=date.today().isoformat(),
    )
    results.headline = [
        Headline("text → image, R@10", results.cell("text", "image").metrics["hit_rate@10"], "names, unseen concepts"),
        Headline("image → image, R@1", results.cell("image", "image").metrics["hit_rate@1"], "across two artists"),
        Headline(
            "image + text → image, R@1", results.cell("image,text", "image").metrics["hit_rate@1"], "across artists"
        ),
    ]
    return results
