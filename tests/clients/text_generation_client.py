"""text-generation, TGI's own client: whole, streamed, details, errors, and chat under the name `tgi`."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import BASE_URL, case, run
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

URL = BASE_URL.removesuffix("/v1")
PROMPT = "The capital of France is"
client = Client(URL, timeout=60)


@case("generate, and its details")
def whole() -> None:
    answer = client.generate(PROMPT, max_new_tokens=8, top_n_tokens=2, decoder_input_details=True)
    details = answer.details
    assert details.generated_tokens == len(details.tokens) == len(details.top_tokens or [])
    assert "".join(token.text for token in details.tokens if not token.special) == answer.generated_text
    assert details.prefill[0].logprob is None
    assert all(token.logprob is not None and token.logprob <= 0 for token in details.tokens)
    assert (
        client.generate(PROMPT, max_new_tokens=8, return_full_text=True).generated_text
        == PROMPT + answer.generated_text
    )


@case("generate_stream is generate")
def streamed() -> None:
    *_, last = told = list(client.generate_stream(PROMPT, max_new_tokens=8))
    text = "".join(one.token.text for one in told if not one.token.special)
    assert text == last.generated_text == client.generate(PROMPT, max_new_tokens=8).generated_text
    assert last.details is not None
    assert last.details.generated_tokens == len(told)


@case("best_of, seed, stop")
def sampled() -> None:
    best = client.generate(PROMPT, max_new_tokens=8, do_sample=True, best_of=3)
    assert len(best.details.best_of_sequences or []) == 2
    one, other = (client.generate(PROMPT, max_new_tokens=8, do_sample=True, seed=7) for _ in range(2))
    assert (one.generated_text, one.details.seed) == (other.generated_text, 7)
    stopped = client.generate(PROMPT, max_new_tokens=40, stop_sequences=["."])
    assert "." not in stopped.generated_text[:-1]


@case("async, whole and streamed")
async def of_asyncio() -> None:
    asked = AsyncClient(URL, timeout=60)
    whole, told = await asyncio.gather(asked.generate(PROMPT, max_new_tokens=8), _all(asked))
    assert told[-1].generated_text == whole.generated_text


async def _all(asked: AsyncClient) -> list[Any]:
    return [one async for one in asked.generate_stream(PROMPT, max_new_tokens=8)]


@case("a wrong parameter is its ValidationError")
def wrong() -> None:
    told = ""
    try:
        client.generate("word " * 4000, max_new_tokens=8)
    except ValidationError as error:
        told = str(error)
    assert "maximum context length" in told


@case("chat, under the name tgi")
def chat() -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat(messages, max_tokens=20, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")


run()
