"""Placement policies: Baton's own by the real Lua functions, and simpler rules beside it.

The rules see the workers as they are at that moment. Baton sees what they announced and what was charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import redis

from benchmarks.simulate.costs import KV_BYTES, LINK_BYTES_PER_S
from benchmarks.simulate.fleet import MAX_SEQUENCES, POOL_BLOCKS, Role, Run, Worker
from benchmarks.simulate.trace import TRACE_BLOCK
from common.blocks import BlockKind
from common.messages import KVLayout, Region, WorkerState
from common.store import entry_of
from common.words import WorkerStatus
from gateway.placement.ledger import (
    PlacementRequest,
    parse_placement,
    place_arguments,
    placement_library,
    release_arguments,
)
from gateway.request.placement import Charged

FOREVER_MS = 24 * 3600 * 1000
DECODE_LISTED = 4  # decode workers that a rule names, as placement does
LAYOUT = KVLayout(
    num_blocks=POOL_BLOCKS, num_layers=32, block_size=TRACE_BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
KIND = BlockKind(model="model", kv_dtype=LAYOUT.dtype, block_size=TRACE_BLOCK)
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


ChoosePrefill = Callable[[Sequence[Worker], Run, int], Worker]  # workers, run, how many came before
RankDecode = Callable[[Sequence[Worker], Run, int], Sequence[Worker]]


CutOver = Callable[[Run], int]  # `PlacementRequest.cut_over_tokens` of each run


class Rule:
    """A rule that looks at the workers themselves."""

    listens = False

    def __init__(
        self, name: str, workers: Sequence[Worker], choose_prefill: ChoosePrefill, rank_decode: RankDecode
    ) -> None:
        self.name = name
        self._prefill = [worker for worker in workers if "prefill" in worker.roles]
        self._decode = [worker for worker in workers if "decode" in worker.roles]
        self._choose_prefill = choose_prefill
        self._rank_decode = rank_decode
        self._placed = 0

    def place(self, run: Run, now_ms: float) -> None:
        self._placed += 1
        run.prefill = self._choose_prefill(self._prefill, run, self._placed)
        run.decode = list(self._rank_decode(self._decode, run, self._placed)[:DECODE_LISTED])
        run.reason = self.name

    def heartbeat(self, worker: Worker) -> None: ...

    def announce(self, worker: Worker) -> None: ...

    def computed(self, run: Run) -> None: ...

    def ended(self, run: Run) -> None: ...


def round_robin(workers: Sequence[Worker]) -> Rule:
    """One worker after the other, in both roles."""
    return Rule(
        "round-robin",
        workers,
        lambda prefill, run, placed: prefill[placed % len(prefill)],
        lambda decode, run, placed: [decode[(placed + at) % len(decode)] for at in range(len(decode))],
    )


def least_loaded(workers: Sequence[Worker]) -> Rule:
    """The worker with the fewest waiting prompt tokens, and the one with the fewest used blocks."""
    return Rule(
        "least-loaded",
        workers,
        lambda prefill, run, placed: min(prefill, key=lambda worker: (worker.backlog_tokens, worker.name)),
        _fewest_blocks,
    )


def prefix_only(workers: Sequence[Worker]) -> Rule:
    """The worker with the longest cached prefix, however long its queue; without any, the shortest queue in tokens."""
    return Rule(
        "prefix-only",
        workers,
        lambda prefill, run, placed: min(
            prefill, key=lambda worker: (-worker.cached_blocks(run), worker.backlog_tokens, worker.name)
        ),
        _fewest_blocks,
    )


def _fewest_blocks(decode: Sequence[Worker], run: Run, placed: int) -> Sequence[Worker]:
    return sorted(decode, key=lambda worker: (not worker.has_room(run), worker.pool.num_used, len(worker.batch)))


RULES = (round_robin, least_loaded, prefix_only)


def by_costs(run: Run) -> int:
    """The decode worker prefills where costs say so."""
    return -1


def never(run: Run) -> int:
    """No decode worker prefills."""
    return 0


class Baton:
    """Baton's own placement on a real server, by the virtual clock."""

    listens = True

    def __init__(
        self,
        workers: Sequence[Worker],
        client: redis.Redis,
        *,
        name: str = "baton",
        cut_over: CutOver = by_costs,
        placed: Callable[[Run], None] = lambda run: None,
    ) -> None:
        """`placed` is called with each run that has its workers."""
        self.name = name
        self.states: dict[str, WorkerState] = {}  # the last heartbeats
        self.place_ms: list[float] = []  # wall clock, with the way there and back
        self._workers = {worker.name: worker for worker in workers}
        self._client = client
        self._cut_over, self._placed = cut_over, placed
        client.flushall()
        client.function_load(placement_library(), replace=True)
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
            kind=KIND,
            reserve_tokens=run.request.prompt_tokens + run.request.answer_tokens,
            deadline_ms=FOREVER_MS,
            cut_over_tokens=self._cut_over(run),
            now_ms=max(1, int(now_ms)),
        )
        arguments = place_arguments(request)
        began = time.perf_counter()
        answer = self._client.fcall("baton4_place", 0, *arguments)
        self.place_ms.append(1000 * (time.perf_counter() - began))
        placement = parse_placement(answer)
        run.prefill = self._workers[placement.prefill]
        run.decode = [self._workers[name] for name in placement.decode]
        run.reason = placement.reason
        run.placed_work = run.request.prompt_tokens - placement.matched_blocks_prefill * TRACE_BLOCK
        run.predicted_ms = placement.costs["predicted_ms"]
        self._placed(run)

    def heartbeat(self, worker: Worker) -> None:
        state = self.states[worker.name] = state_of(worker)
        self._notes.fcall("baton4_enter", 0, "", FOREVER_MS, 1, *entry_of(state))

    def announce(self, worker: Worker) -> None:
        added, removed = worker.pool.drain_events()
        for digest in added:
            self._notes.sadd(b"baton:block:" + digest, f"{worker.name}@1")
        for digest in removed:
            self._notes.srem(b"baton:block:" + digest, f"{worker.name}@1")

    def computed(self, run: Run) -> None:
        self._release(run, "prefill", run.first_token_ms)

    def ended(self, run: Run) -> None:
        self._release(run, "decode", run.end_ms)

    def _release(self, run: Run, stage: Role, now_ms: float) -> None:
        charged = Charged(request_id=run.id, attempt=1, stages=(stage,), workers=())
        self._notes.fcall("baton4_release", 0, *release_arguments([charged], now_ms=max(1, int(now_ms))))

    def _flush(self) -> None:
        if len(self._notes):
            self._notes.execute()


def state_of(worker: Worker) -> WorkerState:
    """The worker's heartbeat."""
    return WorkerState(
        worker=worker.name,
        incarnation=1,
        roles=list(worker.roles),
        status=WorkerStatus.READY,
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
