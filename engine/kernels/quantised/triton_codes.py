# ruff: noqa: SIM300 - Triton compares a compile-time value with what stands on its right
"""Codes of 4 and 8 bits -> numbers for the tensor core, and products with them. M rows, N outputs, K inputs, see `groups`.

An integer of 4 bits is put into the mantissa of 128 (bfloat16) or of 1024 (float16), two at a time, and 128 + zero is subtracted:
both are exact, and much faster than a conversion. One of 8 bits goes into the mantissa of 2^23. A float of 4 bits keeps its bits,
at the end of the exponents.

Where a block lies within a group the sum is multiplied by the scale, so that no element is rounded. Elements of smaller groups,
and of those with minimums, are computed in float32 and rounded before the product; floats of 4 bits whose scales are bfloat16, as
the activations, without the way through float32.

Each of 16 levels is read where it lies, all in one cache line, in float32: rounded before its scale it would be another.
"""

import triton
import triton.language as tl


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


_TIMES = "mov.b32 s, 0x80008000; mov.b32 t, 0x7b807b80; fma.rn.bf16x2 m, m, t, s; fma.rn.bf16x2 $0, m, $3, s;"


@triton.constexpr_function
def _floats(plane, wide, scaled=False):
    """Instructions for a plane of two words: two floats of 4 bits at the end of their exponents.

    `scaled`, in bfloat16 alone: times `$3`, two numbers of 64 times the scale. The first factor, 2^120, is exact for every code.
    """
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
        or.b32 {"m, m, s" if scaled else "$0, m, s"};
        {_TIMES if scaled else ""}
    }}"""


@triton.constexpr_function
def _levels(plane):
    """Instructions for a plane of a word: the float32 of its code's place behind the address `$2`."""
    return f"""{{
        .reg .b32 c; .reg .b64 a;
        bfe.u32 c, $1, {4 * plane}, 4;
        mad.wide.u32 a, c, 4, $2;
        ld.global.nc.f32 $0, [a];
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
def _named(words, levels, i: tl.constexpr, PLAIN: tl.constexpr):
    """The levels, in float32, that plane `i` of the words [BN, 16] names."""
    if PLAIN:
        return tl.load(levels + ((words >> (4 * i)) & 15))
    # Not `tl.load`: in a loop the compiler would copy the levels to shared memory, code by code.
    address = tl.full(words.shape, 0, tl.int64) + levels.to(tl.int64)
    return tl.inline_asm_elementwise(_levels(i), "=f,r,l", [words, address], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def weights(
    words, scale_at, lower_at, group, N, i: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr,
    PLAIN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Elements [BN, 16] of plane `i`; unless `SCALED`, they lack the factor of their scale.

    `lower_at` points at the LEVELS, if there are any.
    """
    at = group.to(tl.int64) * N
    # Factors of 16 bits, as the numbers: one rounding of each product, as in float32.
    NARROW: tl.constexpr = (
        E2M1 and SCALED and not PLAIN and DTYPE == tl.bfloat16 and scale_at.dtype.element_ty == tl.bfloat16
    )
    less = tl.full((BN, 1), MIDDLE, tl.float32)
    if HAS_ZEROS:
        less = tl.load(lower_at + at).to(tl.float32)[:, None]
    less = tl.broadcast_to(less, words.shape)
    if NARROW:
        factor = tl.broadcast_to((tl.load(scale_at + at) * 64.0).to(DTYPE)[:, None], words.shape)
        bits = tl.inline_asm_elementwise(
            _floats(i, True, True), "=r,r,r,r", [words, factor], dtype=tl.int16, is_pure=True, pack=2
        )
        w = bits.to(DTYPE, bitcast=True)
    elif LEVELS:
        w = _named(words, lower_at, i, PLAIN)
    else:
        w = _plane(words, less, i, BITS, E2M1, PLAIN, DTYPE)
    if SCALED and not NARROW:
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
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr,
    PLAIN: tl.constexpr, DTYPE: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products [BN, BM] of the blocks from `begin` to `end`, of the gate and of up; the second only if GATED.

    `words_at` [BN, 16] points at the rows' first words, and those of up are `up` words behind; `scale_at` and `lower_at` [BN] at
    the first group of `width` each, and those of up are N behind; of LEVELS `lower_at` points at the first. `x_at` [BM, 16]:
    the first inputs of the rows that are `there`.
    """
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 16 * PLANES
    AFTER: tl.constexpr = GROUP % COLUMNS == 0 and not HAS_MINIMUMS and not E2M1 and not LEVELS
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
            if GROUP <= COLUMNS:  # planes of one group load its scale once
                group = tl.minimum(block * (COLUMNS // GROUP) + i * 16 // GROUP, G - 1)
            else:
                group = tl.minimum(k // GROUP, G - 1)
            if K % COLUMNS == 0:
                x = tl.load(x_at + k, mask=there[:, None], other=0.0)
            else:
                x = tl.load(x_at + k, mask=there[:, None] & (k + c < K)[None, :], other=0.0)
            w = weights(
                words, scale_at, lower_at, group, width, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1, LEVELS,
                not AFTER, PLAIN, DTYPE,
            )  # fmt: skip
            if AFTER:
                part = tl.dot(w, tl.trans(x), part)
            else:
                acc = tl.dot(w, tl.trans(x), acc)
            if GATED:
                w = weights(
                    words_up, scale_at + N, lower_at + (0 if LEVELS else N), group, width, i, BN, BITS, MIDDLE,
                    HAS_ZEROS, HAS_MINIMUMS, E2M1, LEVELS, not AFTER, PLAIN, DTYPE,
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
