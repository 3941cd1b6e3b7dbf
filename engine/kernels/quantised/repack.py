"""Checkpoint packings of 4-bit and 8-bit groups, unpacked for `groups.pack`. K inputs, N outputs, G groups of a row.

All of them fill int32 words from the lowest bits on. They differ in the direction, in the order within a word, and in the zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in its word of each of eight neighbours


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The operands of `groups.pack`."""

    codes: torch.Tensor  # uint8 [N, K]
    scales: torch.Tensor  # [N, G]
    zeros: torch.Tensor | None  # int16 [N, G]; None: mid-range
    minimums: torch.Tensor | None = None  # [N, G]
    order: torch.Tensor | None = None  # column i of the codes is input order[i]
    levels: torch.Tensor | None = None  # [16] float32

    def sorted(self, order: torch.Tensor | None) -> Unpacked:
        """Return the same with permuted inputs."""
        return self if order is None else replace(self, codes=self.codes[:, order], order=order)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes uint8 [..., n * 32 / bits] of words int32 [..., n]; 3-bit codes span three words."""
    if 32 % bits:
        if words.shape[-1] % bits:
            raise ValueError(f"{words.shape[-1]} words are no whole runs of {bits}, as codes of {bits} bits take")
        wide = words.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF
        wide |= wide.roll(-1, dims=-1) << 32
        places = [(wide[..., at // 32], at % 32) for at in range(0, 32 * bits, bits)]
    else:
        places = [(words, at) for at in range(0, 32, bits)]
    # One position after another: unpacking all at once in 32 or 64 bits would take many times their memory.
    first, _ = places[0]
    codes = torch.empty((*first.shape, len(places)), dtype=torch.uint8, device=words.device)
    for place, (whole, at) in enumerate(places):
        codes[..., place] = (whole >> at).bitwise_and_((1 << bits) - 1)
    return codes.flatten(-2)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor | None, scales: torch.Tensor) -> Unpacked:
    """AWQ's "gemm": `qweight` [K, N / 8], `qzeros` [G, N / 8], `scales` [G, N]."""

    def ordered(words: torch.Tensor) -> torch.Tensor:
        order = torch.tensor(AWQ_ORDER, device=words.device)
        return unpacked(words, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).T

    return Unpacked(ordered(qweight), scales.T, None if qzeros is None else ordered(qzeros).to(torch.int16))


def from_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor | None, scales: torch.Tensor, *, bits: int, less_one: bool
) -> Unpacked:
    """GPTQ: `qweight` [K * bits / 32, N], `qzeros` [G, N * bits / 32], `scales` [G, N].

    `less_one`: zeros are stored less 1, and 0 as the highest code (its first version).
    """
    zeros = None
    if qzeros is not None:
        stored = unpacked(qzeros, bits).to(torch.int16)
        zeros = ((stored + less_one) & ((1 << bits) - 1)).T
    return Unpacked(unpacked(qweight.T, bits), scales.T, zeros)


def from_packed_rows(
    packed: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, *, bits: int, inputs: int
) -> Unpacked:
    """compressed-tensors: `packed` [N, K * bits / 32 rounded up], `zeros` [N * bits / 32 rounded up, G], `scales` [N, G]."""
    codes = unpacked(packed, bits)[:, :inputs]
    if zeros is not None:
        zeros = unpacked(zeros.T, bits)[:, : len(codes)].T.to(torch.int16)
    return Unpacked(codes, scales, zeros)


def from_signed(weight: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor) -> Unpacked:
    """Unpacked bytes: `weight` int8 [N, K], `zeros` int8 and `scales` [N, G]."""
    return Unpacked(
        (weight.to(torch.int16) + 128).to(torch.uint8), scales, None if zeros is None else zeros.to(torch.int16) + 128
    )


def from_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes uint8 [..., 2 n] of bytes [..., n] with two each, low bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def from_exponents(stored: torch.Tensor) -> torch.Tensor:
    """Return float32 scales from bytes that are exponents of 2 (e8m0)."""
    return torch.exp2(stored.float() - 127)


def by_group(g_idx: torch.Tensor, group: int) -> torch.Tensor | None:
    """Return the permutation that makes each group's inputs adjacent; None: they are.

    Raises ValueError where a group has more or fewer inputs than `group`: such a matrix has no order.
    """
    groups = torch.arange(len(g_idx), device=g_idx.device) // group
    if torch.equal(g_idx.long(), groups):
        return None
    order = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[order], groups):
        raise ValueError(f"g_idx does not share the inputs out among groups of {group}")
    return order
