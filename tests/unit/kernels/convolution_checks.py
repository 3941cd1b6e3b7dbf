"""The convolution in front of states, in plain torch and in Triton, against a loop over tokens in float64.

`test_delta.py` runs the Triton kernels in the interpreter, `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

import torch

from engine.kernels.delta import Channels, Columns, Span, convolve
from tests.unit.kernels.state_passes import NUM_BLOCKS, Sequence, StatePass, close, passes
from tests.unit.kernels.triton_checks import poisoned


def _span(first: int, groups: int, width: int, step: int = 0) -> Span:
    return Span(columns=Columns(first=first, step=step or width), groups=groups, width=width)


# With biases or without.
SPECS = {
    "one span": (Channels(spans=(_span(7, 1, 70),), taps=4), True),
    "two spans": (Channels(spans=(_span(80, 2, 30, 33), _span(0, 3, 9)), taps=2, has_silu=False), False),
    "three spans": (Channels(spans=(_span(0, 1, 64), _span(70, 1, 5), _span(100, 4, 3, 9)), taps=3), True),
    "gates": (Channels(spans=(_span(80, 1, 40),), taps=3, has_silu=False, gates=(0, 40)), True),
    "gates and an activation": (Channels(spans=(_span(5, 2, 20, 30),), taps=4, gates=(60, 109)), False),
}
NUM_COLUMNS = 150


def run(name: str, device: str) -> None:
    channels, has_bias = SPECS[name]
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes:
        for each in passes(16, device):
            _check(channels, each, dtype, device, has_bias=has_bias)


def interpret(name: str) -> None:
    run(name, "cpu")


def _check(channels: Channels, of: StatePass, dtype: torch.dtype, device: str, *, has_bias: bool) -> None:
    x = torch.randn(of.num_rows, NUM_COLUMNS, device=device).to(dtype)
    weight = (torch.randn(channels.count, channels.taps, device=device) * 0.5).to(dtype)
    bias = torch.randn(channels.count, device=device).to(dtype) if has_bias else None
    inputs = torch.randn(NUM_BLOCKS, channels.taps + 1, channels.count, device=device).to(dtype)
    kept = inputs[:, 1 : channels.taps, None, None]
    before = inputs.clone()
    with poisoned():
        out = convolve(x, weight, bias, kept, of.batch, channels)
    for sequence in of.sequences:
        wanted, behind = _expected(channels, of, sequence, x, weight, bias, before)
        close(out[sequence.row : sequence.row + sequence.count], wanted, dtype)
        for place, last in behind.items():
            assert torch.equal(kept[place, :, 0, 0], last)
            before[place] = inputs[place]
    assert torch.equal(before, inputs), "nothing else is changed"


def _expected(
    channels: Channels,
    of: StatePass,
    sequence: Sequence,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The outputs in float64, and what each place keeps."""
    start, taps = sequence.start, channels.taps
    new = x[sequence.row : sequence.row + sequence.count]
    parts = [
        new[:, at : at + span.width]
        for span in channels.spans
        for at in range(span.columns.first, span.columns.first + span.groups * span.columns.step, span.columns.step)
    ]
    known = inputs[of.place(sequence, start - 1), 1:taps] if start else inputs.new_zeros(taps - 1, channels.count)
    mixed = torch.cat(parts, dim=1)
    if channels.gates is not None:
        mixed = (mixed.double() * new[:, channels.gates[0] :][:, : channels.count].double()).to(x.dtype)
    known = torch.cat((known, mixed))
    out, behind = [], {}
    for at in range(sequence.count):
        total = (known[at : at + taps].double() * weight.double().T).sum(dim=0)
        out.append(total if bias is None else total + bias.double())
        behind[of.place(sequence, start + at)] = known[at + 1 : at + taps]
    wanted = torch.stack(out)
    wanted = wanted * wanted.sigmoid() if channels.has_silu else wanted
    if channels.gates is not None:
        wanted = wanted * new[:, channels.gates[1] :][:, : channels.count].double()
    return wanted, behind
