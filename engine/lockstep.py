"""Passes on several ranks: the leader says each one to its followers and computes it with them, tokens included.

A pass is two messages, what its forward computation reads and, once the host knows the masks, what sampling reads. Every rank
samples from the same logits by the same words, so no token is sent, and the next pass may start before the host knows any.
A drafter behind it is told in two more, what it reads and which sequences it guesses for: every rank has its share of it.

A pass through stages is one message: only the first stage needs tokens, so it samples alone, from the last one's logits. If it
has several ranks they are told a pass's sampling, and drafting, while later passes are in flight.

Sleep and its end are a message each, behind the passes. All ranks give their memory up, or none: each says in turn whether it
could, and the others learn it before they go on.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from common.messages import KVLayout
from engine.arrays import Ints
from engine.batch.batch import ForwardBatch
from engine.batch.layout import GraphSize, Packed
from engine.config import EngineConfig
from engine.kernels.collectives import Peers
from engine.parallel.group import RankLostError
from engine.parallel.ranks import Ranks
from engine.parallel.together import LackingError, Together, together
from engine.sampling.device import DeviceSampler, Draw, PackedSampling
from engine.sampling.scores import on
from engine.step.later import DraftingLater, LaterPasses, Staged
from engine.step.runner import Runner
from engine.weights.sleeping import Asleep

_HEAD = struct.Struct("<BQ")  # the message's kind, the pass's number
_MOVES = b"\1"


class _Kind(IntEnum):
    FORWARD = 1
    SAMPLING = 2
    READING = 3  # a drafter's, behind the pass
    GUESSING = 4
    SLEEPING = 5  # `_MOVES` if weights move
    WAKING = 6


class _Sampling(msgspec.Struct, frozen=True, array_like=True):
    rows: list[int] | None  # numbers of the logits' rows; None: all
    packed: bytes = b""


class Encoded(Protocol):
    """A message that is encoded for followers alone, see `Guessing`."""

    def encode(self) -> bytes: ...


class Drafting(DraftingLater, Protocol):
    """A follower's drafter, see `DraftChain`."""

    def inputs_of(self, runner: Runner, packed: Packed) -> ForwardBatch: ...

    def read(self, after: Ints, batch: ForwardBatch, size: GraphSize | None) -> Any: ...


class Sleeping(Protocol):
    """An engine that sleeps, with its other ranks. No pass runs, and no other worker has their pools."""

    def sleep(self, *, moves: bool) -> Asleep:
        """Free the pools, whose content is lost, until `wake`; `moves`: and the device's memory, its weights are the host's then.

        Raises MemoryError: it is awake then, with its graphs. Raises RankLostError.
        """
        ...

    def wake(self, asleep: Asleep) -> None:
        """Undo it: pools have zeros, graphs are captured again. Raises MemoryError: it sleeps on then. Raises RankLostError."""
        ...


