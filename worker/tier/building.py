"""The tiers below a worker's pool, as the operator asked for them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from common.pages import KVLayout
from engine.cache.block_pool import BlockPool
from worker.tier.copier import Copies, CopyThread
from worker.tier.disk import Disk
from worker.tier.file_tier import FileTier
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import HostStore, PrivateStore
from worker.tier.host_tier import HostTier
from worker.tier.ranks.asking import Ask, FurtherFiles, FurtherMemory
from worker.tier.ranks.questions import Room
from worker.tier.region import Region
from worker.tier.settings import HostSettings
from worker.tier.shared_store import SharedStore

log = logging.getLogger("baton.tier")


class HasPool(Protocol):
    """An engine's pool."""

    layout: KVLayout
    kv: torch.Tensor


def host_store(settings: HostSettings, layout: KVLayout, *, fingerprint: str, num_ranks: int = 1) -> HostStore | None:
    """Host memory of this process or, if shared, of all that serve this model; None without room for a block.

    Of several ranks each has as many slots, in a process of its own; the first one's region says what is in all of them.
    Not on an event loop: another process may hold the region's lock.
    """
    num_slots = settings.num_bytes // (num_ranks * layout.block_bytes)
    if not num_slots:
        return None
    if not settings.is_shared:
        return PrivateStore(num_slots)
    same = msgspec.msgpack.encode(msgspec.structs.replace(layout, num_blocks=1))
    if num_ranks > 1:  # a rank may keep what a worker of one does
        same += num_ranks.to_bytes(2, "little")
    tag = hashlib.blake2b(same + fingerprint.encode(), digest_size=16).hexdigest()
    try:
        region = Region.join(tag, num_slots, layout.block_bytes)
    except OSError as error:
        # It is for hits alone, and memory for each worker may be too much.
        log.warning("tier.no_region", extra={"error": str(error)})
        return None
    if region.num_slots != num_slots:
        log.warning("tier.other_size", extra={"blocks": region.num_slots, "asked": num_slots})
    return SharedStore(region)


def host_tier(
    engine: HasPool,
    pool: BlockPool,
    store: HostStore | None,
    disk: Disk | None,
    *,
    wake: Callable[[], object],
    ask: Ask | None = None,
) -> HostTier | None:
    """The host tier, with files below it if a disk was claimed for them; None without memory. `ask`: further ranks."""
    if store is None:
        return None
    room = Room(store.num_slots, str(store.region.path) if isinstance(store, SharedStore) else "")
    memory = HostMemory(engine.kv, engine.layout, store, None if ask is None else FurtherMemory(ask, room))
    log.info(
        "tier.host",
        extra={
            "memory_mb": store.num_slots * memory.all_bytes >> 20,
            "blocks": store.num_slots,
            "pools": store.num_slots / pool.num_blocks,
            "shared": isinstance(store, SharedStore),
        },
    )
    tier = HostTier(pool, memory, copier=CopyThread(), wake=wake)
    if disk is not None:
        tier.files = _files(tier, memory, disk, None if ask is None else FurtherFiles(ask, room))
    return tier


def _files(tier: HostTier, memory: HostMemory, disk: Disk, further: FurtherFiles | None) -> FileTier:
    writes, reads = Copies(CopyThread("kv-write")), Copies(CopyThread("kv-read"))
    below = FileTier(tier.blocks, memory, disk.files, disk.blocks, writes=writes, reads=reads, further=further)
    disk.blocks.listener = tier.prefixes.gate(disk.blocks)
    extra = {
        "folder": str(disk.files.folder),
        "disk_mb": disk.blocks.max_bytes >> 20,
        "blocks_found": len(disk.blocks),
    }
    log.info("tier.files", extra=extra)
    return below
