"""M-BEIR evaluation against hand-made vectors: what is right, what ties, what is missing."""

import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer

from conjoin.evaluation import EvaluateOptions, evaluate, format_results, read_qrels
from conjoin.hub import export, from_clip
from conjoin.retrieval import load_encoder
from tiny_letters import letters_encoder
from tiny_runs import read_run

HEADER = "query_modality\tcand_modality\tdataset_name\tdataset_id\tprompt_1\tprompt_2"
CELL = "webqa_task1"


def write(root, name, lines):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def candidates(words, start=1):
    return [
        json.dumps({"did": f"2:{number}", "txt": word, "img_path": None, "modality": "text", "src_content": None})
        for number, word in enumerate(words, start)
    ]


def write_cell(root, name, texts):
    """Queries with their answers, and a candidate that is judged wrong."""
    queries, qrels = [], []
    for number, (text, answers) in enumerate(texts.items(), 1):
        row = {"qid": f"2:{number}", "query_txt": text, "query_img_path": None, "query_modality": "text"}
        queries.append(json.dumps(row | {"pos_cand_list": answers, "neg_cand_list": []}))
        qrels += [f"2:{number} 0 {did} 1 1" for did in answers] + [f"2:{number} 0 2:4 0 1"]
    write(root, f"query/test/mbeir_{name}_test.jsonl", queries)
    write(root, f"qrels/test/mbeir_{name}_test_qrels.txt", qrels)


@pytest.fixture
def root(tmp_path):
    """Four queries: found at 1, at 3 with one of two answers, at 1 tied with another, and not among 12."""
    root = tmp_path / "mbeir"
    write_cell(root, CELL, {"abc": ["2:1"], "axxx": ["2:1", "2:2"], "ghi": ["2:5"], "zy": ["2:19"]})
    local = ["abc", "abx", "axx", "def", "ghi", "igh", *("zz" + "y" * n for n in range(1, 13)), "q"]
    write(root, f"cand_pool/local/mbeir_{CELL}_cand_pool.jsonl", candidates(local))
    union = [*candidates(local), *candidates(["abc", "xxxa", "m"], 90)]
    write(root, "cand_pool/global/mbeir_union_test_cand_pool.jsonl", union)
    instructions = [HEADER, "text\ttext\tWebQA\t2\tx\ty", "text\timage,text\tWebQA\t2\tx\t"]
    write(root, "instructions/query_instructions.tsv", instructions)
    return root


