"""Numbers as sums of several e4m3."""

import triton
import triton.language as tl


@triton.jit
def scale_and_inverse(largest):
    """The power of 2 that makes a group's largest number 128 to 256, and its inverse."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 16), 240)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return scale, ((261 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def first_part(x):
    """The number of 4 significant bits nearest to each, as float32. Of two, the even one.

    By bits: e4m3 and back would do, but the ptxas of Triton 3.6 unpacked a register that held something else.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def neighbours_added(sums, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, 2 BM] -> [BN, BM]: of rows whose two parts are side by side."""
    first, second = tl.split(tl.reshape(sums, (BN, BM, 2)))
    return first + second
