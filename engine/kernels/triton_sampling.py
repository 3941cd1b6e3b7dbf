"""Triton version of `sampling`: each program draws the best of a tile of the vocabulary, torch picks the best tile.

R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

TILE = 1024


def gumbel_argmax(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    scores = scores.contiguous()
    num_rows, vocab_size = scores.shape
    tiles = triton.cdiv(vocab_size, TILE)
    best = torch.empty((num_rows, tiles), dtype=torch.float32, device=scores.device)
    winner = torch.empty((num_rows, tiles), dtype=torch.int64, device=scores.device)
    _draw[(num_rows, tiles)](scores, seeds, positions, best, winner, vocab_size, tiles, TILE=TILE)
    return winner.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]


@triton.jit
def _draw(scores_RV, seeds_R, positions_R, best, winner, vocab_size, tiles, TILE: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < vocab_size
    offset = (tl.load(positions_R + row) << 32) | at.to(tl.int64)
    uniform = tl.rand(tl.load(seeds_R + row), offset)
    uniform = tl.minimum(tl.maximum(uniform, 1e-10), 1 - 5.9604644775390625e-08)
    noisy = tl.load(scores_RV + row * vocab_size + at, mask=inside, other=float("-inf")) - tl.log(-tl.log(uniform))
    noisy = tl.where(inside, noisy, float("-inf"))
    tl.store(best + row * tiles + tile, tl.max(noisy, axis=0))
    tl.store(winner + row * tiles + tile, tile * TILE + tl.argmax(noisy, axis=0))
