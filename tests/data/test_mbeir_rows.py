import json
import pickle
from collections import Counter

import pytest
import torch
from PIL import Image

from conjoin.data import MBEIR_CELLS, MbeirCandidates, MbeirCell, MbeirTraining, find_cells, mbeir_queries
from conjoin.data.mbeir import fixed_choice, format_text, pool_file

HEADER = "query_modality\tcand_modality\tdataset_name\tdataset_id\tprompt_1\tprompt_2\tprompt_3\tprompt_4"
CELL = MbeirCell("webqa", 2)


def write(root, name, rows):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def query(qid, **change):
    row = {"qid": qid, "query_txt": "what is it", "query_img_path": None, "query_modality": "text"}
    return row | {"query_src_content": None, "pos_cand_list": ["2:1"], "neg_cand_list": []} | change


def candidate(did, **change):
    row = {"did": did, "txt": f'"number {did[2:]}"', "img_path": "img/a.png", "modality": "text,image"}
    return row | {"src_content": None} | change


@pytest.fixture
def root(tmp_path):
    """One cell in the published layout, with its oddities."""
    (tmp_path / "img").mkdir()
    Image.new("RGB", (4, 4), "red").save(tmp_path / "img/a.png")
    queries = [
        query("2:1", neg_cand_list=["2:2", "2:3"]),
        query("2:2", pos_cand_list=[{"did": "2:2"}, {"did": "2:1"}], query_txt="WHO?", neg_cand_list=[{"did": "2:3"}]),
        query("0:3", pos_cand_list=["2:3"], query_modality="image", query_txt=None, query_img_path="img/a.png"),
    ]
    pool = [candidate("2:1"), candidate("2:2"), candidate("2:3", modality="text", img_path=None)]
    write(tmp_path, "query/union_train/mbeir_union_up_train.jsonl", queries)
    write(tmp_path, "query/test/mbeir_webqa_task2_test.jsonl", queries[:2])
    write(tmp_path, "cand_pool/global/mbeir_union_train_cand_pool.jsonl", pool)
    write(tmp_path, "cand_pool/local/mbeir_webqa_task2_cand_pool.jsonl", pool[:2])
    prompts = [
        "text\timage,text\tWebQA\t2\tfind a page\t\tfetch it?\t",
        "image\ttext\tVisualNews\t0\tdescribe",
        "text\ttext\tWebQA\t2\tanswer",
    ]
    write(tmp_path, "instructions/query_instructions.tsv", [HEADER, *prompts])
    return tmp_path


def test_the_sixteen_cells():
    assert Counter(cell.group for cell in MBEIR_CELLS) == {"single": 8, "mixed": 6, "multi": 2}
    assert len({cell.name for cell in MBEIR_CELLS}) == 16
    at_10 = {cell.name for cell in MBEIR_CELLS if cell.cutoff == 10}
    assert at_10 == {"fashion200k_task0", "fashion200k_task3", "fashioniq_task7"}
    assert (CELL.query_modality, CELL.target_modality) == ("text", "image,text")
    assert find_cells() == find_cells([]) == list(MBEIR_CELLS)
    assert [cell.name for cell in find_cells(["oven_task8", "edis_task2"])] == ["edis_task2", "oven_task8"]
    with pytest.raises(ValueError, match="unknown M-BEIR cell 'oven_task5'"):
        find_cells(["oven_task5"])


@pytest.mark.parametrize(
    ("text", "formatted"), [(' "a cat"\r\n', "A cat."), ("who?", "Who?"), ("", ""), ("Ende!", "Ende!"), ("éa", "Éa.")]
)
def test_format_text(text, formatted):
    assert format_text(text) == formatted


def test_training_rows(root):
    rows = MbeirTraining(root, hard_negatives=3)
    assert len(rows) == 3 and rows.sources == ["webqa", "webqa", "visualnews"]
    assert [len(ids) for ids in rows.positives] == [1, 2, 1]
    torch.manual_seed(0)
    row = rows[0]
    assert row["query"] == {"text": "what is it."}
    assert row["instruction"] in ("Find a page.", "Fetch it?")
    assert row["positive"] == {"image": str(root / "img/a.png"), "text": "Number 1."}
    assert (row["positive_id"], row["target_modality"], row["dataset"]) == ("2:1", "image,text", "webqa")
    assert sorted(set(row["negative_ids"])) == ["2:2", "2:3"] and len(row["negative_ids"]) == 3
    modalities = {"2:2": "image,text", "2:3": "text"}
    assert row["negative_modalities"] == [modalities[did] for did in row["negative_ids"]]
    image_query = rows[2]
    assert image_query["query"] == {"image": str(root / "img/a.png")} and image_query["instruction"] == "Describe."
    assert image_query["negatives"] == []


def test_every_prompt_and_positive_is_drawn(root):
    rows = MbeirTraining(root)
    drawn = {(row["instruction"], row["positive_id"]) for row in (rows[1] for _ in range(50))}
    assert drawn == {(text, did) for text in ("Find a page.", "Fetch it?") for did in ("2:1", "2:2")}


