"""`conjoin export`: the folder that training saves, and stock checkpoints."""

import json

import pytest
from transformers import AutoModel

from conjoin.cli.main import main
from conjoin.hub import export, load_model
from conjoin.models.mllm_retriever import MllmRetrieverModel
from conjoin.models.score_fusion import ScoreFusionModel
from conjoin.processing import ImageTextProcessor, MllmRetrieverProcessor


@pytest.fixture(scope="module")
def saved(mllm_checkpoints, tmp_path_factory):
    source, _ = mllm_checkpoints("qwen2_vl")
    processor = MllmRetrieverProcessor.from_mllm(source, prompts={"query": "Find it.", "document": "Read it."})
    return str(export(MllmRetrieverModel.from_mllm(source, 2), processor, tmp_path_factory.mktemp("saved")))


def prompts(folder):
    return json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]


def test_a_stock_checkpoint(saved, tmp_path, capsys):
    out = tmp_path / "stock"
    assert main(["export", saved, "--format", "stock", "--out", str(out), "--query-prompt", "Find a picture."]) == 0
    assert f'SentenceTransformer("{out}")' in capsys.readouterr().out
    assert type(AutoModel.from_pretrained(out)).__name__ == "Qwen2VLModel"
    assert prompts(out) == {"query": "Find a picture.", "document": "Read it."}


def test_a_folder_with_its_code(saved, tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["export", saved, "--out", str(out), "--document-prompt", ""]) == 0
    assert f'SentenceTransformer("{out}", trust_remote_code=True)' in capsys.readouterr().out
    assert prompts(out) == {"query": "Find it.", "document": ""} == load_model(out)[1].prompts
    assert (out / "modeling_mllm_retriever.py").is_file()


def test_mistakes_are_one_line(saved, tiny_checkpoints, tmp_path, capsys):
    clip = tiny_checkpoints["clip"]
    model, processor = (
        ScoreFusionModel.from_clip(clip, normalize_inputs=True),
        ImageTextProcessor.from_backbones(clip, clip),
    )
    fused = export(model, processor, tmp_path / "fused")
    for words, message in (
        ([str(fused), "--out", str(tmp_path / "x"), "--format", "stock"], "normalize_inputs=True cannot be exported"),
        ([saved, "--out", str(fused)], "exists; choose another folder"),
        ([clip, "--out", str(tmp_path / "x")], "is a clip; expected a model of this package"),
    ):
        assert main(["export", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
