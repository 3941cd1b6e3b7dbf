"""Who computes and who decodes: Baton's own placement by the real Lua functions, and simpler rules to compare with.

The simpler rules see the workers as they are at that moment; Baton's sees what they announced and what was charged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import redis

from benchmarks.simulate_costs import KV_BYTES, LINK_BYTES_PER_S
from benchmarks.simulate_fleet import MAX_SEQUENCES, POOL_BLOCKS, Run, Worker
from benchmarks.simulate_trace import TRACE_BLOCK
from common.messages import KVLayout, Region, WorkerState
from common.store import LIBRARY, PlacementRequest, parse_placement, place_arguments, register_arguments

FOREVER_MS = 24 * 3600 * 1000
LAYOUT = KVLayout(
    num_blocks=POOL_BLOCKS, num_layers=32, block_size=TRACE_BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
assert LAYOUT.block_bytes == TRACE_BLOCK * KV_BYTES


class Policy(Protocol):
    """Sets `prefill`, `decode` and `reason` of a run; hears what became of it."""

    name: str
    listens: bool  # wants heartbeats and announcements

    def place(self, run: Run, now_ms: float) -> None: ...

    def heartbeat(self, worker: Worker) -> None: ...

    def announce(self, worker: Worker) -> None: ...

    def computed(self, run: Run) -> None: ...

    def ended(self, run: Run) -> None: ...


class _Rule:
    """A rule that looks at the workers themselves."""

    name = ""
    listens = False

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.prefill = [worker for worker in workers if "prefill" in worker.roles]
        self.decode = [worker for worker in workers if "decode" in worker.roles]

    def place(self, run: Run, now_ms: float) -> None:
        run.prefill = self.choose_prefill(run)
        run.decode = self.rank_decode(run)
        run.reason = self.name

    def choose_prefill(self, run: Run) -> Worker:
        raise NotImplementedError

    def rank_decode(self, run: Run) -> list[Worker]:
        ranked = sorted(
            self.decode, key=lambda worker: (not worker.has_room(run), worker.pool.num_used, len(worker.batch))
        )
        return ranked[:4]

    def heartbeat(self, worker: Worker) -> None: ...

    def announce(self, worker: Worker) -> None: ...

    def computed(self, run: Run) -> None: ...

    def ended(self, run: Run) -> None: ...


class RoundRobin(_Rule):
    """One after the other, in both roles."""

    name = "round-robin"
    _count = 0

    def choose_prefill(self, run: Run) -> Worker:
        self._count += 1
        return self.prefill[self._count % len(self.prefill)]

    def rank_decode(self, run: Run) -> list[Worker]:
        return [self.decode[(self._count + at) % len(self.decode)] for at in range(min(4, len(self.decode)))]


class LeastLoaded(_Rule):
    """Where the fewest prompt tokens wait; where the fewest blocks are in use."""

    name = "least-loaded"

    def choose_prefill(self, run: Run) -> Worker:
        return min(self.prefill, key=lambda worker: (worker.backlog_tokens, worker.name))


class PrefixOnly(_Rule):
    """Where the longest prefix is cached, however long the queue; without any, where the fewest prompt tokens wait."""

    name = "prefix-only"

    def choose_prefill(self, run: Run) -> Worker:
        return min(self.prefill, key=lambda worker: (-worker.cached_blocks(run), worker.backlog_tokens, worker.name))


class Baton:
    """`common/store.lua` on a real server, by the virtual clock."""

    listens = True

    def __init__(
        self, workers: Sequence[Worker], client: redis.Redis, *, name: str = "baton", cut_over_tokens: int = -1
    ) -> None:
        self.name = name
        self.states: dict[str, WorkerState] = {}  # the last heartbeats
        self.place_ms: list[float] = []  # wall clock, with the way there and back
        self._workers = {worker.name: worker for worker in workers}
        self._client = client
        self._cut_over_tokens = cut_over_tokens
        client.flushall()
        client.function_load(LIBRARY.read_text(), replace=True)
        self._notes = client.pipeline(transaction=False)
        for worker in workers:
            self.heartbeat(worker)

    def place(self, run: Run, now_ms: float) -> None:
        self._flush()
        request = PlacementRequest(
            request_id=run.id,
            attempt=1,
            digests=list(run.request.blocks),
            num_tokens=run.request.prompt_tokens,
            block_size=TRACE_BLOCK,
            reserve_tokens=run.request.prompt_tokens + run.request.answer_tokens,
            deadline_ms=FOREVER_MS,
            model_fingerprint="model",
            cut_over_tokens=self._cut_over_tokens,
            now_ms=max(1, int(now_ms)),
        )
        arguments = place_arguments(request)
        began = time.perf_counter()
        answer = self._client.fcall("baton2_place", 0, *arguments)
        self.place_ms.append(1000 * (time.perf_counter() - began))
        placement = parse_placement(answer)
        run.prefill = self._workers[placement.prefill]
        run.decode = [self._workers[name] for name in placement.decode]
        run.reason = placement.reason
        run.placed_work = run.request.prompt_tokens - placement.matched_blocks_prefill * TRACE_BLOCK
        run.predicted_ms = placement.costs["predicted_ms"]

    def heartbeat(self, worker: Worker) -> None:
        state = self.states[worker.name] = state_of(worker)
        self._notes.fcall("baton2_register", 0, *register_arguments(state, FOREVER_MS, now_ms=1))

    def announce(self, worker: Worker) -> None:
        added, removed = worker.pool.drain_events()
        if added or removed:
            self._notes.fcall("baton2_announce", 0, f"{worker.name}@1", len(added), *added, *removed)

    def computed(self, run: Run) -> None:
        self._notes.fcall("baton2_release", 0, f"{run.id}:1", "prefill", max(1, int(run.first_token_ms)))

    def ended(self, run: Run) -> None:
        self._notes.fcall("baton2_release", 0, f"{run.id}:1", "decode", max(1, int(run.end_ms)))

    def _flush(self) -> None:
        if len(self._notes):
            self._notes.execute()


def state_of(worker: Worker) -> WorkerState:
    """The worker's heartbeat."""
    return WorkerState(
        worker=worker.name,
        incarnation=1,
        roles=list(worker.roles),
        status="ready",
        model="model",
        model_fingerprint="model",
        tokenizer_fingerprint="tokenizer",
        vocab_size=1,
        max_model_len=POOL_BLOCKS * TRACE_BLOCK,
        region=Region(transport="cuda_ipc", incarnation=1, layout=LAYOUT, address={}),
        running=len(worker.batch),
        waiting=len(worker.waiting),
        queued_tokens=worker.backlog_tokens,
        free_blocks=worker.pool.num_free,
        max_sequences=MAX_SEQUENCES,
        prefill_tokens_per_s=1000 * worker.prompt_tokens_per_ms,
        prefill_bare_fixed_ms=worker.fixed_ms,
        prefill_bare_tokens_per_s=worker.prompt_cost.tokens_per_s,
        prefill_double_tokens=worker.prompt_cost.double_tokens,
        decode_step_ms=worker.step_ms,
        local_tokens_per_s=worker.local_tokens_per_s if "decode" in worker.roles else 0.0,
        link_bytes_per_s=LINK_BYTES_PER_S,
    )


RULES: Iterable[type[_Rule]] = (RoundRobin, LeastLoaded, PrefixOnly)
