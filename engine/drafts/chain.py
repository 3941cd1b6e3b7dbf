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

import msgspec
import numpy as np
import torch

from engine.arrays import Ints
from engine.batch.batch import ForwardBatch
from engine.batch.layout import GraphSize, Packed
from engine.drafts.guesses import Ends, Guesses
from engine.drafts.heads import BlockHead, DraftHead, Rows, known_alone
from engine.drafts.reading import Reading
from engine.passes import Finished, Pass, Sampled
from engine.sampling.readback import Readback
from engine.sampling.verifying import accepts
from engine.sequence import Chunk, Sequence
from engine.spec.model import DraftSpec
from engine.step.limits import HeadLimits
from engine.step.runner import Runner


@dataclass(frozen=True, slots=True)
class Guessing:
    """The sequences that draft behind a pass, the one with the most room first."""

    rows: list[int]  # among the pass's
    sampled: list[int]  # the same rows' numbers among those with logits
    places: Ends

    def encode(self) -> bytes:
        """Encode for ranks that guess, too."""
        its = self.places
        return msgspec.msgpack.encode(
            (self.rows, self.sampled, its.ends.tolist(), its.rooms, its.tables.astype(np.int32).tobytes())
        )

    @classmethod
    def decode(cls, data: bytes) -> Guessing:
        """Read what `encode` wrote. Raises ValueError."""
        rows, sampled, ends, rooms, blocks = msgspec.msgpack.decode(data, type=_Encoded)
        tables = np.frombuffer(blocks, dtype=np.int32).reshape(len(ends), -1)
        return cls(rows, sampled, Ends(tables=tables, ends=np.array(ends, dtype=np.int64), rooms=rooms))


_Encoded = tuple[list[int], list[int], list[int], list[int], bytes]  # see `Guessing.encode`


class Leading(Protocol):
    """The way to other ranks: they are told what to compute behind a pass before this one does."""

    def tell_reading(self, after: Ints) -> None: ...

    def tell_guessing(self, guessing: Guessing) -> None: ...


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
        following = _Following.of(ordered, packed)
        after = np.stack((following.ids, following.sources))
        self.leading.tell_reading(after)
        read = self.read(after, batch, packed.size.graph)
        if not self.num_drafts or not any(chunk.sample for chunk in ordered):
            return _ReadPass.behind(launched, self.device)
        results: list[Sampled | None] | None = None
        # Acceptance of drafts is known on the host alone.
        if self.device.type == "cpu" or any(chunk.drafted for chunk in ordered):
            found = dict(zip(chunks, launched.wait(), strict=True))
            results = [found[chunk] for chunk in ordered]
        starts = [self._start(runner, chunk, following, at) for at, chunk in _ends(ordered, results)]
        starts = sorted((start for start in starts if start.room > 0), key=lambda start: -start.room)
        if not starts:
            return _ReadPass.behind(launched, self.device)
        guessing = self._guessing(runner, starts)
        self.leading.tell_guessing(guessing)
        guessed = self.guess(runner, guessing, read)
        places = {start.chunk: (column, start.room) for column, start in enumerate(starts)}
        return _DraftedPass(launched, chunks, places, Readback(guessed)).finished()

    def read(self, after: Ints, batch: ForwardBatch, size: GraphSize | None) -> Rows:
        """Write the head's keys and values of a pass's rows, see `Reading`. `after` [2, T]: see `_Following`."""
        return self._reading(self._sent(torch.from_numpy(after)), batch, size)

    def guess(self, runner: Runner, guessing: Guessing, read: Rows) -> torch.Tensor:
        """Guess behind rows that were read, see `Guesses`."""
        rows, sampled = self._sent(torch.tensor([guessing.rows, guessing.sampled]))
        return self._guesses(runner, guessing.places, read.at(rows, sampled))

    def repeat(self, runner: Runner, guessing: bytes, read: Rows) -> None:
        """Guess what a leader told of. Raises ValueError for another release's message."""
        self.guess(runner, Guessing.decode(guessing), read)

    def _guessing(self, runner: Runner, starts: list[_Start]) -> Guessing:
        furthest = max(start.chunk.end + start.room for start in starts) + self.reads.ahead
        tables = runner.tables_of(np.array([start.table_row for start in starts], dtype=np.int64), furthest)
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

    def _start(self, runner: Runner, chunk: Chunk, following: _Following, at: int) -> _Start:
        """The end of a sequence in the pass. Steps are at positions within its blocks; there are none in a pause."""
        sequence = chunk.sequence
        table_row, covered = runner.place_of(sequence)
        row, sampled = following.last[at], following.wanted[at]
        room = min(self.num_drafts, covered - chunk.end - self.reads.ahead + 1)
        if sequence.speculation >= 0:
            room = min(room, sequence.speculation)
        if chunk.sampled_index + 1 < sequence.drafts_from:
            room = 0
        return _Start(chunk, row, sampled, table_row, room=room)


