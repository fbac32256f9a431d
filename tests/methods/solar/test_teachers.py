"""Teachers see the student's patches and words, never train, and say the same in any company."""

import pickle

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, CLIPImageProcessorPil, ViTImageProcessorPil

from conjoin.data import PairCollator
from conjoin.methods.solar import SolarStage1Config, SolarStage1Trainer
from conjoin.methods.solar.stage1 import SolarStage1Objective, split_teacher
from conjoin.methods.solar.teachers import (
    TeacherCollator,
    Teachers,
    TextTeacher,
    VisionTeacher,
    align_tokens,
    matching_image_processor,
    tokenize_with_spans,
)
from conjoin.processing import ImageTextProcessor
from tiny_training import cached_step, make_encoder, make_rows, plain_step

TEXTS = ["a cafe\u0301 and cafés", "\u200dA big 😀 dog", "word " * 30, "tab\there  ab", "漢字 ok", "x"]
TOKENIZERS = ["bert", "clip", "xlm_roberta", "siglip"]


def make_teachers(checkpoints, vision="dinov2", text="xlm_roberta", **kwargs):
    return Teachers(
        VisionTeacher.from_pretrained(checkpoints[vision]), TextTeacher.from_pretrained(checkpoints[text], **kwargs)
    )


def pair_rows(texts=TEXTS):
    return [dict(make_rows(len(texts))[i]) | {"text": text} for i, text in enumerate(texts)]


def student(checkpoints, vision="clip", text="clip"):
    model, processor = make_encoder(checkpoints, vision, text)
    return model.eval(), processor


def collate(checkpoints, rows, names=("clip", "clip"), teachers=None):
    model, processor = student(checkpoints, *names)
    teachers = teachers or make_teachers(checkpoints)
    batch = TeacherCollator(processor, 8, teachers)(rows)
    inputs, taught = split_teacher(batch["pairs"])
    return taught, model(**inputs, output_tokens=True), teachers


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


def test_capitals_and_accents_keep_their_places(tiny_checkpoints):
    clip, bert = (AutoTokenizer.from_pretrained(tiny_checkpoints[name]) for name in ("clip", "bert"))
    text = ["A Cafe\u0301 ÀB 😀 z"]
    _, clip_spans = tokenize_with_spans(clip, text)
    bert_encoded, bert_spans = tokenize_with_spans(bert, text)
    letters = bert.convert_ids_to_tokens(bert_encoded["input_ids"][0])
    states = torch.arange(len(letters), dtype=torch.float32)[None, :, None]
    aligned, known = align_tokens(states, bert_spans, clip_spans)
    places = aligned[0, known[0], 0].tolist()
    found = [letters[int(place)] for place in places]
    assert all(place == int(place) for place in places)  # every CLIP token falls into one BERT token
    assert found[:4] == ["a", "c", "##a", "##f"]
    assert found[-6:] == ["##b", "[UNK]", "[UNK]", "[UNK]", "[UNK]", "z"]  # an emoji is four bytes for CLIP


@pytest.mark.parametrize("pupil", TOKENIZERS)
def test_special_tokens_in_a_text_are_words_that_have_targets(tiny_checkpoints, pupil):
    teachers = make_teachers(tiny_checkpoints, text="bert")
    rows = pair_rows(["<s>30</s> now 20", "[SEP]", "see <|endoftext|> b"])
    batch, output, _ = collate(tiny_checkpoints, rows, ("clip", pupil), teachers)
    assert teachers(batch, output).text_mask.any(1).all()


def test_what_the_teacher_cut_off_is_not_known(tiny_checkpoints):
    teachers = make_teachers(tiny_checkpoints, max_length=6)
    batch, output, _ = collate(tiny_checkpoints, pair_rows(), teachers=teachers)
    targets = teachers(batch, output)
    lost = output.text_token_mask & ~targets.text_mask
    assert lost.any()
    assert (targets.text_mask <= output.text_token_mask).all()
    assert targets.text_mask.any(1).all()


def test_a_tokenizer_without_a_limit_cuts_nothing(tiny_checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints["bert"])
    expected = tokenizer("a b")["input_ids"]
    tokenizer.model_max_length = int(1e30)
    assert tokenize_with_spans(tokenizer, ["a b"])[0]["input_ids"].tolist() == [expected]


