import json
import re
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
from PIL import Image

from conjoin.data import EDITS, Edited, construct_symmetric, load_triplets

EXAMPLE = run_path(str(Path(__file__).parents[3] / "examples/construct_symmetric.py"))
COLOURS = ("red", "green", "blue")


def rows():
    return [{"id": f"shop/{colour}", "image": Image.new("RGB", (40, 30), colour)} for colour in COLOURS]


class Steps:
    """Small stand-ins for the three models, which count their calls."""

    def __init__(self, fail_at=None):
        self.calls = []
        self.fail_at = fail_at

    def _count(self, kind):
        self.calls.append(kind)
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt

    def describe(self, image):
        self._count("describe")
        return f" a square of {image.getpixel((0, 0))} \n"

    def edit(self, text):
        self._count("edit")
        return text + ' beside a <tree> & "a" </script> cat\'s house'

    def synthesise(self, text):
        self._count("synthesise")
        return Image.new("RGBA", (500, 20), (len(text), 0, 0, 255))

    def as_arguments(self):
        return {"describe": self.describe, "edit": self.edit, "synthesise": self.synthesise}


def test_candidates_are_triplets_of_crossed_pairs(tmp_path):
    steps = Steps()
    path = construct_symmetric(rows(), tmp_path, **steps.as_arguments())
    assert path == tmp_path / "candidates.jsonl"
    assert steps.calls == ["describe"] * 3 + ["edit"] * 3 + ["synthesise"] * 3  # one model after the other
    triplets = load_triplets(path)
    assert triplets["id"] == [f"shop/{colour}/{kind}" for colour in COLOURS for kind in ("original", "edited")]
    for first, second in zip(triplets.to_list()[::2], triplets.to_list()[1::2], strict=True):
        described, edited = first["positive_text"], first["query_text"]
        assert edited.startswith(described) and edited != described == described.strip()
        assert (first["negative_image"], first["negative_text"]) == (first["query_image"], described)
        assert (second["negative_image"], second["negative_text"]) == (first["positive_image"], edited)
        assert Image.open(first["query_image"]["path"]).size == (40, 30)
        assert Image.open(first["positive_image"]["path"]).mode == "RGB"


@pytest.mark.parametrize("fail_at", range(1, 10))
def test_it_goes_on_where_it_was_cut(tmp_path, fail_at):
    whole = construct_symmetric(rows(), tmp_path / "whole", **Steps().as_arguments()).read_bytes()
    cut = Steps(fail_at)
    with pytest.raises(KeyboardInterrupt):
        construct_symmetric(rows(), tmp_path / "cut", **cut.as_arguments())
    again = Steps()
    path = construct_symmetric(rows(), tmp_path / "cut", **again.as_arguments())
    assert path.read_bytes() == whole
    assert len(cut.calls) - 1 + len(again.calls) == 9
    finished = Steps()
    construct_symmetric(rows(), tmp_path / "cut", **finished.as_arguments())
    assert finished.calls == []


def test_an_id_that_now_has_another_picture(tmp_path):
    pictures = [row["image"] for row in rows()]
    numbered = [{"id": str(number), "image": picture} for number, picture in enumerate(pictures)]
    construct_symmetric(numbered, tmp_path, **Steps().as_arguments())
    moved = [{"id": str(number), "image": picture} for number, picture in enumerate(pictures[1:])]
    with pytest.raises(ValueError, match=r"item '0': it has another image than in .*; an id must stay with its image"):
        construct_symmetric(moved, tmp_path, **Steps().as_arguments())


def test_what_came_out_useless_is_skipped_with_a_reason(tmp_path, caplog):
    steps = Steps()
    edits = iter(["other", "  ", None])

    def edit(text):
        made = next(edits)
        return text if made is None else made

    path = construct_symmetric(rows(), tmp_path, describe=steps.describe, edit=edit, synthesise=steps.synthesise)
    assert load_triplets(path)["id"] == ["shop/red/original", "shop/red/edited"]
    assert "item 'shop/green' is skipped: the edited text is empty" in caplog.text
    assert "item 'shop/blue' is skipped: the edited text is unchanged" in caplog.text
    assert steps.calls.count("synthesise") == 1


@pytest.mark.parametrize(("kind", "negatives"), [("add", ["original"]), ("remove", ["edited"]), ("replace", None)])
def test_an_edit_that_only_adds_or_removes_has_one_negative(tmp_path, kind, negatives):
    """The other combination has the same objects in all as the query."""
    arguments = Steps().as_arguments() | {"edit": lambda text: Edited(f"{text} and a tree", kind)}
    loaded = load_triplets(construct_symmetric(rows()[:1], tmp_path, **arguments))
    assert [name.rsplit("/")[-1] for name in loaded["id"]] == (negatives or ["original", "edited"])


