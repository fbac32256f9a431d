"""`/v1`, asked by plain HTTP as OpenAI's clients and those of vLLM ask."""

import base64
import json

import numpy as np
import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer

from conjoin import load_encoder
from conjoin.serving.endpoint import make_endpoint
from conjoin.serving.searcher import Searcher
from tiny_serving import LIMITS, png, uri

RED, BLUE = ({"type": "image_url", "image_url": {"url": uri(png(colour))}} for colour in ("red", "blue"))
WORDS = {"type": "text", "text": "a red thing"}


@pytest.fixture(scope="module")
def served(exports, tiny_checkpoints, tmp_path_factory):
    """`served(kind)` is the encoder and a client of a model of this kind, trained for the widths 4 and 8."""

    def get(kind):
        folder = tmp_path_factory.mktemp("served") / kind
        if kind == "bert":
            body = Transformer(str(tiny_checkpoints["bert"]))
            model = SentenceTransformer(modules=[body, Pooling(24)], prompts={"query": "seek "}, device="cpu")
            model.save_pretrained(str(folder))
            (folder / "README.md").write_text(
                '{"loss": "MultipleNegativesRankingLoss", "matryoshka_dims": [\n 8,\n 4]}'
            )
        else:
            model, processor = exports(kind)[1:]
            processor.save_pretrained(folder)
            model.save_pretrained(folder)
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"matryoshka_dimensions": [4, 8]}))
        encoder = load_encoder(folder)
        app = make_endpoint(Searcher(encoder, None, LIMITS))
        return encoder, TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    return get


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["bert", "joint_encoder", "mllm_retriever"])
def test_texts_roles_widths_and_forms(served, kind):
    encoder, client = served(kind)
    plain = {"model": "any", "input": ["a red thing", "b"], "user": "me"}
    whole = encoder.encode(plain["input"])
    for more, expected in (
        ({}, whole),
        ({"encoding_format": "float"}, whole),
        ({"input_type": "query"}, encoder.encode_query(plain["input"])),
        ({"dimensions": 4}, unit(whole[:, :4])),
        ({"dimensions": 8, "input_type": "document"}, unit(encoder.encode_document(plain["input"])[:, :8])),
    ):
        answer = client.post("/v1/embeddings", json={**plain, "encoding_format": "base64", **more}).json()
        assert [entry["index"] for entry in answer["data"]] == [0, 1] and answer["object"] == "list"
        found = [entry["embedding"] for entry in answer["data"]]
        if "encoding_format" not in more:
            found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=str(more))
    one = client.post("/v1/embeddings", json={"input": "one", "dimensions": encoder.dimension}).json()
    assert len(one["data"]) == 1 and len(one["data"][0]["embedding"]) == encoder.dimension
    refused = client.post("/v1/embeddings", json={**plain, "dimensions": 5})
    assert refused.status_code == 422 and f"expected 4, 8, {encoder.dimension}, or no" in refused.text


def test_usage_counts_the_tokens_of_texts_and_prompts(served):
    encoder, client = served("bert")
    tokenizer = encoder.model.model.tokenizer
    for more, texts in (({}, ["ab c", "d"]), ({"input_type": "query"}, ["seek ab c", "seek d"])):
        usage = client.post("/v1/embeddings", json={"input": ["ab c", "d"], **more}).json()["usage"]
        expected = sum(len(tokenizer(text)["input_ids"]) for text in texts)
        assert usage == {"prompt_tokens": expected, "total_tokens": expected}


@pytest.mark.parametrize("kind", ["joint_encoder", "mllm_retriever"])
@pytest.mark.parametrize(
    ("messages", "item"),
    [
        ([{"role": "user", "content": "a red thing"}], "a red thing"),
        ([{"role": "user", "content": [RED]}], {"image": "red"}),
        ([{"role": "user", "content": [RED, WORDS]}], {"image": "red", "text": "a red thing"}),
        ([{"role": "user", "content": [WORDS, RED]}], {"image": "red", "text": "a red thing"}),
        ([{"role": "user", "content": [RED, WORDS, BLUE]}], ["red", "a red thing", "blue"]),
    ],
)
def test_messages_are_one_item(served, kind, messages, item):
    encoder, client = served(kind)
    picture = lambda name: Image.new("RGB", (8, 8), name)  # noqa: E731
    if isinstance(item, list):
        content = [{"type": "image", "image": picture("red")}, WORDS, {"type": "image", "image": picture("blue")}]
        item = [{"role": "user", "content": content}]
    elif isinstance(item, dict):
        item = item | {"image": picture(item["image"])}
    answer = client.post("/v1/embeddings", json={"messages": messages, "encoding_format": "float"}).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], encoder.encode([item])[0], atol=1e-5)
    words = len(answer["data"]) == 1 and answer["usage"]["prompt_tokens"]
    assert bool(words) == ("red thing" in str(messages)), "a picture counts no tokens"
    told = [{"role": "system", "content": "Find it."}, *messages]
    answer = client.post("/v1/embeddings", json={"messages": told}).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], encoder.encode([item], prompt="Find it.")[0], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "expected input or messages"),
        ({"input": "a", "messages": []}, "expected input or messages"),
        ({"input": []}, "0 items"),
        ({"input": [[1, 2]]}, "check_embedding_ctx_length=False"),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens: Extra inputs"),
        ({"input": "a", "dimensions": 0}, "dimensions: "),
        ({"input": "a", "input_type": "passage"}, "input_type: "),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "expected one user message"),
        ({"messages": [{"role": "user", "content": []}]}, "neither text nor image"),
        ({"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages.0.name: Extra inputs"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
            "files are not opened",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(searcher, body, problem):
    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1", raise_server_exceptions=False)
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 422 and problem in answer.json()["error"]["message"]


def test_a_model_that_was_not_trained_for_it_is_not_cut(searcher):
    client = TestClient(make_endpoint(searcher), base_url="http://127.0.0.1")
    answer = client.post("/v1/embeddings", json={"input": "a", "dimensions": 4})
    assert answer.status_code == 422 and "was not trained for" in answer.json()["error"]["message"]
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == (searcher.model_name, "model")
