"""A loop around an engine that has no pool: blocks come from a list, and what a sequence lets go of is overwritten at once."""

from __future__ import annotations

import random

import torch

from engine.engine import Engine, Sampled
from engine.sequence import Sequence, first_column

NAN = 255  # bytes of ones are NaN in every format


class ByHand:
    """Runs sequences in one batch, each with at most `chunk_size` tokens a step. Results are by request id."""

    def __init__(self, engine: Engine, *, chunk_size: int = 512, seed: int = 0) -> None:
        self.engine, self._chunk_size = engine, chunk_size
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
        return len(sequence.block_table) + sum(map(len, sequence.columns))

    def _cover(self, sequence: Sequence, end: int) -> None:
        layout = self.engine.layout
        while len(sequence.block_table) * layout.block_size < end:
            sequence.block_table.append(self._free.pop())
            if layout.column_blocks:
                sequence.columns.append(tuple(self._free.pop() for _ in range(layout.column_blocks)))

    def _let_go(self, sequence: Sequence) -> None:
        layout = self.engine.layout
        if not layout.column_blocks:
            return
        for number in range(first_column(sequence.num_computed, layout.window, layout.block_size)):
            gone, sequence.columns[number] = list(sequence.columns[number]), ()
            self._lanes[gone] = NAN
            self._free += gone  # the next to need some takes them
