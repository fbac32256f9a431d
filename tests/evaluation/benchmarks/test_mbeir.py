"""M-BEIR evaluation against hand-made vectors: what is right, what ties, what is missing."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conjoin.data import MBEIR_CELLS, MbeirCell
from conjoin.evaluation import (
    EvaluateOptions,
    Metric,
    RetrievalTask,
    Rows,
    evaluate_task,
    format_results,
    read_run,
    render_report,
)
from conjoin.evaluation.benchmarks.mbeir import MbeirScore, average_score, evaluate_mbeir, mbeir_results
from conjoin.evaluation.task import penalise_hubs
from conjoin.processing import parse_items
from conjoin.retrieval import ItemEncoder

HEADER = "query_modality\tcand_modality\tdataset_name\tdataset_id\tprompt_1\tprompt_2"
CELL = "webqa_task1"


class WordModel(torch.nn.Module):
    """The vector of a text says how often each of its letters occurs; `same` gives every text one vector."""

    def __init__(self, same=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(128))
        self.same = same
        self.config = SimpleNamespace(to_dict=lambda: {"same": same})
        self.rows = 0

    def forward(self, text):
        self.rows += len(text)
        vectors = torch.ones_like(text) if self.same else text @ self.weight
        return SimpleNamespace(embeddings=torch.nn.functional.normalize(vectors, dim=-1))


def letters(items):
    rows = torch.zeros(len(items), 128)
    for row, item in enumerate(items):
        for letter in item["text"].lower().strip("."):
            rows[row, ord(letter)] += 1
    return {"text": rows}


def encoder(**kwargs):
    return ItemEncoder(WordModel(**kwargs), letters, batch_size=4)


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
    return evaluate_mbeir(model or encoder(), root, out, options, **{"cells": [CELL], "instructions": False} | kwargs)


def test_hit_rates_of_both_settings(root, tmp_path):
    local, union = run(root, tmp_path / "out")
    assert (local.setting, local.queries, local.pool, union.setting, union.pool) == ("local", 4, 19, "global", 22)
    values = {k: local.metrics[f"hit_rate@{k}"].value for k in (1, 2, 3, 5, 10)}
    # abc at 1; axxx: axx, abx; ghi ties with igh and so stands at 2; q shares no letter with zy
    assert values == {1: 0.25, 2: 0.75, 3: 0.75, 5: 0.75, 10: 0.75}
    values = {k: union.metrics[f"hit_rate@{k}"].value for k in (1, 2, 3)}
    # abc ties with its double; axxx also finds xxxa before abx
    assert values == {1: 0.0, 2: 0.5, 3: 0.75}
    assert local.published == local.metrics["hit_rate@5"]
    expected = np.mean([1 / 19, 2 / 19, 1 / 19, 1 / 19])
    assert local.metrics["hit_rate@1"].chance == pytest.approx(expected)


def test_local_scores_do_not_depend_on_the_global_pool(root, tmp_path):
    (with_global, _), (alone,) = run(root, tmp_path / "a"), run(root, tmp_path / "b", settings=["local"])
    assert with_global == alone
    assert (tmp_path / "a/collections/mbeir_union_test_cand_pool").is_dir()
    assert (tmp_path / "b/collections/mbeir_webqa_task1_cand_pool").is_dir()


def test_a_model_that_tells_nothing_apart_finds_nothing(root, tmp_path):
    for score in run(root, tmp_path, encoder(same=True)):
        assert [metric.value for metric in score.metrics.values()] == [0.0] * 5


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


def test_run_files_hold_the_ranking(root, tmp_path):
    run(root, tmp_path)
    ranking = read_run(tmp_path / f"runs/local/{CELL}.txt")
    assert list(ranking) == ["2:1", "2:2", "2:3", "2:4"]
    assert [did for did, _ in ranking["2:2"]][:2] == ["2:3", "2:2"] and len(ranking["2:2"]) == 11
    assert [did for did, _ in read_run(tmp_path / f"runs/global/{CELL}.txt")["2:2"]][:2] == ["2:91", "2:3"]


def test_what_is_encoded_is_kept(root, tmp_path):
    first = run(root, tmp_path)
    again = encoder()
    assert run(root, tmp_path, again) == first
    assert again.model.rows == 0


class Instructed:
    """A processor that records the instruction of each item."""

    def __init__(self):
        self.seen = []

    def __call__(self, items, instruction=()):
        self.seen += zip(instruction, [item["text"] for item in items], strict=False)
        return letters(items)


def test_each_query_is_encoded_with_its_instruction(tmp_path):
    queries = Rows("queries", [{"id": f"2:{n}", "text": "abcd"[n]} for n in range(4)], ["u", "v", "u", "v"])
    corpus = Rows("corpus", [{"id": letter, "text": letter} for letter in "abcd"])
    qrels = {f"2:{n}": ["abcd"[n]] for n in range(4)}
    processor = Instructed()
    scores = evaluate_task(
        ItemEncoder(WordModel(), processor), RetrievalTask("t", queries, (corpus,), qrels), tmp_path
    )
    assert sorted(processor.seen) == [("u", "a"), ("u", "c"), ("v", "b"), ("v", "d")]
    assert scores.ranks.tolist() == [1, 1, 1, 1]


def test_hubness_penalty_ranks_as_the_formula_says():
    generator = np.random.default_rng(0)
    queries, pool = (generator.normal(size=(n, 6)) for n in (9, 20))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    scores = queries @ pool.T
    penalised = scores - 0.2 * scores.mean(axis=0)
    moved = penalise_hubs(queries, 0.2)
    np.testing.assert_array_equal(np.argsort(moved @ pool.T), np.argsort(penalised))
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1)
    assert penalise_hubs(queries, 0.0) is queries
    with pytest.raises(ValueError, match="hubness_penalty=1 leaves nothing of query 0"):
        penalise_hubs(np.ones((1, 4)), 1)


class TestErrors:
    def test_a_query_without_an_answer_in_the_pool(self, root, tmp_path):
        write(root, "qrels/test/mbeir_webqa_task1_test_qrels.txt", ["2:1 0 2:90 1 1"])
        model = encoder()
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
        model = ItemEncoder(WordModel(), lambda items: parse_items(items) and letters(items))
        with pytest.raises(FileNotFoundError, match=r"item '2:1': image '.*mbeir/no\.png': no such file"):
            run(root, tmp_path, model, settings=["local"])

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
    assert average_score(scores, "local") == pytest.approx(np.mean(range(16)) / 100)
    assert average_score(scores, "global") == pytest.approx(np.mean(range(16)) / 200)
    assert average_score(scores, "local", "multi") == pytest.approx(0.145)
    assert average_score(scores[:1], "local", "multi") is None


def test_the_printed_table_has_three_groups_and_sixteen_cells(scores):
    lines = format_results(mbeir_results(scores)).splitlines()
    first = lines.index("By cell and pool")
    assert lines[first + 1].split() == "cell task metric n local pool global pool".split()
    labels = [line.split("  ")[0] for line in lines[first + 2 : -1]]
    cells = [cell.name for cell in MBEIR_CELLS]
    assert labels == [
        *cells[:8],
        "average, single",
        *cells[8:14],
        "average, mixed",
        *cells[14:],
        "average, multi",
        "average",
    ]
    assert lines[first + 2].split() == [
        "visualnews_task0",
        "t",
        "→",
        "i",
        "R@5",
        "100",
        "0.0",
        "1,000",
        "0.0",
        "1,000",
    ]
    assert next(line for line in lines if line.startswith("fashioniq")).split()[4] == "R@10"
    assert next(line for line in lines if line.startswith("average  ")).split() == "average 7.5 3.8".split()
    assert next(line for line in lines if line.startswith("average, multi")).split()[-2:] == ["14.5", "7.3"]


def test_the_printed_table_of_the_full_benchmark_is_narrow(scores):
    wide = [replace(s, queries=50_000, pool=5_600_000) for s in scores]
    wide = [replace(s, metrics={k: Metric(1.0, 0.99, 1.0, 0.1) for k in s.metrics}) for s in wide]
    assert max(map(len, format_results(mbeir_results(wide)).splitlines())) <= 100


def test_results_are_saved_and_drawn(scores, tmp_path):
    results = mbeir_results(scores)
    results.save(tmp_path / "results.json")
    assert [headline.metric.value for headline in results.headline] == pytest.approx([0.075, 0.0375])
    assert [table.report_only for table in results.tables] == [False, True, True]
    assert results.tables[1].rows[8][:4] == ["edis_task2", "mixed", 100, 1000]
    page = render_report(tmp_path / "results.json", tmp_path / "report.html").read_text()
    assert "infoseek_task8" in page and "All cut-offs, global pools" in page


def test_cells_know_their_task():
    assert MbeirCell("oven", 8).name == "oven_task8"
