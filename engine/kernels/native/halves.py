"""Products on a CPU with matrices of 16-bit floats, in float32. T tokens, K inputs, N outputs.

Weights are widened exactly (`engine/kernels/native/halves.c`, which says in what order they lie). A row's bits depend neither
on its batch, nor on the number of threads, nor on the processor. In pairs (`pairs.c`) rows are rounded to bfloat16, which
the processor multiplies; others may sum in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from struct import Struct

import torch

from engine.kernels import native
from engine.kernels.native import floats
from engine.processor import multiplies_bfloat16_without_tiles

DTYPES = (torch.bfloat16, torch.float16)
_AT_ONCE = 64 * floats.COLUMNS  # rows copied while they are put in order
# `Product`, `Lookup` and `Order` of `halves.c`, `Product` of `pairs.c`.
_PRODUCT, _LOOKUP, _ORDER, _PAIRS = Struct("4P10q"), Struct("3P6q"), Struct("2P4q"), Struct("5P8q")
# Instructions that `pairs.c` names, as /proc/cpuinfo has them.
PAIRED = floats.WIDER | {"avx512_bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A matrix [N, K] in the order of its product, or one of each expert [E, N, K].

    Panels have 32 rows, the last one what is left: each is [K, 32], in pairs [K / 2, 32, 2].
    """

    panels: torch.Tensor  # [..., N, K] in one of `DTYPES`; in pairs bfloat16
    in_pairs: bool = False

    @property
    def outputs(self) -> int:
        return self.panels.shape[-2]

    @property
    def inputs(self) -> int:
        return self.panels.shape[-1]

    def __getitem__(self, index: int) -> Halves:
        """One expert's matrix."""
        return replace(self, panels=self.panels[index])

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return rows [T, K] of the matrix in float32. `numbers` [T]. Raises IndexError for one that it lacks."""
        library, numbers = native.library(), numbers.long().contiguous()
        assert library is not None
        out = torch.empty(len(numbers), self.inputs)
        failed = library.baton_halves_rows(
            _LOOKUP.pack(
                numbers.data_ptr(), self.panels.data_ptr(), out.data_ptr(), len(numbers), self.inputs, self.outputs,
                self.panels.dtype == torch.float16, self.in_pairs, torch.get_num_threads(),
            )
        )  # fmt: skip
        if failed:
            raise IndexError(f"a matrix of {self.outputs} rows lacks some of {numbers.tolist()}")
        return out


def is_usable() -> bool:
    """True if this machine has the kernel."""
    return native.library() is not None


def is_wide() -> bool:
    """True if this processor multiplies sixteen floats at a time, and may."""
    return floats.is_usable()


def multiplies_pairs() -> bool:
    """True if this processor multiplies pairs of bfloat16 as fast as anything it has."""
    if not (multiplies_bfloat16_without_tiles() and native.features() >= PAIRED):
        return False
    library = native.library()
    return library is not None and library.baton_pairs_product(_PAIRS.pack(*[0] * 11, 1, 0)) == 0


def packed(weight: torch.Tensor, *, in_pairs: bool = False) -> Halves:
    """Put the rows of a matrix [N, K] in order, in its own memory, which is then for the result alone.

    Raises ValueError for another dtype.
    """
    if weight.dtype not in DTYPES or not weight.is_contiguous():
        raise ValueError(f"a matrix of 16-bit floats, row by row, is wanted, not of {weight.dtype}")
    if in_pairs and weight.dtype != torch.bfloat16:
        raise ValueError(f"pairs are of bfloat16, not of {weight.dtype}")
    library, num_threads = native.library(), torch.get_num_threads()
    assert library is not None
    for some in weight.split(_AT_ONCE):
        rows = some.clone()
        library.baton_halves_order(
            _ORDER.pack(rows.data_ptr(), some.data_ptr(), rows.shape[1], len(rows), in_pairs, num_threads)
        )
    return Halves(panels=weight, in_pairs=in_pairs)


def product(
    x: torch.Tensor, weight: Halves, bias: torch.Tensor | None, *, out: torch.Tensor | None = None, adds: bool = False
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N], in `out` if it is given, which it `adds` to. `x` [T, K], `bias` [N], all float32.

    Raises ValueError for rows of another length, and for an `out` of another shape.
    """
    library, x = native.library(), x if x.stride(-1) == 1 else x.contiguous()
    assert library is not None
    if x.shape[1] != weight.inputs:
        raise ValueError(f"rows of {x.shape[1]} inputs don't go with a matrix of {weight.inputs}")
    out = torch.empty(len(x), weight.outputs) if out is None else out
    if out.shape != (len(x), weight.outputs) or out.stride(-1) != 1:
        raise ValueError(f"{len(x)} rows of {weight.outputs} outputs don't go into {list(out.shape)}")
    bias_at, threads = 0 if bias is None else bias.data_ptr(), torch.get_num_threads()
    if weight.in_pairs:
        rounded = torch.empty(len(x), -(-weight.inputs // 2), dtype=torch.int32)
        library.baton_pairs_product(
            _PAIRS.pack(
                x.data_ptr(), rounded.data_ptr(), weight.panels.data_ptr(), bias_at, out.data_ptr(),
                *x.shape, weight.outputs, x.stride(0), out.stride(0), adds, threads, 0,
            )
        )  # fmt: skip
        return out
    library.baton_halves_product(
        _PRODUCT.pack(
            x.data_ptr(), weight.panels.data_ptr(), bias_at, out.data_ptr(), *x.shape, weight.outputs, x.stride(0),
            out.stride(0), weight.panels.dtype == torch.float16, is_wide(), adds, threads, 0,
        )
    )  # fmt: skip
    return out
