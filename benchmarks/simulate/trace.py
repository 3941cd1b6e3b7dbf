"""Requests for a simulation: Mooncake's public traces, or made-up ones of the same form."""

from __future__ import annotations

import bisect
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

TRACE_BLOCK = 512  # tokens of a trace's hash
DAY_STEPS = 1000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `blocks` are the prompt's full blocks; equal ones have equal prefixes."""

    arrival_ms: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[bytes, ...]


def read_trace(file: Path) -> list[TraceRequest]:
    """Read a trace in Mooncake's form. Raises OSError, and ValueError with the line that has another form."""
    requests = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            entry = json.loads(line)
            prompt, answer = int(entry["input_length"]), int(entry["output_length"])
            full = [int(block) for block in entry["hash_ids"]][: prompt // TRACE_BLOCK]
            arrival = float(entry["timestamp"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{number}: not a request of a trace: {error!r}") from error
        blocks = tuple(block.to_bytes(8, "little") for block in full)
        requests.append(TraceRequest(arrival, max(prompt, 1), max(answer, 1), blocks))
    return requests


def speed_up(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests in a shorter time."""
    return [TraceRequest(r.arrival_ms / factor, r.prompt_tokens, r.answer_tokens, r.blocks) for r in requests]


def a_day(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests in the same time, with a day's course: half the mean rate at both ends, 1.5 times it at noon.

    After noon prompts are cut to a quarter and answers are four times as long.
    """
    span = requests[-1].arrival_ms + 1
    shares = list(accumulate(1 - 0.5 * math.cos(2 * math.pi * (at + 0.5) / DAY_STEPS) for at in range(DAY_STEPS)))
    day = []
    for r in requests:
        share = r.arrival_ms / span * shares[-1]
        step = bisect.bisect_right(shares, share)
        before = shares[step - 1] if step else 0.0
        at = (step + (share - before) / (shares[step] - before)) / DAY_STEPS
        prompt, answer, blocks = r.prompt_tokens, r.answer_tokens, r.blocks
        if at > 0.5:
            prompt, answer = max(1, prompt // 4), 4 * answer
            blocks = blocks[: prompt // TRACE_BLOCK]
        day.append(TraceRequest(at * span, prompt, answer, blocks))
    return day


def replicate(requests: Sequence[TraceRequest], copies: int, *, seed: int = 0) -> list[TraceRequest]:
    """Several tenants with the same habits and no common prefix; each begins somewhere else in the trace."""
    chance = random.Random(seed)
    span = requests[-1].arrival_ms + 1
    merged = []
    for copy in range(copies):
        offset, salt = chance.random() * span if copy else 0.0, copy.to_bytes(2, "little")
        for r in requests:
            blocks = tuple(salt + block for block in r.blocks)
            merged.append(TraceRequest((r.arrival_ms + offset) % span, r.prompt_tokens, r.answer_tokens, blocks))
    return sorted(merged, key=lambda request: request.arrival_ms)


def conversations(count: int, *, per_second: float, system_prompts: int = 4, seed: int = 0) -> Iterator[TraceRequest]:
    """Made-up conversations of up to 6 turns that grow, behind a few system prompts."""
    chance = random.Random(seed)
    arrivals = accumulate(chance.expovariate(per_second / 1000) for _ in range(count))
    open_conversations: list[tuple[list[bytes], int]] = []
    for number, arrival in enumerate(arrivals):
        if open_conversations and chance.random() < 0.6:
            blocks, turns = open_conversations.pop(chance.randrange(len(open_conversations)))
        else:
            blocks, turns = [b"system-%d-%d" % (chance.randrange(system_prompts), at) for at in range(2)], 0
        blocks = [*blocks, *(b"%d-%d" % (number, at) for at in range(chance.randint(1, 8)))]
        if turns < 6:
            open_conversations.append((blocks, turns + 1))
        prompt = len(blocks) * TRACE_BLOCK + chance.randrange(TRACE_BLOCK)
        yield TraceRequest(arrival, prompt, chance.randint(20, 200), tuple(blocks))
