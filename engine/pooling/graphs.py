"""Captured passes: those of few tokens are replayed as CUDA graphs, in one launch instead of hundreds. T tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.pooling.encoder import Encoder
from engine.pooling.spec import EncoderSpec, ExpertsSpec
from engine.pooling.texts import PLACES, SIGHTS, Numbers, Texts, num_rows
from engine.step.graphs import Captures

log = logging.getLogger("baton.engine")

# Tokens of captured passes, at most: steps of an eighth where a pass is long.
SIZES = (
    *(32, 64, 96, 128, 192, 256, 320, 384, 448),
    *range(512, 1024, 128),
    *range(1024, 4096, 256),
    *range(4096, 8192, 512),
    *range(8192, 16385, 1024),
)
SHORT = 512  # tokens: shorter passes are captured of any model
# Multiplications of a layer in a pass, about a millisecond of an H200: longer ones are launched faster than computed.
MOST_WORK = 1 << 38
MOST_GRAPHS = 64  # each takes a few MB of a GPU's memory
# Tokens of a pass whose texts are equally long, at least, so that it is captured for them alone: cuDNN's attention is faster.
MANY_ALIKE = 4096


def sizes_of(spec: EncoderSpec) -> tuple[int, ...]:
    """Sizes of the passes of a model that wait for the host's launches, ascending; (): experts make the host wait."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    if isinstance(mlp, ExpertsSpec) or any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        return ()
    widths = 2 * attention.width + 2 * attention.kv_width + (2 + mlp.is_gated) * mlp.intermediate_size
    work = spec.hidden_size * widths
    return tuple(size for size in SIZES if size <= SHORT or size * work <= MOST_WORK)


