"""Float32 on a CPU with AVX-512: products with packed matrices and what follows them, LayerNorm, attention of whole texts.

T tokens, K inputs, N outputs, Hq query heads, Hkv key and value heads, D head size. A row's bits depend neither on its batch nor
on the number of threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import torch

from engine.kernels import native
from engine.kernels.device import use_triton
from engine.processor import has_avx512

# As in the sources: a panel's columns, activations, queries of a piece of work, the largest head.
COLUMNS, QUERIES, MOST_DIM = 32, 192, 256
MOST_KEPT = 16 << 20  # floats of a `Room`
MOST_TABLES = 3
ACTIVATIONS = {"": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "relu": 4, "tanh": 5}
# Instructions that `wide.h` names, as /proc/cpuinfo has them.
WIDER = native.NARROW | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# `Product`, `Norm`, `Embedding` and `Means` of `floats.c`, `Attention` of `texts.c`.
_PRODUCT, _NORM, _ATTENTION = Struct("5P7q"), Struct("4P3qd"), Struct("5P10qd")
_EMBEDDING, _MEANS = Struct("7P3qd"), Struct("4P3q")


@functools.cache
def is_usable() -> bool:
    """True if this machine has the kernels."""
    return has_avx512() and native.features() >= WIDER and native.library() is not None


def takes(x: torch.Tensor) -> bool:
    """True if the kernels compute with tensors of this kind here."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not use_triton(x) and is_usable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A matrix [N, K] in the order of its product, with what follows the product."""

    panels: torch.Tensor  # [panels, K, COLUMNS]
    bias: torch.Tensor | None  # [panels, COLUMNS]
    outputs: int  # N, or half as many where they are gated
    activation: int
    is_gated: bool


def packed(weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "", *, is_gated: bool = False) -> Panels:
    """Return a copy of the matrix [N, K] and its bias [N]; gated: its first half are the rows of the gate."""
    both = [weight] if bias is None else [weight, bias[:, None]]
    panels, *biases = (_in_panels(each, is_gated=is_gated) for each in both)
    return Panels(
        panels=panels,
        bias=biases[0][:, 0].contiguous() if biases else None,
        outputs=len(weight) // (1 + is_gated),
        activation=ACTIVATIONS[activation],
        is_gated=is_gated,
    )


def _in_panels(rows: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """Rows [N, K] as [panels, K, COLUMNS], zeros behind the last ones; those of the gate beside those of up."""
    parts, own = (rows.chunk(2), COLUMNS // 2) if is_gated else ([rows], COLUMNS)
    filled = [torch.cat((part, part.new_zeros(-len(part) % own, part.shape[1]))) for part in parts]
    return torch.cat([part.unflatten(0, (-1, own)) for part in filled], dim=1).transpose(1, 2).contiguous()


class Room:
    """Memory for what one step of a layer makes and the next one reads: new pages cost 4 % of a pass."""

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def rows(self, *shape: int) -> torch.Tensor:
        """Return uninitialised float32 of this shape. What was returned before is lost."""
        size = math.prod(shape)
        if size > MOST_KEPT:
            return torch.empty(shape)
        if size > len(self._kept):
            self._kept = torch.empty(0)  # first, so that both are never there
            self._kept = torch.empty(size)
        return self._kept[:size].view(shape)


def product(
    x: torch.Tensor, weight: Panels, *, onto: torch.Tensor | None = None, room: Room | None = None
) -> torch.Tensor:
    """Return act(x @ weight.T + bias) [T, N], gated act(gate) * up. `x` [T, K]. `onto` [T, N] is added to in place, and returned.

    `room`: where the result lies if it isn't added.

    Raises ValueError for rows of another length, and for an `onto` of another shape.
    """
    library, x = native.library(), x if x.stride(1) == 1 else x.contiguous()
    assert library is not None
    if x.shape[1] != weight.panels.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} inputs don't go with a matrix of {weight.panels.shape[1]}")
    out = (room or Room()).rows(len(x), weight.outputs) if onto is None else onto
    if out.shape != (len(x), weight.outputs) or not out.is_contiguous():
        raise ValueError(f"rows of {weight.outputs} outputs, {len(x)} of them, don't go onto {list(out.shape)}")
    library.baton_floats_product(
        _PRODUCT.pack(
            x.data_ptr(), weight.panels.data_ptr(), 0 if weight.bias is None else weight.bias.data_ptr(),
            0 if onto is None else onto.data_ptr(), out.data_ptr(), *x.shape, weight.outputs, x.stride(0),
            weight.activation, weight.is_gated, torch.get_num_threads(),
        )
    )  # fmt: skip
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, in_place: bool = False
) -> torch.Tensor:
    """Return the LayerNorm of rows [T, K]. `in_place`: it may lie where they do."""
    x = x.contiguous()
    library, out = native.library(), x if in_place else torch.empty_like(x)
    assert library is not None
    library.baton_floats_norm(
        _NORM.pack(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            *x.shape, torch.get_num_threads(), eps,
        )
    )  # fmt: skip
    return out


