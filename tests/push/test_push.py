"""`conjoin push` and `conjoin.hub.push` against a hub on this machine."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from conjoin.cli.main import main
from conjoin.hub import export_stock
from conjoin.hub.card import CARDS
from conjoin.hub.folder import MODELS
from conjoin.push import PushError, model_upload, push
from conjoin.trainers.recipe import TRAINERS

SCRIPT = Path(__file__).parents[2] / "hub_upload" / "push.py"
RECIPE = {
    "trainer": "gcl",
    "vision_model_name_or_path": "openai/clip-vit-base-patch32",
    "text_model_name_or_path": "/home/someone/bert",
    "dataset_mixture": [{"path": "emoji"}, {"path": "someone/captions"}],
    "mined": "/home/someone/My mined/rows",
    "max_steps": 300,
    "num_train_epochs": 3.0,
    "learning_rate": 2e-3,
    "adam_beta2": 0.98,
    "use_peft": False,
    "lora_r": 16,
    "matryoshka_dims": [],
    "ran": {"world_size": 2, "versions": {"torch": "2.13.0"}, "datasets": {"someone/captions": "0123456789"}},
    "log": [{"loss": 0.5}],
}
SCORE = {"label": "text → image, R@10", "metric": {"value": 0.451, "low": 0.4, "high": 0.5, "chance": 0.027}}
RESULTS = {"title": "Emoji", "dataset": {"split": "test"}, "headline": [SCORE]}
STRANGERS = {
    "credentials.json",
    "tokenizer_key.txt",
    "optimizer.pt",
    "README.md",
    ".env",
    "extra.safetensors",
    "checkpoint-2/config.json",
}
LEFT_OUT = STRANGERS - {"checkpoint-2/config.json"} | {"results.json", "checkpoint-2/"}
SHARD = "model-00001-of-00001.safetensors"


def save(exported, folder):
    """A copy of an export with all that one may find beside it."""
    shutil.copytree(exported, folder, dirs_exist_ok=True)
    (folder / "checkpoint-2").mkdir()
    contents = dict.fromkeys(STRANGERS, "secret") | {"recipe.json": json.dumps(RECIPE)}
    for name, text in (contents | {"results.json": json.dumps(RESULTS)}).items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module", params=["joint_encoder", "score_fusion", "token_fusion", "mllm_retriever"])
def folder(request, exports, tmp_path_factory):
    return save(exports(request.param)[0], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(exports, tmp_path_factory):
    return save(exports("score_fusion")[0], tmp_path_factory.mktemp("model"))


@pytest.fixture
def other(model, tmp_path):
    """Another model, whose weights have another name."""
    folder = shutil.copytree(model, tmp_path / "other")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / SHARD).write_bytes(weights[:-4] + b"\1\2\3\4")
    for name in ("model.safetensors", "SHA256SUMS"):
        (folder / name).unlink()
    return folder


def metadata(card):
    return yaml.safe_load(card.split("---")[1])


def weights(hub, **options):
    return [name for name in hub.files(**options) if name.endswith(".safetensors")]


def test_one_commit_holds_the_model_and_its_card(hub, api, folder, tmp_path_factory):
    before = sorted(path.name for path in folder.iterdir())
    upload = model_upload(folder, "me/model")
    url = push(upload, revision="trial", api=api)
    repository = hub.repositories["model", "me/model"]
    assert url == f"{hub.url}/me/model/commit/{repository.branches['trial']}" and repository.private
    assert repository.count == 2 and len(hub.files()) == 1  # the first commit of a repository, and this one
    pushed = {name: raw for name, raw in hub.files(revision="trial").items() if name != ".gitattributes"}
    assert set(pushed) == {name for name in before if name not in LEFT_OUT and name != "checkpoint-2"} | {"README.md"}
    assert set(upload.left_out) == LEFT_OUT and sorted(path.name for path in folder.iterdir()) == before
    assert pushed["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    temporary = str(tmp_path_factory.getbasetemp()).encode()
    for name, raw in pushed.items():
        assert b"someone/" not in raw.replace(b"someone/captions", b"") and temporary not in raw, name
    recipe = json.loads(pushed["recipe.json"])
    assert (recipe["text_model_name_or_path"], recipe["mined"]) == ("bert", "rows")


def test_card_says_what_the_folder_says(folder, tmp_path):
    scores = {"test": [{"hf_subset": "en", "main_score": 0.5}]}
    mteb = {"task_name": "CIRR", "dataset_revision": "abc", "scores": scores}
    (tmp_path / "CIRR.json").write_text(json.dumps(mteb))
    results = [folder / "results.json", tmp_path / "CIRR.json"]
    card = model_upload(folder, "me/model", license="mit", results=results, languages=["en", "de"]).card
    told = metadata(card)
    assert (told["license"], told["language"], told["datasets"]) == ("mit", ["en", "de"], ["someone/captions"])
    assert (told["base_model"], told["base_model_relation"]) == (["openai/clip-vit-base-patch32"], "finetune")
    result, public = told["model-index"][0]["results"]
    assert public["dataset"] | {"name": ""} == {
        "name": "", "type": "mteb/CIRR", "config": "en", "split": "test", "revision": "abc",
    }  # fmt: skip
    assert {"mteb", "loss:GCL"} <= {*told["tags"]} and (public["metrics"][0]["type"]) == "main_score"
    assert "arXiv 2509.25638" in card and "@misc{gcl,\n  title = {Generalized" in card and card.count("```") % 2 == 0
    assert "| inputs | text, image" in card and "| layers of the text model | " in card and "pip install" in card
    link = "[someone/captions](https://huggingface.co/datasets/someone/captions/tree/0123456789) at commit 0123456"
    assert link in card and "| datasets |" not in card
    assert result["dataset"] == {"name": "Emoji", "type": "emoji", "split": "test"}
    assert result["metrics"] == [{"type": "text_to_image_r@10", "value": 45.1, "name": "text → image, R@10"}]
    rows = {"max_steps": 300, "learning_rate": 0.002, "world_size": 2, "versions": "torch 2.13.0"}
    assert all(f"| {name} | {value} |" in card for name, value in rows.items())
    assert not any(name in card for name in ("epochs", "peft", "lora_r", "matryoshka_dims", "adam_beta2"))
    assert "| text → image, R@10 | 45.1 % | 40.0 to 50.0 | 2.7 % |" in card and "`bert`" in card
    assert "CC BY-SA 4.0" in card and 'SentenceTransformer("me/model"' in card
    assert "/home/someone" not in card and "{{" not in card and "{%" not in card


def test_cards_cite_as_the_citation_file_does():
    cited = yaml.safe_load((CARDS / "papers.yaml").read_text())
    papers = {paper["title"]: paper for paper in cited["papers"].values()}
    for reference in yaml.safe_load((SCRIPT.parents[1] / "CITATION.cff").read_text())["references"][1:]:
        paper = papers[reference["title"]]
        assert (f"arXiv:{paper.get('arxiv')}" in json.dumps(reference)) == ("identifiers" in reference)
        assert paper["author"].startswith(reference["authors"][0]["family-names"])
    named = [*cited["models"].values(), *(method["papers"] for method in cited["methods"].values())]
    assert {name for names in named for name in names} | {*cited["options"].values()} == cited["papers"].keys()
    assert {*TRAINERS} <= cited["methods"].keys() and {*MODELS} == cited["models"].keys()


def test_a_stock_export_is_pushed_with_its_modules(retriever, tmp_path):
    export_stock(*retriever("qwen2_vl", 2, embedding_dim=16), tmp_path / "stock")
    upload = model_upload(tmp_path / "stock", "me/stock", base_models=["Qwen/Qwen2-VL-2B-Instruct"])
    files = {path.relative_to(tmp_path / "stock").as_posix() for path in tmp_path.glob("stock/**/*") if path.is_file()}
    assert set(upload.files) == files | {"README.md"} and "3_Dense/model.safetensors" in files and not upload.left_out
    assert "| dimensions | 16 |" in upload.card and "trust_remote_code" not in upload.card
    assert metadata(upload.card)["base_model"] == ["Qwen/Qwen2-VL-2B-Instruct"]


def test_another_model_is_not_replaced_unless_told(hub, api, model, other):
    push(model_upload(model, "me/model"), api=api)
    push(model_upload(model, "me/model", license="mit"), api=api)  # the same weights, another card
    assert b"license: mit" in hub.files()["README.md"]
    hub.files()["picture.txt"] = b"somebody's own"
    before = dict(hub.files())
    with pytest.raises(ValueError, match=r"'me/model' holds another model \(.* differs\).*--replace"):
        push(model_upload(other, "me/model"), api=api)
    push(model_upload(other, "me/model"), revision="v2", api=api)  # a new branch holds the other model alone
    assert hub.files() == before and weights(hub, revision="v2") == [SHARD]
    with pytest.raises(ValueError, match="holds another model"):
        push(model_upload(model, "me/model"), revision="v2", api=api)
    push(model_upload(other, "me/model"), replace=True, api=api)
    assert weights(hub) == [SHARD] and "SHA256SUMS" not in hub.files()
    assert hub.files()["picture.txt"] == b"somebody's own"


@pytest.mark.parametrize(("name", "end"), [("model.safetensors", b"\1\2\3\4"), ("modeling_score_fusion.py", b"#")])
def test_one_changed_file_is_another_model(name, end, hub, api, model, tmp_path):
    push(model_upload(model, "me/model"), api=api)
    path = shutil.copytree(model, tmp_path / "changed") / name
    path.write_bytes(path.read_bytes()[: -len(end)] + end)
    with pytest.raises(ValueError, match=rf"'me/model' holds another model \({name} differs\)"):
        push(model_upload(path.parent, "me/model"), api=api)


def test_a_public_repository_must_be_meant(hub, api, model):
    upload = model_upload(model, "me/model")
    push(upload, public=True, api=api)
    assert not hub.repositories["model", "me/model"].private
    with pytest.raises(ValueError, match=r"'me/model' is public; .*--public"):
        push(upload, revision="v2", api=api)
    assert set(hub.repositories["model", "me/model"].branches) == {"main"}


@pytest.mark.parametrize("place", ["POST .*/create", "POST .*/preupload/", "PUT /store", "POST .*/commit/"])
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (401, "401 Unauthorized.*log in with `hf auth login`, or set HF_TOKEN"),
        (403, "403 Forbidden.*your token"),
        ("break", "(disconnected|reset|broken)"),
    ],
)
def test_a_failure_is_told_and_commits_nothing(hub, api, model, place, trouble, words):
    hub.troubles[place] = trouble
    with pytest.raises(PushError, match=f"(?s)^cannot push to 'me/model': .*{words}"):
        push(model_upload(model, "me/model"), api=api)
    found = hub.repositories.get(("model", "me/model"))
    assert found is None or found.count == 1
    hub.troubles.clear()
    push(model_upload(model, "me/model"), api=api)  # the same call works once the trouble is over
    assert hub.repositories["model", "me/model"].count == 2


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(hub, api, model, monkeypatch):
    upload_files = api.preupload_lfs_files

    def meanwhile(*args, **options):
        hub.repositories["model", "me/model"].commit("main", {"model.safetensors": b"theirs"})
        monkeypatch.setattr(api, "preupload_lfs_files", upload_files)
        upload_files(*args, **options)

    monkeypatch.setattr(api, "preupload_lfs_files", meanwhile)
    with pytest.raises(PushError, match=r"cannot push to 'me/model': .*412 Precondition Failed"):
        push(model_upload(model, "me/model"), api=api)
    assert hub.files() == {"model.safetensors": b"theirs"}


def test_what_cannot_be_pushed_is_one_line(model, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    for name in ("config.json", "modules.json", "processor_config.json", "model.safetensors"):
        (tmp_path / "strange" / name).write_text('{"model_type": "bert"}')
    (tmp_path / "strange" / "damaged.json").write_text("{")
    for name in ("a/1", "b/2"):
        (tmp_path / "two/results" / name).mkdir(parents=True)
        (tmp_path / "two/results" / name / "Task.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    for path in model.iterdir():
        (tmp_path / "broken" / path.name).symlink_to(path if path.suffix != ".safetensors" else "nothing")
    for source, words, message in (
        (tmp_path / "broken", "me/m --dry-run", "lacks model*.safetensors"),
        (model, f"me/m --results {tmp_path / 'strange' / 'damaged.json'} --dry-run", "damaged.json' cannot be read: "),
        (model, f"me/m --results {model / 'config.json'} --dry-run", "config.json' holds no results; expected"),
        (model, f"me/m --results {tmp_path / 'two'} --dry-run", "results of several models: a/1, b/2"),
        (model, f"me/m --results {tmp_path / 'empty'} --dry-run", "has no results of MTEB (results/MODEL"),
        (tmp_path / "empty", "me/m", "lacks config.json, modules.json, processor_config.json, model*.safetensors"),
        (tmp_path / "strange", "me/m", "model.safetensors' cannot be read: "),
        (model, "me/too/deep --dry-run", "me/too/deep"),
        (model, "me/m --model other", "--model is for a collection or a space"),
        (model, "me/m --keep-pictures 9", "--keep-pictures is for a collection"),
        (model, "me/m --type space --language en", "--language is for a model or a collection or a dataset"),
    ):
        assert main(["push", str(source), *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_the_script_of_the_clone_is_the_command(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(model), "me/model", "--dry-run"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 0 and "base_model:\n- openai" in capsys.readouterr().out
