"""The gateway's cost of a streamed token in each dialect, held against OpenAI's.

    python -m benchmarks.gateway.dialects --out benchmarks/results      two cores, about four minutes

The same question is asked greedily of the fake device, so that all answers of a kind are the same tokens. A token's cost is
the slope between answers of 4 and of 260 tokens, in microseconds of the gateway's CPU time; dialects take turns. Chats are
held against OpenAI's chat, texts against its completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.environment import describe
from benchmarks.gateway.client import DONE, load
from benchmarks.gateway.serving import Arm, baton, pin_this, undisturbed
from benchmarks.results_format import Result, ResultsPage, notes_of

SHORT, LONG = 4, 260  # tokens
STREAMS, STEP_MS = 64, 15.0
SETTLE_S = 0.4  # until what ends a request is done
MOST = 1.10  # times OpenAI's
CHAT, TEXT = "Tell me story 2.", "Tell me story 6."  # the fake device ends no answer to them
OPENAI = {"chat": "openai_chat", "text": "openai_completions"}


@dataclass(frozen=True, slots=True)
class Way:
    """The request form of a dialect. `count`: where its body has the number of tokens; `end`: what a whole stream ends with."""

    name: str
    kind: str
    path: str
    fields: dict[str, Any]
    count: tuple[str, ...]
    end: bytes

    def body(self, tokens: int) -> bytes:
        made = json.loads(json.dumps(self.fields))
        place = made
        for name in self.count[:-1]:
            place = place.setdefault(name, {})
        place[self.count[-1]] = tokens
        return json.dumps(made).encode()


_GREEDY = {"model": "demo", "temperature": 0, "stream": True}
_ASKED = {"messages": [{"role": "user", "content": CHAT}]}
WAYS = (
    Way("openai_chat", "chat", "/v1/chat/completions", _GREEDY | _ASKED, ("max_tokens",), DONE),
    Way("responses", "chat", "/v1/responses", _GREEDY | {"input": CHAT}, ("max_output_tokens",), b'"status":"incomplete"'),
    Way("anthropic", "chat", "/v1/messages", _GREEDY | _ASKED, ("max_tokens",), b"message_stop"),
    Way(
        "ollama_chat", "chat", "/api/chat", {"model": "demo", "options": {"temperature": 0}} | _ASKED,
        ("options", "num_predict"), b'"done":true',
    ),
    Way("openai_completions", "text", "/v1/completions", _GREEDY | {"prompt": TEXT}, ("max_tokens",), DONE),
    Way(
        "ollama_generate", "text", "/api/generate",
        {"model": "demo", "prompt": TEXT, "raw": True, "options": {"temperature": 0}}, ("options", "num_predict"), b'"done":true',
    ),
    Way(
        "tgi", "text", "/generate_stream", {"inputs": TEXT, "parameters": {"do_sample": False}},
        ("parameters", "max_new_tokens"), b'"finish_reason"',
    ),
    Way(
        "triton", "text", "/v2/models/demo/generate_stream", {"text_input": TEXT, "parameters": {"temperature": 0}},
        ("parameters", "max_tokens"), b"text_output",
    ),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print the table; with --out write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(arguments)
    facts = describe("benchmarks.gateway.dialects", arguments, torch.device("cpu"))
    load_average = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    facts["load"] = f"{load_average} over 1, 5, 15 minutes; {os.cpu_count()} cores"
    print(*(f"{name}: {fact}" for name, fact in facts.items()), sep="\n")
    pin_this()
    costs = asyncio.run(_costs(options.rounds))
    results = [result for way in WAYS for result in _results(way, costs)]
    for result in results:
        print(
            f"{result.name:32} {result.value:9.3f} {result.unit:4} {'' if result.target is None else f'target {result.target:g}'}"
        )
    if options.out is not None:
        title = "What a streamed token costs in each dialect"
        page = ResultsPage(options.out, "dialects", title=title, facts=facts, notes=notes_of("dialects"))
        for result in results:
            page.add(result)
    return 0


async def _costs(rounds: int) -> dict[str, list[float]]:
    """Microseconds a token, by way, a figure for each round."""
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    async with baton(STEP_MS) as served:
        for way in WAYS:  # everything is warm
            await load(served.gateway.port, way.body(SHORT), streams=STREAMS, requests=128, path=way.path, end=way.end)
        for _ in range(rounds):
            for way in WAYS:
                short = await _cpu_s(served.gateway, way, SHORT, requests=2 * STREAMS)
                long = await _cpu_s(served.gateway, way, LONG, requests=STREAMS)
                found[way.name].append(1e6 * (long - short) / (LONG - SHORT))
    return found


async def _cpu_s(arm: Arm, way: Way, tokens: int, *, requests: int) -> float:
    """CPU seconds of the gateway for one request."""
    with undisturbed(dict.fromkeys([*arm.pids, os.getpid()], 10)):  # others would empty the core's caches
        began = arm.cpu_s()
        await load(arm.port, way.body(tokens), streams=STREAMS, requests=requests, path=way.path, end=way.end)
        await asyncio.sleep(SETTLE_S)
        return (arm.cpu_s() - began) / requests


def _results(way: Way, costs: dict[str, list[float]]) -> list[Result]:
    """Return the cost of a token, and its share of the cost in OpenAI's dialect in the same rounds."""
    cost = Result(name=way.name, value=median(costs[way.name]), unit="us", better="lower")
    if way.name in OPENAI.values():
        return [cost]
    shares = [own / reference for own, reference in zip(costs[way.name], costs[OPENAI[way.kind]], strict=True)]
    return [cost, Result(name=f"{way.name}_share", value=median(shares), unit="1", better="lower", target=MOST)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
