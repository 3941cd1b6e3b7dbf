"""The instructions that make numbers of codes, carried out one by one: Triton's interpreter knows none of a GPU's."""

# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch

from tests.needs import needs

needs("triton")

from engine.kernels.quantised import triton_bytes, triton_codes
from engine.kernels.quantised.groups import E2M1

WORDS = (0x76543210, 0xFEDCBA98, 0x00000000, 0xFFFFFFFF, 0x8F1E2D3C, 0x4B5A6978)
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # of planes of 4 bits in a word
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def carried_out(text: str, operands: dict[str, int], memory: dict[str, int] | None = None, result: str = "$0") -> int:
    """A register after these instructions of PTX, from other registers' 32 bits. `memory`: words by `[address]`."""
    registers = dict(operands)
    for line in text.strip().strip("{}").split(";"):
        name, _, arguments = line.strip().partition(" ")
        if not name or name.startswith(".reg"):
            continue
        target, *given = [each.strip() for each in arguments.split(",")]
        if name == "ld.global.nc.f32":
            registers[target] = (memory or {})[f"[{registers[given[0].strip('[]')]}]"]
            continue
        values = [registers[each] if each in registers else int(each, 0) for each in given]
        registers[target] = _result(name, values) & 0xFFFFFFFF
    return registers[result]


def _result(name: str, values: list[int]) -> int:
    plain: dict[str, Callable[..., int]] = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "add.u32": lambda a, b: a + b,
        "shl.b32": lambda a, by: a << by,
        "shr.u32": lambda a, by: a >> by,
        "bfe.u32": lambda a, at, bits: a >> at & (1 << bits) - 1,
        "mad.wide.u32": lambda a, b, c: a * b + c,
        "prmt.b32": _permuted,
        "lop3.b32": _looked_up,
        "sub.f32": lambda a, b: _bits(_floats(a, torch.float32) - _floats(b, torch.float32)),
    }
    if name in plain:
        return plain[name](*values)
    kind = re.fullmatch(r"(fma|cvt)\.rn\.(bf16x2|f16x2)(\.f32)?", name)
    assert kind is not None, name
    dtype = DTYPES[kind[2]]
    if kind[1] == "cvt":
        high, low = values
        return _bits(torch.cat((_floats(low, torch.float32), _floats(high, torch.float32))).to(dtype))
    a, b, c = (_floats(each, dtype).double() for each in values)
    return _bits((a * b + c).to(dtype))


def _permuted(a: int, b: int, selector: int) -> int:
    every = (b << 32 | a).to_bytes(8, "little")
    chosen = [(every[selector >> 4 * at & 7], selector >> 4 * at & 8) for at in range(4)]
    return int.from_bytes(bytes(0xFF * (byte >> 7) if of_sign else byte for byte, of_sign in chosen), "little")


