import pytest
import torch
from PIL import Image

from conjoin.data import MODALITY_IDS, QueryTable, RetrievalCollator


def processor(items, *, instruction=None, ids=None):
    """A processor that remembers what it was given."""
    return {"items": list(items), "instruction": instruction, "ids": list(ids), "rows": torch.zeros(len(items))}


@pytest.fixture
def rows():
    first = {"id": "0:1", "query": {"image": "a.png", "text": "a cat.png"}, "instruction": "Find it."}
    first |= {"positive": {"text": "cat"}, "positive_id": "0:7", "target_modality": "text"}
    first |= {"negatives": [{"image": "b.png", "text": None}, {"text": "dog"}], "negative_ids": ["0:8", "0:9"]}
    second = {"id": "0:2", "query": {"image": "c.png"}, "instruction": None, "negatives": [], "negative_ids": []}
    second |= {"positive": {"image": "d.png", "text": "both"}, "positive_id": "0:8", "target_modality": "image,text"}
    return [first | {"negative_modalities": ["image", "text"]}, second | {"negative_modalities": []}]


def test_parts_and_their_names(rows):
    batch = RetrievalCollator(processor)(rows)
    assert batch["queries"]["items"] == [{"image": "a.png", "text": "a cat.png"}, {"image": "c.png"}]
    assert batch["positives"]["items"] == [{"text": "cat"}, {"image": "d.png", "text": "both"}]
    assert batch["negatives"]["items"] == [{"image": "b.png"}, {"text": "dog"}]
    assert batch["queries"]["ids"] == ["0:1", "0:2"]
    assert batch["negatives"]["ids"] == ["0:1, negative", "0:1, negative"]
    assert batch["queries"]["instruction"] == ["Find it.", None]
    assert batch["positives"]["instruction"] is None and batch["negatives"]["instruction"] is None
    assert "negatives" not in RetrievalCollator(processor)(rows[1:])


def test_images_come_first(rows, tmp_path):
    """As in collections and benchmarks: an MLLM embeds another order differently."""
    rows[0]["query"] = {"text": "a cat.png", "image": "a.png"}
    batch = RetrievalCollator(processor)(rows)
    assert [list(item) for item in batch["queries"]["items"]] == [["image", "text"], ["image"]]
    (tmp_path / "rows.jsonl").write_text('{"query": {"text": "in blue", "image": "a.png"}, "positive": "c"}\n')
    (tmp_path / "flat.csv").write_text("query_text,query_image,positive\nin blue,a.png,c\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name in ("rows.jsonl", "flat.csv"):
        assert list(QueryTable(tmp_path / name)[0]["query"]) == ["image", "text"], name


def test_modalities_and_ids_are_those_of_the_candidates(rows):
    batch = RetrievalCollator(processor)(rows)
    names = ["text", "image,text", "image", "text"]
    assert batch["candidate_modality"].tolist() == [MODALITY_IDS[name] for name in names]
    positive, other, first, second = batch["ids"].tolist()
    assert other == first and len({positive, other, second}) == 3


def test_texts_alone_without_ids(tmp_path):
    path = tmp_path / "nli.csv"
    path.write_text("sent0,sent1,hard_neg\na,b,c\nd,e,f\n")
    batch = RetrievalCollator(processor)(QueryTable(path, hard_negatives=1).texts().to_list())
    assert batch["queries"]["items"] == [{"text": "a"}, {"text": "d"}]
    assert batch["negatives"]["items"] == [{"text": "c"}, {"text": "f"}]
    assert batch["candidate_modality"].tolist() == [0] * 4 and len(set(batch["ids"].tolist())) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positive": None}, "row with id .*: no 'positive'; its columns are id, query, "),
        ({"positive_id": None}, r"some rows have 'positive_id' \(and 'negative_ids' for their negatives\), but"),
        ({"target_modality": "video"}, "unknown modality 'video'; expected one of text, image, image,text"),
        ({"negatives": [{"text": "x"}]}, "some rows have 'positive_id'"),
    ],
)
def test_rows_that_do_not_fit_together_are_named(rows, change, message):
    rows[1] |= change
    with pytest.raises(ValueError, match=message):
        RetrievalCollator(processor)(rows)
