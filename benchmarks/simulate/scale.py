"""The time of one placement in fleets of any size: the Lua functions alone, prompts of 12,000 tokens in blocks of 16."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
import redis

from benchmarks.results_format import Result
from benchmarks.simulate.fleet import Worker
from benchmarks.simulate.policies import FOREVER_MS, LAYOUT, state_of
from common.blocks import BlockKind
from common.messages import WorkerState
from common.store import entry_of
from gateway.placement.ledger import PlacementRequest, place_arguments, placement_library, release_arguments
from gateway.request.placement import Charged

TOKENS, BLOCK_SIZE = 12_000, 16
SHARED = 64  # blocks of a system prompt that every worker holds
OWN = TOKENS // BLOCK_SIZE - SHARED
REPEATS = 200
KIND = BlockKind(model="model", kv_dtype=LAYOUT.dtype, block_size=BLOCK_SIZE)


def placement_times(client: redis.Redis, sizes: Sequence[int]) -> Iterator[Result]:
    """For each number of workers: mean time in the server and quantiles of the call, for prompts that nobody holds, that
    everybody holds the beginning of, and that one worker holds."""
    for size in sizes:
        _fill(client, size)
        for name in ("unknown", "shared", "held"):
            client.config_resetstat()
            times = [_place(client, f"{name}-{number}", _digests(name, number, size)) for number in range(REPEATS)]
            server_ms = client.info("commandstats")["cmdstat_fcall"]["usec_per_call"] / 1000
            for number in range(REPEATS):
                charged = Charged(request_id=f"{name}-{number}", attempt=1, stages=("prefill", "decode"), workers=())
                client.fcall("baton4_release", 0, *release_arguments([charged]))
            prefix = f"placement_{size}_workers_{name}"
            yield Result(name=f"{prefix}_server_mean", value=server_ms, unit="ms", better="lower")
            for label, quantile in (("p50", 0.5), ("p99", 0.99)):
                value = sorted(times)[int(quantile * REPEATS)]
                yield Result(name=f"{prefix}_call_{label}", value=value, unit="ms", better="lower")


def _fill(client: redis.Redis, size: int) -> None:
    client.flushall()
    client.function_load(placement_library(), replace=True)
    system = [b"system-%d" % at for at in range(SHARED)]
    states = {role: _state(role) for role in ("prefill", "decode")}
    for number in range(size):
        worker = f"w{number}"
        state = msgspec.structs.replace(states["decode" if number % 2 else "prefill"], worker=worker)
        client.fcall("baton4_enter", 0, "", FOREVER_MS, 0, *entry_of(state))
        blocks = [*system, *(b"%d-%d" % (number, at) for at in range(OWN))]
        pipe = client.pipeline(transaction=False)
        for block in blocks:
            pipe.sadd(b"baton:block:" + block, f"{worker}@1")
        pipe.execute()


def _state(role: str) -> WorkerState:
    worker = Worker("w", "prefill" if role == "prefill" else "decode")
    worker.prompt_tokens_per_ms = 40.0
    state = state_of(worker)
    layout = msgspec.structs.replace(LAYOUT, block_size=BLOCK_SIZE, num_blocks=LAYOUT.num_blocks * 512 // BLOCK_SIZE)
    return msgspec.structs.replace(state, region=msgspec.structs.replace(state.region, layout=layout))


def _digests(name: str, number: int, size: int) -> list[bytes]:
    system = [b"system-%d" % at for at in range(SHARED)]
    if name == "unknown":
        return [b"unknown-%d-%d" % (number, at) for at in range(SHARED + OWN)]
    owner = -1 - number if name == "shared" else 2 * (7 * number % max(1, size // 2))
    return [*system, *(b"%d-%d" % (owner, at) for at in range(OWN))]


def _place(client: redis.Redis, request_id: str, digests: list[bytes]) -> float:
    request = PlacementRequest(
        request_id=request_id,
        attempt=1,
        digests=digests,
        num_tokens=TOKENS,
        kind=KIND,
        reserve_tokens=TOKENS + 300,
        deadline_ms=FOREVER_MS,
        cut_over_tokens=-1,
    )
    arguments = place_arguments(request)
    began = time.perf_counter()
    client.fcall("baton4_place", 0, *arguments)
    return 1000 * (time.perf_counter() - began)
