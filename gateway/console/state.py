"""The fleet as the console's JSON; pure. docs/console.md describes the fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.messages import INCARNATION_BITS, GatewayState, Region, WorkerState, WorkerTotals
from common.words import Role
from gateway.answers.catalogue import PooledFacts, Served
from gateway.placement.agreement import kv_name
from gateway.request.attempt import AttemptLine
from gateway.request.spec import Loads
from gateway.request.timeline import Timeline

WINDOW_S = 60.0  # handoffs, links and latencies this recent are shown
MAX_HANDOFFS = 40  # shown individually
EARLIEST_UNIX = 1_700_000_000  # no process of ours is older


def worker_json(state: WorkerState) -> dict[str, Any]:
    """One worker: KV in blocks, rates per second, times in milliseconds; rate 0: not measured."""
    layout, pools = state.region.layout, Role.POOL in state.roles
    blocks = 0 if pools else layout.num_blocks  # the one that it says is nobody's
    return {
        "id": state.worker,
        "incarnation": str(state.incarnation),  # 63 bits: more than a JavaScript number holds
        "started_unix": started_unix(state.incarnation),
        "roles": state.roles,
        "status": state.status,
        "model": state.model,
        "transport": state.region.transport,
        "ranks": len(state.region.each),
        "max_model_len": state.max_model_len,
        "running": state.running,
        "waiting": state.waiting,
        "max_sequences": state.max_sequences,
        "queued_tokens": state.queued_tokens,
        "generated_tokens": state.totals.generated_tokens,
        "pooled_tokens": state.totals.prompt_tokens if pools else 0,
        "drafter": state.drafter,
        "drafts": state.totals.drafts,
        "drafted_tokens": state.totals.drafted_tokens,
        "accepted_tokens": state.totals.accepted_tokens,
        "pass_s": round(state.totals.pass_s, 3),
        "kv_blocks": blocks,
        "kv_used": max(0, blocks - state.free_blocks - state.held_blocks),
        "kv_held": state.held_blocks,
        "kv_free": state.free_blocks,
        "block_tokens": layout.block_size,
        "block_bytes": _block_bytes(state.region),
        "kv_dtype": kv_name(layout),
        "tiers": tiers_json(state.totals),
        "prefill_tokens_per_s": round(state.prefill_tokens_per_s, 1),
        "local_tokens_per_s": round(state.local_tokens_per_s, 1),
        "decode_step_ms": round(state.decode_step_ms, 3),
        "link_bytes_per_s": round(state.link_bytes_per_s),
    }


def _block_bytes(region: Region) -> int:
    """Bytes of a block in all ranks, or stages: their layouts are not told, but that each layer is in one of them."""
    layout = region.layout
    if any(part.layers < part.all_layers for part in layout.pages):
        return sum(part.block_bytes(layout.block_size) for part in layout.whole_pages)
    return len(region.each) * layout.block_bytes


def tiers_json(totals: WorkerTotals) -> dict[str, dict[str, int]]:
    """The tiers below a worker's pool, by name; since its start, prompt tokens found there, and copies that went wrong."""
    host, disk = totals.host, totals.disk
    hits = {"host": max(0, host.hit_tokens - disk.hit_tokens), "disk": disk.hit_tokens}
    return {
        name: {
            "bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
            "hit_tokens": hits[name],
            "failed": tier.bad_digests + tier.failed_copies,
        }
        for name, tier in (("host", host), ("disk", disk))
        if tier.capacity_bytes
    }


def model_json(model: Served, loads: Loads | None = None) -> dict[str, Any]:
    """One model, by its files; `calls` and `reasoning` are the formats of its answers, "": plain text.

    `hosted`: its state at its host, if one loads and unloads it, and by role the workers there, beside what the planner wants.
    """
    hosted = None if loads is None else loads.find(model.name)
    workers = {} if loads is None or hosted is None else loads.workers(model.name)
    counts = {role: {"running": running, "wanted": wanted} for role, (running, wanted) in workers.items()}
    tokenizer = model.tokenizer
    answers = tokenizer.format.format
    return {
        "name": model.name,
        "hosted": None if hosted is None else {"status": hosted.status, "reason": hosted.reason, "workers": counts},
        "max_model_len": model.max_model_len,
        **tokenizer.saved._asdict(),
        "vocab_size": tokenizer.vocab_size,
        "can_chat": tokenizer.can_chat,
        "calls": answers.name,
        "reasoning": answers.reasoning,
    }


