"""`engine.sampler` for a device that must not be waited for: the same tokens, known on the device before the host knows them.

All that a pass needs goes there in one copy, all that comes out of it comes back in one. Nothing depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from common.messages import TokenLogprobs
from engine.kernels.sampling import Choice, Word, choose
from engine.newest import NewestTokens
from engine.passes import Sampled
from engine.sampling_table import Needs, SamplingTable, Trait
from engine.sequence import Chunk, Sequence
from engine.staging import Staging, Words
from engine.token_counts import Changes, TokenCounts

__all__ = ["DeviceSampler", "Draw", "NewestTokens"]


class DeviceSampler:
    """`launch` is called by one thread at a time, always on the same stream; passes may overlap."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = SamplingTable(vocab_size)
        self._counts = TokenCounts(vocab_size, max_rows, device)
        self._staging = Staging(device)
        self._no_words = torch.zeros(0, dtype=torch.int64, device=device)
        self._rows = _Rows([], self._table, vocab_size)  # of the last pass: often the next one's

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: SequenceOf[Chunk], newest: NewestTokens) -> Draw:
        """Sample one token for each row of `logits` [R, V]; `rows` are their chunks. Returns before it is done.

        `newest`: what the pass before sampled, for a chunk that ends with a token that its sequence does not hold yet.
        """
        sequences = [chunk.sequence for chunk in rows]
        if sequences != self._rows.sequences:
            self._rows = _Rows(sequences, self._table, self._vocab_size)
        known = self._rows
        request = self._request(rows, known, newest)
        words = self._no_words
        if request.size:
            np.concatenate(request.pieces, out=self._staging.write(request.size))
            words = self._staging.send(request.size)
        if request.changes is not None:
            self._counts.apply(request.changes, words[request.entries], words[request.places].view(-1, 2), newest)
        num_rows, num_listed = len(rows), known.listed.size
        num_likely = 2 * num_listed * known.width  # ids and log probabilities, behind the rows' reports
        packed = torch.empty((num_rows + -(-num_likely // 3), 3), dtype=torch.int32, device=self._device)
        choice = Choice(
            words=words,
            counts=None if request.changes is None else self._counts.counts,
            filtered=known.filtered.size,
            filtered_at=request.filtered_at,
            random=known.random,
            extras=request.extras,
            logprobs=num_listed > 0,
        )
        chosen = choose(logits, choice, packed[:num_rows])
        if known.width and chosen.normalizer is not None:
            listed = words[request.listed_at : request.listed_at + num_listed]
            top = logits[listed].topk(known.width, dim=-1)
            ids, logprobs = packed[num_rows:].view(-1)[:num_likely].view(2, num_listed, -1)
            ids.copy_(top.indices)
            torch.sub(top.values.float(), chosen.normalizer[listed][:, None], out=logprobs.view(torch.float32))
        return Draw(chosen.token_ids, known.newest.of(chosen.token_ids), packed, known)

    def _request(self, rows: SequenceOf[Chunk], known: _Rows, newest: NewestTokens) -> _Request:
        request = _Request()
        if known.plain and not known.listed.size:
            return request
        ends = np.array([chunk.start + chunk.num_tokens for chunk in rows])
        positions = ends - known.traits[:, Trait.NUM_PROMPT_TOKENS]
        banned = positions < known.traits[:, Trait.MIN_TOKENS]
        request.extras = bool(known.biased.size or known.penalized.size or banned.any())
        table = known.words.copy()
        table[:, Word.POSITION] = positions
        request.add(table.reshape(-1))  # a view: what follows still changes it
        request.filtered_at = request.add(known.filtered).start
        request.listed_at = request.add(known.listed).start
        if known.penalized.size:
            changes = request.changes = self._counts.plan([rows[row] for row in known.penalized], newest)
            table[known.penalized, Word.COUNTS] = changes.lines
            request.entries = request.add(*changes.entries)
            request.places = request.add(np.array(changes.places, dtype=np.int64))
        if known.biased.size or request.extras:
            for row in np.flatnonzero((known.traits[:, Trait.NEEDS] & Needs.BIAS != 0) | banned):
                bias = request.add(known.lists[row].bias)
                bans = request.add(known.lists[row].banned) if banned[row] else slice(bias.stop, bias.stop)
                table[row, Word.BIAS : Word.END + 1] = bias.start, bans.start, bans.stop
        return request


class _Rows:
    """What stays the same for as long as the same sequences are sampled, in the same order."""

    def __init__(self, sequences: list[Sequence], table: SamplingTable, vocab_size: int) -> None:
        own = table.rows(sequences)
        self.sequences = sequences
        self.words = table.words[own]
        self.traits = table.traits[own]
        self.lists = [table.lists[row] for row in own]
        self.random = self._with(Needs.RANDOM).size > 0
        self.filtered = self._with(Needs.FILTERS)
        self.biased = self._with(Needs.BIAS)
        self.penalized = self._with(Needs.PENALTIES)
        self.listed = self._with(Needs.LOGPROBS)
        self.plain = not (
            self.random or self.biased.size or self.penalized.size or self.traits[:, Trait.MIN_TOKENS].any()
        )
        self.asked = {row: max(sequences[row].sampling.logprobs or 0, 0) for row in self.listed.tolist()}
        self.width = min(
            max(self.asked.values(), default=0), vocab_size
        )  # most likely tokens that any row wants to see
        self.newest = NewestTokens.none("cpu", sequences)

    def _with(self, need: Needs) -> Words:
        return np.flatnonzero(self.traits[:, Trait.NEEDS] & need)


class Draw:
    """Sampled tokens on their way to the host."""

    def __init__(self, token_ids: torch.Tensor, newest: NewestTokens, packed: torch.Tensor, rows: _Rows) -> None:
        self.token_ids = token_ids  # [R] int64, on the device: good for the next pass at once
        self.newest = newest  # the same, for the next pass's chunks
        self._asked = rows.asked  # row -> number of likely tokens to report, for the rows with logprobs
        self._width = rows.width
        self._packed, self._copied = packed, None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Sampled | None]:
        """Block until the tokens are known; None for a row whose logits had NaN or +infinity. By any thread, again if need be."""
        if self._copied is not None:
            self._copied.synchronize()
        num_rows = len(self.token_ids)
        report = self._packed.numpy()[:num_rows]
        usable, token_ids = report[:, 0].tolist(), report[:, 1].tolist()
        if not self._asked:
            return [Sampled(token, None) if fine else None for fine, token in zip(usable, token_ids, strict=True)]
        chosen = report[:, 2].copy().view(np.float32).tolist()
        likely = self._packed.numpy()[num_rows:].reshape(-1)[: 2 * len(self._asked) * self._width]
        ids, bits = likely.reshape(2, len(self._asked), self._width)
        top = dict(zip(self._asked, zip(ids.tolist(), bits.view(np.float32).tolist(), strict=True), strict=True))
        results: list[Sampled | None] = []
        for row, token_id in enumerate(token_ids):
            logprobs = None
            if row in self._asked:
                count = self._asked[row]
                logprobs = TokenLogprobs(
                    logprob=chosen[row], top_ids=top[row][0][:count], top_logprobs=top[row][1][:count]
                )
            results.append(Sampled(token_id, logprobs) if usable[row] else None)
        return results


@dataclass(slots=True)
class _Request:
    """What a pass sends to the device, and where in its words what lies."""

    extras: bool = False  # some row has bias, penalties or bans
    pieces: list[Words] = field(default_factory=list)
    size: int = 0
    filtered_at: int = 0
    listed_at: int = 0
    changes: Changes | None = None
    entries: slice = field(default_factory=lambda: slice(0))
    places: slice = field(default_factory=lambda: slice(0))

    def add(self, *pieces: Words) -> slice:
        """Send these too; return where they lie."""
        start = self.size
        self.pieces += pieces
        self.size += sum(piece.size for piece in pieces)
        return slice(start, self.size)
