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
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.parallel.stage import Stage
from engine.passes import Pass, Sampled
from engine.sequence import Chunk

Finish = Callable[[torch.Tensor | None], Pass]


class Staged(Protocol):
    """The passes of a model's first stage. One thread at a time."""

    def know(self, chunks: Iterable[Chunk]) -> None:
        """Wait for the last pass if a chunk ends with a token that it samples. Raises what `Pass.wait` raises."""
        ...

    def launched(self, num_logits: int, finish: Finish) -> Pass:
        """Return a pass whose results `finish` makes of so many rows of logits, after those of the passes before."""
        ...

    def arriving(self, num_logits: int) -> Future[torch.Tensor | None] | Arrived:
        """Return so many rows of logits once they come, without a pass that samples them here: on a further rank."""
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


def staged(stage: Stage, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Staged | None:
    """Those on this device; None for a single stage."""
    if stage.count == 1:
        return None
    return (
        StagedOnGpu(stage, vocab_size, dtype, device)
        if device.type == "cuda"
        else StagedOnCpu(stage, vocab_size, dtype)
    )


def _begins_unknown(chunks: Iterable[Chunk]) -> bool:
    return any(chunk.end > len(chunk.sequence.token_ids) + len(chunk.drafted) for chunk in chunks)


@dataclass(frozen=True, slots=True)
class StagedPass:
    """A pass that may still be in a later stage."""

    results: Future[list[Sampled | None]]

    def wait(self) -> list[Sampled | None]:
        return self.results.result()


class StagedOnCpu:
    """See `Staged`: a thread takes the logits of each pass in order, so that their ring always empties."""

    def __init__(self, stage: Stage, vocab_size: int, dtype: torch.dtype) -> None:
        self._stage, self._vocab_size, self._dtype = stage, vocab_size, dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="last-stage")
        self._newest: StagedPass | None = None

    def know(self, chunks: Iterable[Chunk]) -> None:
        """See `Staged.know`."""
        if self._newest is not None and _begins_unknown(chunks):
            self._newest.wait()

    def launched(self, num_logits: int, finish: Finish) -> Pass:
        """See `Staged.launched`."""
        self._newest = StagedPass(self._thread.submit(self._results, num_logits, finish))
        return self._newest

    def arriving(self, num_logits: int) -> Future[torch.Tensor | None]:
        """See `Staged.arriving`."""
        return self._thread.submit(self._logits, num_logits)

    def sampling(self) -> AbstractContextManager[object]:
        """See `Staged.sampling`: a host has no streams."""
        return nullcontext()

    def follow_on(self) -> None:
        """See `Staged.follow_on`: a host samples."""

    def settle(self) -> None:
        """See `Staged.settle`: a host samples."""

    @torch.inference_mode()
    def _results(self, num_logits: int, finish: Finish) -> list[Sampled | None]:
        return finish(self._logits(num_logits)).wait()

    @torch.inference_mode()
    def _logits(self, num_logits: int) -> torch.Tensor | None:
        shape = (num_logits, self._vocab_size if num_logits else 0)
        logits = self._stage.receive(torch.empty(shape, dtype=self._dtype))
        return logits if num_logits else None


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


@dataclass(frozen=True, slots=True)
class Arrived:
    """Logits that a stream waits for: whatever is launched there finds them."""

    logits: torch.Tensor | None

    def result(self) -> torch.Tensor | None:
        return self.logits


class StagedOnGpu:
    """See `Staged`: logits come and are sampled in a stream of their own, beside the passes that follow."""

    def __init__(self, stage: Stage, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stage, self._vocab_size = stage, vocab_size
        self._nothing = torch.empty(0, 0, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)
        self._over: torch.cuda.Event | None = None  # the last pass is sampled

    def know(self, chunks: Iterable[Chunk]) -> None:
        """See `Staged.know`: the stream waits."""
        if _begins_unknown(chunks):
            self.follow_on()

    def follow_on(self) -> None:
        """See `Staged.follow_on`: the stream of passes waits."""
        if self._over is not None:
            torch.cuda.current_stream(self._nothing.device).wait_event(self._over)

    def launched(self, num_logits: int, finish: Finish) -> Pass:
        """See `Staged.launched`."""
        with self.sampling() as over:
            sampling = finish(self._received(num_logits))
        return StagedPassOnGpu(self._stage, sampling, over)

    @torch.inference_mode()
    def arriving(self, num_logits: int) -> Arrived:
        """See `Staged.arriving`: the stream takes them when they come, so that no ring fills."""
        with self.sampling():
            return Arrived(self._received(num_logits))

    @contextmanager
    def sampling(self) -> Iterator[torch.cuda.Event]:
        """See `Staged.sampling`: it is in the stream that takes logits; the event is recorded behind it."""
        over = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            yield over
            over.record(self._stream)
        self._over = over

    def _received(self, num_logits: int) -> torch.Tensor | None:
        logits = self._nothing.new_empty(num_logits, self._vocab_size) if num_logits else self._nothing
        self._stage.receive(logits)
        return logits if num_logits else None

    def settle(self) -> None:
        """See `Staged.settle`."""
        if self._over is not None:
            self._stage.until(self._over.query)
