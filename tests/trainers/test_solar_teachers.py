"""Teachers see the student's patches and words, never train, and say the same in any company."""

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, CLIPImageProcessorPil, ViTImageProcessorPil

from conjoin import SolarStage1Config, SolarStage1Trainer
from conjoin.processing import ImageTextProcessor
from conjoin.trainers.solar import split_teacher
from conjoin.trainers.solar_teachers import (
    TeacherCollator,
    Teachers,
    align_tokens,
    matching_image_processor,
    tokenize_with_spans,
)
from tiny_solar import stage1
from tiny_training import SETTINGS, cached_step, make_encoder, make_rows, plain_step

TEXTS = ["a cafe\u0301 and cafés", "\u200dA big 😀 dog", "word " * 30, "tab\there  ab", "漢字 ok", "x"]
TOKENIZERS = ["bert", "clip", "xlm_roberta", "siglip"]


def make_teachers(checkpoints, vision="dinov2", text="xlm_roberta", **options):
    return Teachers.from_pretrained(checkpoints[vision], checkpoints[text], **options)


def pair_rows(texts=TEXTS):
    return [dict(make_rows(len(texts))[i]) | {"text": text} for i, text in enumerate(texts)]


def student(checkpoints, vision="clip", text="clip"):
    model, processor = make_encoder(checkpoints, vision, text)
    return model.eval(), processor


def collate(checkpoints, rows, names=("clip", "clip"), teachers=None):
    model, processor = student(checkpoints, *names)
    teachers = teachers or make_teachers(checkpoints)
    inputs, teacher_inputs = split_teacher(TeacherCollator(processor, 8, teachers)(rows)["pairs"])
    return teacher_inputs, model(**inputs, output_tokens=True), teachers


def naive_alignment(states, teacher_offsets, student_offsets, text):
    """One student token: characters counted one by one."""
    inked = {i for i, c in enumerate(text) if not c.isspace()}
    weights = [len(inked & set(range(*student_offsets)) & set(range(*span))) for span in teacher_offsets]
    total = sum(weights)
    return None if not total else sum(w * s for w, s in zip(weights, states, strict=True)) / total


@pytest.mark.parametrize("teacher", TOKENIZERS)
@pytest.mark.parametrize("pupil", TOKENIZERS)
def test_alignment_is_the_mean_by_characters_in_common(tiny_checkpoints, pupil, teacher):
    ours, theirs = (AutoTokenizer.from_pretrained(tiny_checkpoints[name]) for name in (pupil, teacher))
    encoded, spans = tokenize_with_spans(ours, TEXTS, 12)
    teacher_encoded, teacher_spans = tokenize_with_spans(theirs, TEXTS)
    states = torch.randn(*teacher_spans.shape[:2], 3, dtype=torch.float64)
    aligned, known = align_tokens(states, teacher_spans, spans)
    for row, text in enumerate(TEXTS):
        plain = ours(text, truncation=True, max_length=12, return_offsets_mapping=True)
        plain_teacher = theirs(text, truncation=True, max_length=theirs.model_max_length, return_offsets_mapping=True)
        special = encoded["special_tokens_mask"][row].tolist()
        offsets = [
            (0, 0) if teacher_encoded["special_tokens_mask"][row, i] else span
            for i, span in enumerate(plain_teacher["offset_mapping"])
        ]
        for place, span in enumerate(plain["offset_mapping"]):
            want = None if special[place] else naive_alignment(states[row, : len(offsets)], offsets, span, text)
            assert known[row, place] == (want is not None)
            if want is not None:
                assert torch.allclose(aligned[row, place], want)
        assert not known[row, len(plain["input_ids"]) :].any()
    assert (aligned[~known] == 0).all()
    assert known.any(1).all()


@pytest.mark.parametrize("pupil", TOKENIZERS)
def test_special_tokens_in_a_text_are_words_that_have_targets(tiny_checkpoints, pupil):
    teachers = make_teachers(tiny_checkpoints, text="bert")
    rows = pair_rows(["<s>30</s> now 20", "[SEP]", "see <|endoftext|> b"])
    teacher_inputs, output, _ = collate(tiny_checkpoints, rows, ("clip", pupil), teachers)
    assert teachers(teacher_inputs, output).text_mask.any(1).all()


