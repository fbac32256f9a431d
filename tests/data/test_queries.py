"""Rows of queries from tables of one's own: the forms of items, names of columns, draws, and what is wrong."""

import json
import logging
from collections import Counter

import datasets
import pytest
import torch
from PIL import Image

from conjoin.data import QueryMix, QueryTable, RetrievalBatchSampler
from conjoin.data.training_rows import QueryRows, positives_of, repeats_of, sources_of


def write(folder, *rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_texts_images_both_and_interleaved(image_folder):
    red, green, blue = (str(image_folder / f"{name}.png") for name in ("red", "green", "blue"))
    path = write(
        image_folder,
        {"query": "a", "positive": {"image": "red.png"}, "negatives": [{"text": "b", "image": "blue.png"}, "c"]},
        {
            "query": {
                "text": "like <image> in the colour of <image>",
                "images": ["red.png", "blue.png"],
                "image": None,
            },
            "positive": {"image": ["green.png", "blue.png"]},
            "instruction": "Find it",
        },
    )
    table = QueryTable(path, hard_negatives=9, instruction="Else")
    first, second = table[0], table[1]
    assert first["query"] == {"text": "a"} and first["positive"] == {"image": red}
    assert first["target_modality"] == "image" and first["instruction"] == "Else"
    found = dict(zip(first["negative_modalities"], first["negatives"], strict=True))
    assert found == {"image,text": {"text": "b", "image": blue}, "text": {"text": "c"}}
    assert [part["type"] for part in second["query"][0]["content"]] == ["text", "image_url", "text", "image_url"]
    assert second["positive"] == {"image": [green, blue]} and second["instruction"] == "Find it"
    assert (second["negatives"], second["id"]) == ([], "1")


def test_names_of_sentence_transformers_and_flat_columns(image_folder):
    table = QueryTable(
        write(image_folder, {"query": "q", "answer": "a", "negative_1": None, "negative_2": "y", "negative_10": "x"}),
        hard_negatives=5,
    )
    assert sorted(item["text"] for item in table[0]["negatives"]) == ["x", "y"]
    table = QueryTable(write(image_folder, {"anchor": "q", "pos": ["a", "b"], "neg": ["c"]}), hard_negatives=1)
    assert len(table.positives[0]) == 2 and table[0]["negatives"] == [{"text": "c"}]
    (image_folder / "flat.csv").write_text(
        "query,query_image,positive_image,negative_1_text,instruction\nin blue,red.png,blue.png,,\n"
        '"<image> or <image>","[""red.png"", ""green.png""]",blue.png,x,Find\n'
    )
    table = QueryTable(image_folder / "flat.csv", hard_negatives=1)
    assert table[0]["query"] == {"text": "in blue", "image": str(image_folder / "red.png")}
    assert table[0]["negatives"] == [] and table[0]["instruction"] is None
    assert len(table[1]["query"][0]["content"]) == 3 and table[1]["negatives"] == [{"text": "x"}]
    named = {"query": "premise", "positive_image": "pic"}
    table = QueryTable(write(image_folder, {"premise": "a", "pic": "red.png"}), columns=named)
    assert table[0]["positive"] == {"image": str(image_folder / "red.png")}


def test_parquet_with_embedded_images_and_structs(tmp_path):
    item = {"text": datasets.Value("string"), "image": datasets.Image()}
    features = datasets.Features(
        {"query": datasets.Image(), "positives": datasets.List(item), "negative": datasets.Value("string")}
    )
    picture, other = Image.new("RGB", (4, 4), (9, 9, 9)), Image.new("RGB", (4, 4), (99, 9, 9))
    rows = {
        "query": [picture, other],
        "positives": [[{"text": "a", "image": other}, {"text": "b", "image": None}], [{"text": "c", "image": None}]],
        "negative": ["x", None],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    table = QueryTable(tmp_path / "rows.parquet", hard_negatives=1)
    assert table[0]["query"]["image"]["bytes"] and table[1]["positive"] == {"text": "c"}
    drawn = set()
    for epoch in range(8):
        seeded = QueryRows(table, seed=0)
        seeded.epoch = epoch
        assert seeded[0] == seeded[0]
        drawn.add(seeded[0]["target_modality"])
    assert drawn == {"image,text", "text"}


def test_sentences_are_queries(tmp_path):
    (tmp_path / "nli.csv").write_text('Sent0,sent1,hard_neg\nA man eats.,"A man, eating",Nobody eats.\nnull,NA,None\n')
    table = QueryTable(tmp_path / "nli.csv", hard_negatives=1)
    rows = table.texts()
    parts = ("query", "positive", "negatives", "target_modality")
    assert [rows[0][part] for part in parts] == ["A man eats.", "A man, eating", ["Nobody eats."], "text"]
    assert (rows[1]["query"], rows[1]["positive"], rows[1]["negatives"]) == ("null", "NA", ["None"])
    assert QueryTable(tmp_path / "nli.csv").texts()["negatives"][:] == [[], []], "PUMA Eq. 3 has none"
    told = {"premise": ["a"], "entails": ["b"], "contradicts": ["c"], "label": [0]}
    columns = ["query=premise", "positive=entails", "negative=contradicts"]
    drawn = QueryTable(datasets.Dataset.from_dict(told), columns=columns, hard_negatives=1)[0]
    assert (drawn["query"], drawn["negatives"]) == ({"text": "a"}, [{"text": "c"}])
    assert QueryTable(write(tmp_path, {"query": "q", "positive": ["a", "b"]})).texts() is None
    with pytest.raises(ValueError, match="the column 'score' grades pairs"):
        QueryTable(datasets.Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "score": [0.5]}))


