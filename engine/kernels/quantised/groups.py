"""Products with weights in 4-bit or 8-bit groups of inputs. T tokens, K inputs, N outputs, G groups of a row, P partial sums.

One layout for every format that has a scale for each group. An int32 word holds one code of each of several planes, and a block
is W words of a row: 8 W codes of 4 bits or 4 W of 8. Column `W * plane + word` of a block is in bits `place * bits` of the word:
a kernel takes a plane out of all words alike and multiplies it with W neighbouring inputs. A group is whole planes. Of 4 bits the
low halves of a word's bytes are planes 0 to 3, the high ones 4 to 7, so that either are a word of codes in bytes (`place_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

from engine.kernels.activation import act_and_mul
from engine.kernels.device import describe, twin, use_triton
from engine.kernels.quantised.fp8 import Rounding

# W words a block. Wider planes mean fewer products of more inputs; with 64 words loops run out of registers.
WORDS = (32, 16)
# The factor by which wide blocks may pad a matrix's inputs.
MOST_PADDING = 8
GROUPS = (16, 32, 64, 128)  # inputs
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; codes from 8 on are negative
FEW_ROWS = 32  # rows up to which bfloat16 is split into two fp8 parts
IN_PARTS = Rounding(128, 2, for_codes=True)
_ROWS_AT_ONCE = 1 << 24  # elements that the reference dequantises at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A matrix [N, K], or one of each expert.

    An element is `scale * (code - zero)`, or `scale * code + minimum`; with neither zeros nor minimums the zero is `middle`.
    With `levels`, which all experts share, it is `scale * levels[code]`.
    Scales keep the dtype of the checkpoint: none is rounded.
    """

    codes: torch.Tensor  # int32 [..., N, W words of each block]
    scales: torch.Tensor  # [..., G, N]
    zeros: torch.Tensor | None = None  # [..., G, N] whole numbers
    minimums: torch.Tensor | None = None  # [..., G, N]
    inputs: int  # K
    bits: int  # 4 or 8
    words: int  # W
    group: int  # inputs of a group; K: one for each row
    is_e2m1: bool = False  # codes are 4-bit floats (e2m1)
    levels: torch.Tensor | None = None  # [16] float32

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def columns(self) -> int:
        """Inputs of a block."""
        return self.words * 32 // self.bits

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.codes.shape[-1] // self.words

    @property
    def middle(self) -> int:
        """The zero point if there are neither zeros nor minimums."""
        return 0 if self.is_e2m1 or self.levels is not None or self.minimums is not None else 1 << (self.bits - 1)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in (self.codes, self.scales, self.zeros, self.minimums) if each is not None)

    def __getitem__(self, index: int) -> Groups:
        """One expert's matrix."""
        return self._each(lambda tensor: tensor[index])

    def rows(self, begin: int, end: int) -> Groups:
        """Return some rows of the matrix."""
        whole = self._each(lambda tensor: tensor[..., begin:end])
        return replace(whole, codes=self.codes[..., begin:end, :])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Groups:
        zeros, minimums = self.zeros, self.minimums
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=None if zeros is None else change(zeros),
            minimums=None if minimums is None else change(minimums),
        )


def pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    bits: int,
    group: int,
    zeros: torch.Tensor | None = None,
    minimums: torch.Tensor | None = None,
    is_e2m1: bool = False,
    levels: torch.Tensor | None = None,
) -> Groups:
    """Pack non-negative codes [..., N, K] of any integer type. `scales`, `zeros`, `minimums` [..., N, G].

    Raises ValueError where a size does not suit the layout.
    """
    inputs = codes.shape[-1]
    lower = _lower(bits, is_e2m1, levels, zeros, minimums)
    if group != inputs and group not in GROUPS:
        raise ValueError(f"a group has {', '.join(map(str, GROUPS))} or all {inputs} inputs, not {group}")
    num_groups = -(-inputs // group)
    for each in (scales, *lower):
        if each.shape != (*codes.shape[:-1], num_groups):
            raise ValueError(f"codes {list(codes.shape)} in groups of {group} don't go with scales {list(each.shape)}")
    words = words_of(inputs, bits, group)
    return Groups(
        codes=_words(codes, bits, words),
        scales=_by_group(scales),
        zeros=None if zeros is None else _by_group(zeros.to(scales.dtype)),
        minimums=None if minimums is None else _by_group(minimums),
        inputs=inputs,
        bits=bits,
        words=words,
        group=_padded(inputs, bits, words) if group == inputs else group,
        is_e2m1=is_e2m1,
        levels=levels,
    )


def words_of(inputs: int, bits: int, group: int) -> int:
    """Return W: the largest size for which a group is whole planes, and padding to whole blocks is small."""
    for words in WORDS:
        padding = _padded(inputs, bits, words) - inputs
        if (group == inputs or group % words == 0) and padding * MOST_PADDING <= inputs:
            return words
    return WORDS[-1]


def _padded(inputs: int, bits: int, words: int) -> int:
    """Inputs padded to whole blocks."""
    columns = words * 32 // bits
    return -(-inputs // columns) * columns


def _lower(
    bits: int,
    is_e2m1: bool,
    levels: torch.Tensor | None,
    zeros: torch.Tensor | None,
    minimums: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return each group's zeros, minimums or levels. Raises ValueError if they don't fit the kind of codes."""
    found = [each for each in (zeros, minimums) if each is not None]
    if bits not in (4, 8) or (is_e2m1 and bits != 4) or len(found) > 1:
        raise ValueError("codes have 4 or 8 bits, floats 4, and zeros or minimums, not both")
    if levels is not None and (bits != 4 or is_e2m1 or found):
        raise ValueError("levels are named by codes of 4 bits, which have neither zeros nor minimums")
    return found


def allocate(
    shape: tuple[int, ...],
    *,
    bits: int,
    group: int,
    device: torch.device,
    has_zeros: bool = False,
    has_minimums: bool = False,
    has_levels: bool = False,
    is_e2m1: bool = False,
    scales: torch.dtype = torch.float32,
) -> Groups:
    """Return memory for a matrix [..., N, K], whose rows `put` fills; the caller fills in the levels.

    Scales are float32 until `narrow`, or of another dtype.
    """
    *_, rows, inputs = shape
    words, num_groups = words_of(inputs, bits, group), -(-inputs // group)
    padded = _padded(inputs, bits, words)
    of_groups = torch.empty((*shape[:-2], num_groups, rows), dtype=scales, device=device)
    return Groups(
        codes=torch.empty((*shape[:-1], padded * bits // 32), dtype=torch.int32, device=device),
        scales=of_groups,
        zeros=torch.empty_like(of_groups) if has_zeros else None,
        minimums=torch.empty_like(of_groups) if has_minimums else None,
        inputs=inputs,
        bits=bits,
        words=words,
        group=padded if group == inputs else group,
        is_e2m1=is_e2m1,
        levels=torch.empty(16, dtype=torch.float32, device=device) if has_levels else None,
    )


def put(weight: Groups, begin: int, rows: Groups) -> None:
    """Copy packed rows into place, from row `begin` on."""
    place = weight.rows(begin, begin + rows.outputs)
    for own, theirs in zip(place.tensors, rows.tensors, strict=True):
        own.copy_(theirs)


def narrow(weight: Groups) -> Groups:
    """Return the same with 16-bit scales and minimums, if that is exact, and 16-bit zeros."""
    return replace(
        weight,
        scales=_narrow(weight.scales),
        zeros=None if weight.zeros is None else weight.zeros.half(),
        minimums=None if weight.minimums is None else _narrow(weight.minimums),
    )


def _narrow(values: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return values.to(dtype)
    return values


def place_of(plane: int, bits: int) -> int:
    """The position of a plane in a word."""
    return plane if bits == 8 else 2 * plane % 8 + plane // 4


def codes_of(weight: Groups) -> torch.Tensor:
    """Return the codes [..., N, K] uint8."""
    words, planes = weight.codes.unflatten(-1, (-1, weight.words)), 32 // weight.bits
    codes = torch.empty((*words.shape[:-1], planes, weight.words), dtype=torch.uint8, device=words.device)
    for plane in range(planes):
        codes[..., plane, :] = (words >> place_of(plane, weight.bits) * weight.bits).bitwise_and_(
            (1 << weight.bits) - 1
        )
    return codes.flatten(-3)[..., : weight.inputs]


def _words(codes: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    planes, missing = 32 // bits, _padded(codes.shape[-1], bits, width) - codes.shape[-1]
    blocks = pad(codes, (0, missing)).unflatten(-1, (-1, planes, width))
    words = torch.zeros((*blocks.shape[:-2], width), dtype=torch.int32, device=codes.device)
    for plane in range(planes):
        words |= blocks[..., plane, :].to(torch.int32) << (bits * place_of(plane, bits))
    return words.flatten(-2)


def _by_group(scales: torch.Tensor) -> torch.Tensor:
    return scales.transpose(-1, -2).contiguous()


@twin("engine.kernels.quantised.triton_groups")
def dequantised(codes: torch.Tensor, weight: Groups, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [N, K] in `dtype`. Each element is computed in float32 and rounded once. `codes`: the weight's."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=codes.device)
    for begin, end in _slices(weight):
        out[begin:end] = values(weight.rows(begin, end))
    return out


def values(weight: Groups) -> torch.Tensor:
    """Return the elements [..., N, K] in float32."""
    numbers = _numbers(codes_of(weight), weight)
    for of_group, at in _by_size(numbers, weight):

        def across(factors: torch.Tensor, at: slice = at) -> torch.Tensor:
            return factors[..., at, :].float().transpose(-1, -2)[..., None]

        # In place: 32-bit integers are large compared with the codes.
        if weight.minimums is not None:
            torch.addcmul(across(weight.minimums), of_group, across(weight.scales), out=of_group)
        else:
            of_group.sub_(weight.middle if weight.zeros is None else across(weight.zeros)).mul_(across(weight.scales))
    return numbers


def _numbers(codes: torch.Tensor, weight: Groups) -> torch.Tensor:
    """Return the values of the codes without zeros and scales, in float32."""
    levels = weight.levels
    if weight.is_e2m1:
        magnitudes = torch.tensor(E2M1, device=codes.device)
        levels = torch.cat((magnitudes, -magnitudes))
    return codes.float() if levels is None else levels.index_select(0, codes.flatten().int()).view(codes.shape)


def _by_size(numbers: torch.Tensor, weight: Groups) -> Iterator[tuple[torch.Tensor, slice]]:
    """Views [..., N, groups, inputs] of [..., N, K]: whole groups, and a smaller last one."""
    whole = weight.inputs // weight.group
    if whole:
        yield numbers[..., : whole * weight.group].unflatten(-1, (whole, weight.group)), slice(0, whole)
    if weight.inputs % weight.group:
        yield numbers[..., whole * weight.group :].unsqueeze(-2), slice(whole, whole + 1)


def _slices(weight: Groups) -> Iterator[tuple[int, int]]:
    step = max(1, _ROWS_AT_ONCE // weight.inputs)
    for begin in range(0, weight.outputs, step):
        yield begin, min(begin + step, weight.outputs)


@twin("engine.kernels.quantised.triton_groups")
def linear(
    x: torch.Tensor, weight: Groups, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N], in `out` if it is given. `x` [T, K]."""
    result = _product(x, weight, bias)
    return result if out is None else out.copy_(result)


@twin("engine.kernels.quantised.triton_groups")
def linear_parts(x: torch.Tensor, weight: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `linear`, or partial sums [P, T, N] float32 that the next kernel adds as it reads."""
    return _product(x, weight, bias)


@twin("engine.kernels.quantised.triton_groups")
def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: Groups, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Add the product to `residual` [T, N] in place and return None, or leave it and return `linear_parts`' result."""
    return _product(x, weight, bias)


@twin("engine.kernels.quantised.triton_groups")
def gated_linear(x: torch.Tensor, gate_up: Groups, bias: torch.Tensor | None, activation: str = "silu") -> torch.Tensor:
    """Return act(x @ gate.T) * (x @ up.T) [T, N / 2]. `gate_up` [N, K] holds the gate's rows first."""
    return act_and_mul.reference(_product(x, gate_up, bias), activation)


def rounding_of(weight: Groups, num_rows: int, dtype: torch.dtype) -> Rounding | None:
    """The quantisation of so many rows for their product; None: they stay unquantised."""
    device = weight.codes.device
    is_held = weight.bits == 4 and weight.words == 32 and weight.group == IN_PARTS.group
    is_whole = weight.inputs % weight.columns == 0
    is_plain = not weight.is_e2m1 and weight.levels is None and weight.minimums is None
    has_kernel = describe(device).is_hopper if device.type == "cuda" else use_triton(weight.codes)
    suits = is_held and is_whole and is_plain and has_kernel and 0 < num_rows <= FEW_ROWS and dtype == torch.bfloat16
    return IN_PARTS if suits else None


@twin("engine.kernels.quantised.triton_groups_few")
def product_of_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: Groups,
    bias: torch.Tensor | None,
    *,
    partial: bool = False,
) -> torch.Tensor:
    """Return the product [T, N] bfloat16 of rows quantised by `rounding_of`, the fields of `Fp8Rows`.

    `partial`: it may be partial sums as `linear_parts` returns them.
    """
    return _product(_plain(values, scale), weight, bias)


@twin("engine.kernels.quantised.triton_groups_few")
def gated_product_of_rows(
    values: torch.Tensor, scale: torch.Tensor, gate_up: Groups, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return `gated_linear` of such rows."""
    return act_and_mul.reference(_product(_plain(values, scale), gate_up, bias), activation)


def _plain(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The dequantised rows [T, K]."""
    whole = values.float().sum(dim=1).unflatten(-1, (-1, 32, 4)) * scale[0].T[:, :, None, None]
    return whole.transpose(-1, -2).flatten(-3).bfloat16()


def _product(x: torch.Tensor, weight: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    return torch_linear(x, dequantised.reference(weight.codes, weight, x.dtype), bias)
