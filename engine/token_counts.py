"""How often each sequence used each token, on the device: what repetition, presence and frequency penalties need.

A line of `counts` belongs to one living sequence. It is built from the host's tokens once and then follows the sequence token
by token, also by tokens that the host does not know yet. A sequence that starts anew (preempted, resumed) is built anew.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.kernels.sampling import GENERATED
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
    places: list[tuple[int, int]] = field(
        default_factory=list
    )  # start of a line in `counts`, token that it gets one more of
    pending: bool = False  # some of those tokens are -1 - row of NewestTokens: only the device knows them


@dataclass(slots=True)
class _Line:
    index: int
    end: int  # tokens that are counted
    finalizer: weakref.finalize[[int], Sequence]


class TokenCounts:
    """At most `max_lines` sequences; more than that take turns, at the price of building theirs again."""

    def __init__(self, vocab_size: int, max_lines: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_lines = max_lines
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int16, device=device)
        self._free: list[int] = []
        self._dead: deque[int] = deque()  # ids of sequences that are gone, by whatever thread dropped them
        self._lines: OrderedDict[int, _Line] = OrderedDict()  # by id of the sequence; least recently used first

    def plan(self, chunks: SequenceOf[Chunk], newest: NewestTokens) -> Changes:
        """Decide how the lines of these chunks come to count exactly the tokens before each chunk's end. Apply it, in order."""
        while self._dead:  # before any look-up: a new sequence may have the id of a dead one
            self._free.append(self._lines.pop(self._dead.popleft()).index)
        changes = Changes()
        used = {id(chunk.sequence) for chunk in chunks}
        lines: list[_Line] = []
        for chunk in chunks:
            line = self._lines.get(id(chunk.sequence))
            if line is None:
                line = self._new_line(chunk, used)
            self._lines.move_to_end(id(chunk.sequence))
            lines.append(line)
            if chunk.num_tokens == 1 and line.end == chunk.start:
                self._follow(chunk, line.index, newest, changes)
            else:
                self._build(chunk, line.index, newest, changes)
        for chunk, line in zip(chunks, lines, strict=True):  # not before all of them are right
            line.end = chunk.end
        changes.lines = [line.index for line in lines]
        return changes

    def apply(self, changes: Changes, entries: torch.Tensor, places: torch.Tensor, newest: NewestTokens) -> None:
        """Change the counts: `entries` [E] and `places` [P, 2], with their tokens, are the changes' arrays on the device."""
        flat = self.counts.view(-1)
        for line in changes.cleared:
            self.counts[line].zero_()
        if len(entries):
            flat.index_copy_(0, entries >> 16, ((entries << 48) >> 48).to(torch.int16))
        if len(places):
            starts, tokens = places.unbind(1)
            if changes.pending:
                tokens = torch.where(tokens < 0, newest.tensor[(-1 - tokens).clamp_(min=0)], tokens)
            places = starts + tokens
            seen = flat[places]
            flat[places] = torch.where((seen & GENERATED) == GENERATED, seen, seen + 1)

    def _new_line(self, chunk: Chunk, used: set[int]) -> _Line:
        if not self._free and len(self.counts) < self._max_lines:
            self._grow()
        if not self._free:
            oldest = self._lines.pop(next(key for key in self._lines if key not in used))
            oldest.finalizer.detach()
            self._free.append(oldest.index)
        finalizer = weakref.finalize(chunk.sequence, self._dead.append, id(chunk.sequence))
        finalizer.atexit = False
        line = self._lines[id(chunk.sequence)] = _Line(self._free.pop(), -1, finalizer)
        return line

    def _grow(self) -> None:
        before = self.counts
        num_lines = min(self._max_lines, max(8, 2 * len(before)))
        self.counts = before.new_empty((num_lines, self._vocab_size))
        self.counts[: len(before)] = before
        self._free.extend(range(len(before), num_lines))

    def _follow(self, chunk: Chunk, index: int, newest: NewestTokens, changes: Changes) -> None:
        known = chunk.sequence.token_ids
        if chunk.end <= len(known):
            token = known[chunk.end - 1]
            if not 0 <= token < self._vocab_size:
                return
        else:
            row = newest.row_of(chunk.sequence)
            if row is None:
                raise ValueError(f"request {chunk.sequence.request_id}: nobody samples token {chunk.end - 1}")
            token = -1 - row
            changes.pending = True
        changes.places.append((index * self._vocab_size, token))

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
