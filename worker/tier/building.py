"""The tiers below a worker's pool, as the operator asked for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from common.pages import KVLayout
from engine.cache.block_pool import BlockPool
from worker.tier.copier import Copies, CopyThread
from worker.tier.disk import Disk
from worker.tier.file_tier import FileTier
from worker.tier.host_memory import HostMemory
from worker.tier.host_tier import HostTier

log = logging.getLogger("baton.tier")


class HasPool(Protocol):
    """An engine's pool."""

    layout: KVLayout
    kv: torch.Tensor


def host_tier(
    engine: HasPool, pool: BlockPool, num_bytes: int, disk: Disk | None, *, wake: Callable[[], object]
) -> HostTier | None:
    """The host tier, with files below it if a disk was claimed for them; None without room for a block."""
    num_slots = num_bytes // engine.layout.block_bytes
    if not num_slots:
        return None
    log.info(
        "tier.host",
        extra={
            "memory_mb": num_bytes >> 20,
            "blocks": num_slots,
            "pools": num_slots / pool.num_blocks,
        },
    )
    memory = HostMemory(engine.kv, engine.layout, num_slots)
    tier = HostTier(pool, memory, num_slots, copier=CopyThread(), wake=wake)
    if disk is not None:
        tier.files = _files(tier, memory, disk)
    return tier


def _files(tier: HostTier, memory: HostMemory, disk: Disk) -> FileTier:
    writes, reads = Copies(CopyThread("kv-write")), Copies(CopyThread("kv-read"))
    below = FileTier(tier.blocks, memory, disk.files, disk.blocks, writes=writes, reads=reads)
    disk.blocks.listener = tier.prefixes.gate(disk.blocks)
    extra = {
        "folder": str(disk.files.folder),
        "disk_mb": disk.blocks.max_bytes >> 20,
        "blocks_found": len(disk.blocks),
    }
    log.info("tier.files", extra=extra)
    return below
