# ruff: noqa: SIM300 - Triton compares a compile-time value with what stands on its right
"""Triton version of `groups`. M rows, N outputs, K inputs.

Few rows: the codes are streamed once, made numbers of the activations' type in registers and given to the tensor core from there;
N is its wide dimension. An integer of 4 bits is put into the mantissa of 128 (bfloat16) or of 1024 (float16), two at a time, and
128 + zero is subtracted: both are exact, and much faster than a conversion. One of 8 bits goes into the mantissa of 2^23.

Where a block lies within a group the sum is multiplied by the scale, so that no element is rounded. Elements of smaller groups,
and of those with minimums, are computed in float32 and rounded before the product.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as torch_linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.activation import act_and_mul
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.groups import WORDS, Groups
from engine.kernels.triton_activation import gelu_tanh

MAX_ROWS = 64  # with more, the vendor's library multiplies what one kernel has dequantised
PREFETCH_WORDS = 64  # leading ones of each row


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut."""

    rows: int  # weight rows of a program
    stages: int  # blocks in flight
    warps: int
    splits: int = 1  # over K


def dequantised(codes: torch.Tensor, weight: Groups, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=codes.device)
    blocks, rows = weight.codes.shape[-1] // WORDS, 32
    _DEQUANTISE.launch(
        (triton.cdiv(weight.outputs, rows), blocks), None,
        *operands(weight), out, weight.outputs, K=weight.inputs, BN=rows, **constants(weight), num_warps=4,
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, weight: Groups, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    if not _suits(x):
        plain = dequantised(weight.codes, weight, x.dtype)
        if out is None:
            return torch_linear(x, plain, bias)
        return torch.mm(x, plain.T, out=out) if bias is None else torch.addmm(bias, x, plain.T, out=out)
    if out is None:
        out = x.new_empty((x.shape[0], weight.outputs))
    _launch(x, weight, bias, out, _choose(x, weight, parts=False))
    return out


def linear_parts(x: torch.Tensor, weight: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    if not _suits(x):
        return torch_linear(x, dequantised(weight.codes, weight, x.dtype), bias)
    tiles = _choose(x, weight, parts=True)
    shape, dtype = (x.shape[0], weight.outputs), x.dtype
    if tiles.splits > 1:
        shape, dtype = (tiles.splits, *shape), torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _launch(x, weight, bias, out, tiles)
    return out


def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: Groups, bias: torch.Tensor | None
) -> torch.Tensor | None:
    if bias is not None or _suits(x):
        return linear_parts(x, weight, bias)
    residual.addmm_(x, dequantised(weight.codes, weight, x.dtype).T)
    return None


def gated_linear(x: torch.Tensor, gate_up: Groups, bias: torch.Tensor | None, activation: str = "silu") -> torch.Tensor:
    if not _suits(x):
        return act_and_mul(torch_linear(x, dequantised(gate_up.codes, gate_up, x.dtype), bias), activation)
    out = x.new_empty((x.shape[0], gate_up.outputs // 2))
    _launch(x, gate_up, bias, out, Tiles(64, 4, 4), gated=True, gelu=activation == "gelu_tanh")
    return out


def _suits(x: torch.Tensor) -> bool:
    """Whether the kernel of few rows computes this."""
    return 0 < x.shape[0] <= MAX_ROWS and x.element_size() == 2


def _choose(x: torch.Tensor, weight: Groups, *, parts: bool) -> Tiles:
    """Enough programs for every processor; a split has four blocks or more."""
    processors, blocks = describe(x.device).processors, weight.codes.shape[-1] // WORDS
    tiles = triton.cdiv(weight.outputs, 64)
    rows = 64 if tiles >= processors or parts else 32
    splits = 1
    while parts and tiles * splits < processors and blocks // (2 * splits) >= 4 and splits < 4:
        splits *= 2
    return Tiles(rows, 6, 4, splits)


def _launch(
    x: torch.Tensor,
    weight: Groups,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> None:
    """Write the product of few rows to `out` [T, N], or its partial sums [P, T, N]."""
    num_rows, num_outputs = x.shape[0], out.shape[-1]
    pdl = describe(x.device).has_tma
    _FEW_ROWS.launch(
        (triton.cdiv(num_outputs, tiles.rows), tiles.splits), None,
        x, *operands(weight), out, weight.scales if bias is None else bias, num_rows, num_outputs,
        x.stride(0), num_outputs, num_rows * num_outputs,
        K=weight.inputs, BM=max(16, triton.next_power_of_2(num_rows)), BN=tiles.rows, SPLITS=tiles.splits,
        **constants(weight), GATED=gated, GELU=gelu, HAS_BIAS=bias is not None,
        PREFETCH=min(PREFETCH_WORDS, triton.next_power_of_2(weight.codes.shape[-1] // tiles.splits)), PDL=pdl,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip


def operands(weight: Groups) -> tuple[torch.Tensor, ...]:
    """Codes, scales, and zeros or minimums."""
    lower = weight.minimums if weight.zeros is None else weight.zeros
    return weight.codes, weight.scales, weight.scales if lower is None else lower


def constants(weight: Groups) -> dict[str, int | bool]:
    return {
        "G": weight.scales.shape[-2],
        "GROUP": weight.group,
        "BITS": weight.bits,
        "MIDDLE": weight.middle,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_MINIMUMS": weight.minimums is not None,
        "E2M1": weight.is_e2m1,
        "PLAIN": triton.knobs.runtime.interpret,  # which has no instructions of a GPU
    }


@triton.constexpr_function
def _integers(plane, bits, wide):
    """Instructions for a plane of two words: two integers less `$3`, as numbers of 16 bits. `wide`: bfloat16."""
    kind = "bf16x2" if wide else "f16x2"
    if bits == 8:
        return f"""{{
            .reg .b32 a, b; .reg .f32 c, d;
            prmt.b32 a, $1, 0x4b000000, {0x7440 | plane:#x};
            prmt.b32 b, $2, 0x4b000000, {0x7440 | plane:#x};
            mov.b32 c, a; mov.b32 d, b;
            sub.f32 c, c, $3; sub.f32 d, d, $4;
            cvt.rn.{kind}.f32 $0, d, c;
        }}"""
    magic, one = ("0x43004300", "0x3f803f80") if wide else ("0x64006400", "0x3c003c00")
    return f"""{{
        .reg .b32 t, one;
        prmt.b32 t, $1, $2, {0x5410 if plane < 4 else 0x7632:#x};
        shr.u32 t, t, {4 * (plane % 4)};
        lop3.b32 t, t, 0x000f000f, {magic}, 0xea;
        mov.b32 one, {one};
        fma.rn.{kind} $0, t, one, $3;
    }}"""


@triton.constexpr_function
def _floats(plane, wide):
    """Instructions for a plane of two words: two floats of 4 bits at the end of their exponents, see `_SMALLEST`."""
    at = 4 * (plane % 4)
    to, mask = (6, "0x01c001c0") if wide else (9, "0x0e000e00")
    shift = f"shl.b32 m, t, {to - at};" if to >= at else f"shr.u32 m, t, {at - to};"
    return f"""{{
        .reg .b32 t, m, s;
        prmt.b32 t, $1, $2, {0x5410 if plane < 4 else 0x7632:#x};
        {shift}
        and.b32 m, m, {mask};
        shl.b32 s, t, {12 - at};
        and.b32 s, s, 0x80008000;
        or.b32 $0, m, s;
    }}"""


@triton.jit
def _plane(
    words, less, i: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, PLAIN: tl.constexpr, DTYPE: tl.constexpr
):
    """Plane `i` of the words [BN, 16]: integers less the zero `less` [BN, 16], or floats."""
    WIDE: tl.constexpr = DTYPE == tl.bfloat16
    if PLAIN:
        codes = (words >> (BITS * i)) & ((1 << BITS) - 1)
        if E2M1:
            exponent, odd = (codes >> 1) & 3, codes & 1
            twice = tl.where(exponent == 0, odd, (2 + odd) << tl.maximum(exponent - 1, 0))
            return (tl.where(codes >= 8, -twice, twice).to(tl.float32) * 0.5).to(DTYPE)
        return (codes.to(tl.float32) - less).to(DTYPE)
    if E2M1:
        bits = tl.inline_asm_elementwise(_floats(i, WIDE), "=r,r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    elif BITS == 8:
        bits = tl.inline_asm_elementwise(
            _integers(i, 8, WIDE), "=r,r,r,f,f", [words, less + 8388608.0], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        OFFSET: tl.constexpr = 128.0 if WIDE else 1024.0
        bits = tl.inline_asm_elementwise(
            _integers(i, 4, WIDE), "=r,r,r,r", [words, (-OFFSET - less).to(DTYPE)], dtype=tl.int16, is_pure=True, pack=2
        )
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _weights(
    words, scale_at, lower_at, group, N, i: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, PLAIN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Elements [BN, 16] of plane `i`; unless `SCALED`, they lack the factor of their scale."""
    at = group.to(tl.int64) * N
    less = tl.full((BN, 1), MIDDLE, tl.float32)
    if HAS_ZEROS:
        less = tl.load(lower_at + at).to(tl.float32)[:, None]
    less = tl.broadcast_to(less, words.shape)
    w = _plane(words, less, i, BITS, E2M1, PLAIN, DTYPE)
    if SCALED:
        w = w.to(tl.float32)
        if E2M1 and not PLAIN:
            w *= 8.507059173023462e37 if DTYPE == tl.bfloat16 else 16384.0  # 2^126, 2^14
        w *= tl.load(scale_at + at).to(tl.float32)[:, None]
        if HAS_MINIMUMS:
            w += tl.load(lower_at + at).to(tl.float32)[:, None]
        w = w.to(DTYPE)
    return w


@triton.jit
def accumulate(
    words_at, up, scale_at, lower_at, N, width, x_at, there, begin, end,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, PLAIN: tl.constexpr,
    DTYPE: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products [BN, BM] of the blocks from `begin` to `end`, of the gate and of up; the second only if GATED.

    `words_at` [BN, 16] points at the rows' first words, and those of up are `up` words behind; `scale_at` and `lower_at` [BN] at
    the first group of `width` each, and those of up are N behind. `x_at` [BM, 16]: the first inputs of the rows that are `there`.
    """
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 16 * PLANES
    AFTER: tl.constexpr = GROUP % COLUMNS == 0 and not HAS_MINIMUMS and not E2M1
    c = tl.arange(0, 16)
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = acc
    if AFTER:  # a scale is asked for one block ahead
        first = tl.minimum(begin * COLUMNS // GROUP, G - 1).to(tl.int64) * width
        scale = tl.load(scale_at + first)
        if GATED:
            scale_up = tl.load(scale_at + N + first)
    for block in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + block * 16, eviction_policy="evict_first")
        if GATED:
            words_up = tl.load(words_at + up + block * 16, eviction_policy="evict_first")
        if AFTER:
            following = tl.minimum((block + 1) * COLUMNS // GROUP, G - 1).to(tl.int64) * width
            next_scale = tl.load(scale_at + following)
            part = tl.zeros((BN, BM), tl.float32)
            if GATED:
                next_up = tl.load(scale_at + N + following)
                part_up = tl.zeros((BN, BM), tl.float32)
        for i in tl.static_range(PLANES):
            k = block * COLUMNS + i * 16
            group = tl.minimum(k // GROUP, G - 1)
            if K % COLUMNS == 0:
                x = tl.load(x_at + k, mask=there[:, None], other=0.0)
            else:
                x = tl.load(x_at + k, mask=there[:, None] & (k + c < K)[None, :], other=0.0)
            w = _weights(
                words, scale_at, lower_at, group, width, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1, not AFTER,
                PLAIN, DTYPE,
            )  # fmt: skip
            if AFTER:
                part = tl.dot(w, tl.trans(x), part)
            else:
                acc = tl.dot(w, tl.trans(x), acc)
            if GATED:
                w = _weights(
                    words_up, scale_at + N, lower_at + N, group, width, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS,
                    E2M1, not AFTER, PLAIN, DTYPE,
                )  # fmt: skip
                if AFTER:
                    part_up = tl.dot(w, tl.trans(x), part_up)
                else:
                    acc_up = tl.dot(w, tl.trans(x), acc_up)
        if AFTER:
            acc += part * scale.to(tl.float32)[:, None]
            scale = next_scale
            if GATED:
                acc_up += part_up * scale_up.to(tl.float32)[:, None]
                scale_up = next_up
    return acc, acc_up


@triton.jit
def _dequantise(
    codes, scales, lower, out_NK, N,
    K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 16 * PLANES
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16)
    block = tl.program_id(1)
    row = tl.minimum(n, N - 1)
    words = tl.load(codes + row.to(tl.int64)[:, None] * (BLOCKS * 16) + block * 16 + c[None, :])
    for i in tl.static_range(PLANES):
        k = block * COLUMNS + i * 16
        group = tl.minimum(k // GROUP, G - 1)
        w = _weights(
            words, scales + row, lower + row, group, N, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1, True, PLAIN,
            out_NK.dtype.element_ty,
        )  # fmt: skip
        at = out_NK + n.to(tl.int64)[:, None] * K + (k + c)[None, :]
        tl.store(at, w, mask=(n < N)[:, None] & (k + c < K)[None, :])


_DEQUANTISE = Kernel(_dequantise)


@triton.jit
def _prefetch(pointers):
    """Ask for the cache lines at `pointers` without waiting."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MK, codes, scales, lower, out, bias_N, M, N, x_row, out_row, out_split,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, PLAIN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 16 * PLANES
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    BLOCKS_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    DTYPE: tl.constexpr = x_MK.dtype.element_ty
    SIDES: tl.constexpr = 2 if GATED else 1
    tile, split = tl.program_id(0), tl.program_id(1)
    begin = split * BLOCKS_SPLIT
    end = tl.minimum(begin + BLOCKS_SPLIT, BLOCKS)
    n = tile * BN + tl.arange(0, BN)
    m, c = tl.arange(0, BM), tl.arange(0, 16)
    known = tl.minimum(n, N - 1)
    at = codes + known.to(tl.int64)[:, None] * (BLOCKS * 16)
    up = N.to(tl.int64) * (BLOCKS * 16)
    if PDL:
        gdc_launch_dependents()
        LINES: tl.constexpr = (PREFETCH + 31) // 32  # cache lines of 128 bytes = 32 words
        ahead = begin * 16 + tl.arange(0, LINES)[None, :] * 32
        _prefetch(at + ahead)
        if GATED:
            _prefetch(at + up + ahead)
        gdc_wait()
    acc, acc_up = accumulate(
        at + c[None, :], up, scales + known, lower + known, N, N * SIDES,
        x_MK + m[:, None] * x_row + c[None, :], m < M, begin, end, K, BM, BN, G, GROUP, BITS, MIDDLE, HAS_ZEROS,
        HAS_MINIMUMS, E2M1, PLAIN, DTYPE, GATED, STAGES,
    )  # fmt: skip
    if HAS_BIAS and split == 0:
        acc += tl.load(bias_N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_N + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up_value = acc.to(DTYPE).to(tl.float32), acc_up.to(DTYPE).to(tl.float32)
        gate = gelu_tanh(gate) if GELU else gate / (1.0 + tl.exp(-gate))
        acc = gate.to(DTYPE).to(tl.float32) * up_value
    target = out + split.to(tl.int64) * out_split + m[None, :].to(tl.int64) * out_row + n[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


_FEW_ROWS = Kernel(_few_rows)
