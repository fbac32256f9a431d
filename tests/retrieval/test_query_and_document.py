"""Queries are encoded as queries and what they search as documents, in every place: as sentence-transformers does."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from conjoin.evaluation import Cell, EvaluateOptions, Rows, evaluate_cells
from conjoin.retrieval import Collection, Miner, encode_collection, load_encoder, load_mined, mine_hard_negatives
from conjoin.serving.searcher import Searcher
from tiny_commands import conjoin, write_rows

CORPUS = ["a red apple", "two green chairs", "the sea at night", "a chair of wood", "apples and pears", "no"]
QUERIES = ["red apples", "chair"]
ROWS = [{"id": f"r{number}", "text": text} for number, text in enumerate(CORPUS)]


@pytest.fixture(scope="module")
def prompted(tiny_checkpoints, tmp_path_factory):
    """A model whose prompts move its vectors, and the library's own object of it."""
    folder = tmp_path_factory.mktemp("prompted")
    modules = [Transformer(tiny_checkpoints["bert"]), Pooling(24, "mean"), Normalize()]
    prompts = {"query": "question 42 ", "document": "shelf ", "other": "zzz "}
    SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save_pretrained(str(folder))
    return folder, SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def collection(prompted, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "c"
    conjoin("encode", prompted[0], data, "--only", "text", "--out", folder, "--quiet", "--no-bf16")
    return folder


def ranked(library, queries=QUERIES, prompt=None):
    """The ids and the scores of the library, best first."""
    scores = library.encode_query(queries, prompt=prompt) @ library.encode_document(CORPUS).T
    return [[f"r{row}" for row in order] for order in (-scores).argsort(1)], -np.sort(-scores, 1)


def same(results, wanted):
    ids, scores = wanted
    assert [[hit["id"] for hit in hits] for hits in results] == ids
    np.testing.assert_allclose([[hit["score"] for hit in hits] for hits in results], scores, atol=1e-5)


def test_the_roles_are_told_apart(prompted):
    """Else nothing below could fail."""
    library = prompted[1]
    assert np.abs(library.encode_query(QUERIES) - library.encode(QUERIES)).max() > 0.05
    assert np.abs(library.encode_document(CORPUS) - library.encode(CORPUS)).max() > 0.05


@pytest.mark.parametrize("options", [{}, {"prompt": "zzz "}, {"prompt_name": "other"}])
def test_the_command_line(options, prompted, collection, capsys):
    results = []
    for query in QUERIES:
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        conjoin(
            "search",
            collection,
            "--model",
            prompted[0],
            "--text",
            query,
            "-k",
            6,
            *words,
            "--ranking",
            "vectors",
            "--json",
        )
        results.append(json.loads(capsys.readouterr().out)["results"])
    same(results, ranked(prompted[1], prompt="zzz " if options else None))


@pytest.mark.parametrize("options", [{}, {"prompt": "zzz "}])
def test_the_app_and_the_endpoint(options, prompted, collection):
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from conjoin.serving.endpoint import make_endpoint

    searcher = Searcher.load(collection, device="cpu", **options)
    wanted = ranked(prompted[1], prompt=options.get("prompt"))
    same([[vars(hit) for hit in hits] for hits in searcher.search(QUERIES, 6, ranking="vectors")], wanted)
    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1")
    body = {"items": QUERIES, "k": 6, "ranking": "vectors"}
    same(client.post("/search", json=body).json()["results"], wanted)
    given = client.post("/search", json={**body, "prompt": "zzz "}).json()["results"]
    same(given, ranked(prompted[1], prompt="zzz "))
    for role, encode in (("document", prompted[1].encode_document), (None, prompted[1].encode)):
        answer = client.post("/embed", json={"items": QUERIES, "role": role}).json()
        np.testing.assert_allclose(answer["embeddings"], encode(QUERIES), atol=1e-5)


def provenance(mined):
    """By anchor and negative, in order, what each miner found."""
    rows = pq.read_table(mined.path).to_pylist()
    return {row["id"]: dict(zip(row["negatives"], row["found_by"], strict=True)) for row in rows}


@pytest.mark.parametrize("prompt", [None, "zzz "])
def test_mining(prompt, prompted, tmp_path):
    folder, library = prompted
    rows, anchors = Dataset.from_list(ROWS), Dataset.from_list([{"id": q, "text": q} for q in QUERIES])
    miner = Miner("m", str(folder), "text", "text", duplicate_above=1.1)
    mine_hard_negatives(rows, [miner], tmp_path, anchors=anchors, k=6, prompt=prompt)
    mined, (ids, scores) = load_mined(tmp_path), ranked(library, prompt=prompt)
    for row, query in enumerate(QUERIES):
        assert list(mined[query]) == ids[row]
        found = [finding["score"] for (finding,) in provenance(mined)[query].values()]
        np.testing.assert_allclose(found, scores[row], atol=1e-5)


def test_anchors_of_the_corpus_itself_are_queries(prompted, tmp_path):
    miner = Miner("m", str(prompted[0]), "text", "text", duplicate_above=1.1)
    mine_hard_negatives(Dataset.from_list(ROWS), [miner], tmp_path, k=6)
    (found,) = provenance(load_mined(tmp_path))["r0"]["r3"]
    vectors = prompted[1].encode_query([CORPUS[0]]), prompted[1].encode_document([CORPUS[3]])
    assert found["score"] == pytest.approx(float((vectors[0] @ vectors[1].T)[0, 0]), abs=1e-5)


@pytest.mark.parametrize("prompt", [None, "zzz "])
def test_evaluation(prompt, prompted, tmp_path):
    queries = [{"id": query, "text": query} for query in QUERIES]
    cell = Cell("t", Rows("queries", queries), Rows("corpus", ROWS), {query: ["r0"] for query in QUERIES})
    encoder = load_encoder(prompted[0], device="cpu")
    (scores,) = evaluate_cells(encoder, [cell], tmp_path, EvaluateOptions(ks=(1, 6), prompt=prompt))
    ids, expected = ranked(prompted[1], prompt=prompt)
    assert scores.results.ids == ids
    np.testing.assert_allclose(scores.results.scores, expected, atol=1e-5)


def test_the_collection_records_the_prompt_of_its_documents_and_refuses_another(prompted, collection):
    encoder = load_encoder(prompted[0], device="cpu")
    assert Collection(collection).metadata["key"]["prompt"] == "shelf "
    with pytest.raises(ValueError, match="was made with prompt 'shelf ', not 'zzz '"):
        encode_collection(ROWS, encoder, collection, prompt="zzz ", settings={"only": "text"})
    with pytest.raises(ValueError, match="role 'document', not 'query'"):
        encode_collection(ROWS, encoder, collection, role="query", settings={"only": "text"})
    again = encode_collection(ROWS, encoder, collection, prompt_name="document", settings={"only": "text"})
    assert again.changes.encoded == 0


def test_a_collection_records_how_its_model_pools(tiny_checkpoints, data, tmp_path, capsys):
    words = ["encode", tiny_checkpoints["bert"], data, "--only", "text", "--out", tmp_path / "c", "--quiet"]
    with pytest.raises(ValueError, match="--pooling"):
        conjoin(*words)
    conjoin(*words, "--pooling", "mean", "--no-bf16")
    capsys.readouterr()
    conjoin("search", tmp_path / "c", "--text", CORPUS[3], "-k", 1, "--ranking", "vectors", "--json")
    (hit,) = json.loads(capsys.readouterr().out)["results"]
    assert hit["id"] == "r3" and hit["score"] == pytest.approx(1, abs=1e-5)
