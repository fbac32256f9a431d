"""`conjoin push` and `conjoin.hub.push` against a hub on this machine."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from conjoin.cli.main import main
from conjoin.hub import export_stock, model_upload, push
from conjoin.hub.commit import PushError
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.processing import MllmRetrieverProcessor

SCRIPT = Path(__file__).parents[2] / "hub_upload" / "push.py"
RECIPE = {
    "trainer": "gcl",
    "vision_model_name_or_path": "openai/clip-vit-base-patch32",
    "text_model_name_or_path": "/home/someone/bert",
    "dataset_mixture": [{"path": "emoji"}, {"path": "someone/captions"}],
    "mined": "/home/someone/My mined/rows",
    "output_dir": "/home/someone/out",
    "max_steps": 300,
    "num_train_epochs": 3.0,
    "learning_rate": 2e-3,
    "adam_beta2": 0.98,
    "use_peft": False,
    "lora_r": 16,
    "matryoshka_dims": [],
    "ran": {"world_size": 2, "negatives_per_query": 190, "versions": {"torch": "2.13.0"}, "commit": "abc"},
    "log": [{"loss": 0.5}],
}
RESULTS = {
    "title": "Emoji",
    "dataset": {"split": "test"},
    "headline": [
        {"label": "text → image, R@10", "metric": {"value": 0.451, "low": 0.4, "high": 0.5, "chance": 0.027}}
    ],
}
STRANGERS = (
    *("credentials.json", "optimizer.pt", "training_args.bin", "notes.py", "README.md", ".env", "extra.safetensors"),
    *("checkpoint-2/optimizer.pt", "checkpoint-2/config.json"),
)
LEFT_OUT = {"results.json", "link.json", "checkpoint-2/"} | {name for name in STRANGERS if "/" not in name}


@pytest.fixture(scope="module", params=["joint_encoder", "score_fusion", "token_fusion", "mllm_retriever"])
def folder(request, exports, tmp_path_factory):
    return save(exports(request.param)[0], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(exports, tmp_path_factory):
    return save(exports("score_fusion")[0], tmp_path_factory.mktemp("model"))


def save(exported, folder):
    """A copy of an export with all that one may find beside it."""
    saved = shutil.copytree(exported, folder, dirs_exist_ok=True)
    (saved / "recipe.json").write_text(json.dumps(RECIPE))
    (saved / "results.json").write_text(json.dumps(RESULTS))
    (saved / "checkpoint-2").mkdir()
    for name in STRANGERS:
        (saved / name).write_text("secret")
    (saved / "link.json").symlink_to("/etc/hostname")
    return saved


def metadata(card):
    return yaml.safe_load(card.split("---")[1])


def test_one_commit_holds_the_model_and_its_card(hub, api, folder):
    before = sorted(path.name for path in folder.iterdir())
    upload = model_upload(folder, "me/model")
    url = push(upload, revision="trial", api=api)
    repository = hub.repositories["model", "me/model"]
    assert url == f"{hub.url}/me/model/commit/{repository.branches['trial']}" and repository.private
    assert repository.count == 2 and len(hub.files()) == 1  # the first commit of a repository, and this one
    pushed = {name: raw for name, raw in hub.files(revision="trial").items() if name != ".gitattributes"}
    assert set(pushed) == {name for name in before if name not in LEFT_OUT and name != "checkpoint-2"} | {"README.md"}
    assert {"item_inputs.py", "modules.json", "tokenizer.json"} <= set(pushed)
    assert set(upload.left_out) == LEFT_OUT
    assert pushed["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_no_path_of_this_machine_is_pushed(folder, tmp_path_factory):
    upload, temporary = model_upload(folder, "me/model"), str(tmp_path_factory.getbasetemp()).encode()
    for name, file in upload.files.items():
        raw = file if isinstance(file, bytes) else file.read_bytes()
        assert b"someone/" not in raw.replace(b"someone/captions", b"") and temporary not in raw, name
    recipe = json.loads(upload.files["recipe.json"])
    assert (recipe["text_model_name_or_path"], recipe["mined"], recipe["output_dir"]) == ("bert", "rows", "out")


def test_card_says_what_the_folder_says(folder):
    results = [folder / "results.json"]
    card = model_upload(folder, "me/model", license="mit", results=results, languages=["en", "de"]).card
    told = metadata(card)
    assert (told["license"], told["language"], told["datasets"]) == ("mit", ["en", "de"], ["someone/captions"])
    assert (told["base_model"], told["base_model_relation"]) == (["openai/clip-vit-base-patch32"], "finetune")
    (entry,) = told["model-index"]
    (result,) = entry["results"]
    assert entry["name"] == "model"
    assert result["dataset"] == {"name": "Emoji", "type": "emoji", "split": "test"}
    metric = {"type": "text_to_image_r@10", "value": 45.1, "name": "text → image, R@10"}
    assert result["metrics"] == [metric]
    assert "/home/someone" not in card and "`bert`" in card
    rows = {"max_steps": 300, "learning_rate": 0.002, "world_size": 2, "negatives_per_query": 190, "commit": "abc"}
    assert all(f"| {name} | {value} |" in card for name, value in (rows | {"versions": "torch 2.13.0"}).items())
    assert not any(name in card for name in ("epochs", "peft", "lora_r", "matryoshka_dims", "adam_beta2"))
    assert "| text → image, R@10 | 45.1 % | 40.0 to 50.0 | 2.7 % |" in card
    assert "CC BY-SA 4.0" in card and 'SentenceTransformer("me/model"' in card
    assert "{{" not in card and "{%" not in card


def test_a_stock_export_is_pushed_with_its_modules(mllm_checkpoints, tmp_path):
    checkpoint = mllm_checkpoints("qwen2_vl")[0]
    retriever = MllmRetrieverModel.from_mllm(checkpoint, keep_layers=2, embedding_dim=16)
    processor = MllmRetrieverProcessor.from_mllm(checkpoint)
    export_stock(retriever, processor, tmp_path / "stock")
    upload = model_upload(tmp_path / "stock", "me/stock", base_models=["Qwen/Qwen2-VL-2B-Instruct"])
    modules = {"1_Pooling/config.json", "2_Normalize/config.json", "3_Dense/config.json", "3_Dense/model.safetensors"}
    assert modules | {"chat_template.jinja", "model.safetensors"} <= set(upload.files)
    assert not [name for name in upload.files if name.endswith(".py")] and not upload.left_out
    assert "vectors of 16 dimensions" in upload.card and "trust_remote_code" not in upload.card
    assert metadata(upload.card)["base_model"] == ["Qwen/Qwen2-VL-2B-Instruct"]


def test_another_model_is_not_replaced_unless_told(hub, api, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other, symlinks=True)
    push(model_upload(model, "me/model"), api=api)
    push(model_upload(model, "me/model", license="mit"), api=api)  # the same weights, another card
    assert b"license: mit" in hub.files()["README.md"]
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").unlink()
    (other / "SHA256SUMS").unlink()
    (other / "model-00001-of-00001.safetensors").write_bytes(weights[:-4] + b"\1\2\3\4")
    hub.files()["picture.txt"] = b"somebody's own"
    before = dict(hub.files())
    with pytest.raises(ValueError, match=r"'me/model' holds another model \(model.safetensors differs\).*--replace"):
        push(model_upload(other, "me/model"), api=api)
    assert hub.files() == before
    push(model_upload(other, "me/model"), replace=True, api=api)
    assert "model.safetensors" not in hub.files() and "model-00001-of-00001.safetensors" in hub.files()
    assert "SHA256SUMS" not in hub.files() and hub.files()["picture.txt"] == b"somebody's own"


def test_a_new_branch_holds_another_model_alone(hub, api, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other", symlinks=True)
    weights = other / "model.safetensors"
    content = weights.read_bytes()[:-4] + b"\1\2\3\4"
    weights.rename(other / "model-00001-of-00001.safetensors").write_bytes(content)
    (other / "SHA256SUMS").unlink()
    push(model_upload(model, "me/model"), api=api)
    before = dict(hub.files())
    push(model_upload(other, "me/model"), revision="v2", api=api)
    assert hub.files() == before
    assert [name for name in hub.files(revision="v2") if name.endswith(".safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]
    with pytest.raises(ValueError, match="holds another model"):
        push(model_upload(model, "me/model"), revision="v2", api=api)


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
        (500, "500 Internal Server Error"),
        ("break", "(disconnected|reset|broken)"),
    ],
)
def test_a_failure_is_told_and_commits_nothing(hub, api, model, place, trouble, words):
    hub.troubles[place] = trouble
    with pytest.raises(PushError, match=f"^cannot push to 'me/model': .*{words}"):
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


def test_a_link_among_the_files_of_the_model_is_refused(model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, symlinks=True)
    (copy / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (copy / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json' is a symbolic link"):
        model_upload(copy, "me/model")


def test_mistakes_are_one_line(model, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    for name in ("config.json", "modules.json", "processor_config.json", "model.safetensors"):
        (tmp_path / "strange" / name).write_text('{"model_type": "bert"}')
    for arguments, message in (
        ((tmp_path / "empty", "me/model"), "lacks config.json, modules.json, processor_config.json, *.safetensors"),
        ((tmp_path / "strange", "me/model"), "a model of type 'bert'; there are cards for ['joint_encoder'"),
        ((model, "me/too/deep"), "me/too/deep"),
    ):
        assert main(["push", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_the_script_of_the_clone_is_the_command(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(model), "me/model", "--dry-run"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 0 and "base_model:\n- openai" in capsys.readouterr().out
