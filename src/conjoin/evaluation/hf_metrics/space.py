"""A metric as the files of a Space, from which `evaluate.load("OWNER/NAME")` loads it without this package."""

from pathlib import Path

from huggingface_hub import RepoCard, SpaceCardData

from conjoin.evaluation import rank_metrics
from conjoin.hub.card import CARDS
from conjoin.hub.commit import Upload

_APP = """import evaluate
from evaluate.utils import launch_gradio_widget

launch_gradio_widget(evaluate.load("{repo_id}"))
"""


def metric_upload(name: str, repo_id: str, license: str = "apache-2.0") -> Upload:
    """Collect the files of a metric: its script, the functions that it uses, the app of the Space, the card.

    Args:
        name: `hit_rate_at_k`, `recall_at_k` or `mrr_at_k`.
        repo_id: The Space; its name must be that of the metric, because `evaluate` looks for a script of that name.
        license: Of the code.

    Raises:
        FileNotFoundError: No metric of this name.
        ValueError: The Space has another name.
    """
    if repo_id.split("/")[-1] != name:
        raise ValueError(f"the Space of the metric {name!r} must be named OWNER/{name}, got {repo_id!r}")
    here = Path(__file__).parent
    script = (here / name / f"{name}.py").read_text(encoding="utf-8")
    for package in ("conjoin.evaluation.hf_metrics.", "conjoin.evaluation."):
        script = script.replace(f"from {package}", "from .")
    files: dict[str, Path | bytes] = {
        f"{name}.py": script.encode(),
        "shell.py": here / "shell.py",
        "rank_metrics.py": Path(rank_metrics.__file__),
        "app.py": _APP.format(repo_id=repo_id).encode(),
        "requirements.txt": b"evaluate\ndatasets\nnumpy\n",
    }
    description = getattr(rank_metrics, name).__doc__.partition("\n")[0]
    data = SpaceCardData(title=name, sdk="gradio", app_file="app.py", license=license, tags=["evaluate", "metric"])
    template = str(CARDS / "spaces" / "metric.md")
    card = RepoCard.from_template(data, template_path=template, repo_id=repo_id, name=name, description=description)
    files["README.md"] = str(card).encode()
    return Upload(repo_id, "space", files, ("*.py",))
