"""The streams of a first stage on a GPU: what a further rank puts into each, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from engine.batch.layout import Packed, PassSize, SinglesSize
from engine.kernels.collectives import Peers
from engine.lockstep import _HEAD, Lockstep, _Kind, _Sampling
from engine.parallel.group import RankLostError
from engine.parallel.ranks import Ranks
from engine.parallel.stage import Stage
from engine.sampling.device import PackedSampling, SamplingSize
from engine.staged import Sizes, StagedOnGpu

VOCABULARY = 8
PASSES, LOGITS = "passes", "logits"  # the two streams


class Recorded:
    """torch.cuda's streams, and what they got; a pass's runner, sampler and ring write there, too."""

    def __init__(self) -> None:
        self.said = list[tuple[str, str]]()
        self._current, self._events = PASSES, 0

    def say(self, what: str) -> None:
        self.said.append((self._current, what))

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def event(self) -> Any:
        event = mock.Mock()

        def record(stream: str) -> None:
            assert stream == self._current
            self._events += 1
            event.number = self._events
            self.say(f"event {event.number}")

        event.record = record
        return event

    def current_stream(self, device: object) -> Any:
        stream = mock.Mock()
        stream.wait_event = lambda event: self.say(f"waits for event {event.number}")
        return stream

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        self.say(f"receives {list(tensor.shape)}")
        return tensor

    def execute(self, packed: Packed) -> None:
        self.say(f"pass of {packed.size.tokens}")

    def repeat(self, logits: torch.Tensor, packed: PackedSampling, newest: torch.Tensor) -> torch.Tensor:
        self.say(f"samples {len(logits)}")
        return torch.zeros(len(logits), dtype=torch.int64)

    def keep_newest(self, tokens: torch.Tensor) -> None:
        self.say(f"keeps {len(tokens)}")


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    found = Recorded()
    fakes = {
        "Stream": lambda device: LOGITS,
        "stream": found.stream,
        "Event": found.event,
        "current_stream": found.current_stream,
    }
    with mock.patch.multiple(torch.cuda, **fakes):
        yield found


def _stage(recorded: Recorded) -> Stage:
    return Stage(0, 2, before=recorded, after=recorded)  # type: ignore[arg-type]


def _pass(number: int, tokens: int, num_sampled: int, *, begins_unknown: bool = False) -> bytes:
    size = PassSize(tokens=tokens, num_sampled=num_sampled, sampled_rows=0, attention=(), decode=SinglesSize())
    packed = Packed.empty(size)
    if begins_unknown:
        packed.put("sources", np.array([0]), at=tokens - 1)
    return _HEAD.pack(_Kind.FORWARD, number) + packed.encode()


def _sampling(number: int, rows: list[int] | None = None) -> bytes:
    packed = PackedSampling(SamplingSize()).encode()
    return _HEAD.pack(_Kind.SAMPLING, number) + msgspec.msgpack.encode(_Sampling(rows, packed))


class Rank:
    """The second of two ranks of the first stage."""

    def __init__(self, recorded: Recorded) -> None:
        peers = Peers(torch.zeros(64, dtype=torch.int16), [0, 0], 1)
        self._lockstep = Lockstep(Ranks(peers, stage=_stage(recorded)), "cuda")
        self._staged = StagedOnGpu(_stage(recorded), Sizes(VOCABULARY, states=0), torch.float32, torch.device("cpu"))
        self._recorded: Any = recorded

    def follow(self, *frames: bytes) -> None:
        for frame in frames:
            engine: Any = None
            self._lockstep.follow(frame, self._recorded, self._recorded, None, engine, self._staged)


def test_a_rank_samples_beside_the_passes_and_only_one_that_needs_tokens_waits(recorded: Recorded) -> None:
    """As its leader does: the second pass is launched ahead, the third begins with the second one's tokens."""
    Rank(recorded).follow(
        _pass(1, 5, 2), _sampling(1), _pass(2, 4, 3), _sampling(2), _pass(3, 3, 3, begins_unknown=True), _sampling(3)
    )
    assert recorded.said == [
        (PASSES, "pass of 5"),
        (LOGITS, "receives [2, 8]"),
        (LOGITS, "event 1"),
        (LOGITS, "samples 2"),
        (LOGITS, "keeps 2"),
        (LOGITS, "event 2"),
        (PASSES, "pass of 4"),
        (LOGITS, "receives [3, 8]"),
        (LOGITS, "event 3"),
        (LOGITS, "samples 3"),
        (LOGITS, "keeps 3"),
        (LOGITS, "event 4"),
        (PASSES, "waits for event 4"),
        (PASSES, "pass of 3"),
        (LOGITS, "receives [3, 8]"),
        (LOGITS, "event 5"),
        (LOGITS, "samples 3"),
        (LOGITS, "keeps 3"),
        (LOGITS, "event 6"),
    ]


def test_logits_are_taken_while_the_leader_waits_for_masks(recorded: Recorded) -> None:
    """Two passes before the first one's sampling is told; the second samples nothing, and its message is empty."""
    Rank(recorded).follow(_pass(1, 5, 2), _pass(2, 4, 0), _sampling(1, [1]))
    assert recorded.said == [
        (PASSES, "pass of 5"),
        (LOGITS, "receives [2, 8]"),
        (LOGITS, "event 1"),
        (PASSES, "pass of 4"),
        (LOGITS, "receives [0, 0]"),
        (LOGITS, "event 2"),
        (LOGITS, "samples 1"),
        (LOGITS, "keeps 1"),
        (LOGITS, "event 3"),
    ]


def test_another_pass_s_sampling_than_the_next_is_refused(recorded: Recorded) -> None:
    rank = Rank(recorded)
    rank.follow(_pass(1, 5, 2), _pass(2, 4, 2))
    with pytest.raises(RankLostError, match="says message 2 of pass 2: they are out of step"):
        rank.follow(_sampling(2))
