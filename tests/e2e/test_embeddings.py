# mypy: allow-untyped-calls
"""Embeddings through whole processes: OpenAI's client, several workers, a death, and what refuses whom."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from tests.e2e.stack import PATIENCE_S, ROOT, Start, up
from tests.integration.waiting import eventually
from tests.pooling_models import build_pooling_model, build_scoring_model, write_reward_head

DOCS = ROOT / "docs" / "embeddings.md"
TEXTS = ["hello world", "the cat sat on the mat", "paris is the capital of france. " * 3, "a"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pooling_model(tmp_path_factory.mktemp("model") / "mini")


def wanted(folder: Path, texts: list[str]) -> torch.Tensor:
    """Vectors as transformers computes them, one text at a time."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states.mean(0), dim=0))
    return torch.stack(found)


async def test_vectors_are_exact_outlive_a_worker_and_chat_is_refused(
    embedder: Path, start: Start, tmp_path: Path
) -> None:
    async with up(embedder, tmp_path / "data", "--decode", "2") as running:
        await running.says("Baton serves mini")
        assert "/v1/embeddings" in await running.says("curl")
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE_S)
        answer = await client.embeddings.create(model="mini", input=TEXTS)
        found = torch.tensor([one.embedding for one in answer.data])
        torch.testing.assert_close(found, wanted(embedder, TEXTS), rtol=1e-5, atol=1e-5)
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
        short = await client.embeddings.create(model="mini", input=TEXTS[0], dimensions=8, encoding_format="float")
        cut = torch.nn.functional.normalize(found[0, :8], dim=0)
        torch.testing.assert_close(torch.tensor(short.data[0].embedding), cut, rtol=1e-5, atol=1e-5)
        await _batch(client, embedder)
        running.children("services.pool")[0].kill()
        many = await client.embeddings.create(model="mini", input=TEXTS * 50)
        torch.testing.assert_close(torch.tensor([one.embedding for one in many.data[-4:]]), found, rtol=1e-5, atol=1e-5)
        await _bodies(running.url)
        with pytest.raises(openai.NotFoundError, match="makes no text: ask it at /v1/embeddings"):
            await client.chat.completions.create(model="mini", messages=[{"role": "user", "content": "hi"}])
        [card] = (await client.models.list()).data
        assert (card.id, card.model_dump()["capabilities"], card.model_dump()["dimensions"]) == (
            "mini",
            ["embedding"],
            32,
        )


async def _batch(client: openai.AsyncOpenAI, folder: Path) -> None:
    """Lines of OpenAI's batches are answered, the wrong one with its error."""
    bodies = [{"model": "mini", "input": TEXTS[:2]}, {"model": "mini", "input": "a", "dimensions": 33}]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": body}
        for at, body in enumerate(bodies)
    ]
    raw = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("lines.jsonl", raw), purpose="batch")
    made = await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")

    async def is_over() -> bool:
        return (await client.batches.retrieve(made.id)).status in ("completed", "failed")

    await eventually(is_over, limit_s=PATIENCE_S)
    made = await client.batches.retrieve(made.id)
    assert made.request_counts is not None
    assert (made.status, made.request_counts.completed, made.request_counts.failed) == ("completed", 1, 1), made
    good, bad = [
        json.loads((await client.files.content(str(name))).text)["response"]
        for name in (made.output_file_id, made.error_file_id)
    ]
    found = torch.tensor([one["embedding"] for one in good["body"]["data"]])
    torch.testing.assert_close(found, wanted(folder, TEXTS[:2]), rtol=1e-5, atol=1e-5)
    assert (bad["status_code"], bad["body"]["error"]["param"]) == (400, "dimensions")


