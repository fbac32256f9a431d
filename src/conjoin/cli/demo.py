"""`conjoin demo`: train, encode, search and evaluate on the embedded sample."""

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conjoin.evaluation import Example, Results, Shown
    from conjoin.evaluation.benchmarks.emoji import EmojiScores
    from conjoin.retrieval import ItemEncoder
    from conjoin.training import RetrievalTrainer

DEMO = "sample/demo.yaml"
TITLE = "A joint encoder for pictures and words"
SUMMARY = (
    "A small joint image-text encoder on two frozen towers, trained for {steps} steps on pictures of emoji by two "
    "artists and their names. All scores are on {test} concepts that are in no training split. The gallery holds one "
    "artist's picture of each; queries are names, the other artist's pictures, or both."
)
_THUMBNAIL = 128
NAMES = {"image": "image", "text": "text", "image,text": "image + text"}


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `conjoin` program."""
    parser = subparsers.add_parser(
        "demo",
        help="train, encode, search and evaluate on the embedded sample",
        description="Build the emoji sample, train a joint encoder on it, encode a held-out gallery, search "
        "it, evaluate all nine modality combinations, and write a report. About five minutes on two CPU cores; needs "
        "the sample, which the README installs, and no network. --recipe solar runs SOLAR on scenes of several "
        "objects, beside baselines. --SECTION.KEY VALUE changes a key of the recipe.",
        epilog="example: conjoin demo --recipe solar",
    )
    parser.add_argument("--out", metavar="DIR", help="output folder (default: runs/demo, or runs/demo-NAME)")
    parser.add_argument(
        "--recipe",
        metavar="YAML",
        help="a recipe, or solar: both stages of SOLAR (default: training_args/sample/demo.yaml)",
    )
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="compute in bfloat16, or in float32 (default: as the recipe says; the sample's take what is faster here)",
    )
    parser.set_defaults(func=run, overrides=[])


def run(args: argparse.Namespace) -> None:
    """Run the whole demo."""
    import torch
    from transformers.utils import logging

    from conjoin.cli.options import check_out
    from conjoin.cli.train import usage
    from conjoin.evaluation import format_combinations
    from conjoin.evaluation.benchmarks.emoji import evaluate_emoji
    from conjoin.retrieval import ItemEncoder
    from conjoin.retrieval.collection_table import check_place
    from conjoin.training import DEMOS, load_recipe, recipe_folder, train

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    out = check_out(args.out or (f"runs/demo-{args.recipe}" if args.recipe in DEMOS else "runs/demo"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    overrides = _overrides(args, use_cpu=device.type == "cpu")
    if args.recipe in DEMOS:
        _finish(DEMOS[args.recipe].run(out, overrides, _say), out, started)
        return
    made = [out / "gallery", *(out / "evaluation").glob("[!.]*")]
    for folder in made:
        check_place(folder)
    model = str(out / "model")
    _say("1/4  Data and training")
    recipe = load_recipe(args.recipe or recipe_folder() / DEMO, {"training.output_dir": model, **overrides})
    trainer = train(recipe, overwrite=True)
    seed = trainer.args.seed

    _say("2/4  Encoding and evaluating the held-out gallery")
    encoder = ItemEncoder.from_pretrained(
        model, batch_size=64, device=device, dtype=torch.bfloat16 if trainer.args.bf16 else None
    )
    for folder in made:  # vectors of an earlier model
        shutil.rmtree(folder, ignore_errors=True)
    scores = evaluate_emoji(encoder, out / "evaluation", seed=seed)

    _say("3/4  Searching")
    _encode_gallery(encoder, scores, out)
    examples = _examples(scores, seed)
    _print_examples(examples)

    _say("4/4  Results")
    results = _results(trainer, scores, examples, usage(model))
    _add_baseline(trainer, encoder.processor, scores, results)
    print(format_combinations(scores.combinations))
    _finish(results, out, started, f"Search it:  conjoin search {out / 'gallery'} --text 'red apple'\n")


def _finish(results: "Results", out: Path, started: float, hint: str = "") -> None:
    """Save and show the results of a demo; `hint` says what else to do with it."""
    from conjoin.evaluation import format_table, render_report

    results.save(out / "results.json")
    report = render_report(results, out / "report.html")
    for table in results.tables:
        print(f"\n{format_table(table)}")
    print(f"\nThe model, wherever sentence-transformers is installed:\n\n{results.usage}")
    print(f"{hint}Report:     {report.resolve().as_uri()}")
    print(f"Done in {time.perf_counter() - started:.0f} s.")


def _overrides(args: argparse.Namespace, use_cpu: bool) -> dict[str, str]:
    """The overrides of every recipe that the demo runs."""
    from conjoin.cli.train import parse_overrides
    from conjoin.training import DEMOS

    bf16 = str(args.bf16).lower()
    overrides = {"training.use_cpu": str(use_cpu).lower()}
    if args.bf16 is not None:
        overrides["training.bf16"] = bf16
        if args.recipe is None or args.recipe in DEMOS:  # these recipes cache features
            overrides["features.bf16"] = bf16
    return overrides | parse_overrides(args.overrides)


def _encode_gallery(encoder: "ItemEncoder", scores: "EmojiScores", out: Path) -> None:
    """Encode the gallery into a collection to search, with its pictures as files and its names."""
    from conjoin.retrieval import encode_collection

    folder = (out / "pictures").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in scores.candidates:
        path = folder / (row["id"].replace("/", "-") + ".png")
        row["image"].save(path)
        rows.append({"id": row["id"], "image": str(path), "kept": {"text": row["text"]}})
    encode_collection(rows, encoder, out / "gallery", keep_pictures=_THUMBNAIL)


def _say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def _examples(scores: "EmojiScores", seed: int) -> list["Example"]:
    """Nine searches drawn at random: three each by text, by picture and by both."""
    import numpy as np
    import torch

    from conjoin.evaluation import search_examples

    generator = np.random.default_rng(seed)
    gallery = [_shown(row) for row in scores.candidates]
    vectors = torch.from_numpy(scores.collections["image"].vectors(scores.candidates["id"][:]))
    examples = []
    for modality, name in NAMES.items():
        places = generator.choice(len(scores.queries), size=3, replace=False).tolist()
        rows = scores.queries.select(places).select_columns(modality.split(","))
        queries, right = [_shown(row) for row in rows], [{place} for place in places]
        embeddings = scores.query_embeddings[modality][places]
        examples += search_examples(queries, embeddings, gallery, vectors, right, title=f"{name} → image")
    return examples


def _shown(row: dict[str, Any]) -> "Shown":
    from conjoin.evaluation import Shown, picture

    return Shown(row.get("text"), picture(row["image"]) if "image" in row else None)


def _print_examples(examples: list["Example"]) -> None:
    for example in examples:
        asked = example.query.text or "a picture"
        found = ", ".join(("*" if hit.correct else "") + str(hit.item.text) for hit in example.results[:3])
        print(f"  {example.title:22s} {asked:28.28s} → {found}   (correct: rank {example.rank})")


def _results(trainer: "RetrievalTrainer", scores: "EmojiScores", examples: list["Example"], loading: str) -> "Results":
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
    test = len(scores.queries)
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
        combinations=scores.combinations,
        symmetric=[scores.symmetric],
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


def _add_baseline(trainer: "RetrievalTrainer", processor: Any, scores: "EmojiScores", results: "Results") -> None:  # noqa: ANN401
    """Add the baseline, which trains on cached features, if the trainer did."""
    from conjoin.cli.demo_baseline import compare_heads
    from conjoin.training import CachedFeatures

    if isinstance(trainer.train_dataset, CachedFeatures):
        results.tables.append(compare_heads(trainer, processor, scores, results))