def test_a_slow_tokenizer_is_refused(tiny_checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints["bert"])
    slow = type("SlowTokenizer", (), {"is_fast": False, "model_max_length": 9})()
    model = AutoModel.from_pretrained(tiny_checkpoints["bert"])
    with pytest.raises(ValueError, match="SlowTokenizer is no fast tokenizer"):
        TextTeacher(model, slow)
    clip = [
        AutoModel.from_pretrained(tiny_checkpoints["clip"]),
        AutoTokenizer.from_pretrained(tiny_checkpoints["clip"]),
    ]
    with pytest.raises(ValueError, match="CLIPModel is no text encoder, so it cannot teach words"):
        TextTeacher(*clip)
    with pytest.raises(ValueError, match=r"vocabularies have sizes \[77, 42\]"):
        TextTeacher(model, tokenizer, global_model=AutoModel.from_pretrained(tiny_checkpoints["xlm_roberta"]))


@pytest.mark.parametrize("names", [("clip", "clip"), ("siglip", "siglip"), ("vit", "bert"), ("dinov2", "xlm_roberta")])
@pytest.mark.parametrize(
    "teacher_names", [("dinov2", "xlm_roberta"), ("clip", "bert"), ("siglip", "bert"), ("vit", "bert")]
)
def test_targets_stand_at_the_students_tokens(tiny_checkpoints, names, teacher_names):
    teachers = make_teachers(tiny_checkpoints, *teacher_names)
    rows = pair_rows(["a cat", "blue 1 dog", "x y z"])
    batch, output, _ = collate(tiny_checkpoints, rows, names, teachers)
    assert all(len(value) == 3 for value in batch.values())
    targets = teachers(batch, output)
    assert targets.image_tokens.shape == (3, 4, 24)
    assert targets.image_global.shape == (3, 24)
    assert targets.text_tokens.shape[:2] == output.text_token_mask.shape
    assert targets.text_mask.any(1).all()
    assert not any(target.requires_grad for target in targets)
    assert all(target.isfinite().all() for target in targets)


def test_a_patch_of_the_teacher_is_the_students_patch(tiny_checkpoints):
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
    taught = batch["pairs"]["teacher"]
    assert taught["pixel_values"].shape == (6, 3, 24, 16)
    assert teachers.states(taught)["image_tokens"].shape == (6, 6, 24)


def test_vision_teacher_reads_patches_and_cls(tiny_checkpoints):
    model = AutoModel.from_pretrained(tiny_checkpoints["dinov2"]).eval()
    pixels = torch.randn(2, 3, 16, 16)
    want = model(pixels).last_hidden_state
    local, pooled = VisionTeacher(model, AutoImageProcessor.from_pretrained(tiny_checkpoints["dinov2"]))(pixels)
    assert torch.equal(local, want[:, 1:]) and torch.equal(pooled, want[:, 0])
    with pytest.raises(ValueError, match="BertModel has no patches"):
        VisionTeacher(AutoModel.from_pretrained(tiny_checkpoints["bert"]), None)


def test_global_states_may_come_from_another_model(tiny_checkpoints):
    plain = TextTeacher.from_pretrained(tiny_checkpoints["bert"])
    other = AutoModel.from_pretrained(tiny_checkpoints["bert"])
    other.embeddings.word_embeddings.weight.data.neg_()
    both = TextTeacher(plain.model, plain.tokenizer, global_model=other)
    batch = tokenize_with_spans(plain.tokenizer, ["a b", "c"])[0]
    inputs = (batch["input_ids"], batch["attention_mask"])
    assert torch.equal(both(*inputs)[0], plain(*inputs)[0])
    assert torch.equal(both(*inputs)[1], TextTeacher(other, plain.tokenizer)(*inputs)[1])
    assert not torch.allclose(both(*inputs)[1], plain(*inputs)[1])
    assert (plain(*inputs)[0][1, 3:] == 0).all()


def test_company_and_mixed_precision_do_not_matter(tiny_checkpoints):
    rows = pair_rows(["a cat", "blue 1 dog on a mat", "x y z"])
    batch, output, teachers = collate(tiny_checkpoints, rows)
    whole = teachers(batch, output)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(whole, teachers(batch, output), strict=True))
    alone, output, _ = collate(tiny_checkpoints, rows[:1], teachers=teachers)
    for a, b in zip(whole, teachers(alone, output), strict=True):
        size = b.shape[1]
        assert torch.allclose(a[:1, :size].float(), b.float(), atol=1e-5)


