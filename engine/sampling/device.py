"""`engine.sampling.host` on the device: the same tokens, available there before the host knows them.

A pass's words go there in one copy, its results come back in one. No row depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from common.messages import TokenLogprobs
from engine.arrays import Longs
from engine.grammars.grammars import NO_MASKS, Masks
from engine.kernels.sampling import RowWord, SamplingInputs, choose
from engine.passes import Sampled
from engine.sampling.counts import CountChanges, TokenCounts
from engine.sampling.host import token_logprobs
from engine.sampling.readback import Readback
from engine.sampling.table import Feature, RowFact, SamplingTable
from engine.sequence import Chunk, Sequence
from engine.step.staging import NewestTokens, Staging


class DeviceSampler:
    """The sampler. `launch` is called by one thread at a time, always on the same stream; passes may overlap."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = SamplingTable(vocab_size)
        self._counts = TokenCounts(vocab_size, max_rows, device)
        self._staging = Staging(device, torch.int64)
        self._no_words = torch.zeros(0, dtype=torch.int64, device=device)
        self._roster = _Roster([], self._table, vocab_size)  # the last pass's, often reused by the next

    @torch.inference_mode()
    def launch(
        self, logits: torch.Tensor, chunks: SequenceOf[Chunk], newest: NewestTokens, masks: Masks = NO_MASKS
    ) -> Draw:
        """Sample one token for each row of `logits` [R, V], the end of its chunk. Returns before it is done.

        `newest`: the samples of the pass before, for chunks that end with a token their sequence lacks. `masks` change
        the logits.
        """
        sequences = [chunk.sequence for chunk in chunks]
        if sequences != self._roster.sequences:
            self._roster = _Roster(sequences, self._table, self._vocab_size)
        roster = self._roster
        pass_words = self._words_of(chunks, roster, newest, masks)
        words = self._no_words
        if pass_words.size:
            np.concatenate(pass_words.pieces, out=self._staging.write(pass_words.size))
            words = self._staging.send(pass_words.size)
        changes = pass_words.count_changes
        if changes is not None:
            places = words[pass_words.count_places].view(-1, 2)
            self._counts.apply(changes, words[pass_words.count_entries], places, newest)
        num_rows, num_reported = len(chunks), roster.with_logprobs.size
        num_likely = 2 * num_reported * roster.likely_width  # ids and log probabilities, after the rows' reports
        packed = torch.empty((num_rows + -(-num_likely // 3), 3), dtype=torch.int32, device=self._device)
        inputs = SamplingInputs(
            words=words,
            counts=None if changes is None else self._counts.counts,
            filtered=roster.filtered.size,
            filtered_at=pass_words.filtered_at,
            random=roster.random,
            extras=pass_words.extras,
            logprobs=num_reported > 0,
            typical=roster.typical,
            masked=len(masks.rows),
            masked_at=pass_words.masked_at,
            masks_at=pass_words.masks_at,
        )
        sampled = choose(logits, inputs, packed[:num_rows])
        if roster.likely_width and sampled.normalizer is not None:
            reported = words[pass_words.with_logprobs_at : pass_words.with_logprobs_at + num_reported]
            top = logits[reported].topk(roster.likely_width, dim=-1)
            ids, logprobs = packed[num_rows:].view(-1)[:num_likely].view(2, num_reported, -1)
            ids.copy_(top.indices)
            torch.sub(top.values.float(), sampled.normalizer[reported][:, None], out=logprobs.view(torch.float32))
        return Draw(sampled.token_ids, roster.newest.of(sampled.token_ids), packed, roster)

    def _words_of(self, chunks: SequenceOf[Chunk], roster: _Roster, newest: NewestTokens, masks: Masks) -> _PassWords:
        words = _PassWords()
        if roster.plain and not roster.with_logprobs.size and not masks.rows:
            return words
        ends = np.array([chunk.end for chunk in chunks])
        positions = ends - roster.facts[:, RowFact.NUM_PROMPT_TOKENS]
        banned = positions < roster.facts[:, RowFact.MIN_TOKENS]
        banned[masks.rows] = False  # masks handle stop tokens themselves
        words.extras = bool(roster.biased.size or roster.penalized.size or banned.any())
        table = roster.words.copy()
        table[:, RowWord.POSITION] = positions
        words.add(table.reshape(-1))  # a view, so the changes below are included
        words.filtered_at = words.add(roster.filtered).start
        words.with_logprobs_at = words.add(roster.with_logprobs).start
        if masks.rows:
            words.masked_at = words.add(np.array(masks.rows)).start
            words.masks_at = words.add(masks.words.reshape(-1)).start
        if roster.penalized.size:
            changes = words.count_changes = self._counts.plan([chunks[row] for row in roster.penalized], newest)
            table[roster.penalized, RowWord.COUNTS] = changes.rows
            words.count_entries = words.add(*changes.entries)
            words.count_places = words.add(np.array(changes.places, dtype=np.int64))
        if roster.biased.size or words.extras:
            for row in np.flatnonzero((roster.facts[:, RowFact.FEATURES] & Feature.BIAS != 0) | banned):
                bias = words.add(roster.lists[row].bias)
                bans = words.add(roster.lists[row].banned) if banned[row] else slice(bias.stop, bias.stop)
                table[row, RowWord.BIAS : RowWord.END + 1] = bias.start, bans.start, bans.stop
        return words


class _Roster:
    """The part of the sampling table that is reused while the same sequences are sampled in the same order."""

    def __init__(self, sequences: list[Sequence], table: SamplingTable, vocab_size: int) -> None:
        own = table.rows(sequences)
        self.sequences = sequences
        self.words = table.words[own]
        self.facts = table.facts[own]
        self.lists = [table.lists[row] for row in own]
        self.random = self._with(Feature.RANDOM).size > 0
        self.filtered = self._with(Feature.FILTERS)
        self.typical = self._with(Feature.TYPICAL).size > 0
        self.biased = self._with(Feature.BIAS)
        self.penalized = self._with(Feature.PENALTIES)
        self.with_logprobs = self._with(Feature.LOGPROBS)
        self.plain = not (
            self.random or self.biased.size or self.penalized.size or self.facts[:, RowFact.MIN_TOKENS].any()
        )
        # Number of most likely tokens to report, for rows with logprobs.
        self.likely = {row: max(sequences[row].sampling.logprobs or 0, 0) for row in self.with_logprobs.tolist()}
        self.likely_width = min(max(self.likely.values(), default=0), vocab_size)
        self.newest = NewestTokens.none("cpu", sequences)

    def _with(self, feature: Feature) -> Longs:
        return np.flatnonzero(self.facts[:, RowFact.FEATURES] & feature)


@dataclass(slots=True)
class _PassWords:
    """A pass's words for the device, and the offset of each kind."""

    extras: bool = False  # some row has bias, penalties or bans
    pieces: list[Longs] = field(default_factory=list)
    size: int = 0
    filtered_at: int = 0
    with_logprobs_at: int = 0
    masked_at: int = 0
    masks_at: int = 0
    count_changes: CountChanges | None = None
    count_entries: slice = field(default_factory=lambda: slice(0))
    count_places: slice = field(default_factory=lambda: slice(0))

    def add(self, *pieces: Longs) -> slice:
        """Append words; return their offset."""
        start = self.size
        self.pieces += pieces
        self.size += sum(piece.size for piece in pieces)
        return slice(start, self.size)


class Draw:
    """Sampled tokens on their way to the host."""

    def __init__(self, token_ids: torch.Tensor, newest: NewestTokens, packed: torch.Tensor, roster: _Roster) -> None:
        self.token_ids = token_ids  # [R] int64, on the device: usable by the next pass at once
        self.newest = newest  # the same, for the next pass's chunks
        self._likely = roster.likely
        self._likely_width = roster.likely_width
        self._known: list[int] | None = None  # the tokens, once somebody waited for them
        self._packed = Readback(packed)

    def wait(self) -> list[Sampled | None]:
        """Block until the tokens are known; None for a row whose logits had NaN or +infinity. Any thread may repeat it."""
        num_rows = len(self.token_ids)
        report = self._packed.wait().numpy()[:num_rows]
        usable, token_ids = report[:, 0].tolist(), report[:, 1].tolist()
        if not self._likely:
            return [Sampled(token, None) if fine else None for fine, token in zip(usable, token_ids, strict=True)]
        logprobs = self._logprobs(report, num_rows)
        return [
            Sampled(token, logprobs.get(row)) if fine else None
            for row, (fine, token) in enumerate(zip(usable, token_ids, strict=True))
        ]

    def token_of(self, sequence: Sequence) -> int:
        """The token sampled for this sequence; blocks until it is known. Arbitrary if its logits were unusable."""
        if self._known is None:
            self._known = self._packed.wait().numpy()[: len(self.token_ids), 1].tolist()
        row = self.newest.row_of(sequence)
        assert row is not None, "checked when its chunk was packed"
        return self._known[row]

    def _logprobs(self, report: Longs, num_rows: int) -> dict[int, TokenLogprobs]:
        """The log probabilities of the sampled and the most likely tokens, by row."""
        chosen = report[:, 2].copy().view(np.float32).tolist()
        words = self._packed.wait().numpy()[num_rows:].reshape(-1)[: 2 * len(self._likely) * self._likely_width]
        ids, bits = words.reshape(2, len(self._likely), self._likely_width)
        rows = zip(self._likely.items(), ids.tolist(), bits.view(np.float32).tolist(), strict=True)
        return {
            row: token_logprobs(chosen[row], top_ids[:count], top_logprobs[:count])
            for (row, count), top_ids, top_logprobs in rows
        }
