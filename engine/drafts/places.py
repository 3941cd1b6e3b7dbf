"""The rows of a pass that drafts follow, and the sequences that draft behind it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec
import numpy as np

from engine.arrays import Ints
from engine.batch.layout import Packed
from engine.drafts.guesses import Ends
from engine.passes import Sampled
from engine.sampling.verifying import accepts
from engine.sequence import Chunk, Sequence


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


@dataclass(frozen=True, slots=True)
class Start:
    """The end of a sequence in a pass, and its row there."""

    chunk: Chunk
    row: int
    sampled: int  # the row's number among those with logits
    table_row: int  # row of its block table
    room: int  # tokens to draft


@dataclass(frozen=True, slots=True)
class Following:
    """The token after each row of a pass: known, or sampled by the pass itself."""

    ids: np.ndarray  # [T] int32
    sources: np.ndarray  # [T] int32: row of the pass's samples; -1: see `ids`
    last: list[int]  # each chunk's last row
    wanted: list[int]  # and that row's number among those with logits

    @property
    def after(self) -> Ints:
        """[2, T], see `InputTokens`."""
        return np.stack((self.ids, self.sources))

    def known(self, ordered: SequenceOf[Chunk], results: list[Sampled | None]) -> Ints:
        """The same once the pass has sampled."""
        ids = self.ids.copy()
        for row, chunk, result in zip(self.last, ordered, results, strict=True):
            if chunk.sample:
                ids[row] = 0 if result is None else max(0, result.token_id)
        return np.stack((ids, np.full_like(ids, -1)))

    @classmethod
    def of(cls, ordered: SequenceOf[Chunk], packed: Packed) -> Following:
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


def ends_of(ordered: SequenceOf[Chunk], results: list[Sampled | None] | None) -> list[tuple[int, Chunk]]:
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


def places_of(starts: list[Start]) -> dict[Chunk, tuple[int, int]]:
    """Each sequence's row among the guesses, and how many of it count."""
    return {start.chunk: (column, start.room) for column, start in enumerate(starts)}
