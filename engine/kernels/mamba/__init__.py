"""Mamba (Gu and Dao, 2023) and Mamba-2 (Dao and Gu, 2024): selective state space models (SSM) with a recurrent state.

Reading order: `heads` (where a layer's numbers lie), `scan` and `gate` of Mamba-2 in plain torch, `selective` of the first one,
and their Triton versions. The convolution in front and the tiles of prompts are those of `engine.kernels.delta`.
"""

from engine.kernels.mamba.gate import gate
from engine.kernels.mamba.heads import MambaHeads
from engine.kernels.mamba.scan import scan
from engine.kernels.mamba.selective import selective_scan, three_norms

__all__ = ["MambaHeads", "gate", "scan", "selective_scan", "three_norms"]
