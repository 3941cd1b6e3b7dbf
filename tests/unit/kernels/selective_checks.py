"""The selective scan of the first Mamba and its norms, in plain torch and in Triton, against a loop over tokens in float64.

`test_mamba.py` runs the Triton kernels in the interpreter, `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from engine.kernels.mamba import selective_scan, three_norms
from tests.unit.kernels.state_passes import NUM_BLOCKS, Sequence, StatePass, check_states, close, passes
from tests.unit.kernels.triton_checks import poisoned


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    channels: int
    state_size: int
    rank: int
    block_size: int


SPECS = {
    "selective": Sizes(channels=48, state_size=16, rank=20, block_size=16),
    "selective, odd": Sizes(channels=150, state_size=5, rank=3, block_size=8),
    "selective, one number": Sizes(channels=7, state_size=1, rank=1, block_size=64),
    "selective, large": Sizes(channels=8192, state_size=16, rank=256, block_size=1024),
}


def run(name: str, device: str) -> None:
    sizes = SPECS[name]
    of_cpu = torch.float32 if name == "selective" else torch.float16
    for dtype in [of_cpu] if device == "cpu" else [torch.float32, torch.bfloat16]:
        for each in passes(sizes.block_size, device):
            _check_scan(sizes, each, dtype, device)
        _check_norms(sizes, dtype, device)


def interpret(name: str) -> None:
    run(name, "cpu")


@dataclass(frozen=True, slots=True)
class Given:
    """What the scan is given of a pass, beside the states."""

    mixed: torch.Tensor
    x: torch.Tensor
    steps: torch.Tensor
    shared: torch.Tensor
    rates: torch.Tensor
    bias: torch.Tensor
    skip: torch.Tensor

    @classmethod
    def drawn(cls, sizes: Sizes, rows: int, dtype: torch.dtype, device: str) -> Given:
        channels, size = sizes.channels, sizes.state_size

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        of_tokens = (noise(rows, channels), noise(rows, 2 * channels), noise(rows, channels), noise(rows, 2 * size))
        # Some channels forget all of a state at once, as published models' do.
        return cls(*(part.to(dtype) for part in of_tokens), -(2 * noise(channels, size)).exp(), *noise(2, channels))

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.mixed, self.x, self.steps, self.shared, self.rates, self.bias, self.skip)


def _check_scan(sizes: Sizes, of: StatePass, dtype: torch.dtype, device: str) -> None:
    given = Given.drawn(sizes, of.num_rows, dtype, device)
    pool = torch.randn(NUM_BLOCKS, 3, sizes.channels * sizes.state_size, device=device)
    states = pool[:, 1:2].view(NUM_BLOCKS, 1, 1, sizes.channels, -1)
    before = pool.clone()
    with poisoned():
        out = selective_scan(*given.all, states, of.batch)
    kept = before[:, 1].view(NUM_BLOCKS, sizes.channels, -1)
    check_states(of, out, pool, before, dtype, lambda sequence: _expected(given, of, sequence, kept))


def _expected(
    given: Given, of: StatePass, sequence: Sequence, states: torch.Tensor
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The outputs, and each written place's state."""
    mixed, x, steps, shared = (
        part[sequence.row : sequence.row + sequence.count].double()
        for part in (given.mixed, given.x, given.steps, given.shared)
    )
    z, (k, q) = x[:, x.shape[1] // 2 :], shared.chunk(2, dim=1)
    lengths = softplus(steps + given.bias.double())
    state = torch.zeros_like(states[0], dtype=torch.float64)
    if sequence.start:
        state = states[of.place(sequence, sequence.start - 1)].double()
    out, behind = [], {}
    for at in range(sequence.count):
        state = state * (lengths[at][:, None] * given.rates.double()).exp()
        state = state + (lengths[at] * mixed[at])[:, None] * k[at]
        out.append((state @ q[at] + given.skip.double() * mixed[at]) * z[at] * z[at].sigmoid())
        behind[of.place(sequence, sequence.start + at)] = state
    return torch.stack(out), behind


def _check_norms(sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    widths = (sizes.rank, sizes.state_size, sizes.state_size)
    # Rows lie farther apart than they are wide.
    x = torch.randn(5, sum(widths) + 3, device=device).to(dtype)[:, : sum(widths)]
    weight = torch.randn(sum(widths), device=device).to(dtype)
    with poisoned():
        few, shared = three_norms(x, weight, 1e-5, sizes.rank)
    wanted = [
        part * (part.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * own
        for part, own in zip(x.double().split(widths, dim=1), weight.double().split(widths), strict=True)
    ]
    close(few, wanted[0], dtype)
    close(shared, torch.cat(wanted[1:], dim=1), dtype)
