import torch
from PIL import Image
from tiny_solar import frozen_encoder

from conjoin.methods.solar.scores import IntersectionMasks, mask_tokens, pair_tokens, score_windows

ITEMS = [
    {"image": Image.effect_noise((16, 16), 60 + 10 * place).convert("RGB"), "text": text}
    for place, text in enumerate(["a bus and a red owl", "a tree", "an owl in a big tree", "a red bus"])
]


@torch.no_grad()
def test_masks_are_those_of_the_batch_and_the_same_for_an_item_alone(tiny_checkpoints):
    model, processor = frozen_encoder(tiny_checkpoints)
    tokens = pair_tokens(model.eval()(**processor(ITEMS), views=(), output_tokens=True))
    masks = IntersectionMasks.fit(model, tokens)
    together = masks(model, tokens)
    scores = score_windows(model, tokens)
    for name, local, exists in zip(("image", "text"), scores, (tokens.image_mask, tokens.text_mask), strict=True):
        assert torch.equal(together[f"{name}_weights"], mask_tokens(local, exists, 0.0, name)[0])
        assert 0 < together[f"{name}_weights"].sum() < exists.sum()
    for place, item in enumerate(ITEMS):
        inputs = processor([item])
        alone = masks(model, pair_tokens(model(**inputs, views=(), output_tokens=True)))
        width = alone["text_weights"].shape[1]
        assert torch.equal(alone["image_weights"][0], together["image_weights"][place])
        assert torch.equal(alone["text_weights"][0], together["text_weights"][place, :width])
        assert model(**inputs, **alone).embeddings.isfinite().all()
