"""Checks of the paged prefill kernels against float64, which `test_triton.py` runs in Triton's interpreter.

Outputs are full of NaN before a kernel runs, and so is everything in the pool that it must not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.attention import Scores, deal_out_tiles, triton_paged_prefill
from tests.unit.kernels.references import close

Lengths = list[tuple[int, int]]  # new tokens, context


@dataclass(frozen=True)
class Case:
    q: torch.Tensor  # [T, Hq, D], a view of a fused projection
    kv_layer: torch.Tensor  # [num_blocks, 2, B, Hkv, D], one layer of a pool of three
    block_table: torch.Tensor
    lengths: Lengths
    window: int
    scale: float

    def poisoned_out(self) -> torch.Tensor:
        return torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=self.q.device)

    def tiles(self, rows: int) -> torch.Tensor:
        new, context = np.array(self.lengths).T
        return torch.from_numpy(deal_out_tiles(new, context, np.zeros_like(new), rows=rows)).to(self.q.device)


def make_case(
    lengths: Lengths,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    window: int = 0,
    block_size: int = 16,
) -> Case:
    """Blocks lie shuffled in the pool; what no new token may see holds NaN, and tables name such blocks there."""
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    pool = torch.full((num_blocks, 3, 2, block_size, heads[1], head_dim), float("nan"), dtype=dtype, device=device)
    order = torch.randperm(num_blocks).tolist()
    nobody = order.pop()
    table = torch.full((len(lengths), max(counts) + 1), nobody, dtype=torch.int32)
    for sequence, (new, context) in enumerate(lengths):
        oldest = max(0, context - new - window + 1) if window else 0
        for index in range(oldest // block_size, counts[sequence]):
            table[sequence, index] = block = order.pop()
            used = min(block_size, context - index * block_size)
            values = torch.randn(2, used, heads[1], head_dim, device=device)
            pool[block, 1, :, :used] = values.to(dtype)
    num_tokens = sum(new for new, _ in lengths)
    qkv = torch.randn(num_tokens, heads[0] + 2 * heads[1], head_dim, device=device).to(dtype)
    return Case(
        qkv[:, : heads[0]], pool[:, 1], table.to(device), lengths, window, head_dim**-0.5
    )  # fmt: skip


def expected(case: Case) -> torch.Tensor:
    """[T, Hq, D] in float64: sequence by sequence, everything at once."""
    out = torch.empty(case.q.shape, dtype=torch.float64, device=case.q.device)
    block_size, num_kv_heads = case.kv_layer.shape[2:4]
    start = 0
    for sequence, (new, context) in enumerate(case.lengths):
        blocks = case.block_table[sequence, : -(-context // block_size)].long()
        keys, values = case.kv_layer[blocks].transpose(1, 2).flatten(0, 1)[:context].double().nan_to_num().unbind(1)
        grouped = case.q[start : start + new].double().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,chd->hgqc", grouped, keys) * case.scale
        query_at = torch.arange(context - new, context, device=case.q.device)[:, None]
        key_at = torch.arange(context, device=case.q.device)
        hidden = key_at > query_at
        if case.window:
            hidden = hidden | (key_at <= query_at - case.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start : start + new] = torch.einsum("hgqc,chd->qhgd", weights, values).flatten(1, 2)
        start += new
    return out


def check(case: Case, shape: tuple[int, int, int, int] | None = None, rows: int = 64) -> None:
    out = case.poisoned_out()
    triton_paged_prefill.paged_prefill(
        case.q, case.kv_layer, case.block_table, case.tiles(rows), out,
        Scores(scale=case.scale, window=case.window), rows=rows, shape=shape,
    )  # fmt: skip
    close(out, expected(case))


RAGGED: Lengths = [(9, 9), (150, 150), (1, 30), (3, 140), (16, 16), (70, 263)]


def check_ragged() -> None:
    for heads, dtype in [((4, 4), torch.float32), ((4, 1), torch.float16), ((8, 1), torch.float32)]:
        check(make_case(RAGGED, heads, 64, dtype), rows=128 if heads[1] == 1 else 32)


def check_windows() -> None:
    for window in (1, 5, 16, 64, 130, 1000):
        dtype = torch.float32 if window in (5, 130) else torch.float16
        check(make_case([(20, 300), (150, 150), (2, 3), (130, 400)], (2, 1), 64, dtype, window=window))
        check(make_case([(70, 200)], (2, 1), 32, torch.float16, window=window), (32, 64, 4, 2))


def check_head_sizes() -> None:
    for head_dim in (16, 24, 80, 96, 128, 256):
        dtype = torch.float32 if head_dim in (24, 256) else torch.float16
        check(make_case([(5, 20), (130, 131)], (2, 1), head_dim, dtype, window=0 if head_dim % 3 else 40))
    for block_size in (4, 8, 32):
        check(make_case([(5, 20), (40, 77)], (6, 2), 16, torch.float32, block_size=block_size))


def check_random() -> None:
    for _ in range(12):
        lengths = []
        for _ in range(int(torch.randint(1, 6, ()))):
            new = int(torch.randint(1, 120, ()))
            lengths.append((new, new + int(torch.randint(0, 3, ())) * int(torch.randint(0, 100, ()))))
        group = (1, 2, 3, 4)[int(torch.randint(0, 4, ()))]
        window = (0, 0, 33)[int(torch.randint(0, 3, ()))]
        rows, step = (16, 32, 64)[int(torch.randint(0, 3, ()))], (16, 32, 64)[int(torch.randint(0, 3, ()))]
        check(make_case(lengths, (2 * group, 2), 32, torch.float16, window=window), (rows, step, 4, 2))


CHECKS = {
    "ragged": check_ragged,
    "windows": check_windows,
    "head_sizes": check_head_sizes,
    "random": check_random,
}


def interpret(name: str) -> None:
    """For `interpreter`."""
    CHECKS[name]()
