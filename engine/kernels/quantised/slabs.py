"""Experts in 4-bit floats (e2m1) on a CPU: a few outputs at a time are dequantised, and multiplied while in cache.

Each thread takes whole slabs. Operations that share one each would wait for one another some 150 times a product: where other
programs want the cores too, a wait is as long as their turn.

N outputs, K inputs, W outputs of a slab, S slabs, G groups of inputs.
"""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from engine.kernels.quantised.groups import E2M1

# Inputs that share a scale.
GROUP = 32
# Elements of a slab: 1 MiB in bfloat16, which fits a core's L2 cache.
_ELEMENTS = 1 << 19
_CODES_OF_A_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slabs:
    """A matrix [N, K], or one for each expert. Stored transposed, so that a scale applies to neighbours in memory.

    A word has the codes of four outputs, the first one lowest.
    """

    codes: torch.Tensor  # uint16 [..., S, K, W / 4]
    scales: torch.Tensor  # bfloat16 [..., S, G, 1, W], powers of 2
    outputs: int  # N; the last slab may have more

    @property
    def inputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def width(self) -> int:
        """W."""
        return self.scales.shape[-1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, index: int) -> Slabs:
        """One expert's matrix."""
        return replace(self, codes=self.codes[index], scales=self.scales[index])


def allocate(shape: tuple[int, ...]) -> Slabs:
    """Return memory for a matrix [..., N, K], whose rows `put` fills. Raises ValueError for unsupported sizes."""
    *experts, rows, inputs = shape
    if rows % _CODES_OF_A_WORD or inputs % GROUP:
        raise ValueError(
            f"floats of 4 bits need multiples of {_CODES_OF_A_WORD} rows and of {GROUP} inputs, not {rows}, {inputs}"
        )
    width = min(rows, max(GROUP, _ELEMENTS // inputs // GROUP * GROUP))
    slabs = -(-rows // width)
    return Slabs(
        codes=torch.empty((*experts, slabs, inputs, width // _CODES_OF_A_WORD), dtype=torch.uint16),
        scales=torch.empty((*experts, slabs, inputs // GROUP, 1, width), dtype=torch.bfloat16),
        outputs=rows,
    )


def put(weight: Slabs, begin: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Pack some rows of one matrix from row `begin` on: `codes` uint8 [n, K], `scales` [n, G]. Both are multiples of four."""
    words, scales = _words(codes), scales.T
    for at in range(begin - begin % weight.width, begin + len(codes), weight.width):
        first, last = max(begin, at), min(begin + len(codes), at + weight.width)
        slab, inside, taken = at // weight.width, slice(first - at, last - at), slice(first - begin, last - begin)
        weight.codes[slab, :, _in_words(inside)] = words[:, _in_words(taken)]
        weight.scales[slab, :, 0, inside] = scales[:, taken]


def product(x: torch.Tensor, weight: Slabs, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N]. `x` [T, K]; weights are rounded to x's dtype, exactly for bfloat16 and float32."""
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    parts, threads = [x] * len(weight.codes), min(torch.get_num_threads(), len(weight.codes))
    left = iter(range(len(parts)))

    @torch.inference_mode()
    def take() -> None:
        for slab in left:
            parts[slab] = torch.mm(x, _plain(weight.codes[slab], weight.scales[slab], dtype).to(x.dtype))

    if threads == 1:
        take()
    else:
        for done in [_threads(torch.get_num_threads()).submit(take) for _ in range(threads)]:
            done.result()
    out = torch.cat(parts, dim=1)[:, : weight.outputs]
    return out if bias is None else out.add_(bias)


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """A thread pool whose threads run single-threaded operations."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="slabs", initializer=_alone)
    all_there = threading.Barrier(count + 1)
    for _ in range(count):
        threads.submit(all_there.wait)
    all_there.wait()
    # New threads inherit torch's thread count that was set last.
    torch.set_num_threads(count)
    return threads


def _alone() -> None:
    # A thread's first call uses the count set last in the process, whatever the thread itself has set.
    torch.get_num_threads()
    torch.set_num_threads(1)


# A forked process has no such threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


def plain(weight: Slabs, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [N, K]."""
    slabs = [_plain(*each, torch.float32).T for each in zip(weight.codes, weight.scales, strict=True)]
    return torch.cat(slabs)[: weight.outputs].to(dtype)


def _plain(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A slab [K, W] in bfloat16 or float32, by a table lookup of eight bytes at a time: four numbers or two."""
    several = codes if dtype.itemsize == 2 else codes.view(torch.uint8)
    found = _table(dtype).index_select(0, several.flatten().to(torch.int32)).view(dtype)
    return found.view(-1, GROUP, scales.shape[-1]).mul_(scales.to(dtype)).view(-1, scales.shape[-1])


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of each run of codes, as int64."""
    count = 8 // dtype.itemsize
    runs = torch.arange(1 << (4 * count))
    levels = torch.tensor((*E2M1, *(-level for level in E2M1)), dtype=dtype)
    return torch.stack([levels[(runs >> (4 * at)) & 15] for at in range(count)], dim=1).view(torch.int64).flatten()


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [n, K] -> uint16 [K, n / 4]."""
    four = codes.T.contiguous().view(torch.int32)
    pairs = four | four >> 4
    return ((pairs & 0xFF) | (pairs >> 8 & 0xFF00)).to(torch.int16).view(torch.uint16)


def _in_words(outputs: slice) -> slice:
    return slice(outputs.start // _CODES_OF_A_WORD, outputs.stop // _CODES_OF_A_WORD)
