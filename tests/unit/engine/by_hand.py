"""A loop around an engine that has no pool: blocks come from a list, and what a sequence lets go of is overwritten at once."""

from __future__ import annotations

import random

import torch

from engine.engine import Engine, Sampled
from engine.groups import Group, Table, extend, groups_of
from engine.sequence import Sequence
from worker.serving.allocation import blocks_of

NAN = 255  # bytes of ones are NaN in every format


class ByHand:
    """Runs sequences in one batch, each with at most `chunk_size` tokens a step. Results are by request id."""

    def __init__(self, engine: Engine, *, chunk_size: int = 512, seed: int = 0) -> None:
        self.engine, self._chunk_size = engine, chunk_size
        self.groups = groups_of(engine.layout)
        self._free = list(range(engine.layout.num_blocks))
        random.Random(seed).shuffle(self._free)
        self.results: dict[str, list[Sampled | None]] = {}
        self._lanes = engine.kv.flatten(1).view(torch.uint8)
        self._lanes.fill_(NAN)

    def run(self, sequences: list[Sequence]) -> None:
        while running := [sequence for sequence in sequences if not sequence.finish_reason()]:
            chunks = [sequence.schedule(min(sequence.num_unscheduled, self._chunk_size)) for sequence in running]
            for chunk in chunks:
                self._cover(chunk.sequence, chunk.end)
            for chunk, sampled in zip(chunks, self.engine.launch(chunks).wait(), strict=True):
                chunk.sequence.finish(chunk)
                if chunk.sample:
                    self.results.setdefault(chunk.sequence.request_id, []).append(sampled)
                    assert sampled is not None, "NaN among the logits"
                    chunk.sequence.append(sampled.token_id)
                self._let_go(chunk.sequence)

    def num_held(self, sequence: Sequence) -> int:
        return len(blocks_of(sequence))

    def _cover(self, sequence: Sequence, end: int) -> None:
        sequence.tables = sequence.tables or [Table() for _ in self.groups]
        for group, table in zip(self.groups, sequence.tables, strict=True):
            while len(table.entries) * group.block_size < end:
                count = 1 if group.grows or not table.entries else 0
                fresh = [tuple(self._free.pop() for _ in range(group.blocks)) for _ in range(count)]
                extend(group, table, fresh, len(table.entries) + 1)

    def _let_go(self, sequence: Sequence) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for number in range(table.num_gone, self.first_kept(group, sequence.num_computed)):
                gone, table.entries[number] = list(table.entries[number]), ()
                self._lanes[gone] = NAN
                self._free += gone  # the next to need some takes them
                table.num_gone = number + 1

    def first_kept(self, group: Group, num_computed: int) -> int:
        """The first entry that stays; what goes on in place does."""
        return group.first_seen(num_computed) if group.grows else 0
