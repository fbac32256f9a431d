import numpy as np
import pytest
import torch
from PIL import Image
from tiny_solar import frozen_encoder

from conjoin.data.make.scenes import shared_patches, shared_tokens
from conjoin.methods.solar.explain import score_intersection
from conjoin.methods.solar.explain.pictures import boxed_picture
from conjoin.methods.solar.explain.truth import draw_scene_scores, score_scenes
from conjoin.methods.solar.scores import align, pair_tokens, threshold_of
from conjoin.training import CachedFeatures, cache_features

ROWS = [
    {
        "image": Image.effect_noise((16, 16), 90 + place).convert("RGB"),
        "text": "a bus and a red owl",
        "image_objects": [{"object": "dog", "box": [0, 0, 0.5, 1]}, {"object": "bus", "box": [0.5, 0, 1, 0.5]}],
        "text_objects": [{"object": "bus", "start": 2, "end": 5}, {"object": "owl", "start": 12, "end": 19}],
    }
    for place in range(3)
]


def test_scores_equal_a_naive_loop(tiny_checkpoints):
    model, processor = frozen_encoder(tiny_checkpoints)
    found = score_intersection(model, processor, ROWS)
    with torch.no_grad():
        inputs = processor([{"image": row["image"], "text": row["text"]} for row in ROWS])
        scores = align(pair_tokens(model.eval()(**inputs, views=(), output_tokens=True)))
    offsets = processor.tokenizer(ROWS[0]["text"], return_offsets_mapping=True)["offset_mapping"]
    objects = ROWS[0]["image_objects"], ROWS[0]["text_objects"]
    truths = {"patch": shared_patches(*objects, 2), "token": shared_tokens(*objects, offsets)}
    for kind, local in (("patch", scores.image), ("token", scores.text)):
        truth, wins, overlaps, kept = truths[kind].tolist(), [], [], {1: [], 0: []}
        for row in local.scores.tolist():
            shared, private = ([s for s, t in zip(row, truth, strict=True) if t == kept] for kept in (1, 0))
            assert shared and private
            wins += [1.0 if a > b else 0.5 if a == b else 0.0 for a in shared for b in private]
            above = {place for place, score in enumerate(row) if score > threshold_of(local).threshold}
            own = {place for place, t in enumerate(truth) if t == 1}
            overlaps.append(len(above & own) / len(above | own))
            for part, places in kept.items():
                places += [place in above for place, t in enumerate(truth) if t == part]
        assert found[f"{kind}_auroc"] == pytest.approx(sum(wins) / len(wins))
        assert found[f"{kind}_iou"] == pytest.approx(sum(overlaps) / len(overlaps))
        assert found[f"{kind}_shared_kept"] == pytest.approx(sum(kept[1]) / len(kept[1]))
        assert found[f"{kind}_private_kept"] == pytest.approx(sum(kept[0]) / len(kept[0]))


def test_cached_features_give_the_same_scores(tiny_checkpoints, tmp_path):
    model, processor = frozen_encoder(tiny_checkpoints)
    longer = {"id": "longer", "image": ROWS[0]["image"], "text": ROWS[0]["text"] + " in a big tree"}  # more padding
    rows = [row | {"id": str(place)} for place, row in enumerate(ROWS)]
    folder = cache_features(model, processor, [*rows, longer], tmp_path / "features")
    cached = CachedFeatures(folder, first_only=True)
    without = [{name: row[name] for name in ("text", "image_objects", "text_objects")} for row in ROWS]
    found = score_intersection(model, processor, without, 2, cached)
    assert found == pytest.approx(score_intersection(model, processor, ROWS, 2))


def test_no_scene_is_scored_alone(tiny_checkpoints, monkeypatch):
    sizes = []
    spy = lambda tokens: sizes.append(len(tokens.image)) or align(tokens)  # noqa: E731
    monkeypatch.setattr("conjoin.methods.solar.explain.truth.align", spy)
    scenes = score_scenes(*frozen_encoder(tiny_checkpoints), [*ROWS, ROWS[0]], batch_size=3)
    assert len(list(scenes)) == 4 and sizes == [2, 2]


def test_scenes_that_share_everything_cannot_be_scored(tiny_checkpoints):
    model, processor = frozen_encoder(tiny_checkpoints)
    rows = [row | {"image_objects": row["image_objects"][1:]} for row in ROWS]
    with pytest.raises(ValueError, match="no scene has a patch of a shared and one of a private object"):
        score_intersection(model, processor, rows)


def test_boxes_of_shared_objects_are_red():
    black = Image.new("RGB", (280, 280))
    pixels = np.asarray(boxed_picture(black, [((0, 0, 0.4, 1), True), ((0.5, 0, 1, 0.5), False)]), dtype=int)
    red, blue = pixels[..., 0] > pixels[..., 2], pixels[..., 2] > pixels[..., 0]
    assert red[:, :4].all() and not red[:, 140:].any()
    assert blue[:4, 150:270].all() and not blue[150:].any()


def test_a_drawing_greys_the_patches_that_the_mask_leaves_out(tiny_checkpoints):
    model, processor = frozen_encoder(tiny_checkpoints)
    (scored, *_) = score_scenes(model, processor, ROWS)
    above = torch.tensor([True, False, True, True])
    assert scored["patch"].above.shape == above.shape
    scored["patch"] = scored["patch"]._replace(above=above)
    white = Image.new("RGB", (280, 280), "white")
    drawn = np.asarray(draw_scene_scores(white, ROWS[0], scored, processor.tokenizer), dtype=int)
    side, row = (drawn.shape[1] - 10) // 3, drawn[100]  # three panels with margins of 10
    left, right = row[2 * side + 10 + 70], row[2 * side + 10 + 210]
    assert left.tolist() == [255, 255, 255] and right.max() < 200
