"""Keys that a query meets in attention by torch, and biases by distance. H heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.kernels.native import floats
from engine.kernels.texts.attention import Distances
from engine.pooling.spec import EncoderAttentionSpec
from engine.pooling.texts import Texts
from engine.weights.parameters import Weights, whole

# Queries that are computed together where there is a window.
QUERIES_AT_ONCE = 1024
# Distances that have biases of their own, and the one that all longer ones are taken for.
BUCKETS, FARTHEST = 32, 128


@dataclass(frozen=True, slots=True)
class Part:
    """Some queries of a text, the keys that they meet, and biases or which of them are seen; None: all, or all before."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None  # [H or none, queries, keys]


class Masks:
    """The biases and masks of a pass, by length and reach, and its pieces of work: layers share them."""

    def __init__(self, bias: DistanceBias | None, texts: Texts) -> None:
        self._bias, self._device, self._lengths = bias, texts.tokens.device, texts.lengths
        self._places = texts.places
        self._begins = () if texts.sharing is None else texts.sharing.begins
        self._known = dict[tuple[int, ...], torch.Tensor]()

    @property
    def are_biases(self) -> bool:
        return self._bias is not None

    @cached_property
    def distances(self) -> Distances | None:
        """The biases for a kernel over all lengths."""
        return None if self._bias is None else Distances(self._bias.by_distance(), self._places)

    @property
    def pieces(self) -> torch.Tensor:
        """See `floats.attend`."""
        if () not in self._known:
            self._known[()] = floats.pieces_of(self._lengths, self._begins)
        return self._known[()]

    def parts(self, length: int, spec: EncoderAttentionSpec) -> Iterator[Part]:
        """The queries of a text: with a window so many at a time, so that neither work nor memory grows by its square."""
        reach, whole = spec.reach, slice(0, length)
        if self._bias is not None:
            if (length,) not in self._known:
                self._known[length,] = self._bias(length)
            yield Part(whole, whole, self._known[length,])
        elif not reach or length <= reach + 1:
            yield Part(whole, whole, None)
        else:
            for begin in range(0, length, QUERIES_AT_ONCE):
                end = min(begin + QUERIES_AT_ONCE, length)
                first, last = max(0, begin - reach), end if spec.is_causal else min(length, end + reach)
                mask = self._near(end - begin, last - first, begin - first, reach, spec.is_causal)
                yield Part(slice(begin, end), slice(first, last), mask)

    def _near(self, queries: int, keys: int, before: int, reach: int, is_causal: bool) -> torch.Tensor:
        """Return which keys are seen; `before` of them precede the first query."""
        key = (queries, keys, before, reach, is_causal)
        if key not in self._known:
            behind = (
                torch.arange(queries, device=self._device)[:, None] + before - torch.arange(keys, device=self._device)
            )
            self._known[key] = (behind >= 0) & (behind <= reach) if is_causal else behind.abs() <= reach
        return self._known[key]


class DistanceBias:
    """A bias of each head by distance, in buckets that grow with it."""

    def __init__(self, spec: EncoderAttentionSpec, weights: Weights) -> None:
        self._table = weights.new(whole(f"{spec.distances}.weight", BUCKETS, spec.num_heads))
        self._by_distance: torch.Tensor | None = None

    def __call__(self, length: int) -> torch.Tensor:
        """Return [H, length, length]."""
        at = torch.arange(length)
        return self._of(at - at[:, None]).permute(2, 0, 1)

    def by_distance(self) -> torch.Tensor:
        """Return [H, 2 FARTHEST + 1] float32, see `Distances`."""
        if self._by_distance is None:
            self._by_distance = self._of(torch.arange(-FARTHEST, FARTHEST + 1)).T.float().contiguous()
        return self._by_distance

    def _of(self, ahead: torch.Tensor) -> torch.Tensor:
        """Return [..., H] for keys so many positions behind their query in the text."""
        half = BUCKETS // 2
        exact = half // 2
        far = ahead.abs()
        share = torch.log(far.float().clamp(min=1) / exact) / math.log(FARTHEST / exact)
        wide = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
        buckets = torch.where(far < exact, far, wide) + (ahead > 0) * half
        return self._table[buckets.to(self._table.device)]
