"""Gemma 3 270M, the base model, in float32 beside llama.cpp on the same file decoded to float32: windows and 262,144 tokens.

llama.cpp's GELU is a table of half floats, so logprobs are farther apart than SmolLM2's: 0.003 on 2026-11-24.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.quality import perplexity
from tests.e2e.cluster import Cluster
from tests.real import packages
from tests.real.comparison import answered_beside, perplexities, split_otherwise
from tests.real.llama_cpp import LlamaCpp
from tests.real.texts import varied_texts

pytestmark = pytest.mark.real
MOST_APART = 0.03  # nats, of one token's logprob
MOST_PERPLEXITY_APART = 1e-3  # of its value
BEGINNINGS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<table><tr><td>1</td>",
    "Once upon a time there was a lighthouse",
    "Die Hauptstadt von Österreich ist",
    "1, 2, 3, 4,",
    "To sort a list in Python,",
    "今日の天気は",
)


@pytest.fixture(scope="module")
def gemma3() -> Path:
    try:
        return packages.gemma3()
    except packages.NotThereError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def referee(gemma3: Path, llama_cpp: Callable[[Path], LlamaCpp]) -> Iterator[LlamaCpp]:
    with contextlib.closing(llama_cpp(gemma3)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
async def client(gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("gemma3")
    async with Cluster(folder, model=gemma3, dtype="float32", kv_memory_mb=192) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=300) as opened:
            yield opened


async def test_texts_become_the_same_tokens(client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    """But for `</s>`: in the file it is an ordinary token of HTML, llama.cpp takes any token of that name for a control token."""
    texts = [text for text in varied_texts(600) if "</s>" not in text]
    assert len(texts) >= 500
    assert not await split_otherwise(client, referee, texts)


async def test_greedy_answers_are_the_same(client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    prompts = [referee.tokenize(text, special=True, bos=True) for text in BEGINNINGS]
    beside = await answered_beside(client, referee, prompts, 32)
    print(beside)
    assert beside.others == 0
    assert beside.farthest < MOST_APART


async def test_perplexity_is_the_same(gemma3: Path, client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    windows = [[referee.bos, *ids[:-1]] for text in perplexity.texts(gemma3, 1).values() for ids in text][-2:]
    ours, theirs, farthest = await perplexities(client, referee, windows)
    print(ours, theirs, farthest)
    assert ours == pytest.approx(theirs, rel=MOST_PERPLEXITY_APART)
    assert farthest < MOST_APART
