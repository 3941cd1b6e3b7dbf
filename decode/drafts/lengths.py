"""The number of drafted tokens that a pass verifies of each sequence: those that bring the most tokens a millisecond.

A drafted token is worth the probability that its draft is accepted up to it. The tokens of all drafts are sorted by worth, and
the prefix of them is verified that is best for the whole pass (as in vLLM's adaptive verification for DSpark).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from decode.drafts.acceptance import Acceptance
from decode.drafts.history import GREATEST, History, acceptances
from engine.sequence import Sequence

STARTS_AT = 1.05  # gain over a pass without drafts at which drafting begins
STOPS_AT = 1.01  # gain at which it ends
RECENT = 0.05  # a draft's weight in the mean
REMEMBERED = 16  # choices
MOST_PROSPECTS = 4  # numbers of rows whose answers are remembered
MOST_PROSPECTIVE = 512  # drafted tokens: where so many bring no gain, more bring none
STRETCH = 16  # numbers of tokens that are tried or left out together


class Candidate(msgspec.Struct, frozen=True):
    """A draft: its number of tokens, and of the known ones that it was derived from."""

    sequence: Sequence
    length: int
    match_length: int


class DraftLengths:
    """Chooses lengths, and learns from what is accepted."""

    def __init__(self, *, more_ms: Callable[[int], float] = lambda _: 0.0) -> None:
        """`more_ms`: time that a pass with drafts of so many sequences takes longer than its rows."""
        self._more_ms = more_ms
        self._acceptance = Acceptance()
        self._histories: WeakKeyDictionary[Sequence, History] = WeakKeyDictionary()
        self._times = _Times()
        self._drafts = False  # the last choice was to draft
        self._prospects: dict[int, _Prospect] = {}  # by rows
        self.mean_accepted = 1.0  # drafted tokens of a pass of a sequence, lately

    def may_draft(self, sequence: Sequence) -> bool:
        """False during a pause: its drafts failed, or did not pay."""
        return sequence.num_generated >= sequence.drafts_from

    def choose(
        self,
        candidates: ListOf[Candidate],
        *,
        rows: int,
        most_rows: int,
        step_ms: Callable[[int], float],
        decoding: int | None = None,
    ) -> list[int]:
        """The tokens of each draft to verify.

        The pass has `rows` without drafts, of which `decoding` (None: all) sample a token each. `step_ms(rows)` is the time of a
        pass, greater than 0; its values are remembered for `REMEMBERED` choices.
        """
        if not candidates:
            return []
        histories = [self._history(candidate.sequence) for candidate in candidates]
        drafts = _Drafts(
            acceptance=self._rates(candidates, histories),
            lengths=np.array([candidate.length for candidate in candidates]),
            most=max(0, most_rows - rows),
        )
        best = self._best(drafts, rows, rows if decoding is None else decoding, step_ms)
        self._drafts = best > 0
        lengths = drafts.first(best)
        for candidate, history, length in zip(candidates, histories, lengths, strict=True):
            if length:
                history.pays(candidate.match_length)
            elif candidate.length:
                _rest(candidate.sequence, history.does_not_pay())
        return lengths

    def left_out(self, sequence: Sequence) -> None:
        """Take note that a pass leaves out its draft, which would not pay; after some of them it pauses."""
        _rest(sequence, self._history(sequence).does_not_pay())

    def could_pay(self, rows: int, *, longest: int, match_length: int, step_ms: Callable[[int], float]) -> bool:
        """False if a pass of so many sequences gains nothing by drafts, even if each has one of `longest` tokens.

        It is asked of each sequence before each pass; an answer holds for some passes.
        `match_length`: of all drafts of this drafter; 0: they differ, and may be the best.
        """
        prospect = self._prospects.get(rows)
        if prospect is None or prospect.num_asked >= REMEMBERED * rows:
            if len(self._prospects) >= MOST_PROSPECTS:
                self._prospects.clear()
            rates = self._greatest_rates(rows, match_length) if match_length else np.full(rows, GREATEST)
            drafts = _Drafts(rates, np.full(rows, longest), most=min(rows * longest, MOST_PROSPECTIVE))
            could_pay = self._best(drafts, rows, rows, step_ms) > 0
            self._drafts = self._drafts and could_pay
            prospect = self._prospects[rows] = _Prospect(could_pay)
        prospect.num_asked += 1
        return prospect.could_pay

    def _greatest_rates(self, rows: int, match_length: int) -> npt.NDArray[np.float64]:
        """The greatest acceptances of so many sequences, among them new ones, whose acceptance is the usual one."""
        usual = self._acceptance.of(match_length)
        known = [history.acceptance(usual) for history in self._histories.values()]
        return np.sort([*known, *[usual] * rows])[::-1][:rows]

    def _best(self, drafts: _Drafts, rows: int, decoding: int, step_ms: Callable[[int], float]) -> int:
        """The number of the drafts' first tokens that a pass should verify, see `choose`."""
        self._times.renew(step_ms)
        bare_ms = self._times.ms(rows)
        least = decoding / bare_ms * (STOPS_AT if self._drafts else STARTS_AT)
        # Measured times differ by chance: a draft is no gain because a larger step was faster.
        more_ms = self._more_ms(drafts.num_drafts)
        return _best(
            drafts.accepted, decoding, least, lambda count: max(bare_ms, self._times.ms(rows + count)) + more_ms
        )

    def _rates(self, candidates: ListOf[Candidate], histories: ListOf[History]) -> npt.NDArray[np.float64]:
        matches = [candidate.match_length for candidate in candidates]
        usual = {match: self._acceptance.of(match) for match in set(matches)}
        return acceptances(
            np.array([usual[match] for match in matches]),
            accepted=np.array([history.accepted for history in histories]),
            expected=np.array([history.expected for history in histories]),
        )

    def expected(self, sequence: Sequence, length: int, match_length: int) -> float:
        """The number of a draft's tokens that will be accepted on average."""
        usual = self._acceptance.of(match_length)
        history = self._histories.get(sequence)
        rate = usual if history is None else history.acceptance(usual)
        return rate * (1 - rate**length) / (1 - rate)

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn from a verified draft; its accepted tokens are known to the sequence already."""
        history = self._history(sequence)
        self.mean_accepted += RECENT * (accepted - self.mean_accepted)
        usual = self._acceptance.of(history.match_length)
        tried = min(drafted, accepted + 1)  # nothing is known of tokens behind the first that differs
        _rest(sequence, history.verified(usual=usual, tried=tried, accepted=accepted))
        self._acceptance.learn(history.match_length, tried=tried, accepted=accepted)

    def _history(self, sequence: Sequence) -> History:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History()
        return history


def _rest(sequence: Sequence, num_tokens: int) -> None:
    """Begin a pause of its drafts, unless it is of no tokens."""
    if num_tokens:
        sequence.drafts_from = sequence.num_generated + num_tokens


@dataclass(slots=True)
class _Prospect:
    """An answer of `DraftLengths.could_pay`, and how often it was given."""

    could_pay: bool
    num_asked: int = 0


class _Times:
    """Step times by rows, remembered: they change slowly, and a choice asks for hundreds."""

    def __init__(self) -> None:
        self._step_ms: Callable[[int], float] | None = None
        self._known: dict[int, float] = {}
        self._num_choices = 0

    def renew(self, step_ms: Callable[[int], float]) -> None:
        """Begin a choice; forget the times if they are old or another's."""
        self._num_choices += 1
        if step_ms != self._step_ms or self._num_choices > REMEMBERED:
            self._step_ms, self._known, self._num_choices = step_ms, {}, 1

    def ms(self, rows: int) -> float:
        known = self._known.get(rows)
        if known is None:
            assert self._step_ms is not None
            known = self._known[rows] = self._step_ms(rows)
        return known


