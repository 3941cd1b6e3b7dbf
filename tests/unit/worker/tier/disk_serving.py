"""A server with a host tier and files below it."""

from __future__ import annotations

from pathlib import Path

from engine.engine import Engine
from tests.fakes.copier import HandCopier
from tests.unit.worker.tier.serving import NUM_PROMPTS, Server, ask
from worker.tier.copier import Copies
from worker.tier.disk import Disk
from worker.tier.file_tier import FileTier
from worker.tier.host_store import HostStore
from worker.tier.settings import DiskSettings

AMPLE = 1 << 30


class DiskServer(Server):
    """Host memory for two prompts, as the pool has, and files below."""

    def __init__(
        self, engine: Engine, directory: Path, *, max_bytes: int = AMPLE, store: HostStore | None = None
    ) -> None:
        super().__init__(engine, slots_of_pool=1, store=store)
        self.now = 0.0
        self.writer, self.reader = HandCopier(), HandCopier()
        disk = Disk.claim(DiskSettings(directory, max_bytes), engine.layout)
        assert disk is not None
        self.kv_files = disk.files
        writes, reads = Copies(self.writer), Copies(self.reader)
        self.files = self.tier.files = FileTier(
            self.tier.blocks, self.memory, disk.files, disk.blocks, writes=writes, reads=reads, clock=lambda: self.now
        )

    def answer(self, number: int) -> tuple[list[int], int]:
        sequence = ask(number)
        while self.tier.is_loading(sequence, has_room=lambda: True):
            self.reader.land()
            self.copier.land()
        return self._answered(sequence)

    def answers(self, *, times: int = 1) -> list[list[int]]:
        for _ in range(times):
            found = [self.answer(number)[0] for number in range(NUM_PROMPTS)]
        return found

    def settle(self) -> None:
        super().settle()
        self.writer.land()

    def paths(self) -> list[Path]:
        return [*self.kv_files.folder.glob("*/*")]

    def check_nothing_is_held(self) -> None:
        for copier in (self.reader, self.copier, self.writer):
            copier.land()
        assert self.pool.num_used == 0
        blocks = [self.tier.blocks.get(digest) for digest in self.tier.blocks]
        assert not [block for block in blocks if block is None or block.uses]
        slots = [slot for block in blocks if block is not None for entry in block.slots.values() for slot in entry]
        assert len(slots) == len({*slots}) == self.tier.blocks.num_used
        assert len(self.paths()) <= len(self.files.blocks)