@dataclass(frozen=True, slots=True)
class _Start:
    """The end of a sequence in a pass, and its row there."""

    chunk: Chunk
    row: int
    sampled: int  # the row's number among those with logits
    table_row: int  # row of its block table
    room: int  # tokens to draft


@dataclass(frozen=True, slots=True)
class _Following:
    """The token after each row of a pass: known, or sampled by the pass itself."""

    ids: np.ndarray  # [T] int32
    sources: np.ndarray  # [T] int32: row of the pass's samples; -1: see `ids`
    last: list[int]  # each chunk's last row
    wanted: list[int]  # and that row's number among those with logits

    @classmethod
    def of(cls, ordered: SequenceOf[Chunk], packed: Packed) -> _Following:
        size, sampled, wanted, row = packed.size, 0, 0, 0
        found = cls(np.zeros(size.tokens, dtype=np.int32), np.full(size.tokens, -1, dtype=np.int32), [], [])
        for chunk in ordered:
            row = row if chunk.decodes else max(row, size.decode.places)
            known = chunk.sequence.token_ids[chunk.start + 1 : chunk.end + 1]
            found.ids[row : row + len(known)] = known
            row += chunk.num_tokens
            found.last.append(row - 1)
            wanted += chunk.scored
            found.wanted.append(wanted)
            wanted += chunk.sample
            if chunk.sample:
                found.sources[row - 1] = sampled
                sampled += 1
        return found


def _ends(ordered: SequenceOf[Chunk], results: list[Sampled | None] | None) -> list[tuple[int, Chunk]]:
    """The last chunk of each sequence that sampled, behind the drafts that were accepted; see `VerifyingPass`."""
    ends = dict[Sequence, int]()
    for at, chunk in enumerate(ordered):
        if not chunk.sample:
            continue
        if chunk.drafted and results is not None and ends.get(chunk.sequence) != at - 1:
            continue
        if chunk.drafted and results is not None and not accepts(results[at - 1], chunk.drafted[-1]):
            continue
        if results is None or ((result := results[at]) is not None and not result.problem):
            ends[chunk.sequence] = at
    return [(at, ordered[at]) for at in ends.values()]


@dataclass(frozen=True, slots=True)
class _ReadPass:
    """A pass on a GPU without drafts, over once the head has written its keys and values as well."""

    launched: Pass
    over: torch.cuda.Event

    @classmethod
    def behind(cls, launched: Pass, device: torch.device) -> Pass:
        """The pass, and what was launched after it; on a CPU both are over."""
        if device.type == "cpu":
            return launched
        over = torch.cuda.Event()
        over.record()
        return cls(launched, over)

    def wait(self) -> list[Sampled | None]:
        self.over.synchronize()
        return self.launched.wait()


@dataclass(frozen=True, slots=True)
class _DraftedPass:
    """A pass whose results have drafts, on their way to the host."""

    launched: Pass
    chunks: list[Chunk]
    places: dict[Chunk, tuple[int, int]]  # row of `guessed`, and how many of it count
    guessed: Readback

    def wait(self) -> list[Sampled | None]:
        guessed = self.guessed.wait().tolist()
        results = self.launched.wait()
        for index, chunk in enumerate(self.chunks):
            row, count = self.places.get(chunk, (0, 0))
            result = results[index]
            if count and result is not None and not result.problem:
                results[index] = msgspec.structs.replace(result, drafts=tuple(guessed[row][:count]))
        return results

    def finished(self) -> Pass:
        """The same as a completed pass on a CPU."""
        return Finished(self.wait()) if self.guessed.is_immediate else self
