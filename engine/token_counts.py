"""How often each sequence used each token, on the device: what repetition, presence and frequency penalties need.

A line of `counts` belongs to one living sequence. It is built from the host's tokens once and then follows the sequence token
by token, also by tokens that the host does not know yet. A sequence that starts anew (preempted, resumed) is built anew.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.kernels.sampling import GENERATED, count_tokens
from engine.newest import NewestTokens
from engine.sequence import Chunk, Sequence
from engine.staging import Words

_PROMPT = -0x8000  # the sign bit of an int16


@dataclass(slots=True)
class Changes:
    """What a pass does to the counts. The arrays go to the device with the pass's other words."""

    lines: list[int] = field(default_factory=list)  # of each chunk
    cleared: list[int] = field(default_factory=list)  # lines that start from zero
    entries: list[Words] = field(default_factory=list)  # index in `counts` << 16 | value
    places: list[int] = field(
        default_factory=list
    )  # pairs: start of a line in `counts`, token that it gets one more of;
    # -1 - row of NewestTokens if only the device knows it


@dataclass(slots=True)
class _Line:
    index: int
    end: int  # tokens that are counted
    turn: int  # the last pass that used it
    finalizer: weakref.finalize[[int], Sequence]


class TokenCounts:
    """At most `max_lines` sequences; more than that take turns, at the price of building theirs again."""

    def __init__(self, vocab_size: int, max_lines: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_lines = max_lines
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int16, device=device)
        self._free: list[int] = []
        self._dead: deque[int] = deque()  # ids of sequences that are gone, by whatever thread dropped them
        self._lines: dict[int, _Line] = {}  # by id of the sequence
        self._turn = 0

    def plan(self, chunks: SequenceOf[Chunk], newest: NewestTokens) -> Changes:
        """Decide how the lines of these chunks come to count exactly the tokens before each chunk's end. Apply it, in order."""
        while self._dead:  # before any look-up: a new sequence may have the id of a dead one
            self._free.append(self._lines.pop(self._dead.popleft()).index)
        changes = Changes()
        self._turn += 1
        lines: list[_Line] = []
        for chunk in chunks:
            line = self._lines.get(id(chunk.sequence)) or self._new_line(chunk)
            line.turn = self._turn
            lines.append(line)
            if line.end != chunk.start or chunk.num_tokens != 1:
                self._build(chunk, line.index, newest, changes)
            else:
                self._follow(chunk, line.index, newest, changes)
        for chunk, line in zip(chunks, lines, strict=True):  # not before all of them are right
            line.end = chunk.start + chunk.num_tokens
        changes.lines = [line.index for line in lines]
        return changes

    def apply(self, changes: Changes, entries: torch.Tensor, places: torch.Tensor, newest: NewestTokens) -> None:
        """Change the counts: `entries` [E] and `places` [P, 2] are the changes' arrays on the device."""
        flat = self.counts.view(-1)
        for line in changes.cleared:
            self.counts[line].zero_()
        if len(entries):
            flat.index_copy_(0, entries >> 16, ((entries << 48) >> 48).to(torch.int16))
        if len(places):
            count_tokens(self.counts, places, newest.tensor)

    def _new_line(self, chunk: Chunk) -> _Line:
        if not self._free and len(self.counts) < self._max_lines:
            self._grow()
        if not self._free:
            key = min(self._lines, key=lambda key: self._lines[key].turn)
            if self._lines[key].turn == self._turn:
                raise ValueError(f"more than {self._max_lines} sequences with penalties in one pass")
            oldest = self._lines.pop(key)
            oldest.finalizer.detach()
            self._free.append(oldest.index)
        finalizer = weakref.finalize(chunk.sequence, self._dead.append, id(chunk.sequence))
        finalizer.atexit = False
        line = self._lines[id(chunk.sequence)] = _Line(self._free.pop(), -1, self._turn, finalizer)
        return line

    def _grow(self) -> None:
        before = self.counts
        num_lines = min(self._max_lines, max(8, 2 * len(before)))
        self.counts = before.new_empty((num_lines, self._vocab_size))
        self.counts[: len(before)] = before
        self._free.extend(range(len(before), num_lines))

    def _follow(self, chunk: Chunk, index: int, newest: NewestTokens, changes: Changes) -> None:
        known, last = chunk.sequence.token_ids, chunk.start + chunk.num_tokens - 1
        if last < len(known):
            token = known[last]
            if not 0 <= token < self._vocab_size:
                return
        else:
            row = newest.row_of(chunk.sequence)
            if row is None:
                raise ValueError(f"request {chunk.sequence.request_id}: nobody samples token {last}")
            token = -1 - row
        changes.places += (index * self._vocab_size, token)

    def _build(self, chunk: Chunk, index: int, newest: NewestTokens, changes: Changes) -> None:
        sequence = chunk.sequence
        known = np.array(sequence.token_ids[: chunk.end], dtype=np.int64)
        inside = (known >= 0) & (known < self._vocab_size)
        generated = known[sequence.num_prompt_tokens :][inside[sequence.num_prompt_tokens :]]
        prompt = np.unique(known[: sequence.num_prompt_tokens][inside[: sequence.num_prompt_tokens]])
        tokens, counts = np.unique(generated, return_counts=True)
        values = np.minimum(counts, GENERATED)
        both = np.isin(tokens, prompt, assume_unique=True)
        ids = np.concatenate((prompt[~np.isin(prompt, tokens, assume_unique=True)], tokens))
        values = np.concatenate((np.full(len(ids) - len(tokens), _PROMPT), values + np.where(both, _PROMPT, 0)))
        changes.cleared.append(index)
        changes.entries.append((index * self._vocab_size + ids) << 16 | (values & 0xFFFF))
        if chunk.end > len(sequence.token_ids):
            self._follow(chunk, index, newest, changes)
