"""An agent's KV outlasts another tenant's prompts while its tool runs, since the answer ended by a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import client_of
from tests.e2e.cluster import Cluster
from tests.models import CALL_TEMPLATE, TOOL_TOKENS, build_tiny_model, build_tokenizer

# The pool has 512 blocks of 16 tokens. The other's prompts take twice as many, each of the agent's a tenth at most.
PLAIN, *PRESSURE = [[(31 * index + 7 * at + at * at) % 400 + 10 for at in range(900)] for index in range(20)]
KEYS = {"agent": "the-key-of-the-agent", "other": "the-key-of-another"}
TENANTS = "".join(f'[tenants.{name}]\nkeys = ["{key}"]\n' for name, key in KEYS.items())
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}
QUESTION = {"role": "user", "content": "What was the weather in Rome? " * 10}


async def answered(client: httpx.AsyncClient, tenant: str, **body: object) -> tuple[dict[str, Any], int, int]:
    """A choice, the tokens of its prompt and the cached ones."""
    body = {"model": "tiny", "temperature": 0} | body
    path, key = "/v1/completions" if "prompt" in body else "/v1/chat/completions", KEYS[tenant]
    response = await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return response.json()["choices"][0], usage["prompt_tokens"], cached


@pytest.mark.long
async def test_what_ended_by_a_call_is_found_after_others_filled_the_pool(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", "llama")
    build_tokenizer(model, template=CALL_TEMPLATE, added=TOOL_TOKENS[:2])
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    workers = {"prefill": 0, "decode": 0, "both": 1, "fake": True, "kv_memory_mb": 1}
    async with (
        Cluster(tmp_path / "run", model=model, gateway_options=("--tenants", str(tenants)), **workers) as cluster,  # type: ignore[arg-type]
        client_of(cluster) as client,
    ):
        called, num_tokens, _ = await answered(
            client, "agent", messages=[QUESTION], tools=[TOOL], tool_choice="required", max_tokens=100
        )
        assert called["finish_reason"] == "tool_calls"
        for prompt in (PLAIN, *PRESSURE):
            await answered(client, "agent" if prompt is PLAIN else "other", prompt=prompt, max_tokens=1)
        result = {"role": "tool", "tool_call_id": called["message"]["tool_calls"][0]["id"], "content": "It rained."}
        messages = [QUESTION, called["message"], result]
        _, _, found = await answered(client, "agent", messages=messages, tools=[TOOL], max_tokens=1)
        assert found >= num_tokens // 16 * 16 > 0
        _, _, found = await answered(client, "agent", prompt=PLAIN, max_tokens=1)
        assert found == 0