class Lockstep:
    """A rank's passes, counted. A message about another pass than the next one is refused: RankLostError."""

    def __init__(self, ranks: Ranks, device: str) -> None:
        if ranks.group.size > 1 and isinstance(ranks.group, Peers) != device.startswith("cuda"):
            raise ValueError(f"--device {device}: a {type(ranks.group).__name__} has its ranks elsewhere")
        self._ranks = ranks
        self.number = 0  # the newest pass's
        self._is_told = False  # until then each rank launches the same passes by itself
        # Stages' passes are launched by one thread, sampled and drafted behind by another.
        self._telling, self._launching = threading.Lock(), threading.Lock()
        self._unsampled = deque[int]()  # the leader's passes whose sampling is still to be told
        self._later = LaterPasses()  # on a rank of the first stage: passes whose logits come
        # A follower's logits that are still to be sampled, and its samples of the last pass that had any.
        self._logits: torch.Tensor | None = None
        self._newest: torch.Tensor | None = None
        # A drafter's inputs of a follower's last pass until they are read, and then what it guesses from.
        self._unread: tuple[ForwardBatch, GraphSize | None] | None = None
        self._read: Any = None
        self._asleep: Asleep | None = None  # a follower's
        self._failed = ""  # a step that this rank could not take with the others

    @property
    def leads(self) -> bool:
        """True if followers repeat what this rank launches."""
        return self._is_told and self._ranks.leads

    @property
    def _tells_sampling(self) -> bool:
        """True if followers sample, too: the ranks of the first stage."""
        return self.leads and self._ranks.group.size > 1

    @property
    def lost(self) -> str:
        """See `Engine.lost`."""
        try:
            self._ranks.check()
        except RankLostError as error:
            return str(error)
        return self._ranks.followers.problem() or self._failed

    def begin(self) -> None:
        """Wait until all ranks have started, and tell followers of each pass from now on. Raises RankLostError."""
        self._ranks.followers.wait()
        self._is_told = True

    def execute(self, runner: Runner, packed: Packed) -> torch.Tensor | None:
        """Launch a pass on every rank, see `Runner.execute`. Raises RankLostError: after a failure all are out of step."""
        if not self.leads:
            return runner.execute(packed)
        self.number += 1
        with _one_fails_all():
            if packed.size.num_sampled and self._tells_sampling:
                self._unsampled.append(self.number)
            self._tell(_Kind.FORWARD, self.number, packed.encode())
            return runner.execute(packed)

    def draw(
        self,
        sampler: DeviceSampler,
        logits: torch.Tensor,
        packed: PackedSampling,
        newest: torch.Tensor,
        rows: SequenceOf[int] | None,
    ) -> Draw:
        """Start sampling on every rank, see `DeviceSampler.draw`. `rows`: of the pass's logits, None for all."""
        if not self._tells_sampling:
            return sampler.draw(logits, packed, newest)
        with _one_fails_all():
            self._tell_sampling(_Sampling(None if rows is None else list(rows), packed.encode()))
            return sampler.draw(logits, packed, newest)

    def sample_nothing(self) -> None:
        """End a pass whose logits were for scores alone."""
        if self._tells_sampling:
            self._tell_sampling(_Sampling([]))

    def _tell_sampling(self, message: _Sampling) -> None:
        self._tell(_Kind.SAMPLING, self._unsampled.popleft(), msgspec.msgpack.encode(message))

    def _tell(self, kind: _Kind, number: int, body: bytes) -> None:
        with self._telling:
            self._ranks.followers.send(_HEAD.pack(kind, number) + body)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context manager: no other thread launches a pass, or drafts behind one, meanwhile."""
        with self._launching, self.drafting():
            yield

    def tell_reading(self, number: int, after: Ints) -> None:
        """Have followers' drafters read the rows of a pass, see `DraftChain.read`."""
        if self._tells_sampling:
            self._tell(_Kind.READING, number, after.tobytes())

    def tell_guessing(self, number: int, guessing: Encoded) -> None:
        """Have them guess, see `DraftChain.repeat`."""
        if self._tells_sampling:
            self._tell(_Kind.GUESSING, number, guessing.encode())

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Context manager for what is told in several messages: a failure between them loses the ranks."""
        with _one_fails_all() if self.leads else nullcontext():
            yield

    @contextmanager
    def falling_asleep(self, moves: bool) -> Iterator[Together]:
        """Context manager for the way to sleep on every rank, in steps. Raises RankLostError."""
        with self._changing():
            if self.leads:
                self._tell(_Kind.SLEEPING, self.number, _MOVES if moves else b"")
            yield self._together
            self._meet()

    @contextmanager
    def waking(self) -> Iterator[Together]:
        """Context manager for the end of sleep on every rank. What is launched meanwhile, each launches by itself."""
        with self._changing():
            if self.leads:
                self._tell(_Kind.WAKING, self.number, b"")
            was_told, self._is_told = self._is_told, False
            try:
                with self._ranks.stage.apart():
                    yield self._together
                self._meet()
            finally:
                self._is_told = was_told

    def _meet(self) -> None:
        """Wait until all ranks have done what they agreed on."""
        with self._together():
            pass

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if not self.leads:
            yield
            return
        try:
            yield
        except LackingError:
            raise
        except Exception as error:  # nobody knows how far the others came
            self._failed = str(error) if isinstance(error, RankLostError) else f"rank 0: {_named(error)}"
            raise RankLostError(self._failed) from error

    def _together(self) -> AbstractContextManager[None]:
        return together(self._ranks.exchange)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Context manager for what each rank launches by itself: one that compiles or captures longer isn't lost."""
        self._ranks.group.meet()
        yield
        self._ranks.group.meet()

    def follow(
        self,
        frame: bytes,
        runner: Runner,
        sampler: DeviceSampler,
        drafting: Drafting | None,
        engine: Sleeping,
        staged: Staged | None = None,
    ) -> None:
        """Do what the leader's message says. Raises RankLostError, and ValueError for another release's message."""
        try:
            kind, number = _HEAD.unpack_from(frame)
        except struct.error:
            raise ValueError(f"a message of {len(frame)} bytes from rank 0: run the same release everywhere") from None
        body = frame[_HEAD.size :]
        self._ranks.check()
        is_over = self._logits is None and self._unread is None
        if kind in (_Kind.SLEEPING, _Kind.WAKING) or self._asleep is not None:
            self._rest(kind, number, body, engine)
        elif staged is not None:
            self._follow_stages(kind, number, body, runner, sampler, staged, drafting)
        elif kind == _Kind.FORWARD and number == self.number + 1 and is_over:
            self.number, packed = number, Packed.decode(body)
            self._logits, self._read = runner.execute(packed), None
            if drafting is not None:
                self._unread = drafting.inputs_of(runner, packed), packed.size.graph
        elif kind == _Kind.SAMPLING and number == self.number and self._logits is not None:
            self._sample(msgspec.msgpack.decode(body, type=_Sampling), self._logits, runner, sampler)
        elif drafting is not None and number == self.number and self._logits is None:
            self._draft(kind, body, runner, drafting)
        else:
            raise self._out_of_step(kind, number)

    def _rest(self, kind: int, number: int, body: bytes, engine: Sleeping) -> None:
        waits = self._logits is not None or self._unread is not None or self._later.are_some
        is_over = number == self.number and not waits
        with suppress(LackingError):  # the leader says it
            if kind == _Kind.SLEEPING and is_over and self._asleep is None:
                self._newest = self._read = None
                self._asleep = engine.sleep(moves=body == _MOVES)
            elif kind == _Kind.WAKING and self._asleep is not None:
                engine.wake(self._asleep)
                self._asleep = None
            else:
                raise self._out_of_step(kind, number)

    def _follow_stages(
        self,
        kind: int,
        number: int,
        body: bytes,
        runner: Runner,
        sampler: DeviceSampler,
        staged: Staged,
        drafting: Drafting | None,
    ) -> None:
        """Do so as a rank of a stage: those of the first one sample passes, and draft, while later ones are in flight."""
        samples, later = self._ranks.stage.number == 0, self._later
        if kind == _Kind.FORWARD and number == self.number + 1:
            self.number, packed = number, Packed.decode(body)
            if samples and packed.begins_unknown:
                staged.follow_on()
            runner.execute(packed)
            if samples:
                later.launched(number, packed, staged.arriving(packed.size), runner, drafting)
        elif kind in (_Kind.SAMPLING, _Kind.READING, _Kind.GUESSING) and not samples:
            return
        elif kind == _Kind.SAMPLING and later.samples(number):
            with staged.sampling():
                self._sample(msgspec.msgpack.decode(body, type=_Sampling), later.logits(), runner, sampler)
        elif drafting is None or not (
            (kind == _Kind.READING and later.read(number, _after(body), runner, drafting))
            or (kind == _Kind.GUESSING and later.guess(number, body, runner, drafting))
        ):
            raise self._out_of_step(kind, number)

    @torch.inference_mode()  # as a leader's pass is: what graphs read was made so
    def _draft(self, kind: int, body: bytes, runner: Runner, drafting: Drafting) -> None:
        if kind == _Kind.READING and self._unread is not None:
            batch, size = self._unread
            self._unread = None
            self._read = drafting.read(_after(body), batch, size)
        elif kind == _Kind.GUESSING and self._read is not None:
            read, self._read = self._read, None
            drafting.repeat(runner, body, read)
        else:
            raise self._out_of_step(kind, self.number)

    def _out_of_step(self, kind: int, number: int) -> RankLostError:
        at = f"{self.number}, which is {'not ' if self._logits is not None else ''}sampled"
        at += " and not drafted behind" if self._unread is not None else ""
        at += ", asleep" if self._asleep is not None else ""
        return RankLostError(
            f"rank {self._ranks.number} is at pass {at}, and rank 0 says message {kind} of pass {number}: "
            "they are out of step"
        )

    def _sample(self, message: _Sampling, logits: torch.Tensor, runner: Runner, sampler: DeviceSampler) -> None:
        self._logits = None
        if message.rows == []:
            return
        if message.rows is not None:
            logits = logits[on(logits.device, message.rows)]
        newest = logits.new_zeros(0, dtype=torch.int64) if self._newest is None else self._newest
        self._newest = sampler.repeat(logits, PackedSampling.decode(message.packed), newest)
        runner.keep_newest(self._newest)


