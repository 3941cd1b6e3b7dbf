"""Short questions to a published model, and its answers."""

from __future__ import annotations

from typing import Any

import httpx

QUESTIONS = (
    "What is the capital of France?",
    "Name the largest ocean.",
    "Write one sentence about the sea.",
    "Reverse the string 'baton' in Python.",
    "What does HTTP stand for?",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Count from one to five.",
)


ANSWER_S = 300.0  # sixteen answers at once in float32, on a machine that does other things, take more than a minute


def body(question: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24} | options


async def ask(client: httpx.AsyncClient, question: str, **options: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body(question, **options), timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])
