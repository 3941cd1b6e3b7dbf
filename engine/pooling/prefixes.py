"""Beginnings that texts share, in blocks of tokens: their keys, values and last vectors are computed once, and kept.

T computed tokens of a pass, S tokens of its texts, Hkv key and value heads, D head size, E hidden size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch

from common.blocks import BlockKind, hash_blocks
from engine.kernels.texts.gathering import keep_rows, whole_texts
from engine.pooling.sending import sent
from engine.pooling.spec import EncoderSpec

BLOCK = 16
# Blocks that are remembered by their digests alone, so that what comes a second time is kept.
MOST_SEEN = 1 << 15


def can_share(spec: EncoderSpec) -> bool:
    """True if no token's states depend on a later one, nor on which text of a pair it is in."""
    return not spec.tokens.types and all(
        layer.attention.is_causal and not layer.attention.distances for layer in spec.layers
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A text of a pass. Texts with another adapter or salt share nothing."""

    tokens: Sequence[int]
    adapter: str = ""
    salt: str = ""


class _Store:
    """Rows of the kept blocks, BLOCK for each."""

    def __init__(self, spec: EncoderSpec, memory_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        shapes = [
            (layer.attention.kv_width // layer.attention.head_dim, layer.attention.head_dim) for layer in spec.layers
        ]
        numbers = spec.hidden_size + 2 * sum(heads * dim for heads, dim in shapes)
        self.num_blocks = memory_bytes // (BLOCK * numbers * dtype.itemsize)
        rows = BLOCK * self.num_blocks
        self.keys, self.values = (
            [torch.empty(rows, *shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2)
        )
        self.states = torch.empty(rows, spec.hidden_size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Sources of the rows of a pass, and those that are kept."""

    store: _Store
    # Tokens of each text that are not computed for it; (): not known, in a captured pass.
    begins: tuple[int, ...]
    # [S] int32: each token's row in the pass, or n below 0 for the row -1 - n of the store; None: nobody shares.
    sources: torch.Tensor | None
    # [T] int32: the row of the store that keeps a computed row, -1: none does; None: no row is kept.
    kept: torch.Tensor | None
    # [T], places in S of the computed tokens; None: they are all of S.
    own: torch.Tensor | None = None

    @property
    def is_idle(self) -> bool:
        """True if all is computed, and nothing kept."""
        return self.sources is None and self.kept is None

    def on(self, device: torch.device) -> Sharing:
        """Return the same on a device."""
        sources, kept, own = (None if one is None else sent(one, device) for one in (self.sources, self.kept, self.own))
        return replace(self, sources=sources, kept=kept, own=own)

    def heads(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of all texts [S, Hkv, D], for those computed [T, Hkv, D]."""
        store = self.store
        return self._whole(store.keys[layer], keys), self._whole(store.values[layer], values)

    def states(self, x: torch.Tensor) -> torch.Tensor:
        """Return last vectors of all texts [S, E], for those computed [T, E]."""
        return self._whole(self.store.states, x)

    def spread(self, queries: torch.Tensor) -> torch.Tensor:
        """Return [S, H, D], zeros where nothing is computed, for `queries` [T, H, D]."""
        if self.sources is None:
            return queries
        assert self.own is not None
        found = queries.new_zeros(len(self.sources), *queries.shape[1:])
        found[self.own] = queries
        return found

    def _whole(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.kept is not None:
            keep_rows(rows, stored, self.kept)
        return rows if self.sources is None else whole_texts(rows, stored, self.sources)


@dataclass(frozen=True, slots=True)
class _Text:
    """A text's blocks by their digests, and how many of the first are shared."""

    length: int
    digests: list[bytes]
    shared: int

    @property
    def begin(self) -> int:
        return self.shared * BLOCK


class Prefixes:
    """Kept blocks, those that were used last. One thread at a time.

    A block is kept once two texts begin with it, of a pass or of two: texts that come once push nothing out.
    """

    def __init__(
        self, spec: EncoderSpec, *, fingerprint: str, memory_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kind = BlockKind(model=fingerprint, kv_dtype=str(dtype).removeprefix("torch."), block_size=BLOCK)
        self._store = _Store(spec, memory_bytes, dtype, device)
        self._free = list(range(self._store.num_blocks))
        self._slots = OrderedDict[bytes, int]()
        self._seen = OrderedDict[bytes, None]()

    def __len__(self) -> int:
        return len(self._slots)

    @contextmanager
    def shared(self, beginnings: Sequence[Beginning]) -> Iterator[Sharing]:
        """Context manager: the shares of a pass's texts. Rows that it computed are kept at the end, unless it raises."""
        texts, owners, uses = self._found(beginnings)
        used = [digest for text in texts for digest in text.digests[: text.shared] if digest in self._slots]
        depths = {digest: at for text in texts for at, digest in enumerate(text.digests)}
        for digest in used:
            self._slots.move_to_end(digest)
        coming = self._with_room(
            sorted((one for one in owners if uses[one] or one in self._seen), key=depths.__getitem__), set(used)
        )
        try:
            yield self._sharing(texts, owners, coming)
        except BaseException:
            self._free += coming.values()
            raise
        self._slots |= coming
        # A block without those before it is of no use, so these go later.
        for digest in sorted({*used, *coming}, key=depths.__getitem__, reverse=True):
            self._slots.move_to_end(digest)
        for digest in reversed(owners) if self._store.num_blocks else ():
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def _found(
        self, beginnings: Sequence[Beginning]
    ) -> tuple[list[_Text], dict[bytes, tuple[int, int]], Counter[bytes]]:
        """The texts, each computed block with its text and number, and how many other texts use it."""
        texts, owners, uses = list[_Text](), dict[bytes, tuple[int, int]](), Counter[bytes]()
        roots = dict[tuple[str, str], bytes]()
        for number, one in enumerate(beginnings):
            kind = one.adapter, one.salt
            if kind not in roots:
                roots[kind] = self._kind.root(adapter=one.adapter, salt=one.salt)
            digests = hash_blocks(roots[kind], one.tokens, BLOCK)
            # A text's last token is always computed.
            usable = digests[: (len(one.tokens) - 1) // BLOCK]
            shared = list(takewhile(lambda digest: digest in self._slots or digest in owners, usable))
            uses.update(shared)
            for at in range(len(shared), len(digests)):
                owners.setdefault(digests[at], (number, at))
            texts.append(_Text(len(one.tokens), digests, len(shared)))
        return texts, owners, uses

    def _with_room(self, wanted: Sequence[bytes], used: set[bytes]) -> dict[bytes, int]:
        """A slot for each of the first ones, for as many as there is room without those in use."""
        found = dict[bytes, int]()
        for digest in wanted:
            if digest in self._slots:
                continue
            if not self._free:
                oldest = next(iter(self._slots), None)
                if oldest is None or oldest in used:
                    break
                self._free.append(self._slots.pop(oldest))
            found[digest] = self._free.pop()
        return found

    def _sharing(
        self, texts: Sequence[_Text], owners: dict[bytes, tuple[int, int]], coming: dict[bytes, int]
    ) -> Sharing:
        firsts, row = list[int](), 0  # the row that a text's first token has, or would have
        for text in texts:
            firsts.append(row - text.begin)
            row += text.length - text.begin

        def own_row(digest: bytes) -> int:
            text, at = owners[digest]
            return firsts[text] + at * BLOCK

        def rows_of(digest: bytes) -> range:
            if digest in self._slots:
                first = -1 - self._slots[digest] * BLOCK
                return range(first, first - BLOCK, -1)
            return range(own_row(digest), own_row(digest) + BLOCK)

        sources, own, at = list[range](), list[range](), 0
        for text, first in zip(texts, firsts, strict=True):
            sources += map(rows_of, text.digests[: text.shared])
            sources.append(range(first + text.begin, first + text.length))
            own.append(range(at + text.begin, at + text.length))
            at += text.length
        kept = None
        if coming:
            kept = torch.full((row,), -1, dtype=torch.int32)
            for digest, slot in coming.items():
                begin = own_row(digest)
                kept[begin : begin + BLOCK] = torch.arange(slot * BLOCK, (slot + 1) * BLOCK)
        is_shared = any(text.shared for text in texts)
        return Sharing(
            store=self._store,
            begins=tuple(text.begin for text in texts),
            sources=_numbers(sources).int() if is_shared else None,
            kept=kept,
            own=_numbers(own) if is_shared else None,
        )


def _numbers(ranges: Sequence[range]) -> torch.Tensor:
    """Return the numbers of some ranges, one behind the other [N] int64."""
    return torch.from_numpy(np.concatenate([np.arange(one.start, one.stop, one.step) for one in ranges]))
