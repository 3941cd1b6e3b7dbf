"""Products on a CPU with weights of 4, 5, 6 or 8 bits in groups, as they are stored.

T tokens, K inputs, N outputs, G groups of a row. Rows are quantised to 8 bits in groups of 32 inputs, and codes are
multiplied as whole numbers (`engine/kernels/native/product.h`, which says what a block holds). A row depends neither on its
batch nor on the processor.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from struct import Struct, pack

import torch

from engine.kernels import native
from engine.kernels.quantised.gguf_blocks import INT4_LEVELS
from engine.processor import has_avx512, may_multiply_bytes

OUTPUTS = 8  # a tile's
OF_ROWS = 32  # inputs that share a step of a row
GROUPS = (16, 32)  # inputs that share a scale in a block
OF_WIDTH = {5: 32, 6: 16}  # the one group that some widths have
GATES = {"silu": 1, "gelu_tanh": 2}
# GGUF's kinds whose blocks are packed as they are, in the order of `packing.c`.
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
TOO_LARGE = "its scales are too large for float16"
# Instructions that `tiles_bytes.c` names, beside those of every processor that has the kernels.
VEX, DOTTED = native.NARROW | {"avx_vnni"}, native.NEON | {"asimddp"}
_CPU = torch.device("cpu")


class Variant(enum.IntEnum):
    """Instructions that multiply codes, by their numbers in C. All give the same bits."""

    AVX2 = 0
    AVX_VNNI = 1  # bytes, 8 outputs at a time
    AVX512_VNNI_OF_8 = 2  # the same in AVX-512's encoding
    AVX512_VNNI = 3  # bytes, 16 outputs at a time
    NEON = 4
    NEON_DOTPROD = 5  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A matrix [N, K], or one of each expert: an element is `scale * (code - middle)`, or `scale * code + minimum`.

    8-bit codes are signed, and their middle is 0. With levels it is `scale * INT4_LEVELS[code]`.
    """

    blocks: torch.Tensor  # uint8 [..., N / OUTPUTS, K / group, bytes of a block]
    bits: int  # 4, 5, 6 or 8
    group: int  # one of `GROUPS`
    has_minimums: bool
    has_levels: bool = False  # 4 bits in groups of 32 alone

    @property
    def outputs(self) -> int:
        return self.blocks.shape[-3] * OUTPUTS

    @property
    def inputs(self) -> int:
        return self.blocks.shape[-2] * self.group

    @property
    def middle(self) -> int:
        return middle_of(self.bits, has_minimums=self.has_minimums)

    @property
    def _code_bytes(self) -> int:
        return OUTPUTS * self.group * self.bits // 8

    def __getitem__(self, index: int) -> Tiles:
        """One expert's matrix."""
        return replace(self, blocks=self.blocks[index])

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return rows [T, K] of the matrix in float32. `numbers` [T]."""
        tile, place = numbers // OUTPUTS, numbers % OUTPUTS
        blocks = self.blocks.index_select(0, tile)  # [T, G, bytes]
        own = torch.arange(len(numbers))
        bytes_ = blocks[..., : self._code_bytes].unflatten(2, (-1, OUTPUTS, 4))[own, :, :, place].flatten(2)
        halves = blocks[..., self._code_bytes :].contiguous().view(torch.float16).unflatten(2, (-1, OUTPUTS))
        factors = halves[own, :, :, place].float()  # [T, G, 1 or 2]
        found = self._codes(bytes_).mul_(factors[..., :1])
        return (found.add_(factors[..., 1:]) if self.has_minimums else found).flatten(1)

    def _codes(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the codes [T, G, group] of one output's bytes, from `middle` on, in float32."""
        if self.bits == 8:
            return packed.view(torch.int8).float()
        lowest = packed[..., : self.group // 2]
        codes = torch.cat((lowest & 15, lowest >> 4), dim=-1)
        if self.has_levels:
            return _levels().float()[codes.int()]
        if more := self.bits - 4:
            rest = packed[..., self.group // 2 :].unflatten(2, (-1, 1, 4)) >> _places(more)
            codes |= (rest & ((1 << more) - 1)).flatten(2) << 4
        return codes.float().sub_(self.middle)


def middle_of(bits: int, *, has_minimums: bool) -> int:
    """The code of zero."""
    return 0 if bits == 8 or has_minimums else 1 << (bits - 1)


def is_usable() -> bool:
    """True if this machine has the kernel."""
    return native.library() is not None


def variants() -> tuple[Variant, ...]:
    """Those that this processor has."""
    if variant() is Variant.AVX512_VNNI:
        return Variant.AVX2, Variant.AVX512_VNNI_OF_8, Variant.AVX512_VNNI
    return tuple(dict.fromkeys((Variant.NEON if native.is_arm() else Variant.AVX2, variant())))


def allocate(
    *shape: int, bits: int, group: int, has_minimums: bool, has_levels: bool = False, device: torch.device = _CPU
) -> Tiles:
    """Return memory for a matrix [N, K], or one of each expert [E, N, K]. Raises ValueError for sizes that don't `suit`."""
    *experts, outputs, inputs = shape
    if not suit(outputs, inputs, group) or OF_WIDTH.get(bits, group) != group:
        raise ValueError(
            f"tiles have {OUTPUTS} outputs and groups of {GROUPS} inputs: not {outputs}, {inputs} in {group}"
        )
    num_bytes = OUTPUTS * group * bits // 8 + 2 * OUTPUTS * (1 + has_minimums)
    blocks = torch.empty(*experts, outputs // OUTPUTS, inputs // group, num_bytes, dtype=torch.uint8, device=device)
    return Tiles(blocks=blocks, bits=bits, group=group, has_minimums=has_minimums, has_levels=has_levels)


def suit(outputs: int, inputs: int, group: int) -> bool:
    """True if a matrix has whole tiles and whole groups."""
    return group in GROUPS and outputs % OUTPUTS == 0 and inputs % OF_ROWS == 0


def put(
    weight: Tiles, begin: int, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None
) -> None:
    """Pack rows from row `begin` on. `codes` [n, K]: int8 in 8 bits, else uint8; `scales`, `minimums` [n, G] become float16.

    Raises ValueError for a factor that is too large for that.
    """
    bits, group, tiles = weight.bits, weight.group, len(codes) // OUTPUTS
    factors = [each.half() for each in (scales, minimums) if each is not None]
    if not all(each.isfinite().all() for each in factors):
        raise ValueError(TOO_LARGE)
    by_tile = codes.contiguous().view(torch.uint8).view(tiles, OUTPUTS, -1, group)
    by_vector = by_tile.unflatten(3, (group // 4, 4)).permute(0, 2, 3, 1, 4)  # tile, group, vector, output, input
    parts = [by_vector.flatten(2)]
    if bits < 8:
        low, high = (by_vector & 15).chunk(2, dim=2)
        parts = [(low | high << 4).flatten(2)]
    if bits in OF_WIDTH:
        places = _places(bits - 4)
        rest = (by_vector >> 4).unflatten(2, (-1, len(places))) << places[:, None]
        parts.append(rest.sum(dim=3, dtype=torch.uint8).flatten(2))
    parts += [each.view(tiles, OUTPUTS, -1).transpose(1, 2).contiguous().view(torch.uint8) for each in factors]
    first = begin // OUTPUTS
    torch.cat(parts, dim=2, out=weight.blocks[first : first + tiles])


@functools.cache
def _places(width: int) -> torch.Tensor:
    """The lowest bits of a byte's codes of `width` bits each, [8 / width, 1]."""
    return torch.arange(0, 8, width, dtype=torch.uint8)[:, None]


def put_blocks(weight: Tiles, begin: int, kind: str, data: torch.Tensor) -> None:
    """Pack rows of a GGUF file's blocks from row `begin` on, as `put` would. `kind` is one of `PACKED`; `data` uint8 [n, bytes].

    Raises ValueError for a factor that is too large for float16.
    """
    library = native.library()
    assert library is not None
    _pack(library.baton_tiles_pack, weight, begin, data.contiguous(), PACKED.index(kind))


def put_rounded(weight: Tiles, begin: int, rows: torch.Tensor, factors: Sequence[float]) -> None:
    """Round rows [n, K] to 4 bits in groups of 32 inputs, and pack them from row `begin` on.

    A group's scale is one of `factors` times its number that is furthest from 0: the one that leaves the smallest sum of squares.
    Raises ValueError for numbers that float16 does not scale.
    """
    library, tried = native.library(), torch.tensor(factors, dtype=torch.float32)
    assert library is not None
    _pack(library.baton_tiles_round, weight, begin, rows.float().contiguous(), len(tried), tried.data_ptr())


def _pack(function: Callable[[bytes], None], weight: Tiles, begin: int, rows: torch.Tensor, *last: int) -> None:
    """Have `rows` [n, ..] packed from row `begin` on; `last` are the last fields. Raises ValueError for what is refused."""
    target, refused = weight.blocks[begin // OUTPUTS :][: len(rows) // OUTPUTS], torch.zeros(1, dtype=torch.int64)
    addresses = (each.data_ptr() for each in (rows, target, refused))
    function(pack(f"{5 + len(last)}q", *addresses, rows.shape[1], len(rows), *last))
    if refused.item():
        raise ValueError(TOO_LARGE)


@functools.cache
def _levels() -> torch.Tensor:
    return torch.tensor(INT4_LEVELS, dtype=torch.int8)


# `Product` of `product.h`.
_PRODUCT = Struct("10P12q")


def product(
    x: torch.Tensor, weight: Tiles, bias: torch.Tensor | None, *, out: torch.Tensor | None = None, adds: bool = False
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N] in float32, in `out` if it is given, which it `adds` to. `x` [T, K], `bias` [N] float32.

    Raises ValueError for rows of another length.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.outputs)
    _multiply(x, weight, bias, out, adds=adds)
    return out


def gated_product(x: torch.Tensor, weight: Tiles, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return act(first half) * second half of the product, [T, N / 2] in float32. N is a multiple of 2 `OUTPUTS`."""
    sums, found = torch.empty(x.shape[0], weight.outputs), torch.empty(x.shape[0], weight.outputs // 2)
    _multiply(x, weight, bias, sums, found, gate=GATES[activation])
    return found


def _multiply(
    x: torch.Tensor,
    weight: Tiles,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: torch.Tensor | None = None,
    *,
    gate: int = 0,
    adds: bool = False,
) -> None:
    library = native.library()
    assert library is not None
    x, (num_rows, inputs), (tiles, groups, _) = x.float().contiguous(), x.shape, weight.blocks.shape
    if inputs != groups * weight.group:
        raise ValueError(f"rows of {inputs} inputs don't go with a matrix of {weight.inputs}")
    num_steps, num_sums = num_rows * inputs // OF_ROWS, num_rows * groups
    room = torch.empty(4 * (num_steps + 2 * num_sums) + num_rows * inputs, dtype=torch.uint8)
    steps = room.data_ptr()
    sums = steps + 4 * num_steps
    library.baton_tiles_product(
        _PRODUCT.pack(
            x.data_ptr(), weight.blocks.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            0 if gated is None else gated.data_ptr(), sums + 8 * num_sums, steps, sums, sums + 4 * num_sums,
            _levels().data_ptr() if weight.has_levels else 0,
            num_rows, inputs, tiles * OUTPUTS, out.stride(0), weight.bits, weight.group, weight.middle,
            weight.has_minimums, variant(), torch.get_num_threads(), gate, adds,
        )
    )  # fmt: skip


@functools.cache
def variant() -> Variant:
    """The fastest one that this processor has, and that no limit forbids."""
    if native.is_arm():
        return Variant.NEON_DOTPROD if native.features() >= DOTTED else Variant.NEON
    if has_avx512() and getattr(torch.cpu, "_is_vnni_supported", lambda: False)():
        return Variant.AVX512_VNNI
    return Variant.AVX_VNNI if native.features() >= VEX and may_multiply_bytes() else Variant.AVX2
