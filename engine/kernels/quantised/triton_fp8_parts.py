"""Numbers as sums of several e4m3. A part is rounded by its bits: it is needed as a float, too, for what it leaves.

Conversions there and back would do, but the ptxas of Triton 3.6 unpacked a register that held something else.
"""

import triton
import triton.language as tl


@triton.jit
def scale_and_inverse(largest):
    """The power of 2 that makes a group's largest number 128 to 256, and its inverse."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 16), 240)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return scale, ((261 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x):
    """The e4m3 nearest to each number below 448, as float32. Of two, the even one."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Multiples of 2^-9: float32 has no finer ones at 1.5 * 2^14.
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, normal)
