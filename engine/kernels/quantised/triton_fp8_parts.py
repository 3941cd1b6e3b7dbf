"""Splitting of numbers into sums of several e4m3 parts."""

import triton
import triton.language as tl


@triton.jit
def scale_and_inverse(largest):
    """The power of 2 that scales a group's largest element to [128, 256], and its inverse."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 16), 240)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return scale, ((261 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def first_part(x):
    """The nearest number with 4 significant bits, ties to even, as float32.

    By bits: e4m3 and back would do, but the ptxas of Triton 3.6 unpacked a register that held something else.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def neighbours_added(sums, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, 2 BM] -> [BN, BM]: sums of two adjacent parts."""
    first, second = tl.split(tl.reshape(sums, (BN, BM, 2)))
    return first + second
