"""Passes whose first stage is computed here: results come later, from the last stage's logits, pass by pass.

    stage 0   pass n ─ pass n+1 ────────
    stage 1            pass n ─ pass n+1
    sampling                    n ─ n+1

The next pass is launched while other stages compute this one. One that begins with a token that this one samples waits for it:
its host on CPUs; on a GPU the stream alone, so that it is launched at once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from engine.batch.layout import PassSize
from engine.parallel.stage import Stage
from engine.passes import Pass, Sampled
from engine.sequence import Chunk

Finish = Callable[[torch.Tensor | None], Pass]
Draft = Callable[[list[Sampled | None], torch.Tensor], Pass]


@dataclass(frozen=True, slots=True)
class Arrived:
    """The last stage's message about a pass: logits [R, V], and hidden states [T, ..] of all stages but the first.

    Without sampled rows there are no logits; a drafter reads the states. `over`: recorded where a stream of its own takes it.
    """

    logits: torch.Tensor | None
    states: torch.Tensor
    over: torch.cuda.Event | None = None

    def result(self) -> Arrived:
        """Itself: the host need not wait."""
        return self

    def states_here(self) -> torch.Tensor:
        """The hidden states, for which the current stream waits."""
        if self.over is not None:
            stream = torch.cuda.current_stream(self.states.device)
            stream.wait_event(self.over)
            self.states.record_stream(stream)
        return self.states


class Sizes(NamedTuple):
    """The rows of that."""

    vocab_size: int
    states: int  # features of the hidden states; 0: nothing drafts

    def of(self, size: PassSize) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a pass's logits and hidden states."""
        return (size.num_sampled, self.vocab_size if size.num_sampled else 0), (size.tokens, self.states)


class Staged(Protocol):
    """The passes of a model's first stage. One thread at a time."""

    def know(self, chunks: Iterable[Chunk]) -> None:
        """Wait for the last pass if a chunk ends with a token that it samples. Raises what `Pass.wait` raises."""
        ...

    def launched(self, size: PassSize, finish: Finish, draft: Draft | None = None) -> Pass:
        """Return a pass whose results `finish` makes of its logits, after those of the passes before.

        `draft` makes others of these and of the hidden states, in a thread of its own.
        """
        ...

    def arriving(self, size: PassSize) -> Future[Arrived] | Arrived:
        """Return what comes of a pass that isn't sampled here: on a further rank."""
        ...

    def sampling(self) -> AbstractContextManager[object]:
        """Context manager for what a further rank launches to sample logits that were arriving."""
        ...

    def follow_on(self) -> None:
        """Have the next pass begin with the tokens that were sampled last, which the host need not know."""
        ...

    def settle(self) -> None:
        """Wait until the last pass has sampled on the device. Raises RankLostError."""
        ...


