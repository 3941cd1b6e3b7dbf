# mypy: allow-untyped-calls
"""Embeddings through whole processes: OpenAI's client, several workers, a death, and what refuses whom."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
import torch
import transformers

from tests.e2e.stack import PATIENCE_S, ROOT, Start, up
from tests.pooling_models import build_pooling_model

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
