"""The ranking metrics as Spaces, from which the library `evaluate` loads them without this package."""

from pathlib import Path

from huggingface_hub import RepoCard, SpaceCardData

from conjoin.evaluation import rank_metrics
from conjoin.hub.card import CARDS
from conjoin.push.commit import Upload

METRICS = ("hit_rate_at_k", "recall_at_k", "mrr_at_k")
_SCRIPT = """from .rank_metrics import {name}, metric_class

Metric = metric_class({name})
"""
_APP = """import evaluate
from evaluate.utils import launch_gradio_widget

launch_gradio_widget(evaluate.load("{repo_id}"))
"""


def metric_upload(name: str, repo_id: str, license: str = "apache-2.0") -> Upload:
    """Collect the files of a Space, from which `evaluate.load("OWNER/NAME")` loads a metric.

    Args:
        name: `hit_rate_at_k`, `recall_at_k` or `mrr_at_k`.
        repo_id: The Space; its name must be that of the metric, because `evaluate` looks for a script of that name.
        license: Of the code.

    Raises:
        ValueError: No metric of this name, or the Space has another name.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; expected one of {', '.join(METRICS)}")
    if repo_id.split("/")[-1] != name:
        raise ValueError(f"the Space of the metric {name!r} must be named OWNER/{name}, got {repo_id!r}")
    description = getattr(rank_metrics, name).__doc__.partition("\n")[0]
    data = SpaceCardData(title=name, sdk="gradio", app_file="app.py", license=license, tags=["evaluate", "metric"])
    template = str(CARDS / "spaces" / "metric.md")
    card = RepoCard.from_template(data, template_path=template, repo_id=repo_id, name=name, description=description)
    files: dict[str, Path | bytes] = {
        f"{name}.py": _SCRIPT.format(name=name).encode(),
        "rank_metrics.py": Path(rank_metrics.__file__),
        "app.py": _APP.format(repo_id=repo_id).encode(),
        "requirements.txt": b"evaluate\ndatasets\nnumpy\n",
        "README.md": str(card).encode(),
    }
    return Upload(repo_id, "space", files, ("*.py",))
