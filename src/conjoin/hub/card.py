"""Cards of repositories, from templates and from what is measured and recorded only."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import AutoConfig, TrainingArguments

import conjoin
from conjoin.hub.folder import MODELS
from conjoin.hub.local_paths import is_local, public_name, without_paths
from conjoin.hub.stock import PROCESSORS
from conjoin.storage import check_checksums, read_json, reading

_BESIDE = Path(conjoin.__file__).parents[2] / "model_cards"
CARDS = _BESIDE if _BESIDE.is_dir() else Path(conjoin.__file__).parent / "_model_cards"
"""Folder of the templates: next to the sources, or inside the installed package."""

_TRAINING = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "seed"),
)
"""What a card says of the library's own arguments; of ours it says all that are not empty, zero or off."""
_MODELS = ("model_name_or_path", "vision_model_name_or_path", "text_model_name_or_path")
_SAMPLE = "emoji"


def render_card(
    folder: Path,
    repo_id: str,
    *,
    license: str | None = None,
    results: Sequence[str | Path] = (),
    languages: Sequence[str] = (),
    datasets: Sequence[str] = (),
    base_models: Sequence[str] = (),
) -> str:
    """Make the card of a model.

    Args:
        folder: Saved model, with `recipe.json` if a recipe trained it.
        repo_id: Repository of the model.
        license: Licence of the weights.
        results: What `conjoin evaluate` wrote (`results.json`) and what `conjoin mteb` did (a results folder of MTEB).
        languages: Codes of the languages that it was trained for.
        datasets: Ids of its training data on the Hub; those of the recipe when empty.
        base_models: Ids of the models that it was trained from; those of the recipe when empty.

    Raises:
        ValueError: A file is damaged, or something else than results.
    """
    config = _read(folder / "config.json")
    is_library, kind = has_library_card(folder), config.get("model_type", "sentence-transformers")
    recipe = _read(folder / "recipe.json")
    scores = [each for path in results for each in read_results(Path(path))]
    bases = sorted(set(base_models or _hub_ids([recipe.get(name) for name in _MODELS])))
    mixture = recipe.get("dataset_mixture") or [{"path": recipe.get("dataset_name")}]
    trained_on = [each["path"] for each in mixture if each["path"]]
    known = yaml.safe_load((CARDS / "papers.yaml").read_text(encoding="utf-8"))
    method = known["methods"].get(recipe.get("trainer"), {"papers": [], "losses": []})
    cited = [*known["models"].get(kind, []), *method["papers"]]
    cited += [paper for option, paper in known["options"].items() if recipe.get(option)]
    tags = ["sentence-transformers", "conjoin", "multimodal-retrieval", "image-text", kind]
    tags += [f"loss:{name}" for name in method["losses"]]
    tags += ["mteb"] if any(content.get("benchmark") == "MTEB" for content in scores) else []
    card = ModelCardData(
        base_model=bases or None,
        base_model_relation="finetune" if bases else None,
        datasets=sorted(datasets or _hub_ids(trained_on)) or None,
        eval_results=[each for content in scores for each in _eval_results(content)] or None,
        language=list(languages) or None,
        library_name="sentence-transformers",
        license=license,
        model_name=repo_id.split("/")[-1],
        pipeline_tag="feature-extraction",
        tags=[*dict.fromkeys(tags)],
    )
    modules = read_json(folder / "modules.json", "write it again") if is_library else []
    parts = [CARDS / f"{kind if kind in MODELS else 'stock'}.md", CARDS / "common.md"]
    links = {name: f"[{name}](https://huggingface.co/datasets/{name})" for name in _hub_ids(trained_on)}
    commits = recipe.get("ran", {}).get("datasets", {})
    for name in links:
        owner, _, repository = name.partition("/")
        if commit := commits.get(f"{owner}/{camelcase_to_snakecase(repository)}"):
            links[name] = f"[{name}](https://huggingface.co/datasets/{name}/tree/{commit}) at commit {commit[:7]}"
    return str(
        ModelCard.from_template(
            card,
            template_str="".join(part.read_text(encoding="utf-8") for part in parts),
            repo_id=repo_id,
            name=repo_id.split("/")[-1],
            facts=_facts(folder, config, recipe),
            architecture=kind,
            modules=[each["type"].rpartition(".")[2] for each in modules],
            config=config,
            method=recipe.get("trainer"),
            losses=method["losses"],
            data=", ".join(links.get(source) or public_name(source) for source in trained_on),
            settings=_settings(recipe),
            results=[row for content in scores for row in content["headline"]],
            papers={key: known["papers"][key] for key in dict.fromkeys(cited)},
            sample=_SAMPLE in trained_on,
        )
    )


def has_library_card(folder: Path) -> bool:
    """Whether a folder is a model of sentence-transformers that neither this package nor an MLLM made."""
    config = _read(folder / "config.json")
    return (folder / "modules.json").is_file() and config.get("model_type") not in {*MODELS, *PROCESSORS}


