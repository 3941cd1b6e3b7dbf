"""The loads that a worker of both roles is judged by: arrivals, lengths, and when an answer is good.

Each is made from a seed alone, so that a model, a real server and another server get the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest, conversations, read_trace, speed_up
from common.messages import Goal

Device = Literal["bf16", "fp8"]
Requests = Callable[[float, Path | None], list[TraceRequest]]  # by seconds, and the folder of traces if there is one

GOAL = Goal(ttft_ms=200.0, ttft_ms_per_token=0.1, tpot_ms=20.0)
LONG_GOAL = Goal(ttft_ms=200.0, ttft_ms_per_token=0.1, tpot_ms=70.0)  # the pace that long prompts leave any server
TRACE = "conversation_trace.jsonl"
TRACE_FROM_MS = 20 * 60_000.0
CHAT_PROMPT, CHAT_ANSWER = (600, 1.0, 32, 6000), (180, 0.8, 8, 600)  # median, spread of the logarithm, least, most
LONGEST_PROMPT = 32_000
AGENT_TURNS, AGENT_SYSTEM_BLOCKS = 6, 6  # 3,072 tokens that all sessions share


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one device."""

    name: str
    device: Device
    requests: Requests
    seconds: float = 40.0
    goal: Goal = GOAL
    before: Requests | None = None  # served first, and measured by nobody: what it leaves cached


def chat(per_second: float) -> Requests:
    """Independent turns of random tokens, Poisson."""

    def requests(seconds: float, _: Path | None) -> list[TraceRequest]:
        chance = random.Random(34)
        arrivals = accumulate(chance.expovariate(per_second / 1000) for _ in range(math.ceil(per_second * seconds)))
        return [TraceRequest(at, _drawn(chance, *CHAT_PROMPT), _drawn(chance, *CHAT_ANSWER), ()) for at in arrivals]

    return requests


def long_prompts(speed: float) -> Requests:
    """Mooncake's conversations from minute 20; without the trace, made-up ones as long and as frequent."""

    def requests(seconds: float, traces: Path | None) -> list[TraceRequest]:
        if traces is None:
            made = conversations(math.ceil(4 * seconds), per_second=3.4, system_prompts=200, seed=34)
            found = [_longer(request) for request in made]
        else:
            found = [one for one in read_trace(traces / TRACE) if one.arrival_ms >= TRACE_FROM_MS]
            found = [
                TraceRequest(r.arrival_ms - TRACE_FROM_MS, r.prompt_tokens, r.answer_tokens, r.blocks) for r in found
            ]
        fits = [request for request in speed_up(found, speed) if request.prompt_tokens <= LONGEST_PROMPT]
        return [request for request in fits if request.arrival_ms < 1000 * seconds]

    return requests


def agents(per_second: float) -> Requests:
    """Sessions of an agent, Poisson: six turns that grow behind one long system prompt, each soon after the one before."""

    def requests(seconds: float, _: Path | None) -> list[TraceRequest]:
        chance, made = random.Random(34), list[TraceRequest]()
        arrivals = accumulate(chance.expovariate(per_second / 1000) for _ in range(math.ceil(per_second * seconds)))
        for session, began_ms in enumerate(arrivals):
            blocks, at_ms = [b"system-%d" % at for at in range(AGENT_SYSTEM_BLOCKS)], began_ms
            for turn in range(AGENT_TURNS):
                blocks = [*blocks, *(b"%d-%d-%d" % (session, turn, at) for at in range(chance.randint(1, 3)))]
                prompt = len(blocks) * TRACE_BLOCK + chance.randrange(TRACE_BLOCK)
                made.append(TraceRequest(at_ms, prompt, chance.randint(40, 160), tuple(blocks)))
                at_ms += 1000 * chance.uniform(2.0, 4.0)
        return sorted((each for each in made if each.arrival_ms < 1000 * seconds), key=lambda each: each.arrival_ms)

    return requests


CELLS: Mapping[str, Cell] = {
    "chat-8": Cell("chat 8/s", "bf16", chat(8)),
    "chat-14": Cell("chat 14/s", "bf16", chat(14)),
    "chat-20": Cell("chat 20/s", "bf16", chat(20)),
    "fp8-chat-20": Cell("fp8 chat 20/s", "fp8", chat(20)),
    "fp8-chat-28": Cell("fp8 chat 28/s", "fp8", chat(28)),
    "fp8-chat-36": Cell("fp8 chat 36/s", "fp8", chat(36)),
    "long-cold": Cell("long prompts x0.8", "bf16", long_prompts(0.8), goal=LONG_GOAL),
    "long-known": Cell("long prompts x0.8, known", "bf16", long_prompts(0.8), goal=LONG_GOAL, before=long_prompts(0.5)),
    "chat-16": Cell("chat 16/s", "bf16", chat(16), seconds=20.0),
    "chat-28": Cell("chat 28/s", "bf16", chat(28), seconds=20.0),
    "chat-40": Cell("chat 40/s", "bf16", chat(40), seconds=20.0),
    "long-x1": Cell("long prompts x1", "bf16", long_prompts(1.0)),
    "long-x1.6": Cell("long prompts x1.6", "bf16", long_prompts(1.6), seconds=35.0),
    "agents-2": Cell("agents 2/s", "bf16", agents(2), seconds=20.0),
}

TWO_CARDS = ("chat-16", "chat-28", "chat-40", "long-x1", "long-x1.6", "agents-2")  # in the order in which they are sent


def chosen(keys: str, device: Device | None = None) -> list[Cell]:
    """The cells of a comma-separated list, of one format alone if it is given; those of one card without a list.

    Raises ValueError.
    """
    named = [key.strip() for key in keys.split(",")] if keys else [key for key in CELLS if key not in TWO_CARDS]
    if unknown := [key for key in named if key not in CELLS]:
        raise ValueError(f"{unknown[0]!r} is no load: {', '.join(CELLS)}")
    return [CELLS[key] for key in named if device in (None, CELLS[key].device)]


def _longer(request: TraceRequest) -> TraceRequest:
    """A made-up turn with three times the history: prompts of about 9,000 tokens."""
    blocks = tuple(block + bytes([at]) for block in request.blocks for at in range(3))
    tail = request.prompt_tokens % TRACE_BLOCK
    return TraceRequest(request.arrival_ms, len(blocks) * TRACE_BLOCK + tail, 3 * request.answer_tokens, blocks)


def _drawn(chance: random.Random, median: float, spread: float, least: int, most: int) -> int:
    return min(most, max(least, round(median * math.exp(chance.gauss(0.0, spread)))))
