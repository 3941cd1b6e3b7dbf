"""Beginnings that texts share, in blocks of tokens: their keys, values and last vectors are computed once, and kept.

T computed tokens of a pass, S tokens of its texts, Hkv key and value heads, D head size, E hidden size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import torch

from common.blocks import BlockKind, hash_blocks
from engine.kernels.texts.gathering import whole_texts
from engine.pooling.sending import sent_ranges
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
    begins: tuple[int, ...]  # tokens of each text that are not computed for it
    # [S] int32: each token's row in the pass, or n below 0 for the row -1 - n of the store; None: nobody shares.
    index: torch.Tensor | None
    # [T], places in S of the computed tokens; None: they are all of S.
    own: torch.Tensor | None
    kept: torch.Tensor | None  # computed rows that are kept; None: none
    into: torch.Tensor | None  # and their rows in the store

    def heads(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of all texts [S, Hkv, D], for those computed [T, Hkv, D]."""
        store = self.store
        return self._whole(store.keys[layer], keys), self._whole(store.values[layer], values)

    def states(self, x: torch.Tensor) -> torch.Tensor:
        """Return last vectors of all texts [S, E], for those computed [T, E]."""
        return self._whole(self.store.states, x)

    def spread(self, queries: torch.Tensor) -> torch.Tensor:
        """Return [S, H, D], zeros where nothing is computed, for `queries` [T, H, D]."""
        if self.index is None:
            return queries
        assert self.own is not None
        found = queries.new_zeros(len(self.index), *queries.shape[1:])
        found[self.own] = queries
        return found

    def _whole(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.kept is not None:
            assert self.into is not None
            stored[self.into] = rows[self.kept]
        if self.index is None:
            return rows
        return whole_texts(rows, stored, self.index)


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
        self._device = device
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

        index, own, at = list[range](), list[range](), 0
        for text, first in zip(texts, firsts, strict=True):
            index += map(rows_of, text.digests[: text.shared])
            index.append(range(first + text.begin, first + text.length))
            own.append(range(at + text.begin, at + text.length))
            at += text.length
        is_shared = any(text.shared for text in texts)
        return Sharing(
            store=self._store,
            begins=tuple(text.begin for text in texts),
            index=sent_ranges(index, self._device).int() if is_shared else None,
            own=sent_ranges(own, self._device) if is_shared else None,
            kept=self._rows([own_row(digest) for digest in coming]),
            into=self._rows([slot * BLOCK for slot in coming.values()]),
        )

    def _rows(self, begins: Sequence[int]) -> torch.Tensor | None:
        """The rows of blocks that begin there; None: there are none."""
        return sent_ranges([range(begin, begin + BLOCK) for begin in begins], self._device) if begins else None
