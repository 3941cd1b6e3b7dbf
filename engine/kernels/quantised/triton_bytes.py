# ruff: noqa: SIM300 - Triton compares a compile-time value with what stands on its right
"""Conversion of codes of 8 or 4 bits to 16-bit numbers, two at a time, by bit operations: a GPU's own are several times slower.

An e4m3's exponent and mantissa are put at the end of those of bfloat16 or float16, which makes it 2^120 or 2^8 times too small;
one product gives the number, exactly. A weight of e4m3's NaN becomes 480.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _e4m3(bytes_at, source, target, wide, nan_at=None):
    """PTX that converts two bytes of `source`, picked by prmt's `bytes_at`, to `target`. `wide`: bfloat16.

    `nan_at`: those of `n` whose signs say that a byte is no number.
    """
    shift, mask, times = (4, "0x07f007f0", "0x7b807b80") if wide else (1, "0x3f803f80", "0x5c005c00")
    magnitude = f"and.b32 m, m, {mask};"
    if nan_at is not None:
        magnitude = f"prmt.b32 s, n, 0, {nan_at:#x}; lop3.b32 m, m, {mask}, s, 0xea;"
    return f"""
        prmt.b32 t, {source}, 0, {bytes_at:#x};
        shr.u32 m, t, {shift};
        {magnitude}
        lop3.b32 t, t, 0x80008000, m, 0xea;
        mov.b32 m, {times};
        mov.b32 s, 0x80008000;
        fma.rn.{"bf16x2" if wide else "f16x2"} {target}, t, m, s;"""


@triton.constexpr_function
def e4m3_of_bytes(wide, nan):
    """PTX for the four bytes of `$2`."""
    told = "and.b32 n, $2, 0x7f7f7f7f; add.u32 n, n, 0x01010101;" if nan else ""
    low, high = (0x9988, 0xBBAA) if nan else (None, None)
    parts = _e4m3(0x1404, "$2", "$0", wide, low) + _e4m3(0x3424, "$2", "$1", wide, high)
    return f"{{ .reg .b32 t, m, n, s; {told} {parts} }}"


@triton.constexpr_function
def e4m3_of_pairs(odd, nan):
    """PTX for the first or second codes of two pairs, as float16: scaled by 2^-8, or by 144.

    `nan`: what is no number becomes infinite, as 480 * 144 is beyond float16.
    """
    told = "mov.b32 m, 0x78807880; mov.b32 s, 0x80008000; fma.rn.f16x2 $0, $0, m, s;" if nan else ""
    return f"""{{ .reg .b32 t, m, s;
        {"mov.b32 t, $1;" if odd else "shl.b32 t, $1, 8;"}
        shr.u32 m, t, 1;
        and.b32 m, m, 0x3f803f80;
        lop3.b32 $0, t, 0x80008000, m, 0xea;
        {told} }}"""


@triton.constexpr_function
def int8_of_pairs(odd, wide):
    """PTX for the first or second codes of two pairs.

    In bfloat16 seven bits are added to 128, and the sign makes of the 128 that is taken away again 256.
    """
    moved = "shr.u32 t, $1, 8;" if odd else "mov.b32 t, $1;"
    if wide:
        return f"""{{ .reg .b32 t, m, s; {moved}
            lop3.b32 m, t, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 s, t, 0x00800080, 0xc300c300, 0xea;
            mov.b32 t, 0x3f803f80;
            fma.rn.bf16x2 $0, m, t, s; }}"""
    return f"""{{ .reg .b32 t, m, s; {moved}
        lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a;
        mov.b32 m, 0x3c003c00;
        mov.b32 s, 0xe480e480;
        fma.rn.f16x2 $0, t, m, s; }}"""


@triton.constexpr_function
def int4_of_pairs(at, wide):
    """PTX for the codes at `at`, 0 to 3, of two fours. They are put behind 128, or float16's 1024, and 8 more is taken away."""
    above, one, less = (
        ("0x43004300", "0x3f803f80", "0xc308c308") if wide else ("0x64006400", "0x3c003c00", "0xe408e408")
    )
    return f"""{{ .reg .b32 t, m, s;
        {f"shr.u32 t, $1, {4 * at};" if at else "mov.b32 t, $1;"}
        lop3.b32 t, t, 0x000f000f, {above}, 0xea;
        mov.b32 m, {one};
        mov.b32 s, {less};
        fma.rn.{"bf16x2" if wide else "f16x2"} $0, t, m, s; }}"""


@triton.jit
def e4m3_numbers(codes, NAN: tl.constexpr, DTYPE: tl.constexpr):
    """e4m3 codes, loaded as 8-bit integers. NAN: preserves NaN.

    Not pure, it is said: pure instructions are carried out where a product wants its operand, which is then read byte by byte.
    """
    bits = tl.inline_asm_elementwise(
        e4m3_of_bytes(DTYPE == tl.bfloat16, NAN), "=r,=r,r", [codes], dtype=tl.int16, is_pure=False, pack=4
    )
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def weights_as(weights, DTYPE: tl.constexpr, BY_BITS: tl.constexpr):
    """Weights as `DTYPE`. BY_BITS: they are e4m3, and PTX is available."""
    if BY_BITS:
        return e4m3_numbers(weights.to(tl.int8, bitcast=True), False, DTYPE)
    return weights.to(DTYPE)
