"""Asking the chat of the console's page."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.cluster import Cluster


def at(cluster: Cluster, page: str) -> str:
    return f"{cluster.url}/console/{page}"


async def ask(page: Any, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def asked(page: Any, text: str) -> Any:
    """Ask, and wait for the answer's end; its element."""
    before = await page.locator(".turn.model").count()
    await ask(page, text)
    answer = page.locator(".turn.model").nth(before)
    await answer.get_by_role("button", name="Regenerate").wait_for()
    return answer


def answered(*deltas: dict[str, Any], finish: str = "stop") -> Any:
    """A route's answer: a stream of these pieces."""
    chunks = [
        {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 40, "completion_tokens": len(deltas), "prompt_tokens_details": {"cached_tokens": 32}}
    chunks.append({"id": "chatcmpl-x", "choices": [], "usage": usage})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return lambda route: route.fulfill(body=stream, content_type="text/event-stream")
