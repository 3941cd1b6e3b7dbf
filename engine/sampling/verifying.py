"""Verification of drafts: the target's own token is sampled in each drafted one's place, and they are accepted while equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec

from engine.passes import Finished, Pass, Sampled
from engine.sequence import Chunk


@dataclass(frozen=True, slots=True)
class VerifyingPass:
    """A pass whose rows verify drafts: a drafted token is accepted while it is what the target samples in its place.

    The noise of a position depends on nothing else, so the tokens are those of a pass for each of them (Daliri, Musco, Suresh,
    arXiv 2408.07978).
    """

    chunks: list[Chunk]
    rows: Pass  # a result for each of their rows

    def wait(self) -> list[Sampled | None]:
        results = iter(self.rows.wait())
        return [_accepted(chunk, list(islice(results, 1 + len(chunk.drafted)))) for chunk in self.chunks]

    def finished(self) -> Pass:
        """The same as a completed pass, if the rows are there already."""
        return Finished(self.wait()) if isinstance(self.rows, Finished) else self


def verifying(chunks: list[Chunk], launch: Callable[[list[Chunk]], Pass]) -> Pass:
    """Start a pass of the chunks by `launch`, which knows one token behind each chunk; drafts are rows of their own."""
    if not any(chunk.drafted for chunk in chunks):
        return launch(chunks)
    return VerifyingPass(chunks, launch([row for chunk in chunks for row in chunk.rows])).finished()


def accepts(before: Sampled | None, drafted: int) -> bool:
    """True if a drafted token is what was sampled in its place."""
    return before is not None and not before.problem and before.token_id == drafted


def _accepted(chunk: Chunk, results: list[Sampled | None]) -> Sampled | None:
    """The first row's result with those behind the accepted drafts."""
    first, further = results[0], list[Sampled | None]()
    before = first
    for drafted, behind in zip(chunk.drafted, results[1:], strict=True):
        if not accepts(before, drafted):
            break
        further.append(behind)
        before = behind
    return msgspec.structs.replace(first, further=tuple(further)) if first is not None and further else first
