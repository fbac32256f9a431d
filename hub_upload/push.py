"""Push a folder that conjoin saved to the Hub, with a model card made from the contents of the folder.

Usage: python hub_upload/push.py FOLDER OWNER/NAME [--private] [--revision BRANCH] [--dry-run]

Log in with `hf auth login` or set the variable HF_TOKEN. HF_ENDPOINT selects another hub.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from transformers.dynamic_module_utils import get_relative_import_files

TEMPLATES = Path(__file__).resolve().parents[1] / "model_cards"
NEEDED = ("config.json", "modules.json", "processor_config.json")
BELONGS = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    "projection_heads.safetensors",  # of SOLAR's first stage
    *("config.json", "generation_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("SHA256SUMS", "LICENSE", "NOTICE"),
)
"""What is pushed as it is; besides these the code that the configurations name, `recipe.json` and the card."""
CODE_OWNERS = ("config.json", "processor_config.json", "tokenizer_config.json", "preprocessor_config.json")
SETTINGS = ("per_device_train_batch_size", "learning_rate", "temperature", "learn_temperature", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; an input error prints one line to stderr and returns exit code 2."""
    arguments = make_parser().parse_args(argv)
    try:
        check_folder(arguments.folder)
        validate_repo_id(arguments.repo_id)
        results = None if arguments.results is None else read_json(arguments.results)
        card = render_card(arguments.folder, arguments.repo_id, arguments.license, results)
        files = choose_files(arguments.folder)
        report_files(arguments.folder, files)
        if arguments.dry_run:
            print(card)
            return 0
        print(f"pushed to {push(arguments, files, card)}")
    except (ValueError, OSError, HTTPError) as error:
        print(f"push: {_explain(error)}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(prog="push.py", description="Push a model that conjoin saved to the Hub.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that `conjoin train` wrote")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="repository; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to; created if needed (default: main)")
    parser.add_argument("--message", default="Upload model", help="commit message (default: %(default)s)")
    parser.add_argument("--license", metavar="ID", help="licence of the weights, such as apache-2.0; none by default")
    parser.add_argument("--results", type=Path, metavar="JSON", help="results.json of an evaluation, for the card")
    parser.add_argument("--dry-run", action="store_true", help="print the card and push nothing")
    return parser


def check_folder(folder: Path) -> None:
    """Check that the folder can be loaded.

    Raises:
        FileNotFoundError: The folder does not exist, or lacks weights or a file that loading needs.
        ValueError: The folder has a model type without a card.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}")
    absent = [name for name in NEEDED if not (folder / name).is_file()]
    if not list(folder.glob("model*.safetensors")):
        absent.append("*.safetensors")
    if absent:
        raise FileNotFoundError(f"{str(folder)!r} lacks {', '.join(absent)}: was it written by `conjoin train`?")
    kind = read_json(folder / "config.json").get("model_type")
    if not (TEMPLATES / f"{kind}.md").is_file():
        known = sorted(path.stem for path in TEMPLATES.glob("*.md"))
        raise ValueError(f"{str(folder)!r} holds a model of type {kind!r}; there are cards for {known}")


def render_card(folder: Path, repo_id: str, license: str | None = None, results: dict[str, Any] | None = None) -> str:
    """Make the model card from the folder and the results only.

    Args:
        folder: Saved model, with `recipe.json` if a recipe trained it.
        repo_id: Repository of the model.
        license: Licence of the weights.
        results: A `conjoin.evaluation.Results` as JSON.
    """
    config = read_json(folder / "config.json")
    recipe = read_json(folder / "recipe.json") if (folder / "recipe.json").is_file() else {}
    model, data, training = (recipe.get(part, {}) for part in ("model", "data", "training"))
    sources = [model.get(tower) for tower in ("vision", "text")]
    bases = [*sources, model.get("mllm")]
    card_data = ModelCardData(
        base_model=sorted({name for name in bases if name and "/" in name and not _is_local(name)}) or None,
        library_name="sentence-transformers",
        license=license,
        pipeline_tag="feature-extraction",
        tags=["conjoin", "multimodal-retrieval", "image-text", config["model_type"]],
    )
    parameters, dimension = count_parameters(folder), _dimension(config)
    return str(
        ModelCard.from_template(
            card_data,
            template_path=str(TEMPLATES / f"{config['model_type']}.md"),
            repo_id=repo_id,
            model_name=repo_id.split("/")[-1],
            parameters=f"{parameters:,}",
            dimension=dimension,
            towers=[
                {"name": tower, "source": _public(source) if source else _tower_type(config, tower)}
                for tower, source in zip(("vision", "text"), sources, strict=True)
            ],
            method=recipe.get("method"),
            data=_public(data.get("source", "")),
            settings=_length(training) | {name: training[name] for name in SETTINGS if name in training},
            results=[_result_row(row) for row in (results or {}).get("headline", [])],
            sample=data.get("source") == "emoji",
        )
    )


def choose_files(folder: Path) -> list[Path]:
    """Return the files that belong to a model: those of `BELONGS`, its code, and the recipe.

    Raises:
        ValueError: One of them is a symbolic link, so what it points to would be published.
    """
    code = {name for owner in CODE_OWNERS if (folder / owner).is_file() for name in _code_files(folder / owner)}
    chosen = []
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if name not in code | {"recipe.json"} and not any(fnmatchcase(name, pattern) for pattern in BELONGS):
            continue
        if path.resolve() != folder.resolve() / name or not path.is_file():
            raise ValueError(
                f"{str(path)!r} is a symbolic link or no file; push takes real files: copy its target here"
            )
        chosen.append(path)
    return chosen


def report_files(folder: Path, files: list[Path]) -> None:
    """Print what is pushed and what is left out."""
    kept = [path.relative_to(folder).as_posix() for path in files]
    top = {name.partition("/")[0] for name in kept}
    left_out = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in top)
    print(f"files: {', '.join([*kept, 'README.md, made from the folder'])}", file=sys.stderr)
    print(f"left out: {', '.join(left_out) or 'nothing'}", file=sys.stderr)


def push(arguments: argparse.Namespace, files: list[Path], card: str) -> str:
    """Create the repository and the branch if needed, commit the files and the card; return the URL of the commit.

    The folder does not change. The recipe is pushed with local paths shortened to their last part.
    """
    api = HfApi()
    api.create_repo(arguments.repo_id, private=arguments.private or None, exist_ok=True)
    if arguments.revision is not None:
        api.create_branch(arguments.repo_id, branch=arguments.revision, exist_ok=True)
    operations = [
        CommitOperationAdd(path.relative_to(arguments.folder).as_posix(), path)
        for path in files
        if path.name != "recipe.json"
    ]
    if any(path.name == "recipe.json" for path in files):
        recipe = json.dumps(_without_paths(read_json(arguments.folder / "recipe.json")), indent=2) + "\n"
        operations.append(CommitOperationAdd("recipe.json", recipe.encode()))
    operations.append(CommitOperationAdd("README.md", card.encode()))
    commit = api.create_commit(
        arguments.repo_id, operations, commit_message=arguments.message, revision=arguments.revision
    )
    return str(commit.commit_url)


def count_parameters(folder: Path) -> int:
    """Number of stored parameters, read from the headers of the weight files."""
    total = 0
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(path), "numpy") as file:
            for name in file.keys():
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: The file has no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__}, expected an object")
    return content


def _dimension(config: dict[str, Any]) -> int:
    if config["model_type"] == "joint_encoder":
        return int(config["hidden_size"])
    if config["model_type"] == "token_fusion":
        return int(config["text_config"]["hidden_size"])
    backbone = config["backbone_config"]
    if config["model_type"] == "mllm_retriever":
        return int(config["embedding_dim"] or backbone["text_config"]["hidden_size"])
    return int(backbone.get("projection_dim") or backbone["vision_config"]["hidden_size"])


def _tower_type(config: dict[str, Any], tower: str) -> str:
    owner = config.get("backbone_config", config)
    return str(owner[f"{tower}_config"]["model_type"])


def _public(source: str | list[str]) -> str:
    """A source for the public: the id of a checkpoint or dataset, or the last part of a local path."""
    name = source if isinstance(source, str) else source[0]
    return Path(name).name if _is_local(name) else name


def _is_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _without_paths(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Shorten every absolute path in a JSON value to its last part."""
    if isinstance(value, dict):
        return {key: _without_paths(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part) for part in value]
    if isinstance(value, str) and (value.startswith("~") or PurePosixPath(value).is_absolute()):
        return PurePosixPath(value).name
    if isinstance(value, str) and PureWindowsPath(value).is_absolute():
        return PureWindowsPath(value).name
    return value


def _code_files(owner: Path) -> set[str]:
    """Return the names of the files with the classes of a configuration's `auto_map`, and of those they import."""
    entries = (read_json(owner).get("auto_map") or {}).values()
    references = [part for entry in entries for part in (entry if isinstance(entry, list) else [entry]) if part]
    modules = [owner.with_name(f"{part.rpartition('--')[2].rpartition('.')[0]}.py") for part in references]
    found = [file for module in modules if module.is_file() for file in (module, *get_relative_import_files(module))]
    return {Path(file).name for file in found}


def _length(training: dict[str, Any]) -> dict[str, Any]:
    """Length of the training: steps if given, otherwise epochs."""
    steps = training.get("max_steps", -1)
    if steps > 0:
        return {"steps": steps}
    return {"epochs": training["num_train_epochs"]} if "num_train_epochs" in training else {}


def _result_row(row: dict[str, Any]) -> dict[str, str]:
    metric = row["metric"]
    low, high, chance = (metric.get(name) for name in ("low", "high", "chance"))
    return {
        "label": row["label"],
        "value": f"{100 * metric['value']:.1f} %",
        "interval": "" if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f}",
        "chance": "" if chance is None else f"{100 * chance:.1f} %",
    }


def _explain(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code in (401, 403):
        status = error.response.status_code
        return f"the Hub refused ({status}): run `hf auth login`, or set HF_TOKEN to a token that may write"
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError):
        return f"cannot reach the Hub ({error}): is HF_ENDPOINT right, is there a network?"
    return str(error).strip() or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