def _best(accepted: ListOf[float], decoding: int, least: float, pass_ms: Callable[[int], float]) -> int:
    """The number of first tokens that bring the most tokens a millisecond; 0 if none brings more than `least`.

    A stretch of numbers is left out if it would not be best even with all its tokens in the time of its first.
    """
    best = 0
    for first in range(1, len(accepted) + 1, STRETCH):
        last = min(first + STRETCH - 1, len(accepted))
        if decoding + accepted[last - 1] > least * pass_ms(first):
            for count in range(first, last + 1):
                rate = (decoding + accepted[count - 1]) / pass_ms(count)
                if rate > least:
                    best, least = count, rate
    return best


class _Drafts:
    """The tokens of all drafts, sorted by the probability that their draft is accepted up to them; at most `most`."""

    def __init__(self, acceptance: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64], *, most: int) -> None:
        self.num_drafts = len(lengths)
        longest = min(most, int(lengths.max()))
        places = np.arange(longest)
        worth = np.where(places < lengths[:, None], acceptance[:, None] ** (places + 1.0), 0.0).ravel()
        order = np.argsort(-worth)[: min(most, int(np.minimum(lengths, longest).sum()))]
        self._draft_of = order // max(1, longest)
        self.accepted: list[float] = np.cumsum(worth[order]).tolist()  # expected, of the first tokens

    def first(self, count: int) -> list[int]:
        """Each draft's number of tokens among the first `count`."""
        lengths: list[int] = np.bincount(self._draft_of[:count], minlength=self.num_drafts).tolist()
        return lengths