def staged(stage: Stage, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Staged | None:
    """Those on this device; None for a single stage."""
    if stage.count == 1:
        return None
    return StagedOnGpu(stage, sizes, dtype, device) if device.type == "cuda" else StagedOnCpu(stage, sizes, dtype)


def _begins_unknown(chunks: Iterable[Chunk]) -> bool:
    return any(chunk.end > len(chunk.sequence.token_ids) + len(chunk.drafted) for chunk in chunks)


@dataclass(frozen=True, slots=True)
class StagedPass:
    """A pass that may still be in a later stage."""

    results: Future[list[Sampled | None]]

    def wait(self) -> list[Sampled | None]:
        return self.results.result()


class StagedOnCpu:
    """See `Staged`: a thread takes what comes of each pass in order, so that the ring always empties; another one samples.

    The second one may wait for a pass of this stage, and that for the ring's writer.
    """

    def __init__(self, stage: Stage, sizes: Sizes, dtype: torch.dtype) -> None:
        self._stage, self._sizes, self._dtype = stage, sizes, dtype
        self._receiving = ThreadPoolExecutor(1, thread_name_prefix="last-stage")
        self._sampling = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        self._newest: StagedPass | None = None

    def know(self, chunks: Iterable[Chunk]) -> None:
        """See `Staged.know`."""
        if self._newest is not None and _begins_unknown(chunks):
            self._newest.wait()

    def launched(self, size: PassSize, finish: Finish, draft: Draft | None = None) -> Pass:
        """See `Staged.launched`."""
        self._newest = StagedPass(self._sampling.submit(self._results, self.arriving(size), finish, draft))
        return self._newest

    def arriving(self, size: PassSize) -> Future[Arrived]:
        """See `Staged.arriving`."""
        return self._receiving.submit(self._arrived, size)

    def sampling(self) -> AbstractContextManager[object]:
        """See `Staged.sampling`: a host has no streams."""
        return nullcontext()

    def follow_on(self) -> None:
        """See `Staged.follow_on`: a host samples."""

    def settle(self) -> None:
        """See `Staged.settle`: a host samples."""

    @torch.inference_mode()
    def _results(self, arriving: Future[Arrived], finish: Finish, draft: Draft | None) -> list[Sampled | None]:
        arrived = arriving.result()
        results = finish(arrived.logits).wait()
        return results if draft is None else draft(results, arrived.states).wait()

    @torch.inference_mode()
    def _arrived(self, size: PassSize) -> Arrived:
        logits, states = (torch.empty(shape, dtype=self._dtype) for shape in self._sizes.of(size))
        self._stage.receive(logits)
        if self._sizes.states:
            self._stage.receive(states)
        return Arrived(logits if size.num_sampled else None, states)


@dataclass(frozen=True, slots=True)
class StagedPassOnGpu:
    """A pass that may still be in a later stage, and that samples on this device then."""

    stage: Stage
    sampling: Pass
    over: torch.cuda.Event

    def wait(self) -> list[Sampled | None]:
        """See `Pass.wait`. Raises RankLostError."""
        self.stage.until(self.over.query)
        return self.sampling.wait()


class StagedOnGpu:
    """See `Staged`: logits come and are sampled in a stream of their own, beside the passes that follow.

    What drafts behind a pass needs its results, so a thread launches it, in the stream of the passes.
    """

    def __init__(self, stage: Stage, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._stage, self._sizes = stage, sizes
        self._nothing = torch.empty(0, 0, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)
        self._drafting = ThreadPoolExecutor(1, thread_name_prefix="drafting")
        self._over: torch.cuda.Event | None = None  # the last pass is sampled

    def know(self, chunks: Iterable[Chunk]) -> None:
        """See `Staged.know`: the stream waits."""
        if _begins_unknown(chunks):
            self.follow_on()

    def follow_on(self) -> None:
        """See `Staged.follow_on`: the stream of passes waits."""
        if self._over is not None:
            torch.cuda.current_stream(self._nothing.device).wait_event(self._over)

    def launched(self, size: PassSize, finish: Finish, draft: Draft | None = None) -> Pass:
        """See `Staged.launched`."""
        with self.sampling() as over:
            arrived = self._arrived(size)
            sampling = finish(arrived.logits)
        launched = StagedPassOnGpu(self._stage, sampling, over)
        if draft is None:
            return launched
        return StagedPass(self._drafting.submit(self._drafted, launched, arrived.states, draft))

    @torch.inference_mode()
    def _drafted(self, launched: Pass, states: torch.Tensor, draft: Draft) -> list[Sampled | None]:
        with torch.cuda.device(self._nothing.device):
            drafted, over = draft(launched.wait(), states), torch.cuda.Event()
            over.record()
            self._stage.until(over.query)  # `states` are read until then
            return drafted.wait()

    @torch.inference_mode()
    def arriving(self, size: PassSize) -> Arrived:
        """See `Staged.arriving`: the stream takes it when it comes, so that no ring fills."""
        with self.sampling() as over:
            return replace(self._arrived(size), over=over)

    @contextmanager
    def sampling(self) -> Iterator[torch.cuda.Event]:
        """See `Staged.sampling`: it is in the stream that takes logits; the event is recorded behind it."""
        over = torch.cuda.Event()
        if self._stage.is_apart:
            # Zeros come at once: they would not tell that this stage has computed.
            self._stream.wait_stream(torch.cuda.current_stream(self._nothing.device))
        with torch.cuda.stream(self._stream):
            yield over
            over.record(self._stream)
        self._over = over

    def _arrived(self, size: PassSize) -> Arrived:
        logits, states = (self._nothing.new_empty(shape) for shape in self._sizes.of(size))
        self._stage.receive(logits)
        if self._sizes.states:
            self._stage.receive(states)
        return Arrived(logits if size.num_sampled else None, states)

    def settle(self) -> None:
        """See `Staged.settle`."""
        if self._over is not None:
            self._stage.until(self._over.query)
