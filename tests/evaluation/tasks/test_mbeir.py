"""M-BEIR evaluation against hand-made vectors: what is right, what ties, what is missing."""

import json
from dataclasses import replace

import numpy as np
import pytest

from conjoin.data import MBEIR_CELLS
from conjoin.evaluation import EvaluateOptions, Metric, format_results
from conjoin.evaluation.tasks.mbeir import MbeirScore, average_score, evaluate_mbeir, mbeir_results
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


@pytest.fixture
def root(tmp_path):
    """Four queries: found at 1, at 3 with one of two answers, at 1 tied with another, and not among 12."""
    local = ["abc", "abx", "axx", "def", "ghi", "igh", *("zz" + "y" * n for n in range(1, 13)), "q"]
    texts = {"abc": ["2:1"], "axxx": ["2:1", "2:2"], "ghi": ["2:5"], "zy": ["2:19"]}
    queries, qrels = [], []
    for number, (text, answers) in enumerate(texts.items(), 1):
        row = {"qid": f"2:{number}", "query_txt": text, "query_img_path": None, "query_modality": "text"}
        queries.append(json.dumps(row | {"pos_cand_list": answers, "neg_cand_list": []}))
        qrels += [f"2:{number} 0 {did} 1 1" for did in answers] + [f"2:{number} 0 2:4 0 1"]
    root = tmp_path / "mbeir"
    write(root, "query/test/mbeir_webqa_task1_test.jsonl", queries)
    write(root, "qrels/test/mbeir_webqa_task1_test_qrels.txt", qrels)
    write(root, "cand_pool/local/mbeir_webqa_task1_cand_pool.jsonl", candidates(local))
    union = [*candidates(local), *candidates(["abc", "xxxa", "m"], 90)]
    write(root, "cand_pool/global/mbeir_union_test_cand_pool.jsonl", union)
    write(root, "instructions/query_instructions.tsv", [HEADER, "text\ttext\tWebQA\t2\tx\ty"])
    return root


def run(root, out, model=None, **kwargs):
    options = EvaluateOptions(ks=kwargs.pop("ks", (1, 2, 3)))
    return evaluate_mbeir(
        model or letters_encoder(), root, out, options, **{"cells": [CELL], "instructions": False} | kwargs
    )


def test_hit_rates_of_both_settings(root, tmp_path):
    local, union = run(root, tmp_path / "out")
    assert (local.setting, local.queries, local.pool, union.setting, union.pool) == ("local", 4, 19, "global", 22)
    values = {k: local.metrics[f"hit_rate@{k}"].value for k in (1, 2, 3, 5, 10)}
    # abc at 1; axxx: axx, abx; ghi ties with igh and so stands at 2; q shares no letter with zy
    assert values == {1: 0.25, 2: 0.75, 3: 0.75, 5: 0.75, 10: 0.75}
    values = {k: union.metrics[f"hit_rate@{k}"].value for k in (1, 2, 3)}
    # abc ties with its double; axxx also finds xxxa before abx
    assert values == {1: 0.0, 2: 0.5, 3: 0.75}
    for setting, first in (("local", ["2:3", "2:2"]), ("global", ["2:91", "2:3"])):
        assert [did for did, _ in read_run(tmp_path / f"out/runs/{setting}/{CELL}.txt")["2:2"]][:2] == first
    assert local.published == local.metrics["hit_rate@5"]
    expected = np.mean([1 / 19, 2 / 19, 1 / 19, 1 / 19])
    assert local.metrics["hit_rate@1"].chance == pytest.approx(expected)


def test_local_scores_do_not_depend_on_the_global_pool(root, tmp_path):
    (with_global, _), (alone,) = run(root, tmp_path / "a"), run(root, tmp_path / "b", settings=["local"])
    assert with_global == alone
    assert (tmp_path / "a/collections/mbeir_union_test_cand_pool").is_dir()
    assert (tmp_path / "b/collections/mbeir_webqa_task1_cand_pool").is_dir()


@pytest.mark.parametrize(("wrong_ties", "expected"), [(0, 1.0), (1, 0.0)])
def test_only_wrong_candidates_win_a_tie_at_the_last_cut_off(root, tmp_path, wrong_ties, expected):
    """Nine better ones, then a tie of three right ones: rank 10, or below it if a wrong one is in the tie."""
    words = [*("a" * n for n in range(1, 10)), *["ab"] * (3 + wrong_ties), *["axx", "q", "r", "s", "t"] * 2]
    write(root, "cand_pool/local/mbeir_webqa_task1_cand_pool.jsonl", candidates(words))
    query = {"qid": "2:1", "query_txt": "aaa", "query_img_path": None, "query_modality": "text"}
    answers = [f"2:{n}" for n in (10, 11, 12)]
    lines = [json.dumps(query | {"pos_cand_list": answers, "neg_cand_list": []})]
    write(root, "query/test/mbeir_webqa_task1_test.jsonl", lines)
    write(root, "qrels/test/mbeir_webqa_task1_test_qrels.txt", [f"2:1 0 {did} 1 1" for did in answers])
    (score,) = run(root, tmp_path / "out", settings=["local"])
    assert score.metrics["hit_rate@10"].value == expected and score.metrics["hit_rate@5"].value == 0
    assert len(read_run(tmp_path / f"out/runs/local/{CELL}.txt")["2:1"]) == 11


def test_judgements_of_candidates_that_the_pool_lacks_are_counted(root, tmp_path, caplog):
    with (root / "qrels/test/mbeir_webqa_task1_test_qrels.txt").open("a") as file:
        file.write("2:1 0 6:90 1 1\n2:2 0 6:91 1 1\n")
    score = run(root, tmp_path / "out", settings=["local"])[0]
    assert score.queries == 4
    assert "webqa_task1: 2 of the judged candidates are not in the local pool" in caplog.text
    assert "such as '6:90' of query '2:1'" in caplog.text


