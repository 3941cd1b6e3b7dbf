# ruff: noqa: SIM300, RUF005 - Triton compares a compile-time value with what stands on its right, and knows no stars
"""Conversion of 4-bit and 8-bit codes for the tensor core, and GEMMs with them. M rows, N outputs, K inputs, see `groups`.

An integer of 4 bits is put into the mantissa of 128 (bfloat16) or of 1024 (float16), two at a time, and 128 + zero is subtracted:
both are exact, and much faster than a conversion. One of 8 bits goes into the mantissa of 2^23. A float of 4 bits keeps its bits,
at the end of the exponents.

A sum of a group's planes is multiplied by its scale, so that no element is rounded; a minimum multiplies the sum of the group's
inputs, a product with ones. Where rows are many beside a group's inputs, elements are computed in float32 and rounded before the
product. Floats of 4 bits whose scales are bfloat16, as the activations, are multiplied as they are: exactly by powers of 2.

Each of 16 levels is read where it lies, all in one cache line, in float32: rounded before its scale it would be another.
"""

import triton
import triton.language as tl

from engine.kernels.quantised.groups import place_of

# Triton's compiler inlines no other functions.
_place_of = triton.constexpr_function(place_of)


@triton.constexpr_function
def _integers(plane, bits, wide, raw=False):
    """PTX for a plane of two words: two integers less `$3`, as 16-bit numbers. `wide`: bfloat16.

    `raw` ones, of 4 bits, are as many too large as `_offset` says.
    """
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
    at = _place_of(plane, 4)
    magic, one = ("0x43004300", "0x3f803f80") if wide else ("0x64006400", "0x3c003c00")
    return f"""{{
        .reg .b32 t, one;
        prmt.b32 t, $1, $2, {0x5410 if at < 4 else 0x7632:#x};
        shr.u32 t, t, {4 * (at % 4)};
        lop3.b32 {"$0" if raw else "t"}, t, 0x000f000f, {magic}, 0xea;
        {"" if raw else f"mov.b32 one, {one}; fma.rn.{kind} $0, t, one, $3;"}
    }}"""


_RAISE = "mov.b32 s, 0x80008000; mov.b32 t, 0x7b807b80; fma.rn.bf16x2 $0, m, t, s;"
_TIMES = _RAISE.replace("$0", "m") + " fma.rn.bf16x2 $0, m, $3, s;"


@triton.constexpr_function
def _floats(plane, wide, scaled=False):
    """PTX for a plane of two words: two 4-bit floats, scaled by 2^-6 in bfloat16, by 2^-14 in float16.

    These have the code's bits at the end of their exponents; bfloat16's, too small for sums, are raised by 2^120: exactly.
    `scaled`, in bfloat16 alone: times `$3`, two numbers of 64 times the scale.
    """
    place = _place_of(plane, 4)
    at = 4 * (place % 4)
    to, mask = (6, "0x01c001c0") if wide else (9, "0x0e000e00")
    shift = f"shl.b32 m, t, {to - at};" if to >= at else f"shr.u32 m, t, {at - to};"
    return f"""{{
        .reg .b32 t, m, s;
        prmt.b32 t, $1, $2, {0x5410 if place < 4 else 0x7632:#x};
        {shift}
        and.b32 m, m, {mask};
        shl.b32 s, t, {12 - at};
        and.b32 s, s, 0x80008000;
        or.b32 {"m" if wide else "$0"}, m, s;
        {_TIMES if scaled else _RAISE if wide else ""}
    }}"""


@triton.constexpr_function
def _offset(bits, plain, dtype):
    """Return the offset of 4-bit integers; other kinds don't keep it."""
    return 0.0 if plain or bits != 4 else 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.constexpr_function
def _missing(e2m1, plain, dtype):
    """The factor omitted by `_plane`."""
    return (64.0 if dtype == tl.bfloat16 else 16384.0) if e2m1 and not plain else 1.0


@triton.constexpr_function
def _levels(plane):
    """PTX for a plane of a word: the float32 at its code's index after the address `$2`."""
    return f"""{{
        .reg .b32 c; .reg .b64 a;
        bfe.u32 c, $1, {4 * _place_of(plane, 4)}, 4;
        mad.wide.u32 a, c, 4, $2;
        ld.global.nc.f32 $0, [a];
    }}"""


