"""The host tier of a worker, as the operator asked for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from common.pages import KVLayout
from engine.cache.block_pool import BlockPool
from worker.tier.copier import CopyThread
from worker.tier.host_memory import HostMemory
from worker.tier.host_tier import HostTier

log = logging.getLogger("baton.tier")


class HasPool(Protocol):
    """An engine's pool."""

    layout: KVLayout
    kv: torch.Tensor


def host_tier(engine: HasPool, pool: BlockPool, num_bytes: int, *, wake: Callable[[], object]) -> HostTier | None:
    """The tier with so many bytes; None without room for a block."""
    num_slots = num_bytes // engine.layout.block_bytes
    if not num_slots:
        return None
    log.info(
        "tier.host", extra={"memory_mb": num_bytes >> 20, "blocks": num_slots, "pools": num_slots / pool.num_blocks}
    )
    return HostTier(pool, HostMemory(engine.kv, engine.layout, num_slots), num_slots, copier=CopyThread(), wake=wake)