class TestErrors:
    def test_a_query_without_an_answer_in_the_pool(self, root, tmp_path):
        write(root, "qrels/test/mbeir_webqa_task1_test_qrels.txt", ["2:1 0 2:90 1 1"])
        model = letters_encoder()
        with pytest.raises(ValueError, match=r"query '2:1' of webqa_task1: none of its 1 right candidates \['2:90'\]"):
            run(root, tmp_path, model)
        assert model.model.rows == 0

    def test_a_local_candidate_outside_the_global_pool(self, root, tmp_path):
        write(root, "cand_pool/global/mbeir_union_test_cand_pool.jsonl", candidates([*"abcdefghijklmnopqr", "q"])[:-2])
        write(root, "qrels/test/mbeir_webqa_task1_test_qrels.txt", [f"2:{n} 0 2:1 1 1" for n in range(1, 5)])
        with pytest.raises(ValueError, match="candidate '2:18' of the local pool of webqa_task1 is not in the global"):
            run(root, tmp_path)

    def test_a_missing_image_is_named(self, root, tmp_path):
        lines = (
            candidates(["abc"])[0]
            .replace('"img_path": null', '"img_path": "no.png"')
            .replace('"text"', '"image,text"')
        )
        write(root, "cand_pool/local/mbeir_webqa_task1_cand_pool.jsonl", [lines])
        write(root, "qrels/test/mbeir_webqa_task1_test_qrels.txt", [f"2:{n} 0 2:1 1 1" for n in range(1, 5)])
        with pytest.raises(FileNotFoundError, match=r"item '2:1': image '.*mbeir/no\.png': no such file"):
            run(root, tmp_path, settings=["local"])

    def test_missing_files_and_settings(self, root, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"mbeir_cirr_task7_test\.jsonl"):
            run(root, tmp_path, cells=["cirr_task7"])
        (root / "cand_pool/global/mbeir_union_test_cand_pool.jsonl").unlink()
        with pytest.raises(FileNotFoundError, match=r"no such file: .*mbeir_union_test_cand_pool\.jsonl"):
            run(root, tmp_path)
        with pytest.raises(ValueError, match=r"unknown settings \['any'\]"):
            run(root, tmp_path, settings=["any"])
        with pytest.raises(ValueError, match="unknown M-BEIR cell 'webqa'"):
            run(root, tmp_path, cells=["webqa"], settings=["local"])
        with pytest.raises(ValueError, match="no M-BEIR cell is named; expected some of visualnews_task0"):
            run(root, tmp_path, cells=[])
        with pytest.raises(ValueError, match=r"ks=\(5, 0\): cut-offs must be at least 1"):
            run(root, tmp_path, ks=(5, 0))
        with pytest.raises(FileNotFoundError, match="M-BEIR: no such folder"):
            run(root / "elsewhere", tmp_path)


@pytest.fixture
def scores():
    """Cell n scores n % locally and half of it globally."""
    return [
        MbeirScore(cell, setting, 100, 1000, {f"hit_rate@{k}": Metric(n * share / 100) for k in (5, 10)})
        for setting, share in (("local", 1), ("global", 0.5))
        for n, cell in enumerate(MBEIR_CELLS)
    ]


def test_averages(scores):
    results = mbeir_results(scores)
    assert [headline.metric.value for headline in results.headline] == pytest.approx([0.075, 0.0375])
    assert [table.report_only for table in results.tables] == [False, True, True]
    assert results.tables[1].rows[8][:4] == ["edis_task2", "mixed", 100, 1000]
    assert average_score(scores, "local") == pytest.approx(np.mean(range(16)) / 100)
    assert average_score(scores, "global") == pytest.approx(np.mean(range(16)) / 200)
    assert average_score(scores, "local", "multi") == pytest.approx(0.145)
    assert average_score(scores[:1], "local", "multi") is None
    deep = [
        replace(score, metrics=score.metrics | {"hit_rate@50": Metric(1 - score.queries / 200)}) for score in scores
    ]
    labels = {each.label: each.metric.value for each in mbeir_results(deep).headline}
    assert labels["average R@50, global pools"] == 0.5 and len(labels) == 4


def test_the_printed_table_has_three_groups_and_sixteen_cells(scores):
    lines = format_results(mbeir_results(scores)).splitlines()
    first = lines.index("By cell and pool")
    assert lines[first + 1].split() == "cell task metric n local pool global pool".split()
    labels = [line.split("  ")[0] for line in lines[first + 2 : -1]]
    cells = [cell.name for cell in MBEIR_CELLS]
    averages = ["average, single", "average, mixed", "average, multi", "average"]
    assert labels == [*cells[:8], averages[0], *cells[8:14], averages[1], *cells[14:], *averages[2:]]
    assert lines[first + 2].split() == "visualnews_task0 t → i R@5 100 0.0 1,000 0.0 1,000".split()
    assert next(line for line in lines if line.startswith("fashioniq")).split()[4] == "R@10"
    assert next(line for line in lines if line.startswith("average  ")).split() == "average 7.5 3.8".split()
    assert next(line for line in lines if line.startswith("average, multi")).split()[-2:] == ["14.5", "7.3"]


def test_the_printed_table_of_the_full_benchmark_is_narrow(scores):
    wide = [replace(s, queries=50_000, pool=5_600_000) for s in scores]
    wide = [replace(s, metrics={k: Metric(1.0, 0.99, 1.0, 0.1) for k in s.metrics}) for s in wide]
    assert max(map(len, format_results(mbeir_results(wide)).splitlines())) <= 100
