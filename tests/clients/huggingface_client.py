"""huggingface_hub: text_generation whole, streamed and with details, and chat by URL alone (it then says `dummy`)."""

from __future__ import annotations

from typing import Any

from cases import BASE_URL, case, run
from huggingface_hub import AsyncInferenceClient, InferenceClient

URL = BASE_URL.removesuffix("/v1")
PROMPT = "The capital of France is"
client = InferenceClient(URL, timeout=60)


@case("text_generation, whole and streamed")
def whole() -> None:
    text = client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
    streamed = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
    assert "".join(one.token.text for one in streamed if not one.token.special) == text
    assert streamed[-1].details.generated_tokens == len(streamed)
    assert isinstance("".join(client.text_generation(PROMPT, max_new_tokens=8, stream=True)), str)


@case("text_generation, details")
def details() -> None:
    answer = client.text_generation(
        PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, return_full_text=False
    )
    assert answer.details.generated_tokens == len(answer.details.tokens)
    assert answer.details.prefill
    assert "".join(token.text for token in answer.details.tokens if not token.special) == answer.generated_text


@case("text_generation, a grammar")
def grammar() -> None:
    wanted: Any = {"type": "regex", "value": "[0-9]{3}"}
    assert len(client.text_generation(PROMPT, max_new_tokens=8, grammar=wanted, return_full_text=False)) == 3


@case("text_generation, async")
async def of_asyncio() -> None:
    asked = AsyncInferenceClient(URL, timeout=60)
    text = await asked.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
    parts = [part async for part in await asked.text_generation(PROMPT, max_new_tokens=8, stream=True)]
    assert "".join(parts).startswith(text)


@case("chat_completion by URL alone")
def chat() -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat_completion(messages, max_tokens=20, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    told = [
        one.choices[0].delta.content or ""
        for one in client.chat_completion(messages, max_tokens=20, temperature=0, stream=True)
    ]
    assert "Paris" in "".join(told)


run()
