"""SmolLM2-135M-Instruct in float32 beside llama.cpp on the same file decoded to float32: `make real`.

On 2026-11-24 logprobs were at most 1.2e-4 apart and perplexity 1e-5 of its value. The bounds leave room for another processor's
order of additions, and none for a wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.quality import perplexity
from tests.real.comparison import answered_beside, ask, perplexities, split_otherwise
from tests.real.llama_cpp import LlamaCpp
from tests.real.texts import varied_texts

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]
MOST_APART = 5e-4  # nats, of one token's logprob
MOST_PERPLEXITY_APART = 1e-4  # of its value
OWN_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # where a chat has none
CHATS = (
    [("user", "Hello!")],
    [("system", "You answer in rhymes."), ("user", "What is a baton?")],
    [("system", ""), ("user", "An empty system message.")],
    [("user", "One."), ("assistant", "Two."), ("user", "Three."), ("assistant", "Four."), ("user", "Five.")],
    [("system", "Kurz."), ("user", "Grüße 🙂\n\n\tund  Leerraum "), ("assistant", " ja "), ("user", "今日は")],
    [("user", "A question."), ("system", "A late order."), ("user", "Another.")],
    [("user", 'def f():\n    return "{{ x }}" {% raw %}')],
)
SUBJECTS = (
    "a lighthouse",
    "the number seven",
    "Python's lists",
    "rain",
    "a king without a crown",
    "how bread rises",
    "the moon",
    "sorting",
    "an old map",
    "HTTP",
)
FORMS = ("Write about {}.", "Explain {} to a child.", "{}: list three facts, please.")


@pytest.fixture(scope="module")
def referee(smollm2: Path, llama_cpp: Callable[[Path], LlamaCpp]) -> Iterator[LlamaCpp]:
    with contextlib.closing(llama_cpp(smollm2)) as loaded:
        yield loaded


async def test_texts_become_the_same_tokens(client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    assert not await split_otherwise(client, referee, varied_texts(500))


async def test_chats_become_the_same_text(client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        ours = await ask(client, "/tokenize", model="tiny", messages=messages)
        theirs = referee.rendered(chat if chat[0][0] == "system" else [("system", OWN_SYSTEM), *chat])
        assert ours["tokens"] == referee.tokenize(theirs, special=True), chat


async def test_greedy_answers_are_the_same(client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    asked = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    prompts = [referee.tokenize(referee.rendered([("user", each)]), special=True) for each in asked]
    beside = await answered_beside(client, referee, prompts, 64)
    print(beside)
    assert beside.tokens == 30 * 64
    assert beside.others == 0
    assert beside.farthest < MOST_APART


async def test_perplexity_is_the_same(smollm2: Path, client: httpx.AsyncClient, referee: LlamaCpp) -> None:
    windows = [ids for text in perplexity.texts(smollm2, 1).values() for ids in text]
    assert len(windows) == 5
    ours, theirs, farthest = await perplexities(client, referee, windows)
    print(ours, theirs, farthest)
    assert ours == pytest.approx(theirs, rel=MOST_PERPLEXITY_APART)
    assert farthest < MOST_APART
