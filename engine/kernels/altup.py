"""AltUp: several residual streams, predicted before a layer, and corrected by its output on one of them.

S streams, T tokens, E features. What is said of streams is [S, T, E]. Sums are in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.device import twin
from engine.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class StreamRouter:
    """Router coefficients of a token, [T, S], between -1 and 1: tanh of a projection of its norm."""

    norm: torch.Tensor  # [E]
    rows: torch.Tensor  # [S, E]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the coefficients for `x` [T, E], in float32."""
        normed = rms_norm.reference(x, self.norm, self.eps).float()
        return torch.tanh(normed @ self.rows.float().T / x.shape[1])


@twin("engine.kernels.triton_altup")
def predict_streams(
    streams: torch.Tensor, router: StreamRouter, coefficients: torch.Tensor, *, active: int
) -> torch.Tensor:
    """Return each stream plus a mixture of all. Row j * S + i of `coefficients` [S * S, S] weighs stream i in stream j."""
    num_streams, num_tokens, _ = streams.shape
    shares = (router(streams[active]) @ coefficients.float().T).view(num_tokens, num_streams, num_streams)
    mixed = torch.einsum("tji,ite->jte", shares, streams.float())
    return (streams.float() + mixed).to(streams.dtype)


@twin("engine.kernels.triton_altup")
def correct_streams(
    streams: torch.Tensor, activated: torch.Tensor, router: StreamRouter, coefficients: torch.Tensor, *, active: int
) -> torch.Tensor:
    """Return each predicted stream plus a share of what the layer changed: `activated` [T, E] less the active stream.

    The shares are 1 plus what `coefficients` [S, S] make of the router's numbers of `activated`.
    """
    shares = 1.0 + router(activated) @ coefficients.float().T
    changed = activated.float() - streams[active].float()
    return (streams.float() + changed * shares.T[:, :, None]).to(streams.dtype)
