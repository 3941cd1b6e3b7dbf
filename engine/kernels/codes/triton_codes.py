# ruff: noqa: SIM300 - Triton compares a compile-time value with what stands on its right
"""KV quantisation inside Triton kernels: the only place that converts between bytes and numbers.

`CODES` says what a pool holds. Bytes are loaded as such: before Ada, Triton has no e4m3, and bits are moved instead.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.codes.codes import Codes
from engine.kernels.device import describe
from engine.kernels.quantised.triton_bytes import e4m3_numbers, e4m3_of_pairs, int4_of_pairs, int8_of_pairs

NUMBERS, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FP8, FP8_BY_BITS = tl.constexpr(3), tl.constexpr(4)  # all that have a factor for keys and one for values
# 1.5 * 2^23, whose bits are 0x4B400000: adding it rounds to an integer.
_ROUND = tl.constexpr(12582912.0)
# Factor of e4m3 in `of_pairs`, and the magnitude from which a NaN's code becomes infinite.
PAIR_TIMES, PAIR_TIMES_TOLD = tl.constexpr(1 / 256), tl.constexpr(144.0)


def kind_of(codes: Codes | None, device: torch.device) -> int:
    """The constant `CODES` of the kernels."""
    if codes is None:
        return int(NUMBERS.value)
    if codes.scales is not None:
        return int(INT4.value if codes.kind == "int4" else INT8.value)
    # The interpreter's conversions flush e4m3's subnormal numbers.
    return int(FP8.value if describe(device).has_tma else FP8_BY_BITS.value)


def bytes_of(kv_layer: torch.Tensor, codes: Codes | None) -> torch.Tensor:
    """The pool as kernels load it."""
    if codes is None:
        return kv_layer
    return kv_layer.view(torch.int8 if codes.kind == "int8" else torch.uint8)


def scales_of(codes: Codes | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """The kernels' arguments: factors, scales, and the scales' strides between blocks and between keys and values.

    int4's scale and zero point are one int32.
    """
    if codes is None:
        return None, None, 0, 0
    if codes.scales is None:
        return codes.factors, None, 0, 0
    scales = codes.scales if codes.kind == "int8" else codes.scales.view(torch.int32)
    block, plane = scales.stride()[:2]
    return None, scales, block, plane


@triton.jit
def place_of(d, CODES: tl.constexpr):
    """The place, from its head's first, of the number `d` of a head."""
    return d // 2 if CODES == INT4 else d


