"""Decoders of GGUF's blocks of 1 to 3 bits a number: runs of eight or four numbers are rows of a grid, with signs beside them.

The grids are ggml's (MIT), as the `gguf` package writes them: digits of 2 or 4 bits, the lowest first. B blocks, of 256 elements.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

GRIDS = Path(__file__).with_suffix(".json")
_OF_2_BITS = (8, 25, 43)  # magnitudes that digits stand for
_OF_3_BITS = {"IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62), "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15)}
# Eighths: a digit is -1, 0 or 1, and an eighth is added to all of a run, or subtracted.
_OF_1_BIT = (-7, 1, 9, -9, -1, 7)

Found = tuple[
    torch.Tensor, torch.Tensor, tuple[int, ...]
]  # codes [B, 256] uint8, scales [B, G] float32, levels of codes


@functools.cache
def _grid(kind: str) -> torch.Tensor:
    """Digits [rows, 4 or 8] uint8."""
    written, bits = json.loads(GRIDS.read_text())[kind], 4 if kind in _OF_3_BITS else 2
    packed = torch.tensor(list(bytes.fromhex(written)), dtype=torch.uint8)
    digits = packed[:, None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & (1 << bits) - 1
    return digits.view(-1, 4 if kind in _OF_3_BITS else 8)


def _signed(kind: str, rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Codes of rows [B, R] of a grid, the second half of codes where one of the bits of `signs` [B, 32] is set."""
    half = 8 if kind in _OF_3_BITS else 3
    digits = _grid(kind).to(rows.device).index_select(0, rows.flatten().int())
    return digits.view(len(rows), -1) + half * _bits(signs, 1)


def _bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """The bits of bytes [B, n], or numbers of `width` bits, lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return (data[:, :, None] >> shifts & (1 << width) - 1).flatten(1)


def _words(data: torch.Tensor, size: int) -> torch.Tensor:
    """Unsigned words of so many bytes."""
    own = data.contiguous().view(torch.int16 if size == 2 else torch.int32)
    return own.long() & (1 << 8 * size) - 1


def _parted(words: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Parts of words [B, n], [B, n * shifts]."""
    return (words[:, :, None] >> torch.tensor(shifts, device=words.device) & mask).flatten(1)


def _with_parity(seven: torch.Tensor) -> torch.Tensor:
    """Signs of eight numbers, of which an even number is negative: the last bit follows from seven."""
    folded = seven ^ seven >> 4
    folded = folded ^ folded >> 2
    folded = (folded ^ folded >> 1) & 1
    return (seven | folded << 7).to(torch.uint8)


def _half(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16).float()


def _both(levels: tuple[int, ...]) -> tuple[int, ...]:
    return (*levels, *(-level for level in levels))


def iq2_xxs(data: torch.Tensor) -> Found:
    words = _words(data[:, 2:], 4)
    second = words[:, 1::2]
    scales = _half(data[:, :2]) * (0.5 + (second >> 28).float()) * 0.25
    rows = data[:, 2:].unflatten(1, (8, 2, 4))[:, :, 0].flatten(1)
    codes = _signed("IQ2_XXS", rows, _with_parity(_parted(second, (0, 7, 14, 21), 127)))
    return codes, scales, _both(_OF_2_BITS)


def iq2_xs(data: torch.Tensor) -> Found:
    words = _words(data[:, 2:66], 2)
    scales = _half(data[:, :2]) * (0.5 + _bits(data[:, 66:], 4).float()) * 0.25
    return _signed("IQ2_XS", words & 511, _with_parity(words >> 9)), scales, _both(_OF_2_BITS)


def iq2_s(data: torch.Tensor) -> Found:
    scales = _half(data[:, :2]) * (0.5 + _bits(data[:, 74:], 4).float()) * 0.25
    rows = data[:, 2:34].int() | _bits(data[:, 66:74], 2).int() << 8
    return _signed("IQ2_S", rows, data[:, 34:66]), scales, _both(_OF_2_BITS)


def iq3_xxs(data: torch.Tensor) -> Found:
    words = _words(data[:, 66:], 4)
    scales = _half(data[:, :2]) * (0.5 + (words >> 28).float()) * 0.5
    signs = _with_parity(_parted(words, (0, 7, 14, 21), 127))
    return _signed("IQ3_XXS", data[:, 2:66], signs), scales, _both(_OF_3_BITS["IQ3_XXS"])


def iq3_s(data: torch.Tensor) -> Found:
    scales = _half(data[:, :2]) * (1 + 2 * _bits(data[:, 106:], 4).float())
    rows = data[:, 2:66].int() | _bits(data[:, 66:74], 1).int() << 8
    return _signed("IQ3_S", rows, data[:, 74:106]), scales, _both(_OF_3_BITS["IQ3_S"])


def _of_runs(rows: torch.Tensor, is_less: torch.Tensor) -> torch.Tensor:
    """Codes of 1 bit: rows [B, 32] of the grid, and where the eighth is subtracted."""
    digits = _grid("IQ1_S").to(rows.device).index_select(0, rows.flatten().int()).view(*rows.shape, 8)
    return (digits + 3 * is_less.to(torch.uint8)[:, :, None]).flatten(1)


def iq1_s(data: torch.Tensor) -> Found:
    words = _words(data[:, 34:], 2)
    scales = _half(data[:, :2]) * (2 * (words >> 12 & 7) + 1).float() * 0.125
    rows = data[:, 2:34].long() | _parted(words, (0, 3, 6, 9), 7) << 8
    return _of_runs(rows, (words >> 15).repeat_interleave(4, dim=1)), scales, _OF_1_BIT


def iq1_m(data: torch.Tensor) -> Found:
    """The number that multiplies all scales is in the highest bits of their words."""
    words, more = _words(data[:, 48:], 2), _bits(data[:, 32:48], 4)
    factor = (words >> 12 << torch.tensor([0, 4, 8, 12], device=data.device)).sum(dim=1, keepdim=True)
    scales = _half(factor.to(torch.int16)) * (2 * _parted(words, (0, 3, 6, 9), 7) + 1).float() * 0.125
    return _of_runs(data[:, :32].long() | (more & 7).long() << 8, more >> 3), scales, _OF_1_BIT


def tq1_0(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Five digits of base 3 a byte, the last four bytes four: codes, of which 1 is zero, and a scale."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=data.device)
    parts = [
        (data[:, None, begin:end] * powers[:count, None]).flatten(1)  # bytes, as the format wants it
        for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    return (torch.cat(parts, dim=1).int() * 3 >> 8).to(torch.uint8), _half(data[:, 52:])
