"""A worker's pool and host tier without their bytes: the same classes decide, and nothing is computed or copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from common.blocks import hash_root
from common.messages import KVLayout, SamplingParams
from engine.cache.block_pool import BlockPool
from engine.groups import Entry
from engine.sequence import Sequence as Prompt
from worker.serving.allocation import admit, blocks_of
from worker.serving.chunks import finish, schedule
from worker.tier.copier import Copy, Over, T
from worker.tier.host_memory import DIGEST_BYTES, HostMemory
from worker.tier.host_store import PrivateStore, Write
from worker.tier.host_tier import HostTier

CHUNK = 2048  # tokens of a pass
ROOT = hash_root(model="simulated", kv_dtype="none", block_size=16)


class Unwritten(HostMemory):
    """Slots without bytes; every digest is right."""

    def fill(self, writes: Sequence[Write], entries: Sequence[Mapping[int, Entry]]) -> None:
        with self.store.filling(writes):
            for write in writes:
                write.sums = {number: bytes(DIGEST_BYTES * len(slots)) for number, slots in write.slots.items()}

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> bytes:
        return bytes(DIGEST_BYTES * len(blocks))


class Instant:
    """A copier whose copies land when nobody else runs."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, copy: Copy[T], over: Over[T], *, late: Callable[[], None], within_s: float) -> None:
        self._waiting.append(lambda: over(copy()))

    def land(self) -> None:
        """Let all copies land, and those that follow them."""
        while self._waiting:
            self._waiting.popleft()()

    def close(self) -> bool:
        return True


class Simulated:
    """Answers one prompt after the other by one token each."""

    def __init__(self, layout: KVLayout, *, num_slots: int) -> None:
        """A pool of this layout, and a host tier of so many blocks; 0: none."""
        self._pool, self._copier = BlockPool.of(layout), Instant()
        self._tier = None
        if num_slots:
            kv = torch.empty(layout.num_blocks, 1, dtype=torch.uint8)
            memory = Unwritten(kv, layout, PrivateStore(num_slots))
            self._tier = HostTier(self._pool, memory, copier=self._copier, wake=lambda: None)

    def ask(self, token_ids: Sequence[int]) -> int:
        """The tokens of a prompt that were found."""
        pool, tier = self._pool, self._tier
        prompt = Prompt(
            request_id="simulated",
            attempt=1,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=1),
            hash_root=ROOT,
        )
        while tier is not None and tier.is_loading(prompt, has_room=lambda: True):
            self._copier.land()
        admit(pool, prompt, num_tokens=len(token_ids) + 1)
        while lacking := prompt.num_prompt_tokens - prompt.num_scheduled:
            finish(pool, schedule(pool, prompt, min(CHUNK, lacking)))
            self._store(prompt)
        pool.release(blocks_of(prompt), prompt.hold)
        self._store(prompt)
        return prompt.num_cached

    def _store(self, prompt: Prompt) -> None:
        """Store what eviction takes next, as a worker does between passes; copies end before the next one."""
        if self._tier is not None:
            self._tier.left(prompt)
            self._tier.store_ahead()
            self._copier.land()
