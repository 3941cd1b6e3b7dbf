"""`engine.sampling.host` on the device: the same tokens, available there before the host knows them.

A pass's words go there in one copy, its results come back in one. No row depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from common.messages import TokenLogprobs
from engine.arrays import Longs
from engine.grammars.grammars import NO_MASKS, Masks
from engine.kernels.sampling import RowWord, SampledTokens, SamplingInputs, choose
from engine.passes import Sampled
from engine.sampling.counts import CountSize, TokenCounts
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
        return self.draw(logits, self.pack(chunks, newest, masks), newest.tensor)

    def pack(self, chunks: SequenceOf[Chunk], newest: NewestTokens, masks: Masks = NO_MASKS) -> PackedSampling:
        """Lay out what `draw` needs besides the logits. It lasts until the next call, and is drawn before that."""
        sequences = [chunk.sequence for chunk in chunks]
        if sequences != self._roster.sequences:
            self._roster = _Roster(sequences, self._table, self._vocab_size)
        return self._packed(chunks, self._roster, newest, masks)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, packed: PackedSampling, newest: torch.Tensor) -> Draw:
        """Start to sample what `pack` laid out last. `newest`: the samples of the pass before."""
        roster, num_rows = self._roster, len(logits)
        num_reported = roster.with_logprobs.size
        num_likely = 2 * num_reported * roster.likely_width  # ids and log probabilities, after the rows' reports
        report = torch.empty((num_rows + -(-num_likely // 3), 3), dtype=torch.int32, device=self._device)
        words = self._send(packed)
        sampled = self._chosen(logits, packed.size, words, newest, report[:num_rows])
        if roster.likely_width and sampled.normalizer is not None:
            reported = words[packed.with_logprobs_at : packed.with_logprobs_at + num_reported]
            top = logits[reported].topk(roster.likely_width, dim=-1)
            ids, logprobs = report[num_rows:].view(-1)[:num_likely].view(2, num_reported, -1)
            ids.copy_(top.indices)
            torch.sub(top.values.float(), sampled.normalizer[reported][:, None], out=logprobs.view(torch.float32))
        return Draw(sampled.token_ids, roster.newest.of(sampled.token_ids), report, roster)

    @torch.inference_mode()
    def repeat(self, logits: torch.Tensor, packed: PackedSampling, newest: torch.Tensor) -> torch.Tensor:
        """Start to sample what another rank's sampler packed; return the tokens [R]. Nothing comes back to the host."""
        report = torch.empty((len(logits), 3), dtype=torch.int32, device=self._device)
        return self._chosen(logits, packed.size, self._send(packed), newest, report).token_ids

    def _send(self, packed: PackedSampling) -> torch.Tensor:
        if not packed.num_words:
            return self._no_words
        np.concatenate(packed.pieces, out=self._staging.write(packed.num_words))
        return self._staging.send(packed.num_words)

    def _chosen(
        self, logits: torch.Tensor, size: SamplingSize, words: torch.Tensor, newest: torch.Tensor, report: torch.Tensor
    ) -> SampledTokens:
        if size.counts is not None:
            self._counts.apply(size.counts, words, newest)
        counts = None if size.counts is None else self._counts.counts
        return choose(logits, size.inputs(words, counts), report)

    def _packed(self, chunks: SequenceOf[Chunk], roster: _Roster, newest: NewestTokens, masks: Masks) -> PackedSampling:
        size = SamplingSize(random=roster.random, typical=roster.typical, logprobs=roster.with_logprobs.size > 0)
        words = PackedSampling(size)
        if roster.plain and not roster.with_logprobs.size and not masks.rows:
            return words
        ends = np.array([chunk.end for chunk in chunks])
        positions = ends - roster.facts[:, RowFact.NUM_PROMPT_TOKENS]
        banned = positions < roster.facts[:, RowFact.MIN_TOKENS]
        banned[masks.rows] = False  # masks handle stop tokens themselves
        extras = bool(roster.biased.size or roster.penalized.size or banned.any())
        table = roster.words.copy()
        table[:, RowWord.POSITION] = positions
        words.add(table.reshape(-1))  # a view, so the changes below are included
        filtered = Rows(roster.filtered.size, words.add(roster.filtered).start)
        words.with_logprobs_at = words.add(roster.with_logprobs).start
        masked, masks_at, counts = Rows(), 0, None
        if masks.rows:
            masked = Rows(len(masks.rows), words.add(np.array(masks.rows)).start)
            masks_at = words.add(masks.words.reshape(-1)).start
        if roster.penalized.size:
            changes = self._counts.plan([chunks[row] for row in roster.penalized], newest)
            table[roster.penalized, RowWord.COUNTS] = changes.rows
            entries = words.add(*changes.entries)
            counts = self._counts.size(changes, entries, words.add(np.array(changes.places, dtype=np.int64)))
        if extras:
            for row in np.flatnonzero((roster.facts[:, RowFact.FEATURES] & Feature.BIAS != 0) | banned):
                bias = words.add(roster.lists[row].bias)
                bans = words.add(roster.lists[row].banned) if banned[row] else slice(bias.stop, bias.stop)
                table[row, RowWord.BIAS : RowWord.END + 1] = bias.start, bans.start, bans.stop
        words.size = msgspec.structs.replace(
            size, extras=extras, filtered=filtered, masked=masked, masks_at=masks_at, counts=counts
        )
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


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Some rows, whose numbers are among a pass's words."""

    count: int = 0
    at: int = 0


class SamplingSize(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The header of a pass's sampling: what its rows ask for, and where their words are."""

    random: bool = False  # see `SamplingInputs`
    typical: bool = False
    logprobs: bool = False
    extras: bool = False
    filtered: Rows = Rows()
    masked: Rows = Rows()
    masks_at: int = 0
    counts: CountSize | None = None

    def inputs(self, words: torch.Tensor, counts: torch.Tensor | None) -> SamplingInputs:
        """Say it as kernels want it."""
        return SamplingInputs(
            words=words,
            counts=counts,
            filtered=self.filtered.count,
            filtered_at=self.filtered.at,
            random=self.random,
            extras=self.extras,
            logprobs=self.logprobs,
            typical=self.typical,
            masked=self.masked.count,
            masked_at=self.masked.at,
            masks_at=self.masks_at,
        )


class _Message(msgspec.Struct, frozen=True, array_like=True):
    size: SamplingSize
    words: bytes


@dataclass(slots=True)
class PackedSampling:
    """A pass's sampling without its sequences: any rank can do it."""

    size: SamplingSize
    pieces: list[Longs] = field(default_factory=list)  # the words
    num_words: int = 0
    with_logprobs_at: int = 0

    def add(self, *pieces: Longs) -> slice:
        """Append words; return their offset."""
        start = self.num_words
        self.pieces += pieces
        self.num_words += sum(piece.size for piece in pieces)
        return slice(start, self.num_words)

    def encode(self) -> bytes:
        words = b"".join(piece.astype("<i8", copy=False).tobytes() for piece in self.pieces)
        return msgspec.msgpack.encode(_Message(self.size, words))

    @classmethod
    def decode(cls, data: bytes) -> PackedSampling:
        """Decode what `encode` wrote. Raises ValueError for anything else."""
        message = msgspec.msgpack.decode(data, type=_Message)
        words = np.frombuffer(message.words, dtype="<i8")
        return cls(message.size, [words], len(words))


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
