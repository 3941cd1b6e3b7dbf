"""Collectives among the GPUs of one host: sums over ranks, alone or with residual and norm, and gathering of logits."""

from engine.kernels.collectives.inbox import allocate_inbox
from engine.kernels.collectives.peers import Peers

__all__ = ["Peers", "allocate_inbox"]
