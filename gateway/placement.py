"""Placement as a pure choice: the cost formula of `common/store.lua` in Python, for when Redis is away.

Without Redis a gateway knows the workers' heartbeats and its own requests, but no prefixes and no other gateway's charges, nor
how busy workers were lately (`crowding` there). What the formula weighs and why is said there; a test has both choose for the
same fleets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from common.blocks import hash_blocks, hash_root
from common.messages import WorkerState

FULL, CANDIDATES = 1e6, 4
WORK_WEIGHT, IDLE_WEIGHT, SCARCE_MS = 8, 2, 20
LOCAL_SHARE, LOCAL_CANDIDATES = 0.5, 4
LOCAL_CROWD, LOCAL_PATIENCE_MS, LOCAL_PASS_MS = 64, 360, 60
FULL_PASS = 2048
HANDOVER_MS, LINK, READ = 2, 1e9, 2e12
ANSWER_TOKENS, MOVING_SHARE = 64, 0.1


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A worker, what of the prompt it holds, and what was charged to it."""

    state: WorkerState
    matched_blocks: int = 0
    prefill_tokens: int = 0
    prefill_count: int = 0
    decode_tokens: int = 0
    decode_count: int = 0
    fixed_ms: float = 0.0  # of a pass; of an unmeasured worker the dearest one's
    double_tokens: float = 0.0  # see `WorkerState`; of an unmeasured worker the smallest one
    uncached: int = 1  # tokens
    effort: int = 1  # the same in tokens with nothing before them

    @property
    def sequences(self) -> int:
        return self.state.running + self.state.waiting if "decode" in self.state.roles else 0

    @property
    def rate(self) -> float:
        """Of tokens with nothing before them, if that is known; 0 = not measured."""
        return self.state.prefill_bare_tokens_per_s or self.state.prefill_tokens_per_s

    @property
    def known_fixed_ms(self) -> float:
        """Of a pass, beside its tokens at that rate and attention."""
        return self.state.prefill_bare_fixed_ms or self.state.prefill_fixed_ms

    @property
    def num_blocks(self) -> int:
        return self.state.region.layout.num_blocks

    @property
    def max_sequences(self) -> int:
        return max(self.state.max_sequences, 1)

    @property
    def queued_tokens(self) -> int:
        return max(self.prefill_tokens, self.state.queued_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the formula needs of a request, in tokens."""

    num_tokens: int
    block_size: int
    reserve_tokens: int
    cut_over_tokens: int


@dataclass(slots=True, kw_only=True)
class _Option:
    worker: Candidate
    count: int
    cost: float = 0.0
    rate: float = 0.0
    wait: float = 0.0
    work: float = 0.0
    is_full: bool = False
    unhidden: float = 0.0

    @property
    def order(self) -> tuple[float, int, str]:
        return self.cost, self.count, self.worker.state.worker


def choose(candidates: Sequence[Candidate], prompt: Prompt) -> tuple[str, list[str], str]:
    """Return (worker that prefills, decode candidates, reason), or ("", [], why not) when nobody decodes.

    Candidates are empty when the prefill worker decodes as well.
    """
    for candidate in candidates:
        matched = candidate.matched_blocks * prompt.block_size
        candidate.uncached = max(prompt.num_tokens - matched, 1)
    assumed = _assume(candidates)
    for candidate in candidates:
        candidate.effort = _effort(candidate, candidate.uncached, prompt.num_tokens)
    prefill, weight = _rank_prefill(candidates, assumed)
    first = prefill[0] if prefill else None
    decode = _rank_decode(candidates, prompt, first)
    if not decode:
        return "", [], "no decode worker"
    best = decode[0].worker
    nearby = _cheapest_local(decode, assumed, first, prompt.num_tokens, weight)
    if first is None:
        return (nearby[0] if nearby is not None else best).state.worker, [], "local: no prefill worker"
    if 0 <= best.uncached <= prompt.cut_over_tokens:
        return best.state.worker, [], "local: short"
    if first.worker is best:
        return best.state.worker, [], "local: same worker"
    elsewhere = first.cost + HANDOVER_MS + decode[0].unhidden
    if prompt.cut_over_tokens < 0 and nearby is not None and nearby[1] < elsewhere:
        return nearby[0].state.worker, [], "local: earlier"
    reason = "full" if decode[0].is_full else "prefix" if first.worker.matched_blocks else "load"
    names = [option.worker.state.worker for option in decode[:CANDIDATES]]
    if "decode" in first.worker.state.roles and first.worker.state.worker not in names:
        names[-1] = first.worker.state.worker
    return first.worker.state.worker, names, reason


def _assume(candidates: Iterable[Candidate]) -> float:
    """The rate of an unmeasured worker; sets everybody's fixed cost and that of attention."""
    states = [candidate.state for candidate in candidates]
    slowest = min((candidate.rate for candidate in candidates if candidate.rate > 0), default=0.0)
    fixed_ms = max((candidate.known_fixed_ms for candidate in candidates), default=0.0)
    doubles = {s.worker: s.prefill_double_tokens if s.prefill_bare_tokens_per_s else 0.0 for s in states}
    double_tokens = min((tokens for tokens in doubles.values() if tokens > 0), default=0.0)
    for candidate in candidates:
        is_known, state = candidate.rate > 0, candidate.state
        candidate.fixed_ms = candidate.known_fixed_ms if is_known else fixed_ms
        candidate.double_tokens = doubles[state.worker] if is_known else double_tokens
    return slowest or max((s.local_tokens_per_s for s in states), default=0.0)


def _effort(worker: Candidate, uncached: int, tokens: int) -> int:
    if not worker.double_tokens:
        return uncached
    return math.ceil(uncached + uncached * (2 * tokens - uncached) / (2 * worker.double_tokens))


def _rank_prefill(candidates: Iterable[Candidate], assumed: float) -> tuple[list[_Option], float]:
    options = []
    for worker in candidates:
        if "prefill" in worker.state.roles:
            rate = worker.rate or assumed or 1.0
            passes = min(worker.prefill_count, math.ceil(worker.prefill_tokens / FULL_PASS))
            wait = 1000 * worker.queued_tokens / rate + passes * worker.fixed_ms
            work = worker.fixed_ms + 1000 * worker.effort / rate
            options.append(_Option(worker=worker, count=worker.prefill_count, rate=rate, wait=wait, work=work))
    least = min((option.wait for option in options), default=0.0)
    weight = IDLE_WEIGHT + (WORK_WEIGHT - IDLE_WEIGHT) * least / (least + SCARCE_MS)
    for option in options:
        option.cost = option.wait + weight * option.work
    return sorted(options, key=lambda option: option.order), weight


def _rank_decode(candidates: Iterable[Candidate], prompt: Prompt, first: _Option | None) -> list[_Option]:
    work, link = (first.work, first.worker.state.link_bytes_per_s) if first is not None else (0.0, 0.0)
    workers = [worker for worker in candidates if "decode" in worker.state.roles]
    empty = [_empty_step_ms(worker, prompt.block_size) for worker in workers]
    fastest = min((ms for ms in empty if ms > 0), default=1.0)
    options = []
    for worker, empty_ms in zip(workers, empty, strict=True):
        sequences = max(worker.decode_count, worker.sequences)
        used = max(worker.decode_tokens, (worker.num_blocks - worker.state.free_blocks) * prompt.block_size)
        room = worker.num_blocks * prompt.block_size - used + worker.matched_blocks * prompt.block_size
        is_full = sequences >= worker.max_sequences or prompt.reserve_tokens > room
        missing = math.ceil(worker.uncached / prompt.block_size)
        moving = 1000 * missing * worker.state.region.layout.block_bytes / (link if link > 0 else LINK)
        unhidden = max(0.0, moving - work)
        step = (empty_ms or fastest) * (1 + (sequences + 1) / worker.max_sequences)
        step += _token_ms(worker, prompt.block_size) * (used + prompt.num_tokens)
        cost = step + (unhidden + MOVING_SHARE * moving) / ANSWER_TOKENS + (FULL if is_full else 0)
        options.append(_Option(worker=worker, count=worker.decode_count, cost=cost, is_full=is_full, unhidden=unhidden))
    return sorted(options, key=lambda option: option.order)


def _token_ms(worker: Candidate, block_size: int) -> float:
    return 1000 * worker.state.region.layout.block_bytes / block_size / READ


def _empty_step_ms(worker: Candidate, block_size: int) -> float:
    if worker.sequences == 0:
        return 0.0
    said = (worker.num_blocks - worker.state.free_blocks) * block_size
    step_ms = worker.state.decode_step_ms
    rest = max(step_ms - _token_ms(worker, block_size) * said, 0.25 * step_ms)
    return rest / (1 + worker.sequences / worker.max_sequences)


def _cheapest_local(
    decode: Sequence[_Option], assumed: float, first: _Option | None, tokens: int, weight: float
) -> tuple[Candidate, float] | None:
    best: tuple[Candidate, float] | None = None
    for option in decode[:LOCAL_CANDIDATES]:
        worker, state = option.worker, option.worker.state
        own = worker.rate or assumed
        sequences = max(worker.sequences, option.count)
        is_idle = sequences == 0 and 1000 * worker.effort <= LOCAL_PASS_MS * own
        rate = own if is_idle else state.local_tokens_per_s or LOCAL_SHARE * own
        if rate <= 0 or option.is_full:
            continue
        computing = 1000 * (worker.effort if is_idle else worker.uncached) / rate
        wait = 1000 * worker.queued_tokens / rate
        cost = worker.fixed_ms + (0 if is_idle else state.decode_step_ms) + wait + computing
        if not is_idle:
            delay = 1000 * (worker.queued_tokens + worker.uncached) / own
            cost += computing * sequences / LOCAL_CROWD
            cost += max(sequences, 1) * delay * (delay / LOCAL_PATIENCE_MS) ** 2
        if first is not None:
            scarce = 1000 * _effort(first.worker, worker.uncached, tokens) / first.rate
        else:
            scarce = 1000 * worker.effort / own
        cost += (weight - 1) * scarce
        if best is None or cost < best[1]:
            best = worker, cost
    return best


def compatible(state: WorkerState) -> bool:
    """Whether the worker hashes blocks as this gateway does (the parity probe); "" of an older one is not asked."""
    layout = state.region.layout
    return not state.parity_hash or state.parity_hash == _probe_hash(
        state.model_fingerprint, layout.dtype, layout.block_size
    )


@lru_cache(maxsize=64)
def _probe_hash(fingerprint: str, dtype: str, block_size: int) -> bytes:
    root = hash_root(model=fingerprint, kv_dtype=dtype, block_size=block_size)
    return hash_blocks(root, range(2 * block_size), block_size)[-1]
