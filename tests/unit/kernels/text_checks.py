"""Checks of the kernels of passes over whole texts against float64 references.

`test_pooled.py` runs them in Triton's interpreter; `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import gelu

from engine.kernels.activation import erf_gelu_and_mul
from engine.kernels.linear import activated_linear
from engine.kernels.texts.attention import Distances, attend_texts
from engine.kernels.texts.gathering import keep_rows, whole_texts
from engine.kernels.texts.layer_norm import norm_of_rows, norm_of_sum
from engine.kernels.texts.pooling import KINDS, pool_texts
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import Suite, _dtypes

Lengths = Sequence[tuple[int, int]]  # queries, the last ones of a text, and keys
MIXED: Lengths = [(9, 9), (70, 70), (1, 1), (1, 30), (40, 75), (16, 16), (3, 3)]
LARGE: Lengths = [(512, 512), (37, 37), (1, 1), (1500, 1500), (64, 700), (129, 129)]
LONG: Lengths = [(2100, 2100), (300, 300), (5, 5)]


def sight(lengths: Lengths, *, reach: int, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `seen` [2, T], the first key of each query and the one behind its last, and its own key [T]."""
    first, end, own, at = list[int](), list[int](), list[int](), 0
    for queries, keys in lengths:
        for place in range(keys - queries, keys):
            first.append(at + (max(0, place - reach) if reach else 0))
            last = place if is_causal else place + reach if reach else keys
            end.append(at + min(last + 1, keys))
            own.append(at + place)
        at += keys
    return torch.tensor([first, end], dtype=torch.int32), torch.tensor(own, dtype=torch.int32)


def attended(
    heads: Sequence[torch.Tensor], seen: torch.Tensor, scale: float, distances: Distances | None
) -> torch.Tensor:
    """All scores at once."""
    queries, keys, values = (one.double() for one in heads)
    keys, values = (one.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for one in (keys, values))
    scores, at = torch.einsum("qhd,shd->hqs", queries, keys) * scale, torch.arange(len(keys), device=keys.device)
    if distances is not None:
        most = distances.biases.shape[1] // 2
        behind = at - distances.places[:, None]
        scores += distances.biases[:, behind.clamp(-most, most) + most].double()
    is_seen = (at >= seen[0, :, None]) & (at < seen[1, :, None])
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqs,shd->qhd", weights, values)


def check_attention(
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    lengths: Lengths,
    *,
    reach: int = 0,
    is_causal: bool = False,
    is_biased: bool = False,
) -> None:
    """Queries, keys and values are parts of one product, as where nothing is rotated."""
    num_heads, num_kv_heads, dim = heads
    seen, own = (one.to(device) for one in sight(lengths, reach=reach, is_causal=is_causal))
    queries = torch.randn(len(own), num_heads + 1, dim, device=device).to(dtype)[:, :num_heads]
    both = torch.randn(sum(keys for _, keys in lengths), 2 * num_kv_heads, dim, device=device).to(dtype)
    parts = (queries, both[:, :num_kv_heads], both[:, num_kv_heads:])
    distances = Distances(3 * torch.randn(num_heads, 2 * 20 + 1, device=device), own) if is_biased else None
    found = attend_texts(*parts, seen, scale=dim**-0.5, distances=distances)
    close(found, attended(parts, seen, dim**-0.5, distances))


