# mypy: allow-untyped-calls
"""Scores and vectors in every form, as transformers computes them: gateway and workers in one process, on a bus in memory."""

from __future__ import annotations

import base64
import struct
from array import array
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from common.messages import Pool, Pooled
from gateway.pooling.fleet import PoolingFleet, Turn
from gateway.pooling.vectors import in_base64, lists, numbers
from tests.jina_models import merged
from tests.unit.gateway.pooling.served import CLOSE, DOCUMENTS, QUERY, ask, logits, tokens, vector


@pytest.mark.asyncio(loop_scope="module")
async def test_documents_are_ranked_in_each_form(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    scores = [logits(models["cross"], QUERY, document).sigmoid().item() for document in DOCUMENTS]
    order = sorted(range(3), key=lambda at: -scores[at])
    said = {"model": "cross", "query": QUERY}
    jina = await ask(client, "/v1/rerank", **said, documents=[{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]])
    assert [one["index"] for one in jina["results"]] == order
    assert [one["relevance_score"] for one in jina["results"]] == pytest.approx([scores[at] for at in order], **CLOSE)
    assert jina["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    assert jina["usage"]["total_tokens"] > 0
    cohere = await ask(client, "/v2/rerank", **said, documents=DOCUMENTS, top_n=2)
    assert [set(one) for one in cohere["results"]] == [{"index", "relevance_score"}] * 2
    tei = await ask(client, "/rerank", **said, texts=DOCUMENTS, return_text=True, raw_scores=True)
    assert [one["index"] for one in tei] == order
    assert tei[0]["score"] == pytest.approx(logits(models["cross"], QUERY, DOCUMENTS[order[0]]).item(), **CLOSE)
    pairs = await ask(client, "/score", model="cross", text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in pairs["data"]] == pytest.approx(scores, **CLOSE)
    by_vectors = await ask(client, "/score", model="mini", queries=QUERY, documents=DOCUMENTS)
    wanted = [(vector(models["mini"], f"the {QUERY}") @ vector(models["mini"], one)).item() for one in DOCUMENTS]
    assert [one["score"] for one in by_vectors["data"]] == pytest.approx(wanted, **CLOSE)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", ["cross", "mini"])
async def test_the_tokens_a_document_may_have_are_none_of_the_querys(client: httpx.AsyncClient, model: str) -> None:
    query = "capital of france on the mat"
    said = {"model": model, "query": query, "documents": ["paris is the capital of france"]}
    [cut] = (await ask(client, "/v2/rerank", **said, max_tokens_per_doc=2))["results"]
    [short] = (await ask(client, "/v2/rerank", **said | {"documents": ["paris is"]}))["results"]
    assert cut["relevance_score"] == pytest.approx(short["relevance_score"], **CLOSE)


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_of_tokens_are_compared_each_with_its_nearest(client: httpx.AsyncClient) -> None:
    async def vectors(texts: list[str], side: str) -> list[torch.Tensor]:
        rows = await ask(client, "/pooling", model="late", input=texts, prompt_name=side)
        return [torch.tensor(one["data"]) for one in rows["data"]]

    [query], documents = await vectors([QUERY], "query"), await vectors(DOCUMENTS, "document")
    assert len(query) == 12  # padded
    assert len(documents[2]) == 7  # without its comma
    wanted = [(query @ one.T).max(1).values.sum().item() for one in documents]
    found = await ask(client, "/score", model="late", queries=QUERY, documents=DOCUMENTS)
    assert [one["score"] for one in found["data"]] == pytest.approx(wanted, abs=1e-4)
    ranked = (await ask(client, "/v2/rerank", model="late", query=QUERY, documents=DOCUMENTS, top_n=1))["results"]
    assert ranked == [{"index": wanted.index(max(wanted)), "relevance_score": pytest.approx(max(wanted), abs=1e-4)}]
    cut, short = [
        await ask(client, "/v2/rerank", model="late", query=QUERY, documents=[one], max_tokens_per_doc=2)
        for one in (DOCUMENTS[0], "paris is")
    ]
    assert cut["results"] == short["results"]
    answer = await client.post("/v1/embeddings", json={"model": "late", "input": "cat"})
    assert answer.status_code == 400
    assert "vectors of tokens" in answer.json()["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_words_have_weights_beside_a_texts_vector(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    texts = ["the cat sat on the mat", "the"]
    each = (await ask(client, "/pooling", model="m3", input=texts, task="token_classify"))["data"]
    found = await ask(client, "/embed_sparse", model="m3", inputs=texts)
    assert len(found[0]) > 1
    for text, weights, words in zip(texts, each, found, strict=True):
        ids, _ = tokens(models["m3"], text)
        best = dict[int, float]()
        for token, [weight] in zip(ids[0, 1:-1].tolist(), weights["data"], strict=True):
            best[token] = max(weight, best.get(token, 0.0))
        wanted = {token: pytest.approx(w, **CLOSE) for token, w in best.items() if w > 0}
        assert {one["index"]: one["value"] for one in words} == wanted
    rows = (await ask(client, "/pooling", model="m3", input=texts, task="token_embed"))["data"]
    assert [len(one["data"]) for one in rows] == [7, 2]  # all but the first token
    assert len((await ask(client, "/v1/embeddings", model="m3", input=texts))["data"][0]["embedding"]) == 32
    answer = await client.post("/embed_sparse", json={"model": "mini", "inputs": "cat"})
    assert answer.status_code == 400
    assert "makes vectors, and no weights of words" in answer.json()["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_chooses_adapter_and_prompt(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    def wanted(task: str, text: str) -> list[float]:
        ids, _ = tokens(models["jina"], text)
        with torch.no_grad():
            states = merged(models["jina"], task)(ids).last_hidden_state[0]
        return torch.as_tensor(torch.nn.functional.normalize(states.mean(0), dim=0)).tolist()

    async def asked(path: str = "/v1/embeddings", **fields: Any) -> list[float]:
        found = await ask(client, path, model="jina", **fields)
        return list(found["embeddings"]["float"][0] if path == "/v2/embed" else found["data"][0]["embedding"])

    query = pytest.approx(wanted("retrieval.query", f"the {QUERY}"), **CLOSE)
    assert await asked(input=QUERY, task="retrieval.query") == query
    assert await asked(input=QUERY, prompt_name="retrieval.query") == query
    assert await asked(input=QUERY, input_type="query") == query
    assert await asked("/v2/embed", texts=[QUERY], input_type="search_query") == query
    near = pytest.approx(wanted("text-matching", QUERY), **CLOSE)
    assert await asked(input=QUERY, task="text-matching") == near
    assert await asked(input=QUERY) == pytest.approx(wanted("", QUERY), **CLOSE)
    passage = wanted("retrieval.passage", f"a {DOCUMENTS[0]}")
    cosine = torch.tensor(wanted("retrieval.query", f"the {QUERY}")) @ torch.tensor(passage)
    found = await ask(client, "/score", model="jina", queries=QUERY, documents=DOCUMENTS[0])
    assert found["data"][0]["score"] == pytest.approx(cosine.item(), **CLOSE)
    answer = await client.post("/v1/embeddings", json={"model": "jina", "input": "cat", "task": "translation"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "task"


@pytest.mark.asyncio(loop_scope="module")
async def test_labels_are_scored(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    wanted = [logits(models["mood"], one).softmax(-1) for one in DOCUMENTS]
    found = await ask(client, "/classify", model="mood", input=DOCUMENTS)
    assert [one["probs"] for one in found["data"]] == [pytest.approx(one.tolist(), **CLOSE) for one in wanted]
    assert [one["label"] for one in found["data"]] == [f"LABEL_{one.argmax()}" for one in wanted]
    [pair, single] = await ask(client, "/predict", model="mood", inputs=[[QUERY, DOCUMENTS[0]], [DOCUMENTS[1]]])
    assert pair[0]["score"] == pytest.approx(
        logits(models["mood"], QUERY, DOCUMENTS[0]).softmax(-1).max().item(), **CLOSE
    )
    assert [one["score"] for one in single] == sorted([one["score"] for one in single], reverse=True)
    told = {"inputs": DOCUMENTS[0], "parameters": {"top_k": 1, "function_to_apply": "none"}}
    [likeliest] = await ask(client, "/predict", model="mood", **told)
    assert likeliest["score"] == pytest.approx(logits(models["mood"], DOCUMENTS[0]).max().item(), **CLOSE)
    pooled = await ask(client, "/pooling", model="mood", input=DOCUMENTS[0])
    assert pooled["data"][0]["data"] == pytest.approx(wanted[0].tolist(), **CLOSE)


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_in_other_forms_are_the_same(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    wanted = pytest.approx(vector(models["mini"], DOCUMENTS[0]).tolist(), **CLOSE)
    text = DOCUMENTS[0]
    assert (await ask(client, "/embed", model="mini", inputs=text)) == [wanted]
    ollama = await ask(client, "/api/embed", model="mini", input=[text, "a"], keep_alive="5m")
    assert ollama["embeddings"][0] == wanted
    assert (await ask(client, "/api/embeddings", model="mini:latest", prompt=text))["embedding"] == wanted
    source, others = DOCUMENTS[0], DOCUMENTS[1:]
    alike = await ask(client, "/similarity", model="mini", inputs={"source_sentence": source, "sentences": others})
    assert alike == [
        pytest.approx((vector(models["mini"], source) @ vector(models["mini"], one)).item(), **CLOSE) for one in others
    ]
    cohere = await ask(
        client,
        "/v2/embed",
        model="mini",
        texts=[text],
        input_type="search_document",
        embedding_types=["float", "base64"],
    )
    assert cohere["embeddings"]["float"][0] == wanted
    assert list(struct.unpack("<32f", base64.b64decode(cohere["embeddings"]["base64"][0]))) == wanted
    first = await ask(client, "/v1/embed", model="mini", texts=[text], input_type="search_document")
    assert (first["embeddings"], first["response_type"]) == ([wanted], "embeddings_floats")
    assert "several models are served: name one" in (await client.post("/embed", json={"inputs": text})).text
    each = await ask(client, "/embed_all", model="mini", inputs=text)
    ids, _ = tokens(models["mini"], text)
    assert (len(each[0]), len(each[0][0])) == (ids.shape[1], 32)
    counted = 'vllm:prompt_tokens_total{model_name="mini"}'
    before = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(counted)]
    prompted = await ask(client, "/v1/embeddings", model="mini", input="cat", prompt_name="query")
    [after] = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(counted)]
    assert float(after.split()[1]) - float(before[0].split()[1]) == prompted["usage"]["prompt_tokens"]
    assert prompted["data"][0]["embedding"] == pytest.approx(vector(models["mini"], "the cat").tolist(), **CLOSE)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_served_model_of_vectors_is_pulled_already(client: httpx.AsyncClient) -> None:
    assert await ask(client, "/api/pull", model="mini:latest", stream=False) == {"status": "success"}


@pytest.mark.asyncio(loop_scope="module")
async def test_ollamas_clients_find_the_model_of_vectors(client: httpx.AsyncClient) -> None:
    """It asks for no scores, so models of these are not among them."""
    details = {"family": "bert", "families": ["bert"], "format": "safetensors", "parent_model": ""}
    for path in ("/api/tags", "/api/ps"):
        found = {one["name"]: one for one in (await client.get(path)).json()["models"]}
        listed = found["mini:latest"] if {"cross:latest", "mood:latest"}.isdisjoint(found) else {"name": path}
        assert (listed["name"], listed["details"] | details) == ("mini:latest", listed["details"]), path
    assert (listed["context_length"], listed["expires_at"][:4]) == (96, "2300")
    for name in ("mini", "mini:latest"):
        shown = await ask(client, "/api/show", model=name)
        assert shown["capabilities"] == ["embedding"]
        info = {"general.architecture": "bert", "bert.embedding_length": 32, "bert.context_length": 96}
        assert shown["model_info"].items() >= info.items()
    assert "/rerank, /score or /classify" in (await client.post("/api/show", json={"model": "cross"})).text


@pytest.mark.asyncio(loop_scope="module")
async def test_ollamas_fields_shorten_cut_and_are_checked(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    long, short = "the cat " * 100, vector(models["mini"], "a")[:8]
    wanted = pytest.approx(torch.nn.functional.normalize(short, dim=0).tolist(), **CLOSE)
    answer = await client.post("/api/embed", json={"model": "mini", "input": "a", "dimensions": 8, "keep_alive": "5m"})
    assert answer.json()["embeddings"] == [wanted]
    assert answer.headers["x-baton-ignored-fields"] == "keep_alive"
    assert (await ask(client, "/api/embed", model="mini", input=long))["prompt_eval_count"] == 96
    within = await ask(client, "/api/embed", model="mini", input=long, options={"num_ctx": 10})
    assert within["prompt_eval_count"] == 10
    for fields, says in (
        ({"input": long, "truncate": False}, "maximum context length is 96"),
        ({"input": "a", "dimensions": 33}, "have 32, not 33"),
        ({"input": "a", "keep_alive": "soon"}, "keep_alive"),
        ({"input": "a", "options": 5}, "options"),
        ({"input": "a", "options": {"num_ctx": 0}}, "options.num_ctx"),
    ):
        refused = await client.post("/api/embed", json={"model": "mini", **fields})
        assert (refused.status_code, says in refused.json()["error"]) == (400, True), refused.text


@pytest.mark.asyncio(loop_scope="module")
async def test_the_wrong_kind_of_model_says_where_to_ask(client: httpx.AsyncClient) -> None:
    for path, fields, says in (
        ("/v1/embeddings", {"model": "cross", "input": "a"}, "ask it at /rerank, /score or /classify"),
        ("/classify", {"model": "mini", "input": "a"}, "ask it at /v1/embeddings"),
        ("/rerank", {"model": "mood", "query": "a", "documents": ["b"]}, "has 3 labels, and a score needs one"),
        ("/rerank", {"model": "cross", "query": "a"}, "give documents, or texts"),
        ("/score", {"model": "cross", "text_1": ["a", "b"], "text_2": ["c"]}, "one, or as many as"),
        ("/score", {"model": "cross", "text_1": "a", "documents": "c"}, "give queries and documents"),
        ("/predict", {"model": "mood", "inputs": [["a", "b", "c"]]}, "a pair of texts"),
        ("/v2/embed", {"model": "mini", "texts": ["a"], "embedding_types": ["int8"]}, "'float' or 'base64'"),
        ("/predict", {"model": "mood", "inputs": [["a"], [[1, 2]]]}, "a pair of texts"),
        ("/v1/embeddings", {"model": "mini", "input": [5], "truncate_prompt_tokens": 0}, "at least 1"),
        ("/score", {"model": "cross", "text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "at least 1"),
        ("/api/embed", {"model": "nothing", "input": "a"}, "model not found"),
    ):
        refused = await client.post(path, json=fields)
        assert refused.status_code in (400, 404), path
        assert says in refused.text, refused.text


@pytest.mark.asyncio(loop_scope="module")
async def test_priorities_reach_the_workers_turns(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask_worker = list[int](), PoolingFleet.ask

    async def noted(fleet: PoolingFleet, message: Pool, turn: Turn) -> Pooled:
        asked.append(turn.priority)
        return await ask_worker(fleet, message, turn)

    monkeypatch.setattr(PoolingFleet, "ask", noted)
    for path, fields in (
        ("/v1/embeddings", {"model": "mini", "input": "a"}),
        ("/pooling", {"model": "mini", "input": "a"}),
        ("/v2/embed", {"model": "mini", "texts": ["a"]}),
        ("/classify", {"model": "mood", "input": "a"}),
        ("/rerank", {"model": "cross", "query": "a", "documents": ["b"]}),
        ("/rerank", {"model": "mini", "query": "a", "documents": ["b"]}),
        ("/score", {"model": "cross", "text_1": "a", "text_2": "b"}),
    ):
        asked.clear()
        await ask(client, path, **fields, priority=-7)
        assert asked, path
        assert set(asked) == {-7}, path


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_that_no_answer_carries_are_refused_at_once(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolingFleet, "max_answer_bytes", 4 * 32 * 3)
    for path, field in (("/embed_all", "inputs"), ("/pooling", "input")):
        body = {"model": "mini", field: ["a", QUERY]} | ({"task": "token_embed"} if path == "/pooling" else {})
        refused = await client.post(path, json=body)
        assert refused.status_code == 400, path
        assert f"{field} 1 has 5 tokens, and vectors of 3 are sent at most" in refused.text
    assert await ask(client, "/embed", model="mini", inputs=QUERY), "one vector is"


@pytest.mark.parametrize("width", [1, 3])
def test_rows_are_encoded_one_by_one(width: int) -> None:
    values = array("f", [0.5, -1.25, 3.0]).tobytes()
    assert msgspec.json.decode(numbers(values)) == [0.5, -1.25, 3.0]
    assert base64.b64decode(msgspec.json.decode(in_base64(values))) == values
    rows = lists(values, width)
    assert [type(row) for row in rows] == [msgspec.Raw] * (3 // width)
    assert [msgspec.json.decode(row) for row in rows] == [
        [0.5, -1.25, 3.0][at : at + width] for at in range(0, 3, width)
    ]