def test_ids_name_candidates_and_equal_content_has_equal_ids(tmp_path):
    rows = [{"id": i, "query": f"q{i}", "positive": "same" if i < 2 else f"p{i}", "negative": "p2"} for i in range(2)]
    table = QueryTable(write(tmp_path, *rows, {"id": 7, "query": "q", "positive": "p2"}), hard_negatives=1)
    assert table.positives[0] == table.positives[1] != table.positives[2]
    assert table[0]["negative_ids"] == list(table.positives[2]) and table[2]["id"] == "7"
    named = [{"query": "q", "positive": ["a", "b"], "positive_ids": [1, 2], "negative": "a", "negative_id": "3"}]
    assert QueryTable(write(tmp_path, *named)).positives == [("1", "2")]
    both = QueryTable(write(tmp_path, {"query": "q", "positive": "p", "negative": ["x", "p"]}), hard_negatives=2)
    assert both[0]["negatives"] == [{"text": "x"}], "what is both is a positive"
    by_name = {"negative_10": "j", "negative_2": "b", "negative_1": "a"}  # ids are in the order of the numbers
    row = {"query": "q", "positive": "p", "positive_id": "p", **by_name, "negative_id": [1, 2, 10]}
    drawn = QueryTable(write(tmp_path, row), hard_negatives=3)[0]
    found = {item["text"]: id_ for item, id_ in zip(drawn["negatives"], drawn["negative_ids"], strict=True)}
    assert found == {"a": "1", "b": "2", "j": "10"}
    assert positives_of([{"positive_id": 7}, {"positive_id": None}, {"positive_id": "7"}]) == ["7", 1, "7"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q"}, "found no positive column among 'query'"),
        ({"query": "q", "positive": "p", "qeury": 1, "positive_ids": [1, 2]}, "1 items, but 'positive_ids' is"),
        ({"query": "q", "positive": []}, r"row 0 \(id '0'\): 0 items in 'positive'; expected 1 positive"),
        ({"query": ["q", "r"], "positive": "p"}, "2 items in 'query'; expected 1 query"),
        ({"query": {"image": "red.png", "images": ["red.png"]}, "positive": "p"}, "both of image and images"),
        ({"query": "q", "positive": "p", "instruction": 5}, "the instruction is 5; expected a text"),
        ({"query": " ", "positive": "p"}, "row 0 .*query: text is empty"),
        ({"query": "q", "positive": 3}, "positive: got 3; expected a text, an image"),
        ({"query": "q", "positive": "cat.png"}, r"""expected {"image": 'cat.png'}"""),
        ({"query": "q", "positive": {"text": "<image>", "images": ["red.png"] * 2}}, "1 placeholders"),
        ({"query": "q", "positive": "p", "positive_id": 1, "negative": "n"}, "expected both or neither"),
        ({"query": "q", "query_text": "r", "positive": "p"}, "both 'query' and another column give its text"),
        ({"query": "q", "positive": ["p"], "positive_text": "r"}, r"positive: got \['p'\]; expected a text, an image"),
        ({"query": "q", "positive": "p", "id": ""}, "row 0: the id is missing"),
        ({"query": "q", "answer": "p", "label": 1}, "the column 'label' grades pairs"),
    ],
)
def test_what_is_wrong_is_named(image_folder, row, message):
    with pytest.raises(ValueError, match=message):
        QueryTable(write(image_folder, row))