def sums_of_rows(tables: Sequence[tuple[torch.Tensor, torch.Tensor]], multiplier: float) -> torch.Tensor:
    """Return the sums [T, K] of a row of each table [V, K], by numbers [T] int32; the first one's times `multiplier`.

    Raises IndexError for a row that a table lacks, ValueError for more than MOST_TABLES.
    """
    library, [(first, numbers), *_] = native.library(), tables
    assert library is not None
    if len(tables) > MOST_TABLES:
        raise ValueError(f"{len(tables)} tables, at most {MOST_TABLES}")
    out = first.new_empty(len(numbers), first.shape[1])
    for table, rows in tables:
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of a table of {len(table)}")
    pairs = [(table.contiguous(), rows.contiguous()) for table, rows in tables]
    none = [0] * (MOST_TABLES - len(pairs))
    library.baton_floats_embed(
        _EMBEDDING.pack(
            *(table.data_ptr() for table, _ in pairs), *none, *(rows.data_ptr() for _, rows in pairs), *none,
            out.data_ptr(), *out.shape, torch.get_num_threads(), multiplier,
        )
    )  # fmt: skip
    return out


def means(x: torch.Tensor, begins: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the means [B, K] of rows of `x` [T, K]: `lengths` from `begins` on, both int32 [B]."""
    library, x, out = native.library(), x.contiguous(), x.new_empty(len(begins), x.shape[1])
    assert library is not None
    library.baton_floats_means(
        _MEANS.pack(
            x.data_ptr(), begins.data_ptr(), lengths.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads()
        )
    )
    return out


def pieces_of(lengths: Sequence[int], begins: Sequence[int] = ()) -> torch.Tensor:
    """Return the pieces of work of texts of these lengths, int32 [P, 4], see `attend`.

    `begins`: the first token of each text that has a query; (): all have one.
    """
    found, key, query = list[tuple[int, int, int, int]](), 0, 0
    for length, begin in zip(lengths, begins or [0] * len(lengths), strict=True):
        found += ((key, length, first, query - begin) for first in range(begin, length, QUERIES))
        key, query = key + length, query + length - begin
    return torch.tensor(found, dtype=torch.int32).view(-1, 4)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pieces: torch.Tensor, *,
    scale: float, before: int = -1, after: int = -1, room: Room | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention [T, Hq, D] of texts, one behind the other: `queries` [T, Hq, D], `keys` and `values` [S, Hkv, D].

    S is T, or more where some first tokens have no queries; see `pieces_of`.
    `before`, `after`: positions that a query sees on each side; -1: all. D is at most MOST_DIM. `room`: where the result lies.
    Heads of a row that don't lie side by side are copied.
    """
    library, (num_rows, num_heads, size) = native.library(), queries.shape
    assert library is not None
    assert size <= MOST_DIM
    queries, keys, values = (
        each if each.stride()[1:] == (size, 1) else each.contiguous() for each in (queries, keys, values)
    )
    out = (room or Room()).rows(num_rows, num_heads, size)
    library.baton_texts_attend(
        _ATTENTION.pack(
            queries.data_ptr(), keys.data_ptr(), values.data_ptr(), pieces.data_ptr(), out.data_ptr(),
            len(pieces), queries.stride(0), keys.stride(0), values.stride(0), num_heads, keys.shape[1], size, before, after,
            torch.get_num_threads(), scale,
        )
    )  # fmt: skip
    return out