def pooled_json(name: str, model: PooledFacts) -> dict[str, Any]:
    """One model of vectors or scores, by its files: what `model_json` says of others, and what it `makes`."""
    pooling = model.pooling
    return {
        "name": name,
        "hosted": None,
        "max_model_len": pooling.max_len,
        **model.saved._asdict(),
        "vocab_size": model.vocab_size,
        "can_chat": False,
        "calls": "",
        "reasoning": "",
        "makes": "scores" if pooling.labels else "vectors",
        "dimensions": pooling.size,
        "labels": len(pooling.labels),
    }


def started_unix(incarnation: int) -> int | None:
    """Start of a process in unix seconds, from its incarnation; None if it was not made of a time (`services.runtime.names`)."""
    seconds = incarnation >> INCARNATION_BITS
    return seconds if seconds >= EARLIEST_UNIX else None


def gateway_json(state: GatewayState) -> dict[str, Any]:
    """One gateway's service levels and queue."""
    return {
        "id": state.gateway,
        "window_s": state.window_s,
        "ttft_met": state.ttft_met,
        "ttft_count": state.ttft_count,
        "tpot_met": state.tpot_met,
        "tpot_count": state.tpot_count,
        "arriving_tokens_per_s": round(state.arriving_tokens_per_s, 1),
        "queued_requests": state.queued_requests,
        "handing_over": state.handing_over,
        "waiting_tokens": state.waiting_tokens,
        "started_tokens": state.started_tokens,
    }


def handoffs(timelines: Iterable[Timeline], now: float, unix: float) -> list[dict[str, Any]]:
    """The handoffs of the last minute, newest first. `push_ms` is null until the prefill worker reports it.

    `now` is of the gateway's monotonic clock, `unix` the same instant.
    """
    found = [
        (attempt.imported_at, line, attempt)
        for line in timelines
        for attempt in line.attempts
        if attempt.imported_at is not None and now - attempt.imported_at <= WINDOW_S
    ]
    found.sort(key=lambda entry: entry[0], reverse=True)
    return [_handoff(line, attempt, unix - (now - at)) for at, line, attempt in found]


def failed_handoffs(timelines: Iterable[Timeline], now: float) -> Counter[tuple[str, str]]:
    """(from, to) -> the last minute's attempts that a prefill worker started and no decode worker got: others followed, or none
    helped. `to` is the placement's first choice."""
    return Counter(
        (attempt.claimed_by, attempt.decode[0])
        for line in timelines
        for attempt in line.attempts
        if attempt.claimed_by and attempt.decode and attempt.imported is None
        if attempt.ended_at is not None and now - attempt.ended_at <= WINDOW_S
        if attempt is not line.attempt or line.status == "error"
    )


def _handoff(line: Timeline, attempt: AttemptLine, at_unix: float) -> dict[str, Any]:
    assert attempt.imported is not None
    return {
        "id": f"{line.request_id}/{attempt.number}",
        "request_id": line.request_id,
        "from": attempt.claimed_by,
        "to": attempt.imported.worker,
        "at_unix": round(at_unix, 3),
        "bytes": attempt.imported.transferred_bytes,
        "blocks": attempt.imported.transferred_blocks,
        "reused_blocks": attempt.imported.reused_blocks,
        "transfer_ms": round(attempt.imported.transfer_ms, 3),
        "push_ms": None if attempt.settled is None else round(attempt.settled.push_ms, 3),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed, or None."""
    if not values:
        return None
    ordered = sorted(values)
    rank = max(0, -int(-share * len(ordered) // 1) - 1)
    return round(ordered[rank], 3)


def counted(counters: Mapping[str, int], kind: str) -> dict[str, int]:
    """One kind of `Generations.counters`, by label."""
    prefix = f"{kind}:"
    return {name.removeprefix(prefix): count for name, count in sorted(counters.items()) if name.startswith(prefix)}
