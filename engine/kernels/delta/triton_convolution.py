"""Triton version of `convolution`. T tokens, C channels, K taps, I tiles.

Decoding sequences read and shift their inputs in one program, those with drafts token by token. Prompts are convolved tile by
tile, all at once, and keep their inputs in a second kernel, because a tile may end in the block that its prompt begins with.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import TILE_ROWS, Channels, StateBatch
from engine.kernels.delta.triton_moves import CARRIED, carried_target
from engine.kernels.launch import Kernel

CHANNELS_OF_A_STEP = 256
CHANNELS_OF_A_TILE = 64


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    batch: StateBatch,
    channels: Channels,
) -> torch.Tensor:
    out = torch.empty((x.shape[0], channels.count), dtype=x.dtype, device=x.device)
    before, behind = channels.gates or (-1, -1)
    fixed = (x.stride(0), kept.stride(0), kept.stride(1), channels.taps, channels.count, *_columns(channels), before)
    ends = (bias is not None, channels.has_silu, behind)
    variant = (x.dtype, kept.data_ptr() % 16, fixed, ends)
    biases = weight if bias is None else bias
    if len(batch.moves):
        _STEP.launch(
            (len(batch.moves), triton.cdiv(channels.count, CHANNELS_OF_A_STEP)), variant,
            x, weight, biases, kept, batch.moves, out, *fixed, *ends, CHANNELS_OF_A_STEP,
        )  # fmt: skip
    if len(batch.runs):
        blocks = triton.cdiv(channels.count, CHANNELS_OF_A_TILE)
        _TILES.launch(
            (len(batch.tiles), blocks), variant,
            x, weight, biases, kept, batch.tiles, out, *fixed, *ends, TILE_ROWS, CHANNELS_OF_A_TILE,
        )  # fmt: skip
        _KEEP.launch(
            (len(batch.runs), triton.cdiv(channels.count, CHANNELS_OF_A_STEP)), variant,
            x, kept, batch.tiles, batch.runs, *fixed, CHANNELS_OF_A_STEP,
        )  # fmt: skip
    return out


def _columns(channels: Channels) -> tuple[int, ...]:
    """For each of three spans: first channel, width, first column and stride. Missing spans begin at the end."""
    found, begin = list[int](), 0
    for span in channels.spans:
        found += [begin, span.width, span.columns.first, span.columns.step]
        begin += span.groups * span.width
    return (*found, *(3 - len(channels.spans)) * [begin, 1, 0, 0])


@triton.jit
def _input(
    row, c, mask, A: tl.constexpr, A_WIDTH: tl.constexpr, A_FIRST: tl.constexpr, A_STEP: tl.constexpr,
    B: tl.constexpr, B_WIDTH: tl.constexpr, B_FIRST: tl.constexpr, B_STEP: tl.constexpr,
    C: tl.constexpr, C_WIDTH: tl.constexpr, C_FIRST: tl.constexpr, C_STEP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """A channel's input in a row of the projection, which begins there."""
    column = A_FIRST + c // A_WIDTH * A_STEP + c % A_WIDTH
    column = tl.where(c >= B, B_FIRST + (c - B) // B_WIDTH * B_STEP + (c - B) % B_WIDTH, column)
    column = tl.where(c >= C, C_FIRST + (c - C) // C_WIDTH * C_STEP + (c - C) % C_WIDTH, column)
    return _gated(tl.load(row + column, mask=mask, other=0.0), row, c, mask, GATE)


@triton.jit
def _gated(value, row, c, mask, GATE: tl.constexpr):
    if GATE >= 0:
        gate = tl.load(row + GATE + c, mask=mask, other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _output(total, row, c, mask, dtype: tl.constexpr, HAS_SILU: tl.constexpr, GATE: tl.constexpr):
    """Return the activated and gated sums."""
    total = total.to(dtype)
    if HAS_SILU:
        wide = total.to(tl.float32)
        total = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    return _gated(total, row, c, mask, GATE)


@triton.jit
def _step(
    x, weight_CK, bias_C, kept, moves_S2, out_TC,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    S0: tl.constexpr, W0: tl.constexpr, F0: tl.constexpr, T0: tl.constexpr,
    S1: tl.constexpr, W1: tl.constexpr, F1: tl.constexpr, T1: tl.constexpr,
    S2: tl.constexpr, W2: tl.constexpr, F2: tl.constexpr, T2: tl.constexpr, BEFORE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, BEHIND: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if (target >= 0) & (source != CARRIED):
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < C
        while target >= 0:
            following = carried_target(moves_S2, row)
            own = x + row * ROW
            new = _input(own, c, inside, S0, W0, F0, T0, S1, W1, F1, T1, S2, W2, F2, T2, BEFORE)
            total = tl.zeros((CHANNELS,), tl.float32)
            if HAS_BIAS:
                total += tl.load(bias_C + c, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_CK + c * TAPS + TAPS - 1, mask=inside, other=0.0)
            total += new.to(tl.float32) * weight.to(tl.float32)
            for tap in tl.static_range(TAPS - 1):
                old = tl.load(kept + source * BLOCK + tap * PLANE + c, mask=inside & (source >= 0), other=0.0)
                weight = tl.load(weight_CK + c * TAPS + tap, mask=inside, other=0.0)
                total += old.to(tl.float32) * weight.to(tl.float32)
                if tap > 0:
                    tl.store(kept + target * BLOCK + (tap - 1) * PLANE + c, old, mask=inside)
            tl.store(kept + target * BLOCK + (TAPS - 2) * PLANE + c, new, mask=inside)
            out = _output(total, own, c, inside, out_TC.dtype.element_ty, HAS_SILU, BEHIND)
            tl.store(out_TC + row * C + c, out, mask=inside)
            if following >= 0:
                tl.debug_barrier()  # the next token reads what was kept
            row, source, target = row + 1, target, following


@triton.jit
def _tiles(
    x, weight_CK, bias_C, kept, tiles_I8, out_TC,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    S0: tl.constexpr, W0: tl.constexpr, F0: tl.constexpr, T0: tl.constexpr,
    S1: tl.constexpr, W1: tl.constexpr, F1: tl.constexpr, T1: tl.constexpr,
    S2: tl.constexpr, W2: tl.constexpr, F2: tl.constexpr, T2: tl.constexpr, BEFORE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tile = tiles_I8 + tl.program_id(0).to(tl.int64) * 8
    first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    begin, before = tl.load(tile + 4).to(tl.int64), tl.load(tile + 5).to(tl.int64)
    if count > 0:
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        r = tl.arange(0, ROWS)
        row = first + r
        inside = (r < count)[:, None] & (c < C)[None, :]
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            at = row - (TAPS - 1 - tap)
            is_new = (at >= begin)[:, None]
            value = _input(
                x + at[:, None] * ROW, c[None, :], inside & is_new, S0, W0, F0, T0, S1, W1, F1, T1, S2, W2, F2, T2, BEFORE
            )  # fmt: skip
            if tap < TAPS - 1:
                plane = (at - begin + TAPS - 1)[:, None]
                there = inside & (at < begin)[:, None] & (before >= 0)
                old = tl.load(kept + before * BLOCK + plane * PLANE + c[None, :], mask=there, other=0.0)
                value = tl.where(is_new, value, old)
            weight = tl.load(weight_CK + c * TAPS + tap, mask=c < C, other=0.0)
            total += value.to(tl.float32) * weight.to(tl.float32)[None, :]
        own = x + row[:, None] * ROW
        out = _output(total, own, c[None, :], inside, out_TC.dtype.element_ty, HAS_SILU, BEHIND)
        tl.store(out_TC + row[:, None] * C + c[None, :], out, mask=inside)


@triton.jit
def _keep(
    x, kept, tiles_I8, runs_P2,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    S0: tl.constexpr, W0: tl.constexpr, F0: tl.constexpr, T0: tl.constexpr,
    S1: tl.constexpr, W1: tl.constexpr, F1: tl.constexpr, T1: tl.constexpr,
    S2: tl.constexpr, W2: tl.constexpr, F2: tl.constexpr, T2: tl.constexpr, BEFORE: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last tile goes first: only the first ones may write the block that all read. Planes in order."""
    run = tl.program_id(0).to(tl.int64)
    first, count = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    for back in range(count):
        tile = tiles_I8 + (first + count - 1 - back) * 8
        target = tl.load(tile + 3).to(tl.int64)
        if target >= 0:
            begin, before = tl.load(tile + 4).to(tl.int64), tl.load(tile + 5).to(tl.int64)
            end = tl.load(tile).to(tl.int64) + tl.load(tile + 1)
            for plane in tl.static_range(TAPS - 1):
                at = end - (TAPS - 1) + plane
                new = _input(
                    x + at * ROW, c, inside & (at >= begin), S0, W0, F0, T0, S1, W1, F1, T1, S2, W2, F2, T2, BEFORE
                )
                there = inside & (at < begin) & (before >= 0)
                old = tl.load(kept + before * BLOCK + (at - begin + TAPS - 1) * PLANE + c, mask=there, other=0.0)
                tl.store(kept + target * BLOCK + plane * PLANE + c, tl.where(at >= begin, new, old), mask=inside)


_STEP, _TILES, _KEEP = Kernel(_step), Kernel(_tiles), Kernel(_keep)
