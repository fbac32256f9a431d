"""The caller's model is the one that is trained: held, with what is frozen and its adapters; `trainer.model` is it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertModel, CLIPModel, CLIPProcessor, TrainerCallback

from conjoin import ContrastiveConfig, ContrastiveTrainer
from conjoin.hub import load_model
from tiny_training import SETTINGS, make_rows

ADAPTERS = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["visual_projection"])


class TwoTowers(torch.nn.Module):
    """A model that is none of transformers."""

    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def get_image_features(self, pixel_values):
        return self.clip.get_image_features(pixel_values).pooler_output

    def get_text_features(self, input_ids, attention_mask=None):
        return self.clip.get_text_features(input_ids, attention_mask=attention_mask).pooler_output


class WithHead(CLIPModel):
    """A CLIP with a layer of the caller's own."""

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(config.projection_dim, config.projection_dim)
        self.post_init()

    def get_text_features(self, *args, **kwargs):
        output = super().get_text_features(*args, **kwargs)
        output.pooler_output = self.head(output.pooler_output)
        return output


@pytest.fixture
def make(tiny_checkpoints, tmp_path):
    def trainer(model, **arguments):
        processor = CLIPProcessor.from_pretrained(tiny_checkpoints["clip"])
        args = ContrastiveConfig(str(tmp_path / "out"), **SETTINGS | arguments)
        return ContrastiveTrainer(model, args, make_rows(8), processing_class=processor)

    return trainer


def frozen(folder):
    clip = CLIPModel.from_pretrained(folder)
    clip.vision_model.requires_grad_(False)
    return clip


MODELS = {
    "a frozen tower": (frozen, None),
    "PeftModel": (lambda folder: get_peft_model(CLIPModel.from_pretrained(folder), ADAPTERS), None),
    "a head": (WithHead.from_pretrained, "AutoModel would build a CLIPModel, not a WithHead"),
    "no transformers": (lambda folder: TwoTowers(frozen(folder)), "TwoTowers has no configuration of transformers"),
}


@pytest.mark.parametrize(("build", "problem"), MODELS.values(), ids=MODELS)
def test_the_callers_model_is_trained_and_saved_or_said_not_to_be(
    build, problem, make, tiny_checkpoints, tmp_path, caplog
):
    given = build(tiny_checkpoints["clip"])
    held = getattr(given, "get_base_model", lambda: given)()
    known = {name: (parameter, parameter.requires_grad) for name, parameter in given.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in given.named_parameters()}
    trainer = make(given)
    assert any(module is held for module in trainer.model.modules())
    trainer.train()
    moved = set()
    for name, parameter in given.named_parameters():
        assert (parameter is known[name][0], parameter.requires_grad) == (True, known[name][1]), name
        moved |= {name} if not torch.equal(parameter, before[name]) else set()
    assert moved and all(known[name][1] for name in moved)
    if problem:
        assert f"save_model will refuse this model: {problem}" in caplog.text
        with pytest.raises(ValueError, match=problem):
            trainer.save_model(str(tmp_path / "model"))
        return
    trainer.save_model(str(tmp_path / "model"))
    model, processor = load_model(tmp_path / "model")
    batch = processor(["a b", {"image": make_rows(1)[0]["image"], "text": "c"}])
    with torch.no_grad():
        expected = trainer.model.eval()(**batch).embeddings
        torch.testing.assert_close(model(**batch).embeddings, expected, rtol=0, atol=1e-5)


def test_the_model_of_a_trainer_behaves_as_the_retriever(make, tiny_checkpoints, tmp_path):
    trainer, seen = make(tiny_checkpoints["clip"]), []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(model(**trainer.processing_class(["a"])).embeddings.shape)

    trainer.add_callback(Look())
    trainer.train()
    model = trainer.model
    assert seen == [(1, model.config.hidden_size)] * 2 and model.config.model_type == "score_fusion"
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding) and model.dtype == torch.float32
    model.save_pretrained(tmp_path / "plain")
    trainer.save_model()
    saved = load_model(trainer.args.output_dir)[0].config.to_dict()
    tokens = CLIPModel.from_pretrained(tiny_checkpoints["clip"]).config.text_config.eos_token_id
    assert "use_cache" not in saved and saved["backbone_config"]["text_config"]["eos_token_id"] == tokens
    trainer.create_model_card(tags="x")
    assert (tmp_path / "out/README.md").is_file() and (tmp_path / "plain/model.safetensors").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = model.nothing


@pytest.mark.parametrize("chunk_size", [0, 2])
def test_neftune_is_noise_on_tokens(make, tiny_checkpoints, chunk_size):
    losses = []
    for alpha in (None, 5.0):
        torch.manual_seed(0)
        trainer = make(tiny_checkpoints["clip"], neftune_noise_alpha=alpha, gradient_cache_chunk_size=chunk_size)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


def test_a_model_without_two_towers_or_a_room_is_refused(make, tiny_checkpoints, mllm_checkpoints):
    clip = CLIPModel.from_pretrained(tiny_checkpoints["clip"])
    prompts = get_peft_model(BertModel.from_pretrained(tiny_checkpoints["bert"]), prompt_tuning())
    for model, message in (
        (
            BertModel.from_pretrained(tiny_checkpoints["bert"]),
            "BertModel has no get_image_features and get_text_features; expected two towers",
        ),
        (mllm_checkpoints("qwen2_vl")[1], "and get_text_features; expected two towers such as CLIP"),
        (tiny_checkpoints["bert"], "a 'bert' does not say how the states of its tokens become one vector"),
        (prompts, "PROMPT_TUNING of peft adds prompts; expected adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            make(model)
    clip.name_or_path = ""
    with pytest.raises(ValueError, match="CLIPModel has no folder with a processor: pass processing_class"):
        ContrastiveTrainer(clip, train_dataset=make_rows(8))


def prompt_tuning():
    from peft import PromptTuningConfig

    return PromptTuningConfig(num_virtual_tokens=2, task_type="FEATURE_EXTRACTION")
