"""Captured passes: those of few tokens are replayed as CUDA graphs, in one launch instead of hundreds. T tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.pooling.encoder import Encoder
from engine.pooling.texts import PLACES, SIGHTS, Texts, num_rows
from engine.step.graphs import Captures

log = logging.getLogger("baton.engine")

# Tokens: passes of more keep a GPU busy for longer than the host takes to launch them.
SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_GRAPHS = 32  # each takes a few MB of a GPU's memory


@dataclass(slots=True)
class _Captured:
    """A pass over so many tokens, where it reads them, and where it leaves their vectors."""

    texts: Texts
    host: torch.Tensor  # [rows, size] int32, on its way to `texts`
    empty: torch.Tensor  # the same without texts: every token is one of its own
    graph: torch.cuda.CUDAGraph | None = None
    found: torch.Tensor | None = None  # [size, E]


class Passes:
    """An encoder whose passes of few tokens are captured at the second of a size. One thread at a time."""

    def __init__(self, encoder: Encoder, device: torch.device, *, sizes: Sequence[int] = SIZES) -> None:
        """`sizes`: most tokens of captured passes, ascending; (): none is captured."""
        self._encoder, self._device, self._sizes = encoder, device, tuple(sizes)
        self._captures = Captures()
        self._captured = dict[tuple[int, int | None], _Captured]()
        self._asked = set[tuple[int, int | None]]()

    def __len__(self) -> int:
        """Captured passes."""
        return len(self._captured)

    def __call__(self, texts: Texts, *, adapter: int | None) -> torch.Tensor:
        """Return each token's vector [S, E] for texts on the host; the next pass may overwrite it."""
        captured = self._of(texts, adapter)
        if captured is None or captured.graph is None or captured.found is None:
            return self._encoder(texts.on(self._device), adapter=adapter)
        _fill(captured, texts)
        captured.graph.replay()
        return captured.found[: texts.numbers.shape[1]]

    def _of(self, texts: Texts, adapter: int | None) -> _Captured | None:
        """The smallest pass that holds these texts; None: there is none, or not yet."""
        count, sharing = texts.numbers.shape[1], texts.sharing
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or (sharing is not None and (sharing.index is not None or sharing.kept is not None)):
            return None
        key = size, adapter
        if key not in self._captured:
            is_second = key in self._asked
            self._asked.add(key)
            if not is_second or len(self._captured) >= MOST_GRAPHS:
                return None
            try:
                self._captured[key] = self._capture(size, texts, adapter)
            except RuntimeError as error:  # also when memory is short
                log.warning("engine.not_captured", extra={"tokens": size, "reason": str(error)[:200]})
                self._sizes = ()
                return None
        return self._captured[key]

    def _capture(self, size: int, texts: Texts, adapter: int | None) -> _Captured:
        captured = _empty(size, texts, self._device, has_types=self._encoder.spec.tokens.num_types > 1)
        _fill(captured, texts)

        def run() -> None:
            captured.found = self._encoder(captured.texts, adapter=adapter)

        run()  # the first pass of a size does more than launch
        captured.graph = self._captures.capture(run)
        return captured


def _empty(size: int, texts: Texts, device: torch.device, *, has_types: bool) -> _Captured:
    empty = torch.zeros(num_rows(texts.sights), size, dtype=torch.int32)
    empty[PLACES] = torch.arange(size)
    empty[SIGHTS::2], empty[SIGHTS + 1 :: 2] = empty[PLACES], empty[PLACES] + 1
    host = empty.clone().pin_memory() if device.type == "cuda" else empty.clone()
    return _Captured(
        replace(texts, numbers=host.to(device), lengths=(), has_types=has_types, sharing=None, seen=None), host, empty
    )


def _fill(captured: _Captured, texts: Texts) -> None:
    count = texts.numbers.shape[1]
    captured.host[:, :count] = texts.numbers
    captured.host[:, count:] = captured.empty[:, count:]
    captured.texts.numbers.copy_(captured.host, non_blocking=True)
