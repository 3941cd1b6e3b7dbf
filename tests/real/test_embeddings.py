# mypy: allow-untyped-calls
"""all-MiniLM-L6-v2, a published model of embeddings, through a gateway: exact vectors, near ones where texts mean the same."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.e2e.stack import PATIENCE_S, ROOT, up
from tests.real import packages

pytestmark = pytest.mark.real

TEXTS = [
    "The cat sleeps on the sofa.",
    "A feline naps on the couch.",
    "Interest rates rose again this quarter.",
    "Der Zug fährt um acht Uhr ab. " * 12,
    "x",
]


@pytest.fixture(scope="session")
def minilm() -> Path:
    try:
        return packages.minilm()
    except packages.NotThereError as error:
        pytest.skip(str(error))


def wanted(folder: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Vectors as sentence-transformers defines them: the mean of the tokens' vectors, of length 1."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = []
    for text in TEXTS:
        with torch.no_grad():
            states = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states.mean(0), dim=0))
    return torch.stack(found).numpy()


async def test_vectors_are_exact_and_near_where_texts_mean_the_same(minilm: Path, tmp_path: Path) -> None:
    async with up(minilm, tmp_path / "data") as running:
        await running.says("Baton serves all-MiniLM-L6-v2")
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/embeddings", json={"model": "", "input": TEXTS})
            found = np.array([one["embedding"] for one in answer.json()["data"]], np.float32)
            ranked = await client.post("/rerank", json={"query": "Where is the cat?", "documents": TEXTS})
        np.testing.assert_allclose(found, wanted(minilm), atol=1e-5)
        near = found @ found.T
        assert near[0, 1] > 0.5 > near[0, 2]
        assert {one["index"] for one in ranked.json()["results"][:2]} == {0, 1}
        file, array = tmp_path / "texts", tmp_path / "vectors.npy"
        file.write_text("\n".join(TEXTS), encoding="utf-8")
        command = (sys.executable, "-m", "cli.embed", str(file), "-o", str(array), "--url", running.url, "--batch", "2")
        await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True, timeout=PATIENCE_S)
        np.testing.assert_allclose(np.load(array), found, atol=1e-5)


async def test_the_retrieval_example_of_the_docs_finds_and_answers(minilm: Path, smollm2: Path, tmp_path: Path) -> None:
    """As it is written, but for the address and the model that answers."""
    served = ("--model", f"smollm2={smollm2}", "--model", str(minilm), "--device", "cpu")
    async with up(None, tmp_path / "data", *served, "--kv-memory-mb", "64") as running:
        await running.says("Baton serves smollm2, all-MiniLM-L6-v2")
        [example] = re.findall(
            r"^```python\n(import base64\n.*?)^```$",
            (ROOT / "docs" / "embeddings.md").read_text(),
            re.DOTALL | re.MULTILINE,
        )
        here = example.replace("http://127.0.0.1:8000", running.url)
        here = here.replace('"demo"', '"smollm2"')
        told = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", here],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert told.returncode == 0, told.stderr
        context, _, answer = told.stdout.partition("\n\n")
        assert context.startswith("Paris is the capital of France.")
        assert "Paris" in answer