def _after(body: bytes) -> Ints:
    return np.frombuffer(body, dtype=np.int32).reshape(2, -1).copy()


@contextmanager
def _one_fails_all() -> Iterator[None]:
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        raise RankLostError(f"a pass failed on rank 0 ({_named(error)})") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def planned(ranks: Ranks, config: EngineConfig, plan: Callable[[EngineConfig], KVLayout]) -> KVLayout:
    """Plan this process's pool, and send followers the settings. All have as many blocks, as a rule the leader's number."""
    cache = config.cache
    if ranks.fewest is None or cache.num_blocks is not None or cache.kv_memory_bytes is not None:
        layout = plan(config)
        ranks.followers.send(encode_config(config.with_pool(layout.num_blocks, layout.block_size)))
        return layout
    ranks.followers.send(encode_config(config))
    layout = plan(config)
    return plan(config.with_pool(ranks.fewest(layout.num_blocks), layout.block_size))


def encode_config(config: EngineConfig) -> bytes:
    """Encode the settings that a leader sends to its followers, as JSON: `msgspec` stays out of what `--help` loads."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(data: bytes) -> EngineConfig:
    """Read what `encode_config` wrote. Raises msgspec.ValidationError."""
    return msgspec.json.decode(data, type=EngineConfig, dec_hook=lambda kind, value: kind(value))