def test_what_the_teacher_cut_off_is_not_known(tiny_checkpoints):
    teacher_inputs, output, teachers = collate(
        tiny_checkpoints, pair_rows(), teachers=make_teachers(tiny_checkpoints, max_text_length=6)
    )
    targets = teachers(teacher_inputs, output)
    assert (output.text_token_mask & ~targets.text_mask).any()
    assert (targets.text_mask <= output.text_token_mask).all()
    assert targets.text_mask.any(1).all()


def test_text_models_with_other_tokens_are_refused(tiny_checkpoints):
    with pytest.raises(ValueError, match=r"vocabularies have sizes \[42, 77\]"):
        make_teachers(tiny_checkpoints, text_global=tiny_checkpoints["bert"])


@pytest.mark.parametrize("names", [("clip", "clip"), ("siglip", "siglip"), ("vit", "bert"), ("dinov2", "xlm_roberta")])
@pytest.mark.parametrize(
    "teacher_names", [("dinov2", "xlm_roberta"), ("clip", "bert"), ("siglip", "bert"), ("vit", "bert")]
)
def test_targets_stand_at_the_students_tokens(tiny_checkpoints, names, teacher_names):
    teachers = make_teachers(tiny_checkpoints, *teacher_names)
    teacher_inputs, output, _ = collate(tiny_checkpoints, pair_rows(["a cat", "blue 1 dog", "x y z"]), names, teachers)
    assert all(len(value) == 3 for value in teacher_inputs.values())
    targets = teachers(teacher_inputs, output)
    assert targets.image_tokens.shape == (3, 4, 24)
    assert targets.image_global.shape == (3, 24)
    assert targets.text_tokens.shape[:2] == output.text_token_mask.shape
    assert targets.text_mask.any(1).all()
    assert not any(target.requires_grad for target in targets)
    assert all(target.isfinite().all() for target in targets)


def test_a_patch_of_the_teacher_is_the_students_patch():
    """A bright square in one patch of a cropped picture is in the same patch for the teacher, at its resolution."""
    pupil = CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    teacher = ViTImageProcessorPil(size={"height": 7, "width": 7}, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    matched = matching_image_processor(pupil, teacher, 14, 8)
    for column in range(4):
        for row in range(4):
            picture = Image.new("RGB", (400, 200))  # resized by 1/5, its middle 32 of 80 x 40 pixels kept
            picture.paste((255, 255, 255), (120 + 40 * column, 20 + 40 * row, 160 + 40 * column, 60 + 40 * row))
            brightest = []
            for processor, patch in ((pupil, 8), (matched, 14)):
                pixels = processor(images=[picture], return_tensors="pt")["pixel_values"]
                assert pixels.shape[-2:] == (4 * patch, 4 * patch)
                patches = pixels.unflatten(2, (4, patch)).unflatten(4, (4, patch)).mean((0, 1, 3, 5))
                brightest.append(patches.flatten().argmax().item())
            assert brightest == [4 * row + column] * 2
            assert pixels.max() <= 2.01  # the teacher's colours: (1 - 0.5) / 0.25


def test_the_grid_counts_not_the_pixels(tiny_checkpoints):
    teachers = make_teachers(tiny_checkpoints)
    processor = ImageTextProcessor(
        ViTImageProcessorPil(size={"height": 50, "width": 36}), AutoTokenizer.from_pretrained(tiny_checkpoints["bert"])
    )
    batch = TeacherCollator(processor, 16, teachers)(pair_rows())  # 3 x 2 patches of 16; the teacher's have 8
    teacher_inputs = batch["pairs"]["teacher"]
    assert teacher_inputs["pixel_values"].shape == (6, 3, 24, 16)
    assert teachers.states(teacher_inputs)[0].shape == (6, 6, 24)


def test_states_are_those_of_the_models(tiny_checkpoints):
    """Patches and CLS of the vision model; tokens of one text model and CLS of another."""
    vision, text, other = (AutoModel.from_pretrained(tiny_checkpoints[n]).eval() for n in ("dinov2", "bert", "bert"))
    other.embeddings.word_embeddings.weight.data.neg_()
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints["bert"])
    teachers = Teachers(vision, AutoImageProcessor.from_pretrained(tiny_checkpoints["dinov2"]), text, tokenizer, other)
    pixels, encoded = torch.randn(2, 3, 16, 16), tokenize_with_spans(tokenizer, ["a b", "c"])[0]
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    patches, picture, words, sentence = teachers.states({"pixel_values": pixels} | inputs)
    with torch.no_grad():
        image = vision(pixels).last_hidden_state
        tokens, whole = (each(**inputs).last_hidden_state for each in (text, other))
    assert torch.equal(patches, image[:, 1:]) and torch.equal(picture, image[:, 0])
    assert torch.equal(words[0], tokens[0]) and (words[1, 3:] == 0).all()
    assert torch.equal(sentence, whole[:, 0]) and not torch.allclose(whole[:, 0], tokens[:, 0])