def _looked_up(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def _floats(bits: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(bits.to_bytes(4, "little")), dtype=torch.uint8).view(dtype)


def _bits(values: torch.Tensor) -> int:
    return int.from_bytes(bytes(values.contiguous().view(torch.uint8).tolist()), "little")


def _twice(value: float, dtype: torch.dtype) -> int:
    return _bits(torch.full((2,), value, dtype=dtype))


def _pairs() -> list[tuple[int, int]]:
    return [(first, second) for first in WORDS for second in WORDS]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("plane", range(8))
@pytest.mark.parametrize("less", [0, 8, 16])
def test_integers_of_4_bits(plane: int, less: int, dtype: torch.dtype) -> None:
    wide = dtype is torch.bfloat16
    text = triton_codes._integers(plane, 4, wide)
    offset = _twice(-(128.0 if wide else 1024.0) - less, dtype)
    for first, second in _pairs():
        found = _floats(carried_out(text, {"$1": first, "$2": second, "$3": offset}), dtype)
        assert found.tolist() == [(word >> 4 * PLACES[plane] & 15) - less for word in (first, second)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("plane", range(8))
def test_integers_of_4_bits_as_they_are_put_in(plane: int, dtype: torch.dtype) -> None:
    wide = dtype is torch.bfloat16
    text = triton_codes._integers(plane, 4, wide, True)
    for first, second in _pairs():
        found = _floats(carried_out(text, {"$1": first, "$2": second}), dtype)
        assert found.tolist() == [
            (word >> 4 * PLACES[plane] & 15) + (128 if wide else 1024) for word in (first, second)
        ]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("plane", range(4))
@pytest.mark.parametrize("less", [0, 128])
def test_integers_of_8_bits(plane: int, less: int, dtype: torch.dtype) -> None:
    text = triton_codes._integers(plane, 8, dtype is torch.bfloat16)
    offset = _bits(torch.tensor([8388608.0 + less]))
    for first, second in _pairs():
        found = _floats(carried_out(text, {"$1": first, "$2": second, "$3": offset, "$4": offset}), dtype)
        assert found.tolist() == [(word >> 8 * plane & 255) - less for word in (first, second)]


def _e2m1(word: int, plane: int) -> float:
    code = word >> 4 * PLACES[plane] & 15
    return E2M1[code & 7] * (-1 if code >= 8 else 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("plane", range(8))
def test_floats_of_4_bits(plane: int, dtype: torch.dtype) -> None:
    wide = dtype is torch.bfloat16
    text = triton_codes._floats(plane, wide)
    for first, second in _pairs():
        found = _floats(carried_out(text, {"$1": first, "$2": second}), dtype).double() * 2.0 ** (6 if wide else 14)
        assert found.tolist() == [_e2m1(word, plane) for word in (first, second)]


def _e4m3(codes: bytes) -> list[float]:
    return torch.tensor(list(codes), dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_bytes_that_are_floats_of_8_bits_and_no_numbers(dtype: torch.dtype) -> None:
    text = triton_bytes.e4m3_of_bytes(dtype is torch.bfloat16, True)
    for code in range(256):
        codes = bytes((code, 0x7F, code ^ 0x80, 0xFF))
        operands = {"$2": int.from_bytes(codes, "little")}
        found = [_floats(carried_out(text, operands, result=each), dtype) for each in ("$0", "$1")]
        expected = torch.tensor(_e4m3(codes), dtype=torch.float64)
        torch.testing.assert_close(torch.cat(found).double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("nan", [False, True])
def test_pairs_of_floats_of_8_bits(odd: bool, nan: bool) -> None:
    """Whatever lies beside them; what is no number is infinite, if that is asked."""
    times = 144.0 if nan else 2.0**-8
    text = triton_bytes.e4m3_of_pairs(odd, nan)
    for code in range(256):
        codes = bytes((code, code ^ 0x99, code ^ 0x81, 0xFF - code))
        found = _floats(carried_out(text, {"$1": int.from_bytes(codes, "little")}), torch.float16).tolist()
        for number, one in zip(found, codes[odd::2], strict=True):
            sign = -1 if one >= 128 else 1
            broken = sign * (math.inf if nan else 480 * times)
            assert number == (broken if one & 0x7F == 0x7F else _e4m3(bytes((one,)))[0] * times)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("odd", [False, True])
def test_pairs_of_integers_of_8_bits(odd: bool, dtype: torch.dtype) -> None:
    text = triton_bytes.int8_of_pairs(odd, dtype is torch.bfloat16)
    for code in range(256):
        codes = bytes((code, code ^ 0x99, code ^ 0x81, 0xFF - code))
        found = _floats(carried_out(text, {"$1": int.from_bytes(codes, "little")}), dtype)
        assert found.tolist() == torch.tensor(list(codes[odd::2]), dtype=torch.uint8).view(torch.int8).tolist()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("at", range(4))
def test_fours_of_integers_of_4_bits(at: int, dtype: torch.dtype) -> None:
    text = triton_bytes.int4_of_pairs(at, dtype is torch.bfloat16)
    for word in WORDS:
        found = _floats(carried_out(text, {"$1": word}), dtype)
        assert found.tolist() == [(word >> place & 15) - 8 for place in (4 * at, 4 * at + 16)]


@pytest.mark.parametrize("plane", range(8))
def test_levels(plane: int) -> None:
    address, levels = 0x7F00, torch.randn(16)
    memory = {f"[{address + 4 * code}]": _bits(levels[code : code + 1]) for code in range(16)}
    for word in WORDS:
        found = carried_out(triton_codes._levels(plane), {"$1": word, "$2": address}, memory)
        assert _floats(found, torch.float32).item() == levels[word >> 4 * PLACES[plane] & 15].item()


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**-9, 1.0, 2.0**100, 2.0**121, 0.3])
@pytest.mark.parametrize("plane", range(8))
def test_floats_of_4_bits_and_their_scale(plane: int, scale: float) -> None:
    """The exponents of mxfp4, but for a model's last ones, and a scale that rounds: once."""
    text = triton_codes._floats(plane, True, True)
    stored = torch.tensor(scale, dtype=torch.bfloat16)
    factor = _twice(float(stored) * 64, torch.bfloat16)
    for first, second in _pairs():
        found = _floats(carried_out(text, {"$1": first, "$2": second, "$3": factor}), torch.bfloat16)
        exact = [_e2m1(word, plane) * float(stored) for word in (first, second)]
        assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).to(torch.bfloat16))
