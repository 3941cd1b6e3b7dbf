"""What the fake device takes no notice of, through a kill: the real engine's sampling, penalties, stop strings, several choices.

Each request is answered undisturbed first; then a worker dies while all are in the middle, and the answers must be the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.chaos import checks
from tests.chaos.asks import Ask, Seen
from tests.chaos.cluster import ChaosCluster, FaultDidNotHappenError
from tests.chaos.load import Outcome, request

DEMO = Path(__file__).resolve().parents[2] / "demo"
REAL = {"dtype": "float32", "kv_memory_mb": 32, "max_batch_tokens": 64}  # rounding may not choose other tokens
MAX_TOKENS, UNDER_WAY = 64, 6  # tokens of an answer, and of each stream when the worker dies
DEADLINE_S = 60.0
ROUNDS = 10  # of all requests, until a fault finds streams under way
STOP_CHARS = 6
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SAMPLED,
    "top k, min p": {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1,
    },
    "penalties, greedy": {"temperature": 0, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "n = 3": SAMPLED | {"n": 3},
    "n = 2, penalties": SAMPLED | {"n": 2, "presence_penalty": 0.6},
    "logit bias": SAMPLED | {"logit_bias": {"20": 3.0, "21": -100.0}},
}  # fmt: skip
PROMPTS = (
    "Once upon a time there was a little",
    "The king asked his daughter why she",
    "In the middle of the forest stood a house, and",
)


@dataclass(slots=True, kw_only=True)
class Disturbed:
    """What became of all requests while a worker died; lists are violations, one line each."""

    moved: int  # requests that were tried again
    different: list[str]
    unanswered: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    silence_s: float = 0.0


def asks(stops: dict[str, str]) -> list[Ask]:
    """One request of each kind, and of those with a text in `stops` another with it as a stop string, all streamed."""
    bodies = []
    for number, (kind, sampling) in enumerate(KINDS.items()):
        body = {
            "model": "tiny", "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": MAX_TOKENS, "seed": 77 + number,
            "ignore_eos": True, "stream": True, "return_token_ids": True, "timeout": DEADLINE_S, **sampling,
        }  # fmt: skip
        bodies.append((kind, body))
        if stops.get(kind):
            bodies.append((f"{kind}, stop string", body | {"stop": [stops[kind]]}))
    return [
        Ask(number=number, kind=kind, body=body, deadline_s=DEADLINE_S) for number, (kind, body) in enumerate(bodies)
    ]


async def undisturbed(cluster: ChaosCluster) -> tuple[list[Ask], dict[str, dict[int, Seen]]]:
    """All requests, and their choices by kind. Stop strings are late pieces of what comes without them."""
    plain = await _answers(cluster, asks({}))
    asked = asks({kind: _new_piece(choices[0].text) for kind, choices in plain.items()})
    return asked, plain | await _answers(cluster, [one for one in asked if one.kind not in plain])


def _new_piece(text: str) -> str:
    """Some characters from beyond two thirds of the text that are not before; "" where there are none."""
    for begin in range(len(text) * 2 // 3, len(text) - STOP_CHARS):
        piece = text[begin : begin + STOP_CHARS]
        if text.find(piece) == begin:
            return piece
    return ""


async def _answers(cluster: ChaosCluster, asked: list[Ask]) -> dict[str, dict[int, Seen]]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=None) as client:
        outcomes = await asyncio.gather(*(request(client, ask) for ask in asked))
    failed = [f"{one.ask.kind}: {one.status} {one.error} {one.broken}" for one in outcomes if not one.is_whole]
    assert not failed, failed
    return {one.ask.kind: one.choices for one in outcomes}


async def disturbed(
    cluster: ChaosCluster,
    asked: list[Ask],
    expected: dict[str, dict[int, Seen]],
    fault: Callable[[], Awaitable[None]],
) -> Disturbed:
    """Ask everything again, let `fault` happen while every stream is under way, and compare.

    A small model may end the last stream before the fault reaches its worker: then `moved` is 0.
    """
    before = (await cluster.metrics()).get(RETRIES, 0.0)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=None) as client:
        outcomes, asking = await _until_under_way(client, asked)
        began = time.monotonic()
        striking = asyncio.create_task(fault())
        await asyncio.gather(*asking)
        if not striking.done():  # it still looks for a worker that has streams
            striking.cancel()
        with suppress(asyncio.CancelledError):
            await striking
    moved = (await cluster.metrics()).get(RETRIES, 0.0) - before
    return Disturbed(
        moved=int(moved),
        different=[
            f"{one.ask.kind}: {one.choices}, not {expected[one.ask.kind]}"
            for one in outcomes
            if one.is_whole and one.choices != expected[one.ask.kind]
        ],
        unanswered=checks.unanswered(outcomes),
        broken=checks.broken(outcomes),
        errors=dict(checks.errors(outcomes)),
        silence_s=checks.longest_silence(outcomes, began, began + DEADLINE_S),
    )


async def _until_under_way(
    client: httpx.AsyncClient, asked: list[Ask]
) -> tuple[list[Outcome], list[asyncio.Task[Any]]]:
    """The outcomes that grow, with a stream among them that hasn't ended. Raises FaultDidNotHappenError after `ROUNDS`."""
    for _ in range(ROUNDS):
        outcomes = [Outcome(ask=one, started=time.monotonic()) for one in asked]
        asking = [asyncio.create_task(request(client, one.ask, one)) for one in outcomes]
        async with asyncio.timeout(DEADLINE_S):
            while not all(_is_under_way(outcome) for outcome in outcomes):
                await asyncio.sleep(0.005)
        if not all(outcome.is_whole for outcome in outcomes):
            return outcomes, asking
        await asyncio.gather(*asking)
    raise FaultDidNotHappenError(f"all answers were complete before, {ROUNDS} times")


RETRIES = 'baton_gateway_events_total{event="retries"}'


def _is_under_way(outcome: Outcome) -> bool:
    if outcome.is_whole or outcome.error:
        return True
    wanted = outcome.ask.body.get("n", 1)
    return len(outcome.choices) == wanted and all(len(one.tokens) >= UNDER_WAY for one in outcome.choices.values())
