"""Decoders of GGUF's blocks: values of a few bits, in groups that share a scale and optionally a minimum.

B blocks, E elements of a block, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.quantised import gguf_grids
from modelfiles.gguf import KINDS

INT4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL's and IQ4_XS's
_E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value


@dataclass(frozen=True, slots=True)
class Blocks:
    """Decoded blocks: an element is scale * (code - zero) + minimum, with `levels[code]` for the bracket if there are any."""

    codes: torch.Tensor  # [B, E] uint8
    scales: torch.Tensor  # [B, G] float32
    zero: int = 0
    minimums: torch.Tensor | None = None  # [B, G] float32
    levels: tuple[int, ...] = ()

    def values(self) -> torch.Tensor:
        """[B, E] float32, rounded as the format's own code does."""
        if self.levels:
            levels = torch.tensor(self.levels, dtype=torch.float32, device=self.codes.device)
            found = levels.index_select(0, self.codes.flatten().int()).view(self.codes.shape)
        else:
            found = self.codes.float().sub_(self.zero)
        by_group = found.unflatten(1, (self.scales.shape[1], -1)).mul_(self.scales[:, :, None])
        if self.minimums is not None:
            by_group.add_(self.minimums[:, :, None])
        return found


def decoded(kind: str, data: torch.Tensor) -> Blocks:
    """Decode `data`: bytes of whole blocks, uint8. Raises KeyError for a kind that is not in `DECODERS`."""
    return DECODERS[kind](data.view(-1, BLOCK_BYTES[kind]))


def _planes(packed: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Unpack codes from bytes [B, n]: of each `width` bytes first all lowest bits, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unflatten(1, (-1, 1, width)) >> shifts[:, None]) & ((1 << bits) - 1)).flatten(1)


def _half(data: torch.Tensor) -> torch.Tensor:
    """One float16 of a block, [B, 1]."""
    return data.contiguous().view(torch.float16).float()


def _q4_0(data: torch.Tensor) -> Blocks:
    return Blocks(_planes(data[:, 2:], 16, 4), _half(data[:, :2]), zero=8)


def _q4_1(data: torch.Tensor) -> Blocks:
    return Blocks(_planes(data[:, 4:], 16, 4), _half(data[:, :2]), minimums=_half(data[:, 2:4]))


def _q5_0(data: torch.Tensor) -> Blocks:
    return Blocks(_planes(data[:, 6:], 16, 4) | _planes(data[:, 2:6], 1, 1) << 4, _half(data[:, :2]), zero=16)


def _q5_1(data: torch.Tensor) -> Blocks:
    codes = _planes(data[:, 8:], 16, 4) | _planes(data[:, 4:8], 1, 1) << 4
    return Blocks(codes, _half(data[:, :2]), minimums=_half(data[:, 2:4]))


def _q8_0(data: torch.Tensor) -> Blocks:
    return Blocks(data[:, 2:] ^ 0x80, _half(data[:, :2]), zero=128)


def _q2_k(data: torch.Tensor) -> Blocks:
    both, scale, minimum = data[:, :16], _half(data[:, 80:82]), _half(data[:, 82:84])
    return Blocks(
        _planes(data[:, 16:80], 32, 2), scale * (both & 15).float(), minimums=-(minimum * (both >> 4).float())
    )


def _q3_k(data: torch.Tensor) -> Blocks:
    packed = data[:, 96:108]
    scales = (_planes(packed[:, :8], 8, 4) | _planes(packed[:, 8:], 4, 2) << 4).float() - 32
    codes = _planes(data[:, 32:96], 32, 2) | _planes(data[:, :32], 32, 1) << 2
    return Blocks(codes, _half(data[:, 108:]) * scales, zero=4)


def _scales_of_k(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and eight minimums in 12 bytes, after the two numbers that multiply them."""
    first, second, rest = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return _half(data[:, :2]) * scales.float(), -(_half(data[:, 2:4]) * minimums.float())


def _q4_k(data: torch.Tensor) -> Blocks:
    scales, minimums = _scales_of_k(data)
    return Blocks(_planes(data[:, 16:], 32, 4), scales, minimums=minimums)


def _q5_k(data: torch.Tensor) -> Blocks:
    scales, minimums = _scales_of_k(data)
    return Blocks(_planes(data[:, 48:], 32, 4) | _planes(data[:, 16:48], 32, 1) << 4, scales, minimums=minimums)


def _q6_k(data: torch.Tensor) -> Blocks:
    scales = _half(data[:, 208:]) * data[:, 192:208].contiguous().view(torch.int8).float()
    return Blocks(_planes(data[:, :128], 64, 4) | _planes(data[:, 128:192], 32, 2) << 4, scales, zero=32)


def _tq2_0(data: torch.Tensor) -> Blocks:
    return Blocks(_planes(data[:, :64], 32, 2), _half(data[:, 64:]), zero=1)


def _iq4_nl(data: torch.Tensor) -> Blocks:
    return Blocks(_planes(data[:, 2:], 16, 4), _half(data[:, :2]), levels=INT4_LEVELS)


def _iq4_xs(data: torch.Tensor) -> Blocks:
    scales = (_planes(data[:, 4:8], 1, 4) | _planes(data[:, 2:4], 1, 2) << 4).float() - 32
    return Blocks(_planes(data[:, 8:], 16, 4), _half(data[:, :2]) * scales, levels=INT4_LEVELS)


def _mxfp4(data: torch.Tensor) -> Blocks:
    """MXFP4: the exponent is one less, since the levels are doubled."""
    exponents = data[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return Blocks(_planes(data[:, 1:], 16, 4), bits.view(torch.float32), levels=_E2M1_LEVELS)


def _tq1_0(data: torch.Tensor) -> Blocks:
    codes, scales = gguf_grids.tq1_0(data)
    return Blocks(codes, scales, zero=1)


def _of_grid(decode: Callable[[torch.Tensor], gguf_grids.Found]) -> Callable[[torch.Tensor], Blocks]:
    """The decoder of a kind whose runs of numbers are rows of a grid."""

    def blocks_of(data: torch.Tensor) -> Blocks:
        codes, scales, levels = decode(data)
        return Blocks(codes, scales, levels=levels)

    return blocks_of


DECODERS: dict[str, Callable[[torch.Tensor], Blocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "TQ2_0": _tq2_0, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0, "IQ1_S": _of_grid(gguf_grids.iq1_s), "IQ1_M": _of_grid(gguf_grids.iq1_m),
    "IQ2_XXS": _of_grid(gguf_grids.iq2_xxs), "IQ2_XS": _of_grid(gguf_grids.iq2_xs), "IQ2_S": _of_grid(gguf_grids.iq2_s),
    "IQ3_XXS": _of_grid(gguf_grids.iq3_xxs), "IQ3_S": _of_grid(gguf_grids.iq3_s),
}  # fmt: skip
BLOCK_ELEMENTS = {name: elements for name, elements, _ in KINDS.values()}
BLOCK_BYTES = {name: length for name, _, length in KINDS.values()}
