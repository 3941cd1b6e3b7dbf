"""Triton kernels of `collectives`. N ranks, T rows, E features (or elements of a tile), P partial sums, G programs.

Ranks store messages into each other's memory, and nothing else passes between them: memory that is EMPTY has no element yet (a
payload is its own flag, after Lamport). A launch is a round. Its messages lie in one of two phases, in a slot for each source.
Whoever has read an element empties it, so after the round the phase is empty again. A peer writes into it next when it has our
message of the round between, which we sent after we had read all of this one.

Rounds are counted in device memory, by each program for itself: every launch has all programs, some of them without work.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from engine.kernels.collectives import inbox
from engine.kernels.launch import Kernel
from engine.kernels.triton_norm import normed, sum_of_parts

SUM = tl.constexpr(-1)  # beside the kinds of `triton_norm`: neither residual nor norm
SLOT_MULTIPLE = tl.constexpr(inbox.SLOT_MULTIPLE)
TIMED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no clock
POLL_NS = tl.constexpr(1_000_000)  # a poll's time without one


@triton.jit(do_not_specialize=["units", "limit_ms", "rows"])
def _all_reduce(
    x_PTE, residual_TE, weight_E, out_TE, total_TE, peers_N, rounds_G, lost_N, units, limit_ms, rows, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr,
    N: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr, PHASE_BYTES: tl.constexpr, PDL: tl.constexpr,
    PUSH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """One-shot: every rank gets every rank's message of `size` elements, and adds them up; then `add_and_norm`, unless SUM."""
    dtype: tl.constexpr = out_TE.dtype.element_ty
    at = tl.arange(0, E)
    if KIND != SUM:
        weight = tl.load(weight_E + at, mask=at < NUM_FEATURES, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    size, count = units * UNIT, tl.load(rounds_G + tl.program_id(0))
    slot = tl.cdiv(size, SLOT_MULTIPLE) * SLOT_MULTIPLE
    if PUSH:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            begin = row * NUM_FEATURES
            inside = begin + at < size if KIND == SUM else at < NUM_FEATURES
            bits = _bits(sum_of_parts(x_PTE + begin + at, inside, size, PARTS).to(dtype))
            for step in tl.static_range(1, N):
                memory = _memory(peers_N, (RANK + step) % N, count, PHASE_BYTES, dtype)
                tl.store(memory + RANK * slot + begin + at, bits, mask=inside)
        tl.debug_barrier()
    if READ:
        memory = _memory(peers_N, RANK, count, PHASE_BYTES, dtype)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            begin = row * NUM_FEATURES
            inside = begin + at < size if KIND == SUM else at < NUM_FEATURES
            bits = _bits(sum_of_parts(x_PTE + begin + at, inside, size, PARTS).to(dtype))
            values = _receive(bits, memory + begin + at, slot, inside, rounds_G, lost_N, limit_ms, dtype, N, RANK).to(
                dtype
            )
            _empty(memory + begin + at, slot, inside, N, RANK)
            if KIND != SUM:
                values = values + tl.load(residual_TE + begin + at, mask=inside, other=0.0)
                tl.store(total_TE + begin + at, values, mask=inside)
                values = normed(values, weight, eps, NUM_FEATURES, KIND)
            tl.store(out_TE + begin + at, values, mask=inside)
        _end_round(rounds_G, count)


@triton.jit(do_not_specialize=["units", "limit_ms"])
def _reduce_scatter(
    x, out, peers_N, rounds_G, lost_N, units, limit_ms,
    E: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr, PHASE_BYTES: tl.constexpr, PDL: tl.constexpr,
    PUSH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Each rank gets its share of every rank's message of `size` elements, and adds up that.

    Shares end in zeros where the message does: every rank sends something to every other one in each round.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    at = tl.arange(0, E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    size, count = units * UNIT, tl.load(rounds_G + tl.program_id(0))
    share = tl.cdiv(size, N * SLOT_MULTIPLE) * SLOT_MULTIPLE
    if PUSH:
        for begin in range(tl.program_id(0) * E, share, tl.num_programs(0) * E):
            for step in tl.static_range(1, N):
                target = (RANK + step) % N
                bits = _share(x, target * share + begin + at, begin + at < share, size)
                memory = _memory(peers_N, target, count, PHASE_BYTES, dtype)
                tl.store(memory + RANK * share + begin + at, bits, mask=begin + at < share)
        tl.debug_barrier()
    if READ:
        memory = _memory(peers_N, RANK, count, PHASE_BYTES, dtype)
        for begin in range(tl.program_id(0) * E, share, tl.num_programs(0) * E):
            inside = begin + at < share
            bits = _share(x, RANK * share + begin + at, inside, size)
            values = _receive(bits, memory + begin + at, share, inside, rounds_G, lost_N, limit_ms, dtype, N, RANK)
            _empty(memory + begin + at, share, inside, N, RANK)
            tl.store(out + begin + at, values.to(dtype), mask=inside)
        _end_round(rounds_G, count)


@triton.jit(do_not_specialize=["units", "limit_ms", "width_units"])
def _all_gather(
    x_TW, out_TNW, peers_N, rounds_G, lost_N, units, limit_ms, width_units,
    E: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr, PHASE_BYTES: tl.constexpr, PDL: tl.constexpr,
    PUSH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Every rank gets every rank's message of `size` elements in rows of `width`, and puts rows side by side."""
    dtype: tl.constexpr = out_TNW.dtype.element_ty
    at = tl.arange(0, E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    size, width, count = units * UNIT, width_units * UNIT, tl.load(rounds_G + tl.program_id(0))
    slot = tl.cdiv(size, SLOT_MULTIPLE) * SLOT_MULTIPLE
    if PUSH:
        for begin in range(tl.program_id(0) * E, size, tl.num_programs(0) * E):
            inside = begin + at < size
            bits = _bits(tl.load(x_TW + begin + at, mask=inside, other=0.0))
            for step in tl.static_range(1, N):
                memory = _memory(peers_N, (RANK + step) % N, count, PHASE_BYTES, dtype)
                tl.store(memory + RANK * slot + begin + at, bits, mask=inside)
        tl.debug_barrier()
    if READ:
        memory = _memory(peers_N, RANK, count, PHASE_BYTES, dtype)
        for begin in range(tl.program_id(0) * E, size, tl.num_programs(0) * E):
            inside = begin + at < size
            own = _bits(tl.load(x_TW + begin + at, mask=inside, other=0.0))
            _receive(own, memory + begin + at, slot, inside, rounds_G, lost_N, limit_ms, dtype, N, RANK)
            place = (begin + at) // width * (N * width) + (begin + at) % width
            for source in tl.static_range(N):
                bits = own
                if source != RANK:
                    bits = tl.load(memory + source * slot + begin + at, mask=inside, other=0, volatile=True)
                tl.store(out_TNW + source * width + place, bits.to(dtype, bitcast=True), mask=inside)
            _empty(memory + begin + at, slot, inside, N, RANK)
        _end_round(rounds_G, count)


@triton.jit
def _share(x, at, inside, size):
    return _bits(tl.load(x + at, mask=inside & (at < size), other=0.0))


@triton.jit
def _bits(values):
    """Return what a message has of `values`."""
    bits = values.to(_word(values.dtype), bitcast=True)
    return tl.where(_is_empty(bits), tl.zeros_like(bits), bits)


@triton.jit
def _is_empty(bits):
    return bits == _empty_word(bits.dtype)


@triton.constexpr_function
def _word(dtype):
    return tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32


@triton.constexpr_function
def _empty_word(dtype):
    return inbox.EMPTY_16 if dtype.primitive_bitwidth == 16 else inbox.EMPTY_32


@triton.jit
def _memory(peers_N, rank, count, PHASE_BYTES: tl.constexpr, DTYPE: tl.constexpr):
    """Return where a rank has the messages of this round."""
    address = tl.load(peers_N + rank) + (count & 1) * PHASE_BYTES
    return tl.multiple_of(address.to(tl.pointer_type(_word(DTYPE))), 16)


@triton.jit
def _receive(
    own, slots, slot, inside, rounds_G, lost_N, limit_ms,
    DTYPE: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Wait until no source's elements at `slots` are empty; return the sum over ranks [E] float32, the first rank's first.

    After the limit the sum is wrong, `lost_N` gets a 1 for each rank that is missing, and no later round waits.
    """
    has_given_up = rounds_G + tl.num_programs(0)
    limit_ns = tl.where(tl.load(has_given_up) != 0, 0, limit_ms.to(tl.int64) * 1_000_000)
    total = tl.zeros(own.shape, tl.float32)
    empty = tl.zeros(own.shape, tl.int32)
    is_missing = True
    waited = limit_ns * 0
    began = globaltimer() if TIMED else waited
    waits = True
    while waits:
        total = tl.zeros(own.shape, tl.float32)
        empty = tl.zeros(own.shape, tl.int32)
        for source in tl.static_range(N):
            bits = own
            if source != RANK:
                bits = tl.load(slots + source * slot, mask=inside, other=0, volatile=True)
            empty |= _is_empty(bits).to(tl.int32) << source
            total += bits.to(DTYPE, bitcast=True).to(tl.float32)
        is_missing = tl.max(empty, axis=0) != 0
        waited = globaltimer() - began if TIMED else waited + POLL_NS
        waits = is_missing & (waited < limit_ns)
    if is_missing:
        tl.store(has_given_up, 1)
        for source in tl.static_range(N):
            # A word each: other programs may miss other ranks.
            if tl.max((empty >> source) & 1, axis=0) != 0:
                tl.store(lost_N + source, 1)
    return total


@triton.jit
def _empty(slots, slot, inside, N: tl.constexpr, RANK: tl.constexpr):
    """Empty what `_receive` has read."""
    word: tl.constexpr = slots.dtype.element_ty
    for source in tl.static_range(N):
        if source != RANK:
            tl.store(slots + source * slot, tl.full(slots.shape, _empty_word(word), word), mask=inside)


@triton.jit
def _end_round(rounds_G, count):
    tl.debug_barrier()  # all warps have read the count
    tl.store(rounds_G + tl.program_id(0), count + 1)


ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = Kernel(_all_reduce), Kernel(_reduce_scatter), Kernel(_all_gather)