def _facts(folder: Path, config: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a model, what it embeds and what its towers are, as far as its files say."""
    count = 0
    for path in sorted(folder.rglob("model*.safetensors")):
        with reading(path, "save the model again"), safe_open(str(path), "numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    facts: dict[str, Any] = {"parameters": f"{count:,}"}
    if not has_library_card(folder):
        known = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text, backbone = known.get_text_config(), config.get("backbone_config", config)
        widths = [known.hidden_size] if known.model_type in MODELS else config.get("matryoshka_dimensions")
        facts["dimensions"] = max(widths or [text.hidden_size])
        facts["layers of the text model"] = text.num_hidden_layers
        for tower, source in (("vision", recipe.get(_MODELS[1])), ("text", recipe.get(_MODELS[2]))):
            name = public_name(source) if source else backbone.get(f"{tower}_config", {}).get("model_type")
            facts[f"{tower} tower"] = name and f"`{name}`"
    else:  # the width of the last module that has one
        settings = [_read(path) for path in sorted(folder.glob("[0-9]*_*/config.json"))]
        widths = [each.get("out_features") or each.get("embedding_dimension") for each in settings]
        facts["dimensions"] = next(filter(None, reversed(widths)), None)
    for path in sorted(folder.rglob("sentence_bert_config.json")):
        facts["inputs"] = ", ".join(_read(path).get("modality_config", {}))
    return {name: value for name, value in facts.items() if value}


def _hub_ids(names: Sequence[Any]) -> list[str]:
    return [name for name in names if isinstance(name, str) and "/" in name and not is_local(name)]


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """What a card's table says of the training: the keys of a recipe that are set, and what it ran on."""
    ran = dict(recipe.get("ran", {}))
    ran["versions"] = ", ".join(f"{name} {number}" for name, number in ran.get("versions", {}).items())
    ran["datasets"] = ""  # beside the method
    unused = {each.name for each in fields(TrainingArguments)} - {*_TRAINING} | {"ran", "log", *_MODELS, "trainer"}
    unused |= {"num_train_epochs"} if recipe.get("max_steps", -1) > 0 else {"max_steps"}
    unused |= set() if recipe.get("use_peft") else {name for name in recipe if name.startswith("lora_")}
    kept = {name: value for name, value in recipe.items() if name not in unused} | ran
    return {name: str(without_paths(value)).replace("|", r"\|") for name, value in kept.items() if value}


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read evaluations as dictionaries with a `title`, a `dataset` and the scores as a `headline`.

    Args:
        path: A `results.json`; or a results folder of MTEB, or one of its files, with the main score of each split and
            subset of a task that is a number.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: A file is damaged or holds no results, or the folder those of several models.
    """
    files = sorted(path.glob("results/*/*/*.json")) if path.is_dir() else [path]
    files = [file for file in files if file.name != "model_meta.json"]
    if len(models := sorted({"/".join(file.parent.parts[-2:]) for file in files})) > 1:
        raise ValueError(f"{str(path)!r} has results of several models: {', '.join(models)}; name the files of one")
    if not files:
        raise FileNotFoundError(f"{str(path)!r} has no results of MTEB (results/MODEL/REVISION/TASK.json)")
    found = []
    for file in files:
        check_checksums(file.parent, "evaluate again", [file.name])
        content = read_json(file, "write it again")
        if "headline" in content:
            found.append({"title": file.stem, **content})
        elif isinstance(content.get("scores"), dict) and "task_name" in content:
            task = content["task_name"]
            for split, subsets in content["scores"].items():
                for subset in filter(lambda each: math.isfinite(each["main_score"]), subsets):
                    name = task if subset["hf_subset"] == "default" else f"{task} ({subset['hf_subset']})"
                    row = {"label": f"{name}, main score", "metric": {"value": subset["main_score"]}}
                    data = {"type": task, "config": subset["hf_subset"], "split": split}
                    data["revision"] = content.get("dataset_revision")
                    found.append({"title": f"MTEB {name}", "benchmark": "MTEB", "dataset": data, "headline": [row]})
        else:
            raise ValueError(f"{str(file)!r} holds no results; expected results.json, or results of MTEB")
    return found


def _eval_results(content: dict[str, Any]) -> list[EvalResult]:
    """The headline of an evaluation as entries of `model-index`; scores in percent."""
    title, data = str(without_paths(content["title"])), content.get("dataset", {})
    is_mteb = content.get("benchmark") == "MTEB"
    return [
        EvalResult(
            task_type="retrieval",
            task_name="Retrieval",
            dataset_type=f"mteb/{data['type']}" if is_mteb else _slug(title),
            dataset_name=title,
            dataset_config=data["config"] if is_mteb else None,
            dataset_split=str(data["split"]) if data.get("split") else None,
            dataset_revision=data["revision"] if is_mteb else None,
            metric_type="main_score" if is_mteb else _slug(row["label"]),
            metric_name=row["label"],
            metric_value=round(100 * row["metric"]["value"], 2),
        )
        for row in content["headline"]
    ]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9@]+", "_", text.lower().replace("→", "to")).strip("_")


def _read(file: Path) -> dict[str, Any]:
    """The content of a JSON file, empty if there is none."""
    return dict(read_json(file, "write it again")) if file.is_file() else {}