def _printed(code: str) -> str:
    """The output of a script that ends well."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def _bodies(url: str) -> None:
    """Tokens are taken as they are, base64 is the same numbers, and a wrong field is named."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def ask(**fields: object) -> httpx.Response:
            return await client.post("/v1/embeddings", json={"model": "mini", **fields})

        by_text = (await ask(input="hello world")).json()
        by_ids = (await ask(input=[2, 14, 15, 3], encoding_format="base64")).json()
        numbers = struct.unpack("<32f", base64.b64decode(by_ids["data"][0]["embedding"]))
        assert numbers == pytest.approx(by_text["data"][0]["embedding"], abs=1e-6)
        assert by_ids["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
        for fields, param, says in (
            ({"input": ""}, "input", "must not be empty"),
            ({"input": [1, "a"]}, "input", "must be a string"),
            ({"input": [500]}, "input", "not below 128"),
            ({"input": "a", "dimensions": 33}, "dimensions", "have 32, not 33"),
            ({"input": "a " * 200}, "input", "truncate_prompt_tokens"),
            ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
            ({"input": "a", "prompt_name": "query"}, "prompt_name", "is no prompt of this model"),
            ({"input": "a", "model": "other"}, "model", "does not exist"),
        ):
            refused = await ask(**fields)
            error = refused.json()["error"]
            assert (refused.status_code in (400, 404), error["param"]) == (True, param), refused.text
            assert says in error["message"]
        assert (await ask(input="a " * 200, truncate_prompt_tokens=-1)).json()["usage"]["prompt_tokens"] == 96


@pytest.mark.long
async def test_rerankers_and_rewards_that_are_decoders_score_as_transformers_does(start: Start, tmp_path: Path) -> None:
    """Qwen3-Reranker as it is published, through /rerank and /score; a head of labels, and rewards of steps."""
    ranker = build_scoring_model(tmp_path / "Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", tie_word_embeddings=True)
    labels = build_scoring_model(tmp_path / "labels", "LlamaForSequenceClassification", num_labels=3)
    steps = build_scoring_model(tmp_path / "steps", "Qwen2Model")
    write_reward_head(steps, "ForProcessRewardModel", labels=2)
    served = [part for folder in (ranker, labels, steps) for part in ("--model", str(folder))]
    async with start(*served, "--device", "cpu") as running:
        await running.says("Baton serves Qwen3-Reranker-0.6B, labels, steps")
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:

            async def ask(path: str, **body: object) -> Any:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            documents = ["The cat sat.", "Paris is a city. " * 4]
            ranked = await ask("/rerank", model=ranker.name, query="Who sat?", documents=documents)
            scored = await ask("/score", model=ranker.name, queries="Who sat?", documents=documents)
            found = [one["score"] for one in scored["data"]]
            assert {one["index"]: one["relevance_score"] for one in ranked["results"]} == dict(enumerate(found))
            assert found == pytest.approx(_yes(ranker, "Who sat?", documents), abs=1e-5)
            await _again(client, ranker, "Who sat?")
            told = await ask("/score", model=ranker.name, queries="Who?", documents="x", instruction="Find it")
            assert [one["score"] for one in told["data"]] == pytest.approx(
                _yes(ranker, "Who?", ["x"], "Find it"), abs=1e-5
            )
            classified = (await ask("/classify", model="labels", input="hello"))["data"][0]
            assert classified["probs"] == pytest.approx(_labels(labels, "hello"), abs=1e-5)
            rewards = await ask("/pooling", model="steps", input="one<extra_0>two<extra_0>")
            assert [len(step) for step in rewards["data"][0]["data"]] == [2, 2]
            for path, body, says in (
                ("/pooling", {"model": "steps", "input": "no step"}, "has no <extra_0>"),
                ("/classify", {"model": "steps", "input": "x"}, "ask it at /pooling"),
                ("/v1/embeddings", {"model": "labels", "input": "x"}, "makes scores"),
                ("/rerank", {"model": "labels", "query": "x", "documents": ["y"]}, "has 3 labels"),
            ):
                refused = await client.post(path, json=body)
                assert (refused.status_code, says in refused.text) == (400, True), refused.text


async def _again(client: httpx.AsyncClient, ranker: Path, query: str) -> None:
    """Other documents of a query that was ranked before find what both begin with, and are scored as if they didn't."""
    documents = ["Dogs bark all night. " * 2, "A mat lies here.", "France is in Europe."]
    answer = await client.post("/rerank", json={"model": ranker.name, "query": query, "documents": documents})
    scores = [one["relevance_score"] for one in sorted(answer.json()["results"], key=lambda one: one["index"])]
    assert scores == pytest.approx(_yes(ranker, query, documents), abs=1e-5)
    before = len(_tokenizer(ranker)(_form(query, "", FORM).removesuffix(FORM_END))["input_ids"]) // 16 * 16
    lines = (await client.get("/debug/requests")).json()["latest"]
    line = max(lines, key=lambda one: one["received_unix"])
    assert before > 100
    assert line["cached_tokens"] == len(documents) * before

    async def is_told() -> bool:
        told = (await client.get("/metrics")).text
        counts = [line.rpartition(" ")[2] for line in told.splitlines() if line.startswith(FOUND)]
        return sum(map(float, counts)) >= len(documents) * before

    await eventually(is_told, limit_s=PATIENCE_S)


FOUND = "baton_worker_cached_tokens_total"
FORM = "Given a web search query, retrieve relevant passages that answer the query"
FORM_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _form(query: str, document: str, told: str) -> str:
    """Qwen3-Reranker's, as its authors define it."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
        ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}{FORM_END}"
    )


def _tokenizer(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def _yes(folder: Path, query: str, documents: list[str], instruction: str = "") -> list[float]:
    """Qwen3-Reranker's score as its authors define it."""
    tokenizer = _tokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for document in documents:
        text = _form(query, document, instruction or FORM)
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        both = logits[[tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]]
        found.append(both.softmax(-1)[1].item())
    return found


def _labels(folder: Path, text: str) -> list[float]:
    tokenizer = _tokenizer(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return list(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0].softmax(-1).tolist())


@pytest.mark.long
async def test_a_model_that_generates_says_where_vectors_are(embedder: Path, start: Start) -> None:
    async with start("--model", "demo", "--model", f"mini={embedder}", "--device", "cpu") as running:
        await running.says("Baton serves demo, mini")
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            refused = await client.post("/v1/embeddings", json={"model": "demo", "input": "a"})
            assert "'mini' can" in refused.json()["error"]["message"]
            good = await client.post("/v1/embeddings", json={"model": "mini", "input": "a"})
            assert len(good.json()["data"][0]["embedding"]) == 32
            asked = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert (await client.post("/v1/chat/completions", json=asked)).json()["usage"]["completion_tokens"] == 4
            example = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)[-1]
            here = example.replace("http://127.0.0.1:8000", running.url).replace("all-MiniLM-L6-v2", "mini")
            said = await asyncio.to_thread(_printed, here)
            assert "\n\n" in said, said
            ready = (await client.get("/ready")).json()
            assert (ready["workers"]["pool"], "refused" in ready) == (1, False)
