"""`format: queries` from the command line, by every method that takes queries."""

import json

import pytest
import torch
import yaml
from PIL import Image

from conjoin.cli.main import main
from conjoin.data import QueryTable, RetrievalCollator
from conjoin.data.training_rows import NamedCandidates
from conjoin.losses import info_nce
from conjoin.methods.contrastive import ContrastiveConfig, QueryContrastiveObjective, QueryContrastiveTrainer
from conjoin.training import load_recipe
from tiny_training import make_encoder, make_trainer, without_dropout


@pytest.fixture
def rows(tmp_path):
    """Two files of eight rows: texts that ask for images, and images that ask for texts."""
    for number in range(9):
        Image.new("RGB", (16, 16), (25 * number, 250 - 19 * number, 90 * number % 256)).save(
            tmp_path / f"{number}.png"
        )
    files = {"asked.jsonl": [], "shown.jsonl": []}
    for number in range(8):
        item = {"image": f"{number}.png"}
        files["asked.jsonl"].append({"query": f"box {number}", "positive": item, "negatives": [{"image": "8.png"}]})
        files["shown.jsonl"].append({"query": item | {"text": "name"}, "positive": [f"box {number}", f"b {number}"]})
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def recipe(rows, tiny_checkpoints):
    def write(method, model=None, **training):
        towers = {
            "vision": tiny_checkpoints["dinov2"],
            "text": tiny_checkpoints["bert"],
            "config": {"hidden_size": 16, "num_attention_heads": 2},
        }
        settings = {"output_dir": str(rows / "out"), "per_device_train_batch_size": 4, "max_steps": 2,
                    "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True,
                    "save_strategy": "no"} | training  # fmt: skip
        data = {"format": "queries", "hard_negatives": 1, "source": str(rows / "asked.jsonl")}
        content = {"method": method, "model": model or towers, "data": data, "training": settings}
        (rows / "recipe.yaml").write_text(yaml.safe_dump(content))
        return str(rows / "recipe.yaml")

    return write


def losses(folder):
    return [entry for entry in json.loads((folder / "out" / "recipe.json").read_text())["log"] if "loss" in entry]


@pytest.mark.parametrize("method", ["contrastive", "puma_stage2"])
def test_several_sources_train_from_the_command_line(recipe, rows, method):
    sources = yaml.safe_dump(
        [
            {"source": str(rows / "asked.jsonl"), "weight": 2, "instruction": "find the picture"},
            {"source": str(rows / "shown.jsonl"), "name": "shown"},
        ],
        default_flow_style=True,
    )
    words = ["--data.sources", sources, "--data.eval_source", str(rows / "asked.jsonl")]
    words += ["--training.eval_strategy", "steps", "--training.eval_steps", "2"]
    assert main(["train", recipe(method, one_dataset_per_batch=True), *words]) == 0
    log = json.loads((rows / "out" / "recipe.json").read_text())["log"]
    assert sum("loss" in entry for entry in log) == 2
    assert any("eval_query_to_candidate_hit_rate@1" in entry for entry in log)


def test_the_loss_is_info_nce_with_a_learned_temperature(rows, tiny_checkpoints):
    model, processor = make_encoder(tiny_checkpoints)
    without_dropout(model)
    config = ContrastiveConfig(output_dir=str(rows / "out"), use_cpu=True, report_to="none", temperature=0.1)
    objective = QueryContrastiveObjective(model, config)
    table = QueryTable(rows / "asked.jsonl", hard_negatives=1)
    batch = NamedCandidates(RetrievalCollator(processor))([table[index] for index in range(4)])
    terms = objective(**batch)
    parts = [model(**batch[part]).pooler_output for part in ("queries", "positives", "negatives")]
    candidates = torch.cat([parts[1], parts[2][:1]])  # the four negatives are one item, but never a positive
    both = torch.cat(parts[1:])
    torch.testing.assert_close(terms["contrastive_loss"], info_nce(parts[0], both, 0.1))
    assert terms["contrastive_loss"] > info_nce(parts[0], candidates, 0.1)
    terms["contrastive_loss"].backward()
    assert all(parameter.grad.abs() > 0 for parameter in objective.loss.parameters())


def test_every_positive_of_a_row_is_right_in_evaluation(tmp_path, tiny_checkpoints):
    pairs = [("a", ["z z", "a"]), ("a", "a"), ("q", "q")]
    lines = [{"query": query, "positive": positive} for query, positive in pairs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table, trainers = QueryTable(tmp_path / "rows.jsonl"), {"queries": (ContrastiveConfig, QueryContrastiveTrainer)}
    model, processor = make_encoder(tiny_checkpoints)
    for seed in range(4):  # in some the first row draws the text that is not its query
        trainer = make_trainer("queries", model, processor, tmp_path, table, table, trainers, seed=seed)
        assert trainer.evaluate()["eval_query_to_candidate_hit_rate@1"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.format": "nli", "data.instruction": "x"}, "instruction='x' is for format queries, not nli"),
        ({"data.format": "pairs", "data.sources": "[{source: a}]"}, "pairs are streamed; set streaming: true"),
        ({"data.format": "nli", "data.datasets": "[VisualNews]"}, "is for format mbeir or mmeb, not nli"),
        ({"data.format": "querys"}, "unknown format 'querys'; expected one of"),
        ({"data.image_column": "image"}, "image_column='image' is for pairs"),
        ({"data.streaming": "true"}, "streaming is for pairs"),
        ({"data.sources": "[{sources: a}]"}, "unknown key 'sources'"),
    ],
)
def test_settings_of_another_format_are_refused(recipe, changes, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe("contrastive"), changes)


def test_more_that_is_refused(recipe, rows, capsys):
    path, sources = recipe("contrastive"), "[{source: %s}]" % (rows / "asked.jsonl")
    assert main(["train", path, "--data.sources", sources, "--data.eval_split", "test"]) != 0
    assert "name the eval_source" in capsys.readouterr().err
    assert main(["train", path, "--features.folder", str(rows / "features")]) != 0
    assert "only those of pairs can be cached" in capsys.readouterr().err
