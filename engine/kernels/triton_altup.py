"""Triton versions of `altup`: one program a token, with all its streams. S streams, T tokens, E features."""

import torch
import triton
import triton.language as tl

from engine.kernels.altup import StreamRouter
from engine.kernels.launch import Kernel


def predict_streams(
    streams: torch.Tensor, router: StreamRouter, coefficients: torch.Tensor, *, active: int
) -> torch.Tensor:
    streams, out = streams.contiguous(), torch.empty_like(streams, memory_format=torch.contiguous_format)
    _launch(_PREDICT, streams, streams[active], router, coefficients, out, active)
    return out


def correct_streams(
    streams: torch.Tensor, activated: torch.Tensor, router: StreamRouter, coefficients: torch.Tensor, *, active: int
) -> torch.Tensor:
    streams, out = streams.contiguous(), torch.empty_like(streams, memory_format=torch.contiguous_format)
    _launch(_CORRECT, streams, activated.contiguous(), router, coefficients, out, active)
    return out


def _launch(
    kernel: Kernel,
    streams: torch.Tensor,
    read: torch.Tensor,
    router: StreamRouter,
    coefficients: torch.Tensor,
    out: torch.Tensor,
    active: int,
) -> None:
    num_streams, num_tokens, num_features = streams.shape
    wide, lanes = triton.next_power_of_2(num_features), triton.next_power_of_2(num_streams)
    fixed = (active, num_streams, num_features, lanes, wide)
    kernel.launch(
        (num_tokens,), (streams.dtype, fixed),
        streams, read, router.norm, router.rows, coefficients, out, num_tokens, router.eps, *fixed,
        num_warps=8 if wide * lanes >= 8192 else 4,
    )  # fmt: skip


@triton.jit
def _routed(
    x_E, norm_E, rows_SE, eps,
    NUM_STREAMS: tl.constexpr, NUM_FEATURES: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Return a token's coefficients [S], and its row [E] in float32."""
    at, stream = tl.arange(0, E), tl.arange(0, S)
    inside = at < NUM_FEATURES
    x = tl.load(x_E + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / NUM_FEATURES + eps)).to(x_E.dtype.element_ty)
    normed = (tl.load(norm_E + at, mask=inside, other=0.0) * normed).to(tl.float32)
    rows = tl.load(
        rows_SE + stream[:, None] * NUM_FEATURES + at[None, :],
        mask=(stream < NUM_STREAMS)[:, None] & inside[None, :],
        other=0.0,
    )
    products = tl.sum(rows.to(tl.float32) * normed[None, :], axis=1) / NUM_FEATURES
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * products)), x  # tanh


@triton.jit
def _all_streams(
    streams_STE, token, num_tokens,
    NUM_STREAMS: tl.constexpr, NUM_FEATURES: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Return pointers to a token's streams [S, E], and their mask."""
    at, stream = tl.arange(0, E), tl.arange(0, S)
    rows = (stream.to(tl.int64) * num_tokens + token) * NUM_FEATURES
    return rows[:, None] + at[None, :], (stream < NUM_STREAMS)[:, None] & (at < NUM_FEATURES)[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def _predict(
    streams_STE, active_TE, norm_E, rows_SE, coefficients, out_STE, num_tokens, eps,
    ACTIVE: tl.constexpr, NUM_STREAMS: tl.constexpr, NUM_FEATURES: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, stream = tl.arange(0, E), tl.arange(0, S)
    routed, _ = _routed(
        active_TE + token * NUM_FEATURES, norm_E, rows_SE, eps, NUM_STREAMS, NUM_FEATURES, S, E
    )  # fmt: skip
    where, inside = _all_streams(streams_STE, token, num_tokens, NUM_STREAMS, NUM_FEATURES, S, E)
    streams = tl.load(streams_STE + where, mask=inside, other=0.0).to(tl.float32)
    there = (stream < NUM_STREAMS)[:, None] & (stream < NUM_STREAMS)[None, :]
    for of in tl.static_range(NUM_STREAMS):
        numbers = of * NUM_STREAMS * NUM_STREAMS + stream[:, None] * NUM_STREAMS + stream[None, :]
        shares = tl.sum(tl.load(coefficients + numbers, mask=there, other=0.0).to(tl.float32) * routed[None, :], axis=1)
        row = (of * num_tokens.to(tl.int64) + token) * NUM_FEATURES + at
        own = tl.load(streams_STE + row, mask=at < NUM_FEATURES, other=0.0).to(tl.float32)
        predicted = own + tl.sum(streams * shares[:, None], axis=0)
        tl.store(out_STE + row, predicted.to(out_STE.dtype.element_ty), mask=at < NUM_FEATURES)


@triton.jit(do_not_specialize=["num_tokens"])
def _correct(
    streams_STE, activated_TE, norm_E, rows_SE, coefficients, out_STE, num_tokens, eps,
    ACTIVE: tl.constexpr, NUM_STREAMS: tl.constexpr, NUM_FEATURES: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, stream = tl.arange(0, E), tl.arange(0, S)
    routed, activated = _routed(
        activated_TE + token * NUM_FEATURES, norm_E, rows_SE, eps, NUM_STREAMS, NUM_FEATURES, S, E
    )  # fmt: skip
    there = (stream < NUM_STREAMS)[:, None] & (stream < NUM_STREAMS)[None, :]
    numbers = stream[:, None] * NUM_STREAMS + stream[None, :]
    coefficients = tl.load(coefficients + numbers, mask=there, other=0.0).to(tl.float32)
    shares = 1.0 + tl.sum(coefficients * routed[None, :], axis=1)
    row = (ACTIVE * num_tokens.to(tl.int64) + token) * NUM_FEATURES + at
    changed = activated - tl.load(streams_STE + row, mask=at < NUM_FEATURES, other=0.0).to(tl.float32)
    where, inside = _all_streams(streams_STE, token, num_tokens, NUM_STREAMS, NUM_FEATURES, S, E)
    streams = tl.load(streams_STE + where, mask=inside, other=0.0).to(tl.float32)
    corrected = streams + changed[None, :] * shares[:, None]
    tl.store(out_STE + where, corrected.to(out_STE.dtype.element_ty), mask=inside)


_PREDICT, _CORRECT = Kernel(_predict), Kernel(_correct)