def check_lengths(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for lengths in [MIXED, [(1, 1)], [(64, 64)] * 3] + [LARGE, LONG] * large:
            check_attention(device, dtype, (2, 2, 64), lengths)
            check_attention(device, dtype, (2, 1, 64), lengths, is_causal=True)


def check_windows(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for reach in (1, 5, 33):
            for lengths in [MIXED] + [LARGE] * large:
                check_attention(device, dtype, (2, 2, 32), lengths, reach=reach)
                check_attention(device, dtype, (2, 1, 32), lengths, reach=reach, is_causal=True)


def check_distances(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for lengths in [MIXED[:5]] + [LARGE] * large:
            check_attention(device, dtype, (2, 2, 16), lengths, is_biased=True)


def check_head_sizes(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for dim in (8, 24, 80, 96, 128, 256):
            check_attention(device, dtype, (3, 1, dim), MIXED[:4] if not large else LARGE, is_causal=dim == 128)


def check_shapes(device: str, large: bool) -> None:
    """Tiles of any pass."""
    from engine.kernels.texts import triton_attention

    for dim in (64, 128, 256):
        seen, _ = (one.to(device) for one in sight(MIXED, reach=0, is_causal=dim == 128))
        sizes = (seen.shape[1], 2), (int(seen[1].max()), 1), (int(seen[1].max()), 1)
        for dtype in _dtypes(device)[1:]:
            heads = [torch.randn(*size, dim, device=device).to(dtype) for size in sizes]
            wanted = attended(heads, seen, 0.1, None)
            for count in (200, 2000):
                shape = triton_attention.shape_of(count, dim, dtype)
                close(triton_attention.attend_texts(*heads, seen, scale=0.1, shape=shape), wanted)


def check_norms(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for rows, features in [(3, 64), (2, 100), (5, 1)] + [(300, 4096), (7, 768), (1, 5120)] * large:
            residual, x = (2 + torch.randn(2, rows, features, device=device)).to(dtype).unbind(0)
            weight, bias = torch.randn(2, features, device=device).to(dtype).unbind(0)
            parts = torch.randn(3, rows, features, device=device)
            for added, its_bias in ((x, bias), (None, None), (parts, bias), (x, None)):
                total = residual.double()
                if added is not None:
                    total = total + (added.double() if added.dim() == 2 else added.double().sum(dim=0))
                wanted = _layer_norm(total, weight, its_bias)
                for keeps_sum in (True, False):
                    normed, kept = norm_of_sum(residual, added, weight, its_bias, 1e-5, keeps_sum=keeps_sum)
                    close(normed, wanted)
                    assert (kept is not None) == keeps_sum
                    if kept is not None:
                        close(kept, total)


def check_rows(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for features in (64, 100) + (768,) * large:
            tables = [torch.randn(30, features, device=device).to(dtype) for _ in range(3)]
            numbers = torch.randint(0, 30, (3, 5), device=device, dtype=torch.int32)
            weight, bias = torch.randn(2, features, device=device).to(dtype).unbind(0)
            for count in (1, 2, 3):
                total = 1.5 * tables[0][numbers[0]].double()
                for table, own in list(zip(tables, numbers, strict=True))[1:count]:
                    total = total + table[own].double()
                its_bias = bias if count > 1 else None
                rows = list(zip(tables, numbers, strict=True))[:count]
                close(norm_of_rows(weight, its_bias, 1e-5, rows, 1.5), _layer_norm(total, weight, its_bias))


def check_pooling(device: str, large: bool) -> None:
    spans = torch.tensor([[0, 3, 4, 50], [3, 1, 40, 2], [0, 2, 7, 1]], dtype=torch.int32)
    if large:
        spans = torch.tensor([[0, 700, 701], [700, 1, 3000], [1, 0, 5]], dtype=torch.int32)
    for dtype in _dtypes(device):
        for features in (24, 100) + (768,) * large:
            x = torch.randn(int((spans[0] + spans[1]).max()), features, device=device).to(dtype)
            for kind in KINDS:
                close(pool_texts(x, spans.to(device), kind), pool_texts.reference(x.double(), spans, kind))


def check_gathering(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for shape in [(3, 8), (100,), (2, 260)] + [(8, 128)] * large:
            both = torch.randn(40, 2, *shape, device=device).to(dtype)
            stored = torch.randn(32, *shape, device=device).to(dtype)
            sources = torch.randint(-32, 40, (500 if large else 9,), dtype=torch.int32, device=device)
            found = whole_texts(both[:, 1], stored, sources)
            for own, source in zip(found, sources.tolist(), strict=True):
                assert torch.equal(own, both[source, 1] if source >= 0 else stored[-1 - source])
            kept = torch.full((40,), -1, dtype=torch.int32, device=device)
            kept[:7] = torch.randperm(32, device=device)[:7]
            wanted = stored.clone()
            wanted[kept[:7].long()] = both[:7, 1]
            keep_rows(both[:, 1], stored, kept)
            assert torch.equal(stored, wanted)


def check_activations(device: str, large: bool) -> None:
    """GELU by erf, gated or behind a product, whose epilogue in bfloat16 has the one by tanh."""
    for dtype in _dtypes(device):
        for size in (32, 1030) + (3072,) * large:
            gate_up = (3 * torch.randn(3, 2 * size, device=device)).to(dtype)
            first, second = gate_up.double().chunk(2, dim=-1)
            close(erf_gelu_and_mul(gate_up, is_up_first=False), gelu(first) * second)
            close(erf_gelu_and_mul(gate_up, is_up_first=True), gelu(second) * first)
        for rows, inputs, outputs in [(3, 256, 64), (70, 40, 24)] + [(3000, 768, 3072)] * large:
            x, weight = (torch.randn(n, inputs, device=device).to(dtype) for n in (rows, outputs))
            x, bias = x / inputs**0.5, torch.randn(outputs, device=device).to(dtype)
            product = x.double() @ weight.double().T + bias.double()
            close(activated_linear(x, weight, bias, "gelu"), gelu(product))
            close(activated_linear(x, weight, bias, "gelu_tanh"), gelu(product, approximate="tanh"))


def _layer_norm(total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = total - total.mean(dim=-1, keepdim=True)
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "lengths": check_lengths,
    "windows": check_windows,
    "distances": check_distances,
    "head_sizes": check_head_sizes,
    "shapes": check_shapes,
    "norms": check_norms,
    "rows": check_rows,
    "pooling": check_pooling,
    "activations": check_activations,
    "gathering": check_gathering,
}
SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