def test_some_datasets_without_instructions(root):
    rows = pickle.loads(pickle.dumps(MbeirTraining(root, datasets=["webqa"], instructions=False)))
    assert len(rows) == 2 and rows[0]["instruction"] is None
    assert rows[0]["query"] == {"text": "What is it."}
    with pytest.raises(ValueError, match="has no queries of cirr"):
        MbeirTraining(root, datasets=["cirr"])
    with pytest.raises(ValueError, match="unknown M-BEIR dataset 'coco'"):
        MbeirTraining(root, datasets=["coco"])


def test_evaluation_queries_have_the_same_prompt_every_time(root):
    rows = mbeir_queries(root, CELL)
    assert rows == mbeir_queries(root, CELL)
    assert [row["instruction"] for row in rows] == [
        fixed_choice(["Find a page.", "Fetch it?"], qid) for qid in ("2:1", "2:2")
    ]
    assert {fixed_choice(["a", "b", "c"], f"2:{number}") for number in range(20)} == {"a", "b", "c"}
    assert mbeir_queries(root, CELL, instructions=False)[1] == {
        "id": "2:2",
        "query": {"text": "WHO?"},
        "instruction": None,
    }


def test_candidates_are_rows_to_encode(root):
    pool = MbeirCandidates(root, pool_file(root, CELL, "test"))
    assert len(pool) == 2 and pool.ids == ["2:1", "2:2"] and "2:2" in pool and "2:3" not in pool
    assert list(pool) == [pool["2:1"], pool["2:2"]] == list(pool)
    assert pool["2:2"] == {
        "id": "2:2",
        "image": str(root / "img/a.png"),
        "text": "Number 2.",
        "modality": "image,text",
    }


def test_a_split_may_have_its_own_local_pool(root):
    write(root, "cand_pool/local/mbeir_webqa_task2_test_cand_pool.jsonl", [candidate("2:9")])
    assert MbeirCandidates(root, pool_file(root, CELL, "test")).ids == ["2:9"]
    assert MbeirCandidates(root, pool_file(root, CELL, "val")).ids == ["2:1", "2:2"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([candidate("2:1"), candidate("2:1")], "the id '2:1' occurs twice"),
        ([candidate("2:1", img_path="/etc/a.png")], "candidate '2:1': the path '/etc/a.png' leaves the folder"),
        ([candidate("2-1")], "did '2-1' is not dataset:number"),
        ([candidate("2:1", modality="audio")], "candidate '2:1': unknown modality 'audio'"),
        ([candidate("2:1", img_path=None)], "candidate '2:1': its modality is image,text, but its image path is"),
        ([candidate("2:1", modality="text", txt=" ")], "candidate '2:1': the item has neither text nor image"),
        ([{"txt": "x"}], "line 1: did None is not dataset:number"),
        ([{"did": "2:1", "modality": "image,text", "img_path": "img/a.png"}], "'2:1': the field 'txt' is missing"),
        ([], "is empty: it has no rows"),
    ],
)
def test_bad_candidates_are_named(root, rows, message):
    path = write(root, "cand_pool/local/mbeir_webqa_task2_cand_pool.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        list(MbeirCandidates(root, path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_cand_list": []}, "query '2:1': it has no positive candidate"),
        ({"pos_cand_list": ["2:77"]}, "query '2:1': candidate '2:77' is not in the pool '.*union_train_cand"),
        ({"neg_cand_list": ["2:2", {"did": "0:1"}]}, "query '2:1': candidate '0:1' is not in the pool"),
        ({"pos_cand_list": [{"id": "2:1"}]}, "query '2:1': candidate '' is not in the pool"),
        ({"query_txt": ""}, "query '2:1': the item has neither text nor image"),
        ({"qid": "99:1"}, "qid '99:1' is not dataset:number with a dataset below 10"),
        ({"qid": "3:1"}, "query '3:1': there is no instruction for dataset 3, text -> image,text"),
    ],
)
def test_bad_queries_are_named(root, change, message):
    write(root, "query/union_train/mbeir_union_up_train.jsonl", [query("2:1") | change])
    with pytest.raises(ValueError, match=message):
        MbeirTraining(root, hard_negatives=1)[0]
    if "neg_cand_list" in change:
        assert len(MbeirTraining(root)) == 1  # negatives that are never drawn may be absent


def test_a_repeated_query_or_a_missing_file_is_named(root):
    write(root, "query/test/mbeir_webqa_task2_test.jsonl", [query("2:1"), query("2:1")])
    with pytest.raises(ValueError, match="the queries of webqa_task2: the id '2:1' occurs twice"):
        mbeir_queries(root, CELL)
    (root / "instructions/query_instructions.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"'.*query_instructions.tsv'"):
        MbeirTraining(root)
    with pytest.raises(FileNotFoundError, match=r"mbeir_oven_task6_test.jsonl"):
        mbeir_queries(root, MbeirCell("oven", 6), instructions=False)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["query_modality\tprompt_1"], "no column 'cand_modality'"),
        ([HEADER, "text\timage,text\tWebQA\t2\t\t"], "query '2:1': there is no instruction for dataset 2"),
        (
            [HEADER, "text\tfilm\tWebQA\t2\tx"],
            "query '2:1': there is no instruction for dataset 2, text -> image,text",
        ),
    ],
)
def test_bad_instructions(root, lines, message):
    write(root, "instructions/query_instructions.tsv", lines)
    with pytest.raises(ValueError, match=message):
        mbeir_queries(root, CELL)