def _power(number: int) -> int:
    """The first power of two that isn't less."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Input:
    """Numbers that a captured pass reads, from wherever their last dimension ends on as without any text."""

    host: torch.Tensor  # [..., size] int32
    empty: Numbers
    there: torch.Tensor

    @classmethod
    def of(cls, empty: torch.Tensor, device: torch.device) -> _Input:
        host = empty.clone().pin_memory() if device.type == "cuda" else empty.clone()
        return cls(host, empty.numpy(), host.to(device, copy=True))

    def fill(self, numbers: torch.Tensor | None) -> None:
        """`numbers` [..., at most size] of the host; None: no text has any."""
        host, count = self.host.numpy(), 0 if numbers is None else numbers.shape[-1]
        if numbers is not None:
            host[..., :count] = numbers.numpy()  # torch would wake threads, which takes a millisecond
        host[..., count:] = self.empty[..., count:]
        self.there.copy_(self.host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Key:
    """A captured pass among the others."""

    computed: int  # tokens, at most
    # Tokens of whole texts, at most, where prefixes are shared or kept; 0: they are not.
    whole: int
    adapter: int | None
    length: int = 0  # tokens of each text, if they are alike; 0: any


@dataclass(slots=True)
class _Captured:
    """A pass over so many tokens, where it reads them, and where it leaves their vectors."""

    texts: Texts
    numbers: _Input
    sources: _Input | None
    kept: _Input | None
    found: torch.Tensor  # [tokens of whole texts, E], of a memory that all share
    graph: torch.cuda.CUDAGraph | None = None

    def fill(self, texts: Texts) -> None:
        self.numbers.fill(texts.numbers[:, : texts.count])
        if self.sources is None or self.kept is None or texts.sharing is None:
            return
        sources = texts.sharing.sources
        self.sources.fill(texts.places if sources is None else sources)
        self.kept.fill(texts.sharing.kept)


class Passes:
    """An encoder whose passes of few tokens are captured at the second of a size. One thread at a time."""

    def __init__(self, encoder: Encoder, device: torch.device, *, sizes: Sequence[int]) -> None:
        """`sizes`: most tokens of captured passes, ascending; (): none is captured."""
        self._encoder, self._device, self._sizes = encoder, device, tuple(sizes)
        self._captures = Captures()
        self._found: torch.Tensor | None = None  # [largest size, E]
        self._captured = dict[_Key, _Captured]()
        self._asked = set[_Key]()
        self._takes_alike = True

    def __len__(self) -> int:
        """Captured passes."""
        return len(self._captured)

    def __call__(self, texts: Texts, *, adapter: int | None) -> torch.Tensor:
        """Return each token's vector [S, E] for texts on the host; the next pass may overwrite it."""
        key = self._key_of(texts, adapter)
        captured = None if key is None else self._known_of(key, texts)
        if captured is None or captured.graph is None:
            return self._encoder(texts.on(self._device), adapter=adapter)
        captured.fill(texts)
        captured.graph.replay()
        return captured.found[: sum(texts.lengths)]

    def _key_of(self, texts: Texts, adapter: int | None) -> _Key | None:
        """The smallest pass that holds these texts; None: there is none."""
        if not self._sizes or sum(texts.lengths) > self._sizes[-1]:
            return None
        count, sharing = texts.count, texts.sharing
        if sharing is None or sharing.is_idle:
            if self._takes_alike and count >= MANY_ALIKE and count % 4 == 0 and texts.are_alike(0):
                return _Key(count, 0, adapter, texts.lengths[0])
            return _Key(next(size for size in self._sizes if size >= count), 0, adapter)
        # In larger steps: both numbers vary, and each pair is another pass. Keys of whole texts are only copied.
        least, most = self._sizes[0], self._sizes[-1]
        step = max(_power(count) // 8, least)
        whole = max(_power(sum(texts.lengths)), least)
        return _Key(min(-(-count // step) * step, most), min(whole, most), adapter)

    def _known_of(self, key: _Key, texts: Texts) -> _Captured | None:
        """None: it comes for the first time, or there is no more room."""
        if key not in self._captured:
            is_second = key in self._asked
            self._asked.add(key)
            if not is_second or len(self._captured) >= MOST_GRAPHS:
                return None
            try:
                # The largest first: the others' memory is within its own.
                largest = (
                    key if self._captured else _Key(self._sizes[-1], self._sizes[-1] if key.whole else 0, key.adapter)
                )
                for each in dict.fromkeys((largest, key)):
                    self._captured[each] = self._capture(each, texts)
            except RuntimeError as error:  # also when memory is short
                log.warning("engine.not_captured", extra={"tokens": key.computed, "reason": str(error)[:200]})
                if key.length:  # there is another pass for them
                    self._takes_alike = False
                    return None
                self._sizes, self._found = (), None
                self._captured.clear()
                return None
        return self._captured[key]

    def _capture(self, key: _Key, texts: Texts) -> _Captured:
        if self._found is None:
            table = self._encoder.tokens_table
            self._found = table.new_empty(self._sizes[-1], self._encoder.spec.hidden_size)
        captured = self._empty(key, texts, self._found[: key.whole or key.computed])
        captured.fill(texts)

        def run() -> None:
            captured.found.copy_(self._encoder(captured.texts, adapter=key.adapter))

        run()  # the first pass of a size does more than launch
        captured.graph = self._captures.capture(run)
        return captured

    def _empty(self, key: _Key, texts: Texts, found: torch.Tensor) -> _Captured:
        """A pass without texts: each token is one of its own, and meets the first key where whole texts are others."""
        empty = torch.zeros(num_rows(texts.sights), key.computed, dtype=torch.int32)
        empty[PLACES] = torch.arange(key.computed)
        empty[SIGHTS::2] = 0 if key.whole else empty[PLACES]
        empty[SIGHTS + 1 :: 2] = empty[SIGHTS::2] + 1
        numbers, sources, kept, sharing = _Input.of(empty, self._device), None, None, None
        if key.whole and texts.sharing is not None:
            sources = _Input.of(torch.zeros(key.whole, dtype=torch.int32), self._device)
            kept = _Input.of(torch.full((key.computed,), -1, dtype=torch.int32), self._device)
            sharing = replace(texts.sharing, begins=(), sources=sources.there, kept=kept.there, own=None)
        has_types = self._encoder.spec.tokens.num_types > 1
        static = replace(
            texts,
            numbers=numbers.there,
            count=key.computed,
            lengths=texts.lengths if key.length else (),
            has_types=has_types,
            sharing=sharing,
            seen=None,
        )
        return _Captured(static, numbers, sources, kept, found)
