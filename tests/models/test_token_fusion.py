import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

from conjoin import TokenFusionModel
from conjoin.hub.build import towers_model

TEXTS = ["a red box", "x", "7 more words"]


@torch.no_grad()
@pytest.mark.parametrize("text", ["bert", "xlm_roberta"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_text_alone_is_what_the_text_encoder_makes_of_it(text, pooling, tiny_checkpoints, built):
    model = towers_model(TokenFusionModel, tiny_checkpoints["vit"], tiny_checkpoints[text], pooling=pooling).eval()
    batch = built({"bert": "token siglip + bert", "xlm_roberta": "token vit + xlm-roberta"}[text])[1](TEXTS)
    encoder = AutoModel.from_pretrained(tiny_checkpoints[text]).eval()
    states = encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    weights = batch["attention_mask"][..., None].float()
    sentence = states[:, 0] if pooling == "cls" else (states * weights).sum(1) / weights.sum(1)
    output = model(**batch)
    assert torch.equal(output.pooler_output, sentence)
    assert torch.equal(output.embeddings, F.normalize(sentence, dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("name", ["token dinov2 + bert", "token vit + xlm-roberta"])
def test_fused_by_hand(name, built, pairs):
    """CLS, the patches, the text: at consecutive positions, through the text encoder's own embedding norm."""
    model, processor = built(name)
    batch = processor(pairs[:1])
    table = model.text_model.embeddings
    patches = model.visual_projection(model.run_vision_tower(batch["pixel_values"]))
    words = table.word_embeddings(batch["input_ids"])
    tokens = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1) + table.token_type_embeddings.weight[0]
    start = {"token dinov2 + bert": 0, "token vit + xlm-roberta": 2}[name]
    positions = table.position_embeddings.weight[start : start + tokens.shape[1]]
    states = model.text_model.encoder(table.LayerNorm(tokens + positions)).last_hidden_state
    torch.testing.assert_close(model(**batch).pooler_output, states[:, 0])
    assert patches.shape[1] == 4 and tokens.shape[1] == 4 + 9 + ("roberta" in name) * 3


@torch.no_grad()
def test_an_image_alone_is_an_image_with_an_empty_text(built, pairs):
    model, processor = built("token siglip + bert")
    batch = processor(pairs)
    empty = torch.tensor([[model.config.cls_token_id, model.config.sep_token_id]]).expand(4, -1)
    assert torch.equal(empty[0], torch.tensor(processor.tokenizer("")["input_ids"]))
    expected = model(pixel_values=batch["pixel_values"], input_ids=empty).embeddings
    torch.testing.assert_close(model(pixel_values=batch["pixel_values"]).embeddings, expected)


@torch.no_grad()
def test_patches_count_against_the_positions(built, pictures):
    model, processor = built("token siglip + bert")  # 40 positions, 4 patches
    fits, too_long = ["a" * 34, "a" * 35]
    assert model(**processor([{"text": fits, "image": pictures[0]}])).embeddings.isfinite().all()
    assert model(**processor([too_long, pictures[0]])).embeddings.isfinite().all()  # not in one item
    with pytest.raises(ValueError, match="an item has 41 tokens, patches included, but the text encoder has 40 pos"):
        model(**processor(["x", {"text": too_long, "image": pictures[0]}]))


def test_special_tokens_come_from_the_tokenizer(tiny_checkpoints):
    folders = tiny_checkpoints["vit"], tiny_checkpoints["xlm_roberta"]
    text = AutoModel.from_pretrained(folders[1])
    for source in (folders[1], text):
        config = towers_model(TokenFusionModel, folders[0], source).config
        assert (config.cls_token_id, config.sep_token_id) == (0, 2)
    text.name_or_path = ""
    with pytest.raises(ValueError, match="also pass cls_token_id and sep_token_id"):
        towers_model(TokenFusionModel, folders[0], text, cls_token_id=5)
    assert towers_model(TokenFusionModel, folders[0], text, cls_token_id=5, sep_token_id=6).config.cls_token_id == 5


def test_unsuitable_towers(tiny_checkpoints):
    with pytest.raises(ValueError, match="has no vision tower: its BertConfig has no 'patch_size'"):
        towers_model(TokenFusionModel, tiny_checkpoints["bert"], tiny_checkpoints["bert"])
    with pytest.raises(ValueError, match="'clip_text_model' has no table of learned positions"):
        towers_model(TokenFusionModel, tiny_checkpoints["vit"], tiny_checkpoints["clip"])
    with pytest.raises(ValueError, match=r"Field 'pooling' expected one of \('cls', 'mean'\), got max"):
        towers_model(TokenFusionModel, tiny_checkpoints["vit"], tiny_checkpoints["bert"], pooling="max")
