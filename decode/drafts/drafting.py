"""Speculation with a drafter: its guesses, or what a grammar forces, cut to the lengths that pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decode.drafts.drafter import Drafter
from decode.drafts.head import LIKE_A_MATCH_OF
from decode.drafts.lengths import Candidate, DraftLengths
from engine.sequence import Sequence

WORTH_A_PAUSE = 0.5  # accepted tokens a pass, where only the first pass is missed
CERTAIN = 64  # the match length of tokens that a grammar forces


class Drafting:
    """One drafter for the whole batch."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        most: int,
        step_ms: Callable[[int], float] = lambda _: 1.0,
        wait_ms: Callable[[int], float] = lambda _: 0.0,
        is_paid: bool = False,
        forced: Callable[[Sequence], list[int]] = lambda _: [],
    ) -> None:
        """`most`: drafted tokens of a sequence in a pass. `step_ms(rows)`: expected time of a step, 0 = not known yet.

        `wait_ms(num_sequences)`: time that a step takes longer whose plan waits for results, and behind which so many
        draft. Without either all drafts are verified. `is_paid`: the engine drafts, and it takes the device time.
        `forced(sequence)`: the tokens that its grammar leaves no choice about.
        """
        self._drafter = drafter
        self._forced = forced
        self._most = most
        self._step_ms = step_ms
        self._is_paid = is_paid
        self._wait_ms = wait_ms
        self._lengths = DraftLengths(more_ms=wait_ms)

    @property
    def ahead(self) -> int:
        return self._most + 1 if self._drafter.follows_results else 0

    def awaits(self, sequence: Sequence, *, rows: int) -> bool:
        """Sitting out costs the sequence one token, and the draft's first token stands for the one in flight."""
        most = self._most_of(sequence)
        if not most or not self._lengths.may_draft(sequence) or not (self._could_pay(rows) or sequence.grammar):
            return False
        if self._drafter.follows_results:
            return self._lengths.expected(sequence, most, self._drafter.match_length(sequence)) > WORTH_A_PAUSE
        guess, match = self._guess(sequence, most + 1)
        if len(guess) < 2:
            return False
        first, whole = (self._lengths.expected(sequence, length, match) for length in (1, len(guess)))
        return whole - first > 1

    def stops_the_others(self, num_drafting: int, num_running: int) -> bool:
        """Passes that wait for drafts cost all a part of a step, passes that don't half the steps of those that draft."""
        if not num_drafting:
            return False
        saved = num_drafting * (self._lengths.mean_accepted + 1) / 2
        return saved > num_running * self._wait_ms(num_drafting) / self._expected_ms(num_running)

    def drafts(
        self, wanted: Mapping[Sequence, int], *, rows: int, most_rows: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        candidates, guesses, could_pay = list[Candidate](), list[list[int]](), self._could_pay(rows)
        for sequence, most in wanted.items():
            most = min(most, self._most_of(sequence))
            if not most or not self._lengths.may_draft(sequence):
                continue
            if not could_pay and not sequence.grammar:
                if self._is_paid:  # the engine drafts for it until it pauses
                    self._lengths.left_out(sequence)
                continue
            guess, match = self._guess(sequence, most)
            if guess:
                candidates.append(Candidate(sequence, len(guess), match))
                guesses.append(guess)
        lengths = self._lengths.choose(candidates, rows=rows, most_rows=most_rows, step_ms=self._expected_ms)
        return {
            candidate.sequence: tuple(guess[:length])
            for candidate, guess, length in zip(candidates, guesses, lengths, strict=True)
            if length
        }

    def verified(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        self._lengths.verified(sequence, drafted, accepted)

    def ended(self, sequence: Sequence) -> None:
        self._drafter.ended(sequence)

    def _guess(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """Tokens that may follow, and the length of the match that says so."""
        if forced := self._forced(sequence)[:most]:
            return forced, CERTAIN
        guess = self._drafter.draft(sequence, most)
        return guess, self._drafter.match_length(sequence) if guess else 0

    def _expected_ms(self, rows: int) -> float:
        return self._step_ms(rows) or 1.0  # before the first step all sizes look alike

    def _could_pay(self, rows: int) -> bool:
        """True if drafts without a grammar may pay in a pass of so many rows."""
        match_length = LIKE_A_MATCH_OF if self._drafter.follows_results else 0
        return self._lengths.could_pay(rows, longest=self._most, match_length=match_length, step_ms=self._expected_ms)

    def _most_of(self, sequence: Sequence) -> int:
        """The most tokens of its drafts, as its request wants it."""
        return self._most if sequence.speculation < 0 else min(self._most, sequence.speculation)
