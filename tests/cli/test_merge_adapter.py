"""`conjoin merge-adapter`: peft's adapters and checkpoints of a run become models of their own."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor

from conjoin.cli.main import main
from conjoin.hub import export
from conjoin.hub.build import mllm_model, mllm_processor
from test_hostile_inputs import guarded


@pytest.fixture(scope="module")
def mllm(mllm_checkpoints):
    return mllm_checkpoints("qwen2_vl")[0]


@pytest.fixture(scope="module")
def base(mllm, tmp_path_factory):
    """A pruned model, saved."""
    model, processor = mllm_model(mllm, 2), mllm_processor(mllm)
    return str(export(model, processor, tmp_path_factory.mktemp("base")))


def adapt(base, folder, layer="q_proj"):
    """Write adapters as peft does; returns what the adapted model makes of an item."""
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(base, trust_remote_code=True)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=rf".*language_model.*\.{layer}", init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return embed(adapted, base)


@torch.no_grad()
def embed(model, folder):
    return model(**AutoProcessor.from_pretrained(folder, trust_remote_code=True)(["a man", "b"])).embeddings


def test_adapters_of_peft_are_merged(base, tmp_path, capsys):
    expected = adapt(base, tmp_path / "adapters")
    assert main(["merge-adapter", str(tmp_path / "adapters"), "--out", str(tmp_path / "merged")]) == 0
    assert f'SentenceTransformer("{tmp_path / "merged"}"' in capsys.readouterr().out
    merged = AutoModel.from_pretrained(tmp_path / "merged", trust_remote_code=True).eval()
    torch.testing.assert_close(embed(merged, tmp_path / "merged"), expected, rtol=0, atol=1e-5)
    plain = AutoModel.from_pretrained(base, trust_remote_code=True).eval()
    assert (embed(plain, base) - expected).abs().max() > 1e-2
    assert load_file(tmp_path / "merged/model.safetensors").keys() == plain.state_dict().keys()
    assert (tmp_path / "merged/modules.json").is_file()


def test_a_base_that_moved_is_given(base, tmp_path, capsys):
    expected = adapt(base, tmp_path / "adapters")
    config = tmp_path / "adapters/adapter_config.json"
    words = ["merge-adapter", str(tmp_path / "adapters"), "--out", str(tmp_path / "merged")]
    for named, problem in ((None, "are for None, no folder"), ("him/base", "give the base, --base him/base")):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": named}))
        with guarded("a base on the Hub"):
            assert main(words) == 2
        assert problem in capsys.readouterr().err
    assert main([*words, "--base", base]) == 0
    merged = AutoModel.from_pretrained(tmp_path / "merged", trust_remote_code=True).eval()
    torch.testing.assert_close(embed(merged, tmp_path / "merged"), expected, rtol=0, atol=1e-5)


def test_adapters_of_another_model_are_refused(mllm, base, tmp_path, capsys):
    adapt(base, tmp_path / "adapters")
    other = mllm_model(mllm, 3)
    export(other, mllm_processor(mllm), tmp_path / "deeper")
    adapt(str(tmp_path / "deeper"), tmp_path / "deeper-adapters")
    cases = [
        (tmp_path / "adapters", str(tmp_path / "deeper"), "2 weights are missing or left over"),
        (tmp_path / "deeper-adapters", base, "2 weights are missing or left over, such as"),
        (tmp_path / "adapters", mllm, "is a qwen2_vl; expected a model of this package"),
    ]
    for adapters, model, message in cases:
        words = ["merge-adapter", str(adapters), "--base", model, "--out", str(tmp_path / "merged")]
        assert main(words) == 2, message
        error = capsys.readouterr().err
        assert message in error
        assert not (tmp_path / "merged").exists()


def test_what_is_no_adapter_is_named(base, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([str(tmp_path / "empty")], "no adapter_config.json in"),
        ([base], "expected a folder that peft wrote"),
        ([str(tmp_path / "absent")], "no adapter_config.json in"),
    ):
        assert main(["merge-adapter", *words, "--out", str(tmp_path / "x")]) == 2
        assert message in capsys.readouterr().err
    assert main(["merge-adapter", base, "--out", str(tmp_path / "empty")]) == 2
    assert "exists; choose another folder" in capsys.readouterr().err