def test_errors_name_the_row(tiny_checkpoints):
    teachers = make_teachers(tiny_checkpoints)
    model, processor = make_encoder(tiny_checkpoints)
    collator = TeacherCollator(processor, 8, teachers)
    rows = pair_rows(["a", "b"])
    with pytest.raises(ValueError, match=r"an image and a text in every row: item 'row1'"):
        collator([rows[0], rows[1] | {"text": None}])
    with pytest.raises(ValueError, match=r"no teacher inputs.*TeacherCollator"):
        teachers.states({"pixel_values": torch.zeros(1)})
    other = ImageTextProcessor(processor.image_processor, processor.tokenizer, max_text_length=4)
    with pytest.raises(ValueError, match=r"^item 'row1': the processor and its tokenizer give different"):
        strange = TeacherCollator(processor, 8, teachers)
        strange.collator = PairCollator(other)
        strange([rows[0], rows[1] | {"text": "b " * 9}])
    inputs, taught = split_teacher(collator(rows)["pairs"])
    output = model(**inputs, output_tokens=True)
    taught["pixel_values"] = taught["pixel_values"][..., :8]
    with pytest.raises(ValueError, match=r"the student has \(2, 4\) patches .* the teacher \(2, 2\)"):
        teachers(taught, output)


def test_the_collator_travels_to_workers_without_models(tiny_checkpoints):
    teachers = make_teachers(tiny_checkpoints)
    collator = TeacherCollator(make_encoder(tiny_checkpoints)[1], 8, teachers)
    weights = sum(p.numel() * 4 for m in (teachers.vision.model, teachers.text.model) for p in m.parameters())
    travelled = pickle.dumps(collator)
    assert not any(name.encode() in travelled for name in ("Dinov2Model", "XLMRobertaModel"))
    assert weights > 0
    rows = pair_rows()
    again, here = (each(rows)["pairs"] for each in (pickle.loads(travelled), collator))
    taught_again, taught = again.pop("teacher"), here.pop("teacher")
    assert all(torch.equal(value, again[name]) for name, value in here.items())
    assert all(torch.equal(value, taught_again[name]) for name, value in taught.items())


def test_stage_1_learns_from_teachers_that_stay(tiny_checkpoints, tmp_path):
    teachers = make_teachers(tiny_checkpoints)
    model, processor = student(tiny_checkpoints)
    before = {name: value.clone() for name, value in teachers.vision.model.state_dict().items()}
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 1, "logging_steps": 1}
    config = SolarStage1Config(output_dir=str(tmp_path), disable_tqdm=True, report_to="none", **settings)
    rows = make_rows(8).map(lambda row, i: {"text": TEXTS[i % 6]}, with_indices=True)
    trainer = SolarStage1Trainer(
        model, config, teachers, train_dataset=rows,
        processing_class=processor, data_collator=TeacherCollator(processor, 8, teachers),
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "ld_loss" in entry]
    assert len(logged) == 2
    assert all(entry["ld_loss"] > 0 and entry["gd_loss"] > 0 for entry in logged)
    assert all(torch.equal(value, before[name]) for name, value in teachers.vision.model.state_dict().items())
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    saved = torch.nn.Module.state_dict(trainer.model)
    for each in (teachers.vision.model, teachers.text.model):
        assert not each.training
        assert not any(p.requires_grad or id(p) in trained for p in each.parameters())
        assert not {p.data_ptr() for p in each.parameters()} & {p.data_ptr() for p in saved.values()}


def test_the_gradient_cache_asks_live_teachers_once(tiny_checkpoints, monkeypatch):
    teachers = make_teachers(tiny_checkpoints)
    model, processor = student(tiny_checkpoints)
    config = SolarStage1Config(output_dir="unused", use_cpu=True, report_to="none")
    objective = SolarStage1Objective(model, config, teachers).double().eval()
    batch = TeacherCollator(processor, 8, teachers)(pair_rows())
    _, expected = plain_step(objective, batch)
    asked = []
    states = Teachers.states
    monkeypatch.setattr(
        Teachers, "states", lambda self, batch: asked.append(len(batch["input_ids"])) or states(self, batch)
    )
    _, found = cached_step(objective, batch, len(TEXTS))
    assert asked == [len(TEXTS)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    cached_step(objective, batch, 4)
    assert asked[1:] == [4, 2]