@triton.jit
def widened(kept, dtype: tl.constexpr, CODES: tl.constexpr, d=0):
    """Return loaded values as `dtype` without their factor: exact, as they have at most 8 significant bits.

    `d`: which numbers they are; only int4 asks.
    """
    if CODES == NUMBERS:
        return kept
    elif CODES == INT4:
        code = (kept.to(tl.int32) >> (d % 2 * 4)) & 15
        return ((code + 0x4B400000).to(tl.float32, bitcast=True) - (_ROUND + 8.0)).to(dtype)
    elif CODES == FP8 and dtype == tl.float32:
        return kept.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CODES == FP8:
        return e4m3_numbers(kept, True, dtype)
    elif CODES == FP8_BY_BITS:
        wide = kept.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: from e4m3's exponents to float32's
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), number).to(dtype)
    else:
        # An integer in the mantissa of 1.5 * 2^23: a GPU's integer conversion is several times slower.
        return ((kept.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - _ROUND).to(dtype)


@triton.jit
def step_of(both):
    """The scale of int4's scales."""
    return (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def zero_of(both):
    """The zero point of int4's scales."""
    return (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def of_fours(fours, AT: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """The code at AT of each four of int4 as a number of `DTYPE`. PLAIN: for the interpreter."""
    if PLAIN:
        return (((fours.to(tl.int32) >> (4 * AT)) & 15) - 8).to(DTYPE)
    text: tl.constexpr = int4_of_pairs(AT, DTYPE == tl.bfloat16)
    bits = tl.inline_asm_elementwise(text, "=r,r", [fours], dtype=tl.int16, is_pure=True, pack=2)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def of_pairs(
    pairs, ODD: tl.constexpr, NAN: tl.constexpr, DTYPE: tl.constexpr, CODES: tl.constexpr, PLAIN: tl.constexpr
):
    """The first code of each pair, or the second one, as a number of `DTYPE`.

    e4m3's are float16, multiplied with PAIR_TIMES; with NAN with PAIR_TIMES_TOLD. PLAIN: for the interpreter.
    """
    if PLAIN:
        code = (pairs.to(tl.int32) >> (8 if ODD else 0)) & 0xFF
        if CODES == INT8:
            return ((code ^ 0x80) - 128).to(DTYPE)
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        if NAN:
            number = half.to(tl.float32) * (256 * PAIR_TIMES_TOLD)
            return tl.where((code & 0x7F) == 0x7F, float("inf"), number).to(tl.float16)
        return half
    text: tl.constexpr = int8_of_pairs(ODD, DTYPE == tl.bfloat16) if CODES == INT8 else e4m3_of_pairs(ODD, NAN)
    bits = tl.inline_asm_elementwise(text, "=r,r", [pairs], dtype=tl.int16, is_pure=True, pack=2)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def in_fp8(x, factor, CODES: tl.constexpr):
    """The e4m3 code of each x / factor, and its value. Rounds to nearest even; NaN stays NaN."""
    number = x.to(tl.float32) / factor
    small = tl.minimum(tl.abs(number), 448.0) * 7.52316384526264e-37  # 2^-120: e4m3's subnormal numbers are float32's
    bits = small.to(tl.int32, bitcast=True)
    code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    code = tl.where(number != number, 0x7F, code)
    negative = (number.to(tl.int32, bitcast=True) >> 24) & 0x80
    kept = (code | negative).to(tl.uint8)
    return kept, (widened(kept, tl.float32, CODES) * factor).to(x.dtype)


@triton.jit
def largest_of(x, inside):
    """The largest magnitude of each row of x [rows, D], NaN if one is."""
    wide = tl.where(inside, x.to(tl.float32), 0.0)
    return tl.max(tl.abs(wide), axis=1) + tl.sum(wide * 0.0, axis=1)


@triton.jit
def in_int8(x, largest):
    """The code of each x [rows, D], given the largest magnitude `largest` [rows, 1], and its value."""
    steps = tl.where(largest > 0, 127.0 / largest, 0.0)
    rounded = (x.to(tl.float32) * steps + _ROUND) - _ROUND
    return rounded.to(tl.int8), (rounded * (largest / 127.0)).to(x.dtype)


@triton.jit
def ends_of(x, inside):
    """The smallest and the largest number of each row of x [rows, D], NaN if one is."""
    wide = x.to(tl.float32)
    broken = tl.sum(tl.where(inside, wide, 0.0) * 0.0, axis=1)
    smallest = tl.min(tl.where(inside, wide, float("inf")), axis=1)
    return smallest + broken, tl.max(tl.where(inside, wide, float("-inf")), axis=1) + broken


@triton.jit
def int4_scales(smallest, largest):
    """The scale and the zero point of rows with these ends as the pool keeps them, one int32; see `codes`."""
    step = _bfloat16_bits((largest - smallest) * 0.06666666666666667)
    zero = _bfloat16_bits(0.5 * (smallest + largest) + 0.5 * (step << 16).to(tl.float32, bitcast=True))
    return (zero << 16) | step


@triton.jit
def _bfloat16_bits(x):
    """The upper half of x as the nearest bfloat16, NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def in_int4(x, both, ROWS: tl.constexpr, PLACES: tl.constexpr):
    """Two codes of each x [ROWS, 2 PLACES] a byte, given the rows' scales `both` [ROWS], and their values."""
    step, zero = step_of(both)[:, None], zero_of(both)[:, None]
    number = (x.to(tl.float32) - zero) * tl.where(step > 0, 1.0 / step, 0.0)
    rounded = (tl.minimum(tl.maximum(number, -8.0), 7.0) + _ROUND) - _ROUND
    low, high = tl.split((rounded.to(tl.int32) + 8).reshape(ROWS, PLACES, 2))
    return (low | (high << 4)).to(tl.uint8), (rounded * step + zero).to(x.dtype)


@triton.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@triton.jit
def turned(x, ROWS: tl.constexpr, PLACES: tl.constexpr, SIZE: tl.constexpr):
    """x [ROWS, PLACES] times blocks of Sylvester's Hadamard matrix of SIZE, in float32; see `codes.turned`."""
    wide = x.to(tl.float32)
    for _ in tl.static_range(_log2(SIZE)):
        first, second = tl.split(wide.reshape(ROWS, PLACES // SIZE, SIZE // 2, 2))
        wide = tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(ROWS, PLACES)
    return wide
