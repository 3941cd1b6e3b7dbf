"""Drafting behind a pass: the head reads all of the pass's rows, then guesses a chain of tokens for each sequence that sampled.

The keys and values of the pass's rows are complete when it ends. Further steps leave theirs in slots behind the sequence's end,
where its next pass writes its own: those of a head from the second step on, which reads the first drafted token, those of a
draft model from the first, which reads the sampled one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.batch.batch import ForwardBatch
from engine.batch.layout import Packed
from engine.drafts.heads import BlockHead, DraftHead, known_alone
from engine.kernels.embedding import InputTokens
from engine.passes import Finished, Pass, Sampled
from engine.sampling.readback import Readback
from engine.sampling.verifying import accepts
from engine.sequence import Chunk, Sequence
from engine.spec.model import DraftSpec
from engine.step.limits import HeadLimits
from engine.step.runner import Runner


@dataclass(frozen=True, slots=True)
class DraftChain:
    """A head or draft model behind the passes of its target."""

    head: DraftHead | BlockHead
    kept: SequenceOf[Any]  # the head's views of the pool
    device: torch.device
    heads: tuple[HeadLimits, ...]
    num_drafts: int  # most tokens of a draft; 0: the head's keys and values alone
    reads: DraftSpec

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
        known, sources = self._sent(torch.from_numpy(np.stack((following.ids, following.sources))))
        read = self.head.read(InputTokens(known, sources, batch.tokens.newest), batch, self.kept)
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
        rows, sampled = self._sent(torch.tensor([(start.row, start.sampled) for start in starts]).T.contiguous())
        if isinstance(self.head, BlockHead):
            guessed = self._blocks(self.head, runner, starts, read.at(rows, sampled))
        else:
            guessed = self._chain(self.head, runner, starts, read.at(rows, sampled))
        places = {start.chunk: (column, start.room) for column, start in enumerate(starts)}
        return _DraftedPass(launched, chunks, places, Readback(guessed)).finished()

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

    def _chain(self, head: DraftHead, runner: Runner, starts: list[_Start], rows: Any) -> torch.Tensor:
        """Guess step by step; [S, steps] int64, of which a start's first `room` count. Those with the most room come first."""
        steps = starts[0].room
        guessed = torch.zeros((len(starts), steps), dtype=torch.int64, device=self.device)
        table_rows = np.array([start.table_row for start in starts], dtype=np.int64)
        ends = np.array([start.chunk.end + self.reads.ahead for start in starts], dtype=np.int64)
        ids = hidden = torch.empty(0)
        for step in range(steps):
            count = sum(start.room > step for start in starts)
            batch = runner.singles(table_rows[:count], ends[:count] + step, self.heads)
            if step:
                rows = head.read_on(ids[:count], hidden[:count], batch, self.kept)
            ids, hidden = head.guess(rows, batch, self.kept)
            guessed[:count, step] = ids
        return guessed

    def _blocks(self, head: BlockHead, runner: Runner, starts: list[_Start], anchors: torch.Tensor) -> torch.Tensor:
        """Guess all at once; see `_chain`. A block's first row is the pass's last, or else the sampled token's behind it."""
        behind = min(self.reads.ahead, 1)
        widths = [start.room + self.reads.ahead - behind for start in starts]
        table_rows = np.repeat(np.array([start.table_row for start in starts], dtype=np.int64), widths)
        ends = np.repeat(np.array([start.chunk.end + behind - 1 for start in starts], dtype=np.int64), widths)
        own = ends + np.concatenate([np.arange(1, width + 1) for width in widths])
        seen = ends + np.repeat(np.array(widths, dtype=np.int64), widths)

        def inputs(is_causal: bool) -> ForwardBatch:
            return runner.singles(table_rows, own, self.heads, seen=own if is_causal else seen)

        return head.guess_blocks(anchors, [start.room for start in starts], inputs, self.kept)


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
                results[index] = replace(result, drafts=tuple(guessed[row][:count]))
        return results

    def finished(self) -> Pass:
        """The same as a completed pass on a CPU."""
        return Finished(self.wait()) if self.guessed.is_immediate else self
