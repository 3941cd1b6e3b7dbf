"""Mamba-2 (Dao and Gu, 2024): a state that decays with every token, which adds to it and reads from it.

Reading order: `heads` (where a layer's numbers lie), `scan` and `gate` in plain torch, and their Triton versions. The
convolution in front and the tiles of prompts are those of `engine.kernels.delta`.
"""

from engine.kernels.mamba.gate import gate
from engine.kernels.mamba.heads import MambaHeads
from engine.kernels.mamba.scan import scan

__all__ = ["MambaHeads", "gate", "scan"]
