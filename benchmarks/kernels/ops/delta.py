"""The gated delta rule at the shape of Qwen3-Next: decoding batches, and prompts. States are float32, as ours are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import softplus

from benchmarks.kernels.ops.comparing import OURS, PLAIN, Comparison, Implementation, Run
from benchmarks.kernels.ops.libraries import library
from engine.kernels.delta import Columns, DeltaHeads, StateBatch, deal_out_states, delta_rule
from engine.kernels.delta.rule import unit

MOST_EXACT = 512  # tokens of a prompt that are computed in float64
KEPT_BLOCK = 1 << 20  # tokens of a state's block: only the last state of a prompt is kept
RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def delta_rules(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Comparison]:
    """Batches that decode, then prompts."""
    sizes = (1, 2, 16, 16) if is_tiny else (16, 2, 128, 128)
    for count in (2,) if is_tiny else (1, 32, 64, 256):
        yield _comparison(_Inputs.draw(count, 1, sizes, device, dtype))
    for count in (70,) if is_tiny else (2048, 8192):
        yield _comparison(_Inputs.draw(1, count, sizes, device, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """B sequences of T new tokens each; the states before them [B, Hv, Dk, Dv]."""

    mixed: torch.Tensor
    x: torch.Tensor  # strengths, then rates
    decay: torch.Tensor
    bias: torch.Tensor
    states: torch.Tensor
    heads: DeltaHeads
    new: int

    @classmethod
    def draw(
        cls, count: int, new: int, sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
    ) -> _Inputs:
        keys, ratio, key_dim, value_dim = sizes
        values = keys * ratio
        together = Columns(first=0, step=ratio)
        heads = DeltaHeads(
            num_key_heads=keys, ratio=ratio, key_dim=key_dim, value_dim=value_dim, taps=4,
            q=together, k=together, v=together, z=together, b=together, a=Columns(first=values, step=ratio),
        )  # fmt: skip
        rows = count * new
        return cls(
            mixed=torch.randn(rows, 2 * heads.keys_size + heads.values_size, device=device).to(dtype),
            x=torch.randn(rows, 2 * values, device=device).to(dtype),
            decay=torch.randn(values, device=device),
            bias=torch.randn(values, device=device),
            states=torch.randn(count, values, key_dim, value_dim, device=device) * 0.1,
            heads=heads,
            new=new,
        )

    @property
    def count(self) -> int:
        return len(self.states)

    def parts(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Queries and keys [B, T, Hk, Dk], values [B, T, Hv, Dv], strengths and rates [B, T, Hv]."""
        heads = self.heads
        q, k, v = self.mixed.to(dtype).split((heads.keys_size, heads.keys_size, heads.values_size), dim=1)
        beta, rate = self.x.to(dtype).chunk(2, dim=1)
        shaped = (
            q.unflatten(1, (-1, heads.key_dim)),
            k.unflatten(1, (-1, heads.key_dim)),
            v.unflatten(1, (-1, heads.value_dim)),
            beta,
            rate,
        )
        return tuple(part.unflatten(0, (self.count, self.new)).contiguous() for part in shaped)

    def batch(self) -> StateBatch:
        device, count = self.mixed.device, self.count
        if self.new == 1:
            places = torch.arange(count, dtype=torch.int32, device=device)
            tiles = torch.zeros(0, 8, dtype=torch.int32, device=device)
            return StateBatch(places[:, None].repeat(1, 2), tiles, torch.zeros(0, 2, dtype=torch.int32, device=device))
        start = np.array([KEPT_BLOCK], dtype=np.int64)  # a state is there already, in the block before
        table = np.zeros((1, 2), dtype=np.int32)
        tiles, runs = (
            torch.from_numpy(each).to(device)
            for each in deal_out_states(
                start, start + self.new, np.zeros(1, dtype=np.int64), table, block_size=KEPT_BLOCK
            )
        )
        return StateBatch(torch.zeros(0, 2, dtype=torch.int32, device=device), tiles, runs)

    def exact(self) -> torch.Tensor:
        """The outputs [B, some T, Hv, Dv] of the recurrence, token by token."""
        q, k, v, beta, rate = self.parts(torch.float64)
        ratio, scale = self.heads.ratio, self.heads.key_dim**-0.5
        q, k = (unit(part).repeat_interleave(ratio, dim=2) for part in (q, k))
        g = (-self.decay.double().exp() * softplus(rate + self.bias.double())).exp()
        beta, state, out = beta.sigmoid(), self.states.double(), []
        for token in range(min(self.new, MOST_EXACT)):
            state = state * g[:, token, :, None, None]
            known = (state * k[:, token, :, :, None]).sum(dim=2)
            added = (v[:, token] - known) * beta[:, token, :, None]
            state = state + k[:, token, :, :, None] * added[:, :, None]
            out.append((state * q[:, token, :, :, None]).sum(dim=2) * scale)
        return torch.stack(out, dim=1)


def _comparison(of: _Inputs) -> Comparison:
    heads, batch = of.heads, of.batch()

    def ours(rule: object) -> Run:
        states = of.states.clone().flatten(2)[:, None, None]
        assert callable(rule)
        return lambda: rule(of.mixed, of.x, of.decay, of.bias, states, batch, heads)

    numbers = of.count * of.new * heads.num_value_heads * heads.key_dim * heads.value_dim
    return Comparison(
        op="delta-rule",
        shape=f"decode b{of.count}" if of.new == 1 else f"prompt {of.new}",
        implementations={
            OURS: Implementation(prepare=lambda: ours(delta_rule)),
            PLAIN: Implementation(prepare=lambda: ours(delta_rule.reference), in_graph=False),
            "flash-linear-attention": Implementation(
                prepare=lambda: _fla(of), output=lambda out: out.reshape(-1, heads.num_value_heads, heads.value_dim)
            ),
        },
        exact=of.exact,
        compared=lambda out: out.unflatten(0, (of.count, of.new))[:, :MOST_EXACT],
        num_bytes=2.0 * of.states.nbytes + of.mixed.nbytes + of.x.nbytes + 2.0 * len(of.mixed) * heads.values_size,
        flops=6.0 * numbers,
    )


def _fla(of: _Inputs) -> Run:
    rules = library("fla.ops.gated_delta_rule")
    rule = rules.fused_recurrent_gated_delta_rule if of.new == 1 else rules.chunk_gated_delta_rule
    q, k, v, beta, rate = of.parts(of.mixed.dtype)

    def run() -> torch.Tensor:
        out: torch.Tensor = rule(
            q, k, v, g=rate, beta=beta, scale=of.heads.key_dim**-0.5, initial_state=of.states, output_final_state=True,
            A_log=of.decay, dt_bias=of.bias, **RAW,
        )[0]  # fmt: skip
        return out

    return run