def test_company_and_mixed_precision_do_not_matter(tiny_checkpoints):
    rows = pair_rows(["a cat", "blue 1 dog on a mat", "x y z"])
    teacher_inputs, output, teachers = collate(tiny_checkpoints, rows)
    whole = teachers(teacher_inputs, output)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(whole, teachers(teacher_inputs, output), strict=True))
    alone, output, _ = collate(tiny_checkpoints, rows[:1], teachers=teachers)
    for a, b in zip(whole, teachers(alone, output), strict=True):
        assert torch.allclose(a[:1, : b.shape[1]].float(), b.float(), atol=1e-5)


def test_errors_name_what_is_wrong(tiny_checkpoints):
    teachers = make_teachers(tiny_checkpoints)
    processor = make_encoder(tiny_checkpoints)[1]
    collator, rows = TeacherCollator(processor, 8, teachers), pair_rows(["a", "b"])
    for changed in ({"text": None}, {"image": [rows[1]["image"]] * 2}):
        with pytest.raises(ValueError, match="item 'row1': teachers need one image and a text in every row"):
            collator([rows[0], rows[1] | changed])
    with pytest.raises(ValueError, match=r"no teacher inputs.*TeacherCollator"):
        teachers.states({})
    towers, processor = make_encoder(tiny_checkpoints)
    with pytest.raises(ValueError, match="a tower that is trained cannot be a teacher"):
        stage1("unused", towers, processor, make_rows(8))


def test_the_gradient_cache_asks_teachers_once(tiny_checkpoints, tmp_path, monkeypatch):
    teachers, (model, processor) = make_teachers(tiny_checkpoints), student(tiny_checkpoints)
    trainer = stage1(tmp_path, model, processor, None, teacher=teachers)
    step, batch = trainer.model.double().eval(), trainer.data_collator(pair_rows())
    _, expected = plain_step(step, batch)
    asked, states = [], Teachers.states
    monkeypatch.setattr(
        Teachers, "states", lambda self, batch: asked.append(len(batch["input_ids"])) or states(self, batch)
    )
    _, found = cached_step(step, batch, len(TEXTS))
    assert asked == [len(TEXTS)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    cached_step(step, batch, 4)
    assert asked[1:] == [4, 2]


def test_teachers_train_a_student_and_stay(tiny_checkpoints, tmp_path):
    rows = make_rows(8).map(lambda row, i: {"text": TEXTS[i % 6]}, with_indices=True)
    model, processor = student(tiny_checkpoints)
    config = SolarStage1Config(
        output_dir=str(tmp_path), vision_teacher=tiny_checkpoints["dinov2"],
        text_teacher=tiny_checkpoints["xlm_roberta"], teacher_max_text_length=12, **SETTINGS,
    )  # fmt: skip
    trainer = SolarStage1Trainer(model, config, rows, rows, processing_class=processor)
    teachers = [trainer.teacher.vision, *trainer.teacher.texts]
    before = [{name: value.clone() for name, value in each.state_dict().items()} for each in teachers]
    trainer.train()
    assert trainer.state.log_history[0]["ld_loss"] > 0 and trainer.state.log_history[0]["gd_loss"] > 0
    assert 0 <= trainer.evaluate()["eval_mean_hit_rate@1"] <= 1
    for each, state in zip(teachers, before, strict=True):
        torch.testing.assert_close(dict(each.state_dict()), state, rtol=0, atol=0)
        assert not each.training and not any(p.requires_grad for p in each.parameters())
