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

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: SequenceOf[Chunk], newest: NewestTokens) -> Draw:
        """Sample one token for each row of `logits` [R, V]; `rows` are their chunks. Returns before it is done.

        `newest`: what the pass before sampled, for a chunk that ends with a token that its sequence does not hold yet.
        """
        sequences = [chunk.sequence for chunk in rows]
        request = self._request(rows, sequences, newest)
        words = self._no_words
        if request.size:
            np.concatenate(request.pieces, out=self._staging.write(request.size))
            words = self._staging.send(request.size)
        if request.changes is not None:
            self._counts.apply(request.changes, words[request.entries], words[request.places].view(-1, 2), newest)
        num_rows, num_listed, width = len(rows), request.listed.size, request.width
        packed = torch.empty(3 * num_rows + 2 * num_listed * width, dtype=torch.int32, device=self._device)
        choice = Choice(
            words=words,
            counts=None if request.changes is None else self._counts.counts,
            filtered=request.num_filtered,
            filtered_at=request.filtered_at,
            random=bool(request.needs & Needs.RANDOM),
            extras=request.extras,
            logprobs=num_listed > 0,
        )
        chosen = choose(logits, choice, packed[: 3 * num_rows].view(-1, 3))
        if width:
            listed = words[request.listed_at : request.listed_at + num_listed]
            top = logits[listed].topk(width, dim=-1)
            ids, logprobs = packed[3 * num_rows :].view(2, num_listed, width)
            ids.copy_(top.indices)
            torch.sub(top.values.float(), chosen.normalizer[listed][:, None], out=logprobs.view(torch.float32))
        counts = [sequences[row].sampling.logprobs or 0 for row in request.listed]
        asked = dict(zip(request.listed.tolist(), counts, strict=True))
        return Draw(chosen.token_ids, NewestTokens(chosen.token_ids, sequences), packed, asked, width)

    def _request(self, rows: SequenceOf[Chunk], sequences: list[Sequence], newest: NewestTokens) -> _Request:
        own = self._table.rows(sequences)
        traits = self._table.traits[own]
        needs = Needs(int(np.bitwise_or.reduce(traits[:, Trait.NEEDS])))
        positions = np.array([chunk.start + chunk.num_tokens for chunk in rows]) - traits[:, Trait.NUM_PROMPT_TOKENS]
        banned = positions < traits[:, Trait.MIN_TOKENS]
        extras = bool(needs & (Needs.BIAS | Needs.PENALTIES)) or bool(banned.any())
        request = _Request(needs, extras)
        if extras or needs & Needs.RANDOM:
            table = self._table.words[own]
            table[:, Word.POSITION] = positions
            request.add(table.reshape(-1))  # a view: what follows still changes it
        if needs & Needs.FILTERS:
            filtered = _rows_with(traits, Needs.FILTERS)
            request.num_filtered, request.filtered_at = filtered.size, request.add(filtered).start
        if needs & Needs.LOGPROBS:
            request.listed = _rows_with(traits, Needs.LOGPROBS)
            request.listed_at = request.add(request.listed).start
            most = max(sequences[row].sampling.logprobs or 0 for row in request.listed)
            request.width = min(max(most, 0), self._vocab_size)
        if needs & Needs.PENALTIES:
            penalized = _rows_with(traits, Needs.PENALTIES)
            changes = request.changes = self._counts.plan([rows[row] for row in penalized], newest)
            table[penalized, Word.COUNTS] = changes.lines
            request.entries = request.add(*changes.entries)
            request.places = request.add(np.array(changes.places, dtype=np.int64).reshape(-1))
        for row in np.flatnonzero((traits[:, Trait.NEEDS] & Needs.BIAS != 0) | banned):
            lists = self._table.lists[own[row]]
            bias = request.add(lists.bias)
            bans = request.add(lists.banned) if banned[row] else slice(bias.stop, bias.stop)
            table[row, Word.BIAS : Word.END + 1] = bias.start, bans.start, bans.stop
        return request


class Draw:
    """Sampled tokens on their way to the host."""

    def __init__(
        self, token_ids: torch.Tensor, newest: NewestTokens, packed: torch.Tensor, asked: dict[int, int], width: int
    ) -> None:
        self.token_ids = token_ids  # [R] int64, on the device: good for the next pass at once
        self.newest = newest  # the same, for the next pass's chunks
        self._asked = asked  # row -> number of likely tokens to report, for the rows with logprobs
        self._width = width
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
        num_rows, packed = len(self.token_ids), self._packed.numpy()
        report = packed[: 3 * num_rows].reshape(-1, 3)
        usable, token_ids = report[:, 0].tolist(), report[:, 1].tolist()
        if not self._asked:
            return [Sampled(token, None) if fine else None for fine, token in zip(usable, token_ids, strict=True)]
        chosen = report[:, 2].copy().view(np.float32).tolist()
        ids, bits = packed[3 * num_rows :].reshape(2, len(self._asked), self._width)
        top = dict(zip(self._asked, zip(ids.tolist(), bits.view(np.float32).tolist(), strict=True), strict=True))
        results: list[Sampled | None] = []
        for row, token_id in enumerate(token_ids):
            logprobs = None
            if row in self._asked:
                count = max(self._asked[row], 0)
                logprobs = TokenLogprobs(
                    logprob=chosen[row], top_ids=top[row][0][:count], top_logprobs=top[row][1][:count]
                )
            results.append(Sampled(token_id, logprobs) if usable[row] else None)
        return results


@dataclass(slots=True)
class _Request:
    """What a pass sends to the device, and where in its words what lies."""

    needs: Needs
    extras: bool  # some row has bias, penalties or bans
    pieces: list[Words] = field(default_factory=list)
    size: int = 0
    num_filtered: int = 0
    filtered_at: int = 0
    listed: Words = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # rows with logprobs
    listed_at: int = 0
    width: int = 0  # most likely tokens that any row wants to see
    changes: Changes | None = None
    entries: slice = field(default_factory=lambda: slice(0))
    places: slice = field(default_factory=lambda: slice(0))

    def add(self, *pieces: Words) -> slice:
        """Send these too; return where they lie."""
        start = self.size
        self.pieces += pieces
        self.size += sum(piece.size for piece in pieces)
        return slice(start, self.size)


def _rows_with(traits: Words, need: Needs) -> Words:
    return np.flatnonzero(traits[:, Trait.NEEDS] & need)
