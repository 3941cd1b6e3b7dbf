"""The events of a worker, as the operator asked for them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from common.blocks import hash_root
from common.pages import KVLayout
from engine.cache.block_pool import BlockPool
from worker.events.journal import Journal
from worker.events.settings import EventsSettings
from worker.tier.host_tier import HostTier

LOWER_MEDIA = ("CPU", "STORAGE")  # vLLM's names of the tiers below the pool


class Closes(Protocol):
    """A publisher, whose module is imported only if there is one."""

    def close(self) -> None: ...


def published(
    settings: EventsSettings, pool: BlockPool, layout: KVLayout, *, fingerprint: str, tier: HostTier | None
) -> Closes:
    """Tell readers of the blocks in the pool and the tiers below. Called in the event loop. Raises ConfigError.

    Of a model with several groups readers hear of prefixes that can be resumed, as the prefix index does.
    """
    from worker.events.publisher import Publisher  # needs pyzmq

    root = hash_root(model=fingerprint, kv_dtype=layout.dtype, block_size=layout.block_size)
    journal = Journal(has=partial(pool.has, 0), plain_root=root, most=settings.max_queue_size)
    pool.changes.journal = journal
    for name, gate in zip(LOWER_MEDIA, tier.prefixes.gates if tier is not None else (), strict=False):
        gate.told = journal.medium(name, gate.has)
    retell = partial(asyncio.get_running_loop().call_soon_threadsafe, journal.retell)
    return Publisher(settings, journal.waiting, block_size=layout.block_size, retell=retell)