def test_a_rewritten_text_makes_a_variant(tmp_path):
    arguments = Steps().as_arguments() | {"rewrite": lambda text: f"in other words: {text}"}
    loaded = load_triplets(construct_symmetric(rows()[:1], tmp_path, **arguments))
    assert loaded["variant_text"] == [f"in other words: {text}" for text in loaded["query_text"]]
    assert [image["path"] for image in loaded["variant_image"]] == [image["path"] for image in loaded["query_image"]]
    same = Steps().as_arguments() | {"rewrite": lambda text: text}
    assert load_triplets(construct_symmetric(rows()[:1], tmp_path / "same", **same))["variant_text"][:] == [None, None]


@pytest.mark.parametrize(
    ("given", "change", "message"),
    [
        (rows(), {"edit": lambda text: text}, "none of 3 items gave a candidate"),
        (rows()[:1] * 2, {}, "row 1: the id 'shop/red' occurs twice"),
        ([{"id": "a", "image": b"junk"}], {}, "item 'a': cannot read the image"),
    ],
)
def test_bad_steps_and_rows(tmp_path, given, change, message):
    with pytest.raises(ValueError, match=message):
        construct_symmetric(given, tmp_path, **Steps().as_arguments() | change)


def page_data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_review_sheet_is_complete_in_itself(tmp_path):
    path = construct_symmetric(rows(), tmp_path, **Steps().as_arguments())
    page = (tmp_path / "review.html").read_text()
    data = page_data(page)
    assert data["rows"] == [json.loads(line) for line in path.read_text().splitlines()]
    assert len(data["pictures"]) == 6 and page.count("<section") == 6  # each picture once
    assert all(picture.startswith("data:image/jpeg;base64,") for picture in data["pictures"].values())
    assert page.count('type="checkbox" value="accept"') == page.count('type="checkbox" value="reject"') == 6
    assert not re.search(r"(src|href)=\"(http|//|\.)", page) and "default-src 'none'" in page
    assert "&lt;tree&gt;" in page and "<tree>" not in page


class TestModels:
    @pytest.fixture
    def pipelines(self, monkeypatch):
        made = []

        def pipeline(task, model, **options):
            made.append((task, model, options))
            return lambda **call: [{"generated_text": json.dumps([task, sorted(call), call["max_new_tokens"]])}]

        monkeypatch.setattr("transformers.pipeline", pipeline)
        return made

    def test_texts_by_transformers(self, pipelines):
        describe, edit = (
            EXAMPLE["describe_with"]("eyes", device="cpu"),
            EXAMPLE["edit_with"]("words", max_new_tokens=9),
        )
        assert pipelines == []  # nothing is loaded before it is needed
        common = ["do_sample", "max_new_tokens", "return_full_text"]
        assert json.loads(describe(Image.new("RGB", (2, 2)))) == ["image-text-to-text", [*common, "text"], 160]
        made = edit("a tree")
        assert json.loads(made.text) == ["text-generation", [*common, "text_inputs"], 9]
        assert made == edit("a tree") and made.edit in EDITS
        assert {edit(f"{number} trees").edit for number in range(20)} == set(EDITS)
        assert json.loads(EXAMPLE["rewrite_with"]("words")("a tree"))[0] == "text-generation"
        assert pipelines == [
            ("image-text-to-text", "eyes", {"device": "cpu"}),
            ("text-generation", "words", {}),
            ("text-generation", "words", {}),
        ]

    def test_pictures_by_diffusers(self, monkeypatch):
        seen = []

        class Pipeline:
            @classmethod
            def from_pretrained(cls, model):
                seen.append(model)
                return cls()

            def to(self, device):
                seen.append(device)
                return self

            def __call__(self, prompt, generator, **options):
                seen.append((prompt, generator.initial_seed(), options))
                return SimpleNamespace(images=[Image.new("RGB", (3, 3))])

        monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoPipelineForText2Image=Pipeline))
        synthesise = EXAMPLE["synthesise_with"]("painter", seed=5, device="cpu", num_inference_steps=4)
        assert synthesise("a tree").size == synthesise("a tree").size == (3, 3)
        assert seen == ["painter", "cpu", *[("a tree", 5, {"num_inference_steps": 4})] * 2]
