"""Decode workers that may still grant a lease, given their replies so far. Decides only; `prefill.reserving` asks."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages import ReserveReply
from common.words import Refusal
from prefill.stop import Stop

MAX_SILENT_ROUNDS = 5


class Candidates:
    """The candidates of one attempt, best first. A final refusal is not asked again."""

    def __init__(self, workers: Iterable[str]) -> None:
        self._open = list(workers)
        self._refused: dict[str, ReserveReply] = {}  # final refusals by worker
        self._silent_rounds = 0  # consecutive rounds in which every open candidate was silent

    @property
    def open(self) -> list[str]:
        """Candidates worth asking."""
        return list(self._open)

    @property
    def detail(self) -> str:
        """Details of the final refusals, for people."""
        return "; ".join(f"{worker}: {reply.detail or reply.reason}" for worker, reply in self._refused.items())

    def refused(self, worker: str, reply: ReserveReply) -> None:
        """Record a candidate's refusal."""
        if reply.reason.is_final:
            self._open.remove(worker)
            self._refused[worker] = reply

    def round_ended(self, *, num_silent: int) -> Stop | None:
        """Return the outcome of the attempt, if it is decided, after each candidate was asked once."""
        self._silent_rounds = self._silent_rounds + 1 if num_silent == len(self._open) else 0
        if self._open and self._silent_rounds < MAX_SILENT_ROUNDS:
            return None
        reasons = {reply.reason for reply in self._refused.values()}
        if Refusal.DRAINING in reasons:
            return Stop.NOBODY_DECODES
        if self._open:
            return Stop.NOBODY_ANSWERS
        return Stop.INVALID if reasons == {Refusal.INVALID} else Stop.REFUSED
