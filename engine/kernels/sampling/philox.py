"""Counter-based random numbers: Philox 4x32-10 exactly as Triton's `tl.rand` computes it, in plain torch.

The key is a request's seed, the counter (vocabulary index, position), so every number can be computed again, anywhere and in
any order.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_ROUNDS = 10
_TO_UNIFORM = 4.6566127342e-10  # below 2**-31, which keeps every product below 1


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard Gumbel noise [R, vocab_size] float32 for `seeds` [R] and `positions` [R], both int64."""
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    uniform = uniforms(seeds[:, None], (positions[:, None] << 32) | tokens)
    return -(-uniform.clamp(1e-10, 1 - 2**-24).log()).log()


def uniforms(seeds: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return `tl.rand(seed, offset)` for int64 tensors that broadcast: float32 in [0, 1)."""
    words = philox(seeds, offsets)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return torch.where(signed < 0, -signed - 1, signed).float() * _TO_UNIFORM


def philox(seeds: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the first 32-bit output word of Philox 4x32-10, in int64. Products wrap; their bits 32 to 63 are right."""
    key_low, key_high = seeds & _MASK, (seeds >> 32) & _MASK
    c0, c1 = offsets & _MASK, (offsets >> 32) & _MASK
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0 = ((product_b >> 32) & _MASK) ^ c1 ^ key_low
        c2 = ((product_a >> 32) & _MASK) ^ c3 ^ key_high
        c1, c3 = product_b & _MASK, product_a & _MASK
        key_low, key_high = (key_low + _KEY_A) & _MASK, (key_high + _KEY_B) & _MASK
    return c0