@triton.jit
def _plane(
    words, less, i: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, RAW: tl.constexpr, PLAIN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Plane `i` of the words [BN, W]: integers less the zero `less` [BN], or floats without the factor `_missing`.

    RAW integers are `_offset` too large instead.
    """
    WIDE: tl.constexpr = DTYPE == tl.bfloat16
    less = tl.broadcast_to(less[:, None], words.shape)
    if PLAIN:
        codes = (words >> (BITS * _place_of(i, BITS))) & ((1 << BITS) - 1)
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
        OFFSET: tl.constexpr = _offset(BITS, PLAIN, DTYPE)
        bits = tl.inline_asm_elementwise(
            _integers(i, 4, WIDE, RAW), "=r,r,r,r", [words, (-OFFSET - less).to(DTYPE)], dtype=tl.int16, is_pure=True,
            pack=2,
        )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _named(words, levels, i: tl.constexpr, PLAIN: tl.constexpr):
    """The float32 levels indexed by plane `i` of the words [BN, W]."""
    if PLAIN:
        return tl.load(levels + ((words >> (4 * _place_of(i, 4))) & 15))
    # Not `tl.load`: in a loop the compiler would copy the levels to shared memory, code by code.
    address = tl.full(words.shape, 0, tl.int64) + levels.to(tl.int64)
    return tl.inline_asm_elementwise(_levels(i), "=f,r,l", [words, address], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def weights(
    words, scale, lower, levels, i: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Elements [BN, W] of plane `i`. `scale`, `lower` [BN]: its group's; `levels` points at the LEVELS, if there are any."""
    if _is_narrow(E2M1, PLAIN, DTYPE, scale.dtype):
        factor = tl.broadcast_to((scale * 64.0).to(DTYPE)[:, None], words.shape)
        bits = tl.inline_asm_elementwise(
            _floats(i, True, True), "=r,r,r,r", [words, factor], dtype=tl.int16, is_pure=True, pack=2
        )
        return bits.to(DTYPE, bitcast=True)
    scale = scale.to(tl.float32) * _missing(E2M1, PLAIN, DTYPE)
    if LEVELS:
        w = _named(words, levels, i, PLAIN)
    else:
        less = lower.to(tl.float32) if HAS_ZEROS else tl.full((BN,), MIDDLE, tl.float32)
        w = _plane(words, less, i, BITS, E2M1, False, PLAIN, DTYPE).to(tl.float32)
    w *= scale[:, None]
    if HAS_MINIMUMS:
        w += lower.to(tl.float32)[:, None]
    return w.to(DTYPE)


@triton.constexpr_function
def _is_narrow(e2m1, plain, dtype, scales):
    """True if scales have the numbers' 16 bits: then each product is rounded once, as in float32."""
    return e2m1 and not plain and dtype == tl.bfloat16 and scales == tl.bfloat16


@triton.constexpr_function
def groups_of(group, columns):
    """Return the number of groups in a block; a longer group counts as one."""
    return max(1, columns // group)


@triton.jit
def first_group(block, G: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first group of a block, or of the last block if there are no more."""
    GROUPS: tl.constexpr = groups_of(GROUP, COLUMNS)
    return tl.minimum(block * COLUMNS // GROUP, (G - 1) // GROUPS * GROUPS)


@triton.jit
def of_group(at, first, j: tl.constexpr, width, G: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the values at `at` [BN] for group `j` of the block whose first group is `first`."""
    at += first.to(tl.int64) * width
    if G % groups_of(GROUP, COLUMNS) == 0:  # a constant stride costs no instruction
        return tl.load(at + j * width)
    return tl.load(at + tl.minimum(j, G - 1 - first) * width)


@triton.jit
def _of_block(at, block, width, G: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    found = ()
    for j in tl.static_range(groups_of(GROUP, COLUMNS)):
        found = found + (of_group(at, first_group(block, G, GROUP, COLUMNS), j, width, G, GROUP, COLUMNS),)
    return found


@triton.jit
def _inputs(x_at, there, k, K: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr):
    if K % COLUMNS == 0:
        return tl.load(x_at + k, mask=there[:, None], other=0.0)
    return tl.load(x_at + k, mask=there[:, None] & (k + tl.arange(0, W) < K)[None, :], other=0.0)


@triton.jit
def _plus(
    total, words, scale, lower, levels, x, i: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """Accumulate the product of plane `i`, without its scale if that comes AFTER."""
    if AFTER:
        less = lower.to(tl.float32) if HAS_ZEROS else tl.full((BN,), MIDDLE, tl.float32)
        w = _plane(words, less, i, BITS, E2M1, HAS_MINIMUMS, PLAIN, x.dtype)
    else:
        w = weights(
            words, scale, lower, levels, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1, LEVELS, PLAIN, x.dtype
        )
    return tl.dot(w, tl.trans(x), total)


@triton.jit
def _scaled(acc, part, scale, minimum, of_inputs, HAS_MINIMUMS: tl.constexpr, OFFSET: tl.constexpr):
    """Scale a group's sum, and add the contribution of its minimum; codes then are OFFSET too large."""
    scale = scale.to(tl.float32)
    acc += part * scale[:, None]
    if HAS_MINIMUMS:
        acc += of_inputs * (minimum.to(tl.float32) - scale * OFFSET)[:, None]
    return acc


@triton.constexpr_function
def _comes_after(rows, group, has_minimums, levels, narrow):
    """True if sums are scaled instead of elements: they are fewer where rows are many compared with a group's inputs.

    Narrow factors take as many instructions either way, and fewer registers with elements.
    """
    return not levels and not narrow and rows <= (group if has_minimums else 2 * group)


@triton.jit
def accumulate(
    words_at, up, scale_at, lower_at, N, width, x_at, there, begin, end,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr,
    LEVELS: tl.constexpr, PLAIN: tl.constexpr, DTYPE: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products [BN, BM] of the blocks from `begin` to `end`, of gate and up; the second only if GATED.

    `words_at` [BN, W] points at the rows' first words, and those of up are `up` words behind; `scale_at` and `lower_at` [BN] at
    the first group of `width` each, and those of up are N behind; of LEVELS `lower_at` points at the first. `x_at` [BM, W]:
    the first inputs of the rows that are `there`.
    """
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = W * PLANES
    GROUPS: tl.constexpr = groups_of(GROUP, COLUMNS)
    NARROW: tl.constexpr = _is_narrow(E2M1, PLAIN, DTYPE, scale_at.dtype.element_ty)
    AFTER: tl.constexpr = _comes_after(BM, GROUP, HAS_MINIMUMS, LEVELS, NARROW)
    OFFSET: tl.constexpr = _offset(BITS, PLAIN, DTYPE)
    nothing = tl.zeros((BN, BM), tl.float32)
    acc, acc_up, part, part_up, of_inputs = nothing, nothing, nothing, nothing, nothing
    ones = tl.full((BN, W), 1.0, DTYPE)
    if AFTER:  # scales of sums are prefetched one block ahead
        scales = _of_block(scale_at, begin, width, G, GROUP, COLUMNS)
        minimums = _of_block(lower_at, begin, width, G, GROUP, COLUMNS) if HAS_MINIMUMS else scales
        if GATED:
            scales_up = _of_block(scale_at + N, begin, width, G, GROUP, COLUMNS)
            minimums_up = _of_block(lower_at + N, begin, width, G, GROUP, COLUMNS) if HAS_MINIMUMS else scales_up
    for block in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + block * W, eviction_policy="evict_first")
        if GATED:
            words_up = tl.load(words_at + up + block * W, eviction_policy="evict_first")
        if AFTER:
            next_scales = _of_block(scale_at, block + 1, width, G, GROUP, COLUMNS)
            next_minimums = _of_block(lower_at, block + 1, width, G, GROUP, COLUMNS) if HAS_MINIMUMS else next_scales
        else:
            # Values carried from block to block would make the compiler route elements through shared memory.
            scales = _of_block(scale_at, block, width, G, GROUP, COLUMNS)
        lower = scales
        if HAS_ZEROS or (HAS_MINIMUMS and not AFTER):
            lower = _of_block(lower_at, block, width, G, GROUP, COLUMNS)
        if GATED:
            if AFTER:
                next_scales_up = _of_block(scale_at + N, block + 1, width, G, GROUP, COLUMNS)
                next_minimums_up = next_scales_up
                if HAS_MINIMUMS:
                    next_minimums_up = _of_block(lower_at + N, block + 1, width, G, GROUP, COLUMNS)
            else:
                scales_up = _of_block(scale_at + N, block, width, G, GROUP, COLUMNS)
            lower_up = scales_up
            if HAS_ZEROS or (HAS_MINIMUMS and not AFTER):
                lower_up = _of_block(lower_at + N, block, width, G, GROUP, COLUMNS)
        for j in tl.static_range(GROUPS):
            for i in tl.static_range(j * PLANES // GROUPS, (j + 1) * PLANES // GROUPS):
                x = _inputs(x_at, there, block * COLUMNS + i * W, K, W, COLUMNS)
                part = _plus(
                    part, words, scales[j], lower[j], lower_at, x, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1,
                    LEVELS, PLAIN, AFTER,
                )  # fmt: skip
                if GATED:
                    part_up = _plus(
                        part_up, words_up, scales_up[j], lower_up[j], lower_at, x, i, BN, BITS, MIDDLE, HAS_ZEROS,
                        HAS_MINIMUMS, E2M1, LEVELS, PLAIN, AFTER,
                    )  # fmt: skip
                if AFTER and HAS_MINIMUMS:
                    of_inputs = tl.dot(ones, tl.trans(x), of_inputs)
            if AFTER:
                acc = _scaled(acc, part, scales[j], minimums[j], of_inputs, HAS_MINIMUMS, OFFSET)
                part = nothing
                if GATED:
                    acc_up = _scaled(acc_up, part_up, scales_up[j], minimums_up[j], of_inputs, HAS_MINIMUMS, OFFSET)
                    part_up = nothing
                of_inputs = nothing
        if AFTER:
            scales, minimums = next_scales, next_minimums
            if GATED:
                scales_up, minimums_up = next_scales_up, next_minimums_up
    if not AFTER:
        return part, part_up
    MISSING: tl.constexpr = _missing(E2M1, PLAIN, DTYPE)
    return acc * MISSING, acc_up * MISSING
