"""Drafting behind a pass: the head reads all of the pass's rows, then guesses a chain of tokens for each sequence that sampled.

The keys and values of the pass's rows are complete when it ends. Further steps leave theirs in slots behind the sequence's end,
where its next pass writes its own: those of a head from the second step on, which reads the first drafted token, those of a
draft model from the first, which reads the sampled one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.arrays import Ints
from engine.batch.batch import ForwardBatch
from engine.batch.layout import GraphSize, Packed
from engine.drafts.drafted import DraftedPass, ReadPass
from engine.drafts.guesses import Ends, Guesses
from engine.drafts.heads import BlockHead, DraftHead, Rows, known_alone
from engine.drafts.later import Later, Leading, Taken
from engine.drafts.places import Following, Guessing, Start, ends_of, places_of
from engine.drafts.reading import Reading
from engine.passes import Pass, Sampled
from engine.sampling.readback import Readback
from engine.sequence import Chunk
from engine.spec.model import DraftSpec
from engine.step.limits import HeadLimits
from engine.step.runner import Runner


class States(Protocol):
    """The model's hidden states that the drafter reads, see `AuxStates`."""

    def kept(self, rows: int) -> torch.Tensor: ...

    def give(self, kept: torch.Tensor, arrived: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftChain:
    """A head or draft model behind the passes of its target."""

    head: DraftHead | BlockHead
    kept: SequenceOf[Any]  # the head's views of the pool
    device: torch.device
    heads: tuple[HeadLimits, ...]
    num_drafts: int  # most tokens of a draft; 0: the head's keys and values alone
    reads: DraftSpec
    leading: Leading
    states: States
    _reading: Reading = field(init=False)
    _guesses: Guesses = field(init=False)

    def __post_init__(self) -> None:
        guesses = Guesses(self.head, self.kept, self.heads, num_drafts=self.num_drafts, reads=self.reads)
        object.__setattr__(self, "_guesses", guesses)
        object.__setattr__(self, "_reading", Reading(self.head, self.kept, self.reads))

    def inputs_of(self, runner: Runner, packed: Packed) -> ForwardBatch:
        """The inputs of a pass that has not sampled yet: later `newest` are its own samples."""
        batch = runner.inputs_of(packed)
        return replace(batch, tokens=known_alone(batch.tokens.ids(), batch)) if self.reads.is_model else batch

    def behind(
        self,
        runner: Runner,
        launched: Pass,
        chunks: list[Chunk],
        ordered: SequenceOf[Chunk],
        packed: Packed,
        batch: ForwardBatch,
    ) -> Pass:
        """Return the launched pass, `ordered` as it was packed, whose results have drafts. `batch`: its `inputs_of`."""
        following, number = Following.of(ordered, packed), self.leading.number
        self.leading.tell_reading(number, following.after)
        read = self.read(following.after, batch, packed.size.graph)
        if not self.num_drafts or not any(chunk.sample for chunk in ordered):
            return ReadPass.behind(launched, self.device)
        results: list[Sampled | None] | None = None
        # Acceptance of drafts is known on the host alone.
        if self.device.type == "cpu" or any(chunk.drafted for chunk in ordered):
            found = dict(zip(chunks, launched.wait(), strict=True))
            results = [found[chunk] for chunk in ordered]
        starts = [self._start(runner, chunk, following, at) for at, chunk in ends_of(ordered, results)]
        starts = sorted((start for start in starts if start.room > 0), key=lambda start: -start.room)
        if not starts:
            return ReadPass.behind(launched, self.device)
        guessing = self.guessing(starts, self._tables(runner, starts))
        self.leading.tell_guessing(number, guessing)
        guessed = self.guess(runner, guessing, read)
        return DraftedPass(launched, chunks, places_of(starts), Readback(guessed)).finished()

    def later(self, runner: Runner, chunks: list[Chunk], ordered: SequenceOf[Chunk], packed: Packed) -> Later:
        """Take what is needed of the pass that was launched last to draft behind it once its results are known."""
        following = Following.of(ordered, packed)
        drafting = [at for at, chunk in enumerate(ordered) if chunk.sample] if self.num_drafts else []
        starts = {at: start for at in drafting if (start := self._start(runner, ordered[at], following, at)).room > 0}
        tables = dict(zip(starts, self._tables(runner, list(starts.values())), strict=True)) if starts else {}
        return Later(
            self, runner, chunks, ordered, following, starts, tables, self.leading.number, self.taken(runner, packed)
        )

    def taken(self, runner: Runner, packed: Packed) -> Taken:
        """Keep of the pass that was executed last what `read_taken` needs."""
        ids = runner.inputs_of(packed).tokens.ids() if self.reads.is_model else None
        return Taken(packed, self.states.kept(packed.size.tokens).clone(), ids)

    def read_taken(self, runner: Runner, taken: Taken, arrived: torch.Tensor, after: Ints) -> Rows:
        """Write the head's keys and values of rows that were taken; `arrived` [T, ..]: other stages' hidden states."""
        self.states.give(taken.kept, arrived)
        batch = runner.inputs_again(taken.packed)
        if taken.ids is not None:
            batch = replace(batch, tokens=known_alone(taken.ids, batch))
        return self.read(after, batch, taken.packed.size.graph)

    def read(self, after: Ints, batch: ForwardBatch, size: GraphSize | None) -> Rows:
        """Write the head's keys and values of a pass's rows, see `Reading`. `after` [2, T]: see `Following`."""
        return self._reading(self._sent(torch.from_numpy(after)), batch, size)

    def guess(self, runner: Runner, guessing: Guessing, read: Rows) -> torch.Tensor:
        """Guess behind rows that were read, see `Guesses`."""
        rows, sampled = self._sent(torch.tensor([guessing.rows, guessing.sampled]))
        return self._guesses(runner, guessing.places, read.at(rows, sampled))

    def repeat(self, runner: Runner, guessing: bytes, read: Rows) -> None:
        """Guess what a leader told of. Raises ValueError for another release's message."""
        self.guess(runner, Guessing.decode(guessing), read)

    def _tables(self, runner: Runner, starts: list[Start]) -> Ints:
        """The blocks [S, W] of sequences in the pass that was packed last."""
        furthest = max(start.chunk.end + start.room for start in starts) + self.reads.ahead
        return runner.tables_of(np.array([start.table_row for start in starts], dtype=np.int64), furthest)

    def guessing(self, starts: list[Start], tables: Ints) -> Guessing:
        """The sequences that draft, the one with the most room first, and their blocks [S, W]."""
        ends = np.array([start.chunk.end for start in starts], dtype=np.int64)
        return Guessing(
            rows=[start.row for start in starts],
            sampled=[start.sampled for start in starts],
            places=Ends(tables=tables, ends=ends, rooms=[start.room for start in starts]),
        )

    @torch.inference_mode()
    def rehearse(self, runner: Runner, sizes: Iterable[GraphSize]) -> None:
        """Launch kernel by kernel what `capture` will capture."""
        self._reading.rehearse(runner, sizes)
        if counts := self._counts(sizes):
            self._guesses.rehearse(runner, counts, self._anchors(runner))

    @torch.inference_mode()
    def capture(self, runner: Runner, sizes: Iterable[GraphSize]) -> dict[int, float]:
        """Capture the drafts of as many sequences as these passes decode; return their milliseconds by that number."""
        self._reading.capture(runner, sizes)
        counts = self._counts(sizes)
        return self._guesses.capture(runner, counts, self._anchors(runner)) if counts else {}

    def forget_graphs(self) -> None:
        """Drop what was captured."""
        self._reading.forget_graphs()
        self._guesses.forget_graphs()

    def _counts(self, sizes: Iterable[GraphSize]) -> list[int]:
        return [size.decoding for size in sizes if not size.prompts] if self.num_drafts else []

    def _anchors(self, runner: Runner) -> Callable[[int], Any]:
        """Rows of an empty pass, of any number."""
        batch = runner.an_empty_pass()
        read = self.head.read(batch.tokens, batch, self.kept)

        def of(count: int) -> Any:
            rows = torch.zeros(count, dtype=torch.int64, device=self.device)
            return read.at(rows, rows)

        return of

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """Copy without waiting for the device, which may be running this very pass."""
        return values if self.device.type == "cpu" else values.pin_memory().to(self.device, non_blocking=True)

    def _start(self, runner: Runner, chunk: Chunk, following: Following, at: int) -> Start:
        """The end of a sequence in the pass. Steps are at positions within its blocks; there are none in a pause."""
        sequence = chunk.sequence
        table_row, covered = runner.place_of(sequence)
        row, sampled = following.last[at], following.wanted[at]
        room = min(self.num_drafts, covered - chunk.end - self.reads.ahead + 1)
        if sequence.speculation >= 0:
            room = min(room, sequence.speculation)
        if chunk.sampled_index + 1 < sequence.drafts_from:
            room = 0
        return Start(chunk, row, sampled, table_row, room=room)