def test_files_names_and_numbers_that_are_wrong(image_folder, caplog):
    good = {"query": "q", "positive": "p", "negative": "n"}
    with pytest.raises(FileNotFoundError, match=r"positive: image .*gone.png"):
        QueryTable(write(image_folder, good, {"query": "q", "positive": {"image": "gone.png"}}))
    for arguments, message in (
        ({"columns": {"query": "qurey"}}, r"no column 'qurey'; .*did you mean 'query'"),
        ({"columns": {"questoin": "query"}}, "unknown role 'questoin'"),
        ({"hard_negatives": -1}, "hard_negatives=-1"),
        ({"split": "test"}, "only the split 'train'"),
    ):
        with pytest.raises(ValueError, match=message):
            QueryTable(write(image_folder, good), **arguments)
    for empty in (write(image_folder), datasets.Dataset.from_dict({"query": [], "positive": []})):
        with pytest.raises(ValueError, match="has no rows"):
            QueryTable(empty)
    with pytest.raises(ValueError, match="expected a dataset with a length"):
        QueryTable(datasets.Dataset.from_list([good]).to_iterable_dataset())
    with pytest.raises(FileNotFoundError, match=r"no such file: '.*none.jsonl'"):
        QueryTable(image_folder / "none.jsonl")
    with pytest.raises(ValueError, match="row 1: the id '1' occurs twice"):
        QueryTable(write(image_folder, good | {"id": 1}, good | {"id": 1}))
    with caplog.at_level(logging.WARNING):
        QueryTable(write(image_folder, good))
    assert "hard_negatives=0 leaves them out" in caplog.text


def test_sources_are_mixed_by_weight(tmp_path):
    sizes = {"a": 8, "b": 8, "c": 4}
    tables = []
    for name, count in sizes.items():
        rows = ({"query": f"q{i}", "positive": f"{name}{i}"} for i in range(count))
        tables.append(QueryTable(write(tmp_path, *rows, name=f"{name}.jsonl"), name=name))
    mix = QueryMix(tables, [1.0, 0.5, 2.25])
    assert [mix[i]["positive"]["text"] for i in (0, 7, 8, 19)] == ["a0", "a7", "b0", "c3"]
    sampler = RetrievalBatchSampler(positives_of(mix), 1, repeats=repeats_of(QueryRows(mix)))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        rows = [row for batch in sampler for row in batch]
        used = Counter(sources_of(mix)[row] for row in rows)
        assert used == {"a": 8, "b": 4, "c": 9} and len(sampler) == 21
        assert set(Counter(row for row in rows if row >= 16).values()) == {2, 3}
        epochs.append({row for row in rows if 8 <= row < 16})
    assert epochs[0] != epochs[1]
    for batch in RetrievalBatchSampler(positives_of(mix), 4, repeats=mix.repeats):
        assert len(set(batch)) == 4
    never = RetrievalBatchSampler(positives_of(mix), 1, repeats=QueryMix(tables, [1, 0, 1]).repeats)
    assert {sources_of(mix)[row] for (row,) in never} == {"a", "c"}


def test_a_generator_decides_every_draw(tmp_path):
    row = {"query": "q", "positive": ["a", "b", "c"], "negatives": list("uvwxyz")}
    table = QueryTable(write(tmp_path, row), hard_negatives=2)
    torch.manual_seed(3)
    first = table[0]
    torch.manual_seed(3)
    assert table[0] == first and len({item["text"] for item in first["negatives"]}) == 2