def write_pictures(root, pictures):
    """A task of lone pictures and one of pictures with texts, each of which asks by an instruction."""
    names = [f"mbeir_images/{number}.png" for number in range(len(pictures))]
    for name, picture in zip(names, pictures, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(root / name)
    lines = [HEADER, "image\timage\tNIGHTS\t4\tfind a day-to-day image\t"]
    write(root, "instructions/query_instructions.tsv", [*lines, "image,text\timage\tFashionIQ\t7\tlike it but\t"])
    for cell, dataset, modality, text in (
        ("nights_task4", 4, "image", None),
        ("fashioniq_task7", 7, "image,text", ""),
    ):
        queries, qrels, pool = [], [], []
        for number, name in enumerate(names):
            asked = {"query_txt": None if text is None else f"red {number}", "query_img_path": name}
            row = {"qid": f"{dataset}:{number}", "query_modality": modality, "neg_cand_list": []} | asked
            queries.append(json.dumps(row | {"pos_cand_list": [f"{dataset}:{number}"]}))
            qrels.append(f"{dataset}:{number} 0 {dataset}:{number} 1 4")
            shown = {"did": f"{dataset}:{number}", "txt": None, "img_path": name, "modality": "image"}
            pool.append(json.dumps(shown | {"src_content": None}))
        write(root, f"query/test/mbeir_{cell}_test.jsonl", queries)
        write(root, f"qrels/test/mbeir_{cell}_test_qrels.txt", qrels)
        write(root, f"cand_pool/local/mbeir_{cell}_cand_pool.jsonl", pool)


def test_equal_weights_have_equal_numbers_through_every_door(tiny_checkpoints, pictures, tmp_path):
    """The instruction stands before each query, a lone picture's, too."""
    root, clip = tmp_path / "mbeir", tiny_checkpoints["clip"]
    write_pictures(root, [*pictures, *(picture.rotate(90) for picture in pictures)])
    saved = SentenceTransformer(modules=[Transformer(clip)], device="cpu")
    saved.save_pretrained(str(tmp_path / "sentence"))
    doors = {"stock": clip, "fusion": export(*from_clip(clip), tmp_path / "fusion"), "sentence": tmp_path / "sentence"}
    found, cells = {}, ["nights_task4", "fashioniq_task7"]
    for name, folder in doors.items():
        encoder = load_encoder(folder, device="cpu")
        for told in (True, False):
            how = {"cells": cells, "pools": ["local"], "instructions": told, "data": str(root)}
            options = EvaluateOptions(ks=(1, 3), baselines=False)
            results = evaluate(encoder, "mbeir", tmp_path / f"{name}-{told}", options, **how)
            rates = {cell: {k: rate.value for k, rate in results.metrics(f"local/{cell}").items()} for cell in cells}
            asked = encoder.encode_query(pictures, prompt="find " if told else None)
            found[name, told] = rates, asked @ encoder.encode_document(pictures).T
    for told in (True, False):
        for name in ("fusion", "sentence"):
            assert found[name, told][0] == found["stock", told][0], name
            np.testing.assert_allclose(found[name, told][1], found["stock", told][1], atol=1e-5)
    assert np.abs(found["stock", True][1] - found["stock", False][1]).max() > 1e-2


def run(root, out, model=None, **which):
    how = {"cells": [CELL], "instructions": False} | which
    return evaluate(model or letters_encoder(), "mbeir", out, EvaluateOptions(baselines=False), data=str(root), **how)


def rates(results, pool):
    metrics = results.metrics(f"{pool}/{CELL}")
    return {k: metrics[f"hit_rate@{k}"].value for k in (1, 5, 10, 50)}


def test_hit_rates_of_both_pools(root, tmp_path):
    results = run(root, tmp_path / "out")
    local, union = results.scores
    assert (local.queries, local.candidates, union.candidates) == (4, 19, 22)
    # abc at 1; axxx: axx, abx; ghi ties with igh and so stands at 2; q shares no letter with zy
    assert rates(results, "local") == {1: 0.25, 5: 0.75, 10: 0.75, 50: 1.0}
    # abc ties with its double; axxx also finds xxxa before abx
    assert rates(results, "global") == {1: 0.0, 5: 0.75, 10: 0.75, 50: 1.0}
    for pool, first in (("local", ["2:3", "2:2"]), ("global", ["2:91", "2:3"])):
        assert [did for did, _ in read_run(tmp_path / f"out/runs/{pool}/{CELL}.txt")["2:2"]][:2] == first
    assert local.metrics["published"] == local.metrics["hit_rate@5"]
    assert local.metrics["hit_rate@1"].chance == pytest.approx(np.mean([1 / 19, 2 / 19, 1 / 19, 1 / 19]))
    alone = run(root, tmp_path / "alone", pools=["local"])
    assert alone.scores == [local] and (tmp_path / f"alone/collections/mbeir_{CELL}_cand_pool").is_dir()
    assert [path.name for path in (tmp_path / "out/collections").glob("mbeir*")] == ["mbeir_union_test_cand_pool"]


@pytest.mark.parametrize(("wrong_ties", "expected"), [(0, 1.0), (1, 0.0)])
def test_only_wrong_candidates_win_a_tie_at_a_cut_off(root, tmp_path, wrong_ties, expected):
    """Nine better ones, then a tie of three right ones: rank 10, or below it if a wrong one is in the tie."""
    words = [*("a" * n for n in range(1, 10)), *["ab"] * (3 + wrong_ties), *["axx", "q", "r", "s", "t"] * 20]
    write(root, f"cand_pool/local/mbeir_{CELL}_cand_pool.jsonl", candidates(words))
    write_cell(root, CELL, {"aaa": [f"2:{n}" for n in (10, 11, 12)]})
    found = rates(run(root, tmp_path / "out", pools=["local"]), "local")
    assert found[10] == expected and found[5] == 0
    assert len(read_run(tmp_path / f"out/runs/local/{CELL}.txt")["2:1"]) == 100


def test_averages_of_groups_and_pools(root, tmp_path):
    for name in ("webqa_task2", "edis_task2"):
        write_cell(root, name, {"abc": ["2:1"], "zy": ["2:19"]})
        pool = (root / f"cand_pool/local/mbeir_{CELL}_cand_pool.jsonl").read_text()
        write(root, f"cand_pool/local/mbeir_{name}_cand_pool.jsonl", pool.splitlines())
    results = run(root, tmp_path / "out", cells=[CELL, "webqa_task2", "edis_task2"])
    published = {score.name: score.metrics["published"].value for score in results.scores}
    assert published["local/edis_task2"] == 0.5 and published[f"local/{CELL}"] == 0.75
    for table, pool in zip(results.tables, ("local", "global"), strict=True):
        assert table.title == f"{pool} pools" and table.columns[1:6] == "task group n candidates published".split()
        cells = [f"{pool}/{name}" for name in (CELL, "edis_task2", "webqa_task2")]
        assert [row[0] for row in table.rows] == [*cells, "average, mixed", "average", "random order"]
        values = {row[0]: row[5].value for row in table.rows}
        assert values["average, mixed"] == pytest.approx(np.mean([published[name] for name in cells[1:]]))
        assert values["average"] == pytest.approx(np.mean([published[name] for name in cells]))
    labels = [f"average, {pool} pools, {name}" for pool in ("local", "global") for name in ("published", "R@50")]
    assert [each.label for each in results.headline] == labels and results.headline[0].detail == "3 cells"
    assert results.headline[1].metric.value == 1.0
    assert max(map(len, format_results(results).splitlines())) <= 100


def test_judgements_of_candidates_that_the_pool_lacks_are_counted(root, tmp_path, caplog):
    with (root / f"qrels/test/mbeir_{CELL}_test_qrels.txt").open("a") as file:
        file.write("2:1 0 6:90 1 1\n2:2 0 6:91 1 1\n")
    assert run(root, tmp_path / "out", pools=["local"]).scores[0].queries == 4
    assert f"{CELL}: 2 of the judged candidates are not in the local pool" in caplog.text
    assert "such as '6:90' of query '2:1'" in caplog.text


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        ({"cells": ["cirr_task7"]}, FileNotFoundError, r"mbeir_cirr_task7_test\.jsonl"),
        ({"pools": ["any"]}, ValueError, r"unknown pools \['any'\]"),
        ({"pools": []}, ValueError, "there are no cells to evaluate"),
        ({"cells": ["webqa"]}, ValueError, "unknown M-BEIR cell 'webqa'"),
        ({"data": "elsewhere"}, FileNotFoundError, "elsewhere"),
        ("no answer", ValueError, "query '2:1' of local/webqa_task1: none of"),
        ("global pool", ValueError, "'2:18' of the local pool of webqa_task1"),
    ],
)
def test_bad_data_is_named_before_anything_is_encoded(root, tmp_path, which, error, message):
    if which == "no answer":
        write_cell(root, CELL, {"a": ["2:90"]})
    if which == "global pool":
        write(root, "cand_pool/global/mbeir_union_test_cand_pool.jsonl", candidates("abcdefghijklmnopq"))
    model, asked = letters_encoder(), which if isinstance(which, dict) else {}
    with pytest.raises(error, match=message):
        evaluate(model, "mbeir", tmp_path, **{"data": str(root), "cells": [CELL], "instructions": False} | asked)
    assert model.model.rows == 0


@pytest.mark.parametrize("task", ["", " 8"])
def test_qrels_of_four_and_of_five_columns(tmp_path, task):
    rows = ("9:1 0 9:10 1", "9:1 0 9:11 2", "", "9:2 0 9:12 1", "9:2 0 9:13 0", "9:3 0 9:10 0")  # 0 is dropped
    write(tmp_path, "qrels.txt", [f"{row}{row and task}" for row in rows])
    assert read_qrels(tmp_path / "qrels.txt") == {"9:1": {"9:10": 1, "9:11": 2}, "9:2": {"9:12": 1}}


@pytest.mark.parametrize("bad", ["q 0 b", "q 0 b yes"])
def test_bad_qrels(tmp_path, bad):
    write(tmp_path, "qrels.txt", ["q 0 a 1", bad])
    with pytest.raises(ValueError, match=rf"qrels.txt, line 2: expected 'qid 0 docid rel \[task\]', got '{bad}'"):
        read_qrels(tmp_path / "qrels.txt")
