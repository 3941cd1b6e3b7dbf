"""Who is asked for room again, and what ends an attempt that nobody takes."""

from __future__ import annotations

import pytest

from common.messages import ReserveReply
from common.words import Refusal
from prefill.reserving import MAX_SILENT_ROUNDS, Candidates
from prefill.stop import Stop

FINAL = [refusal for refusal in Refusal if refusal.is_final]
PASSING = [refusal for refusal in Refusal if not refusal.is_final]
SILENT = None


def refusal(reason: Refusal, detail: str = "") -> ReserveReply:
    return ReserveReply(granted=False, reason=reason, detail=detail)


def ask(candidates: Candidates, answers: dict[str, Refusal | None]) -> Stop | None:
    """One round: each candidate that is still asked gives its answer."""
    silent = 0
    for worker in candidates.open:
        answer = answers[worker]
        if answer is SILENT:
            silent += 1
        else:
            candidates.refused(worker, refusal(answer))
    return candidates.round_ended(num_silent=silent)


def test_every_refusal_is_either_final_or_passing() -> None:
    assert set(PASSING) == {Refusal.FULL, Refusal.UNKNOWN_WRITER, Refusal.VERIFYING, Refusal.UNKNOWN_JOB}
    assert Refusal.INVALID in FINAL
    assert Refusal.OTHER in FINAL, "a newer worker's word may never end"


@pytest.mark.parametrize("reason", PASSING)
def test_a_passing_refusal_is_asked_again_for_ever(reason: Refusal) -> None:
    candidates = Candidates(["a", "b"])
    for _ in range(100):
        assert ask(candidates, {"a": reason, "b": reason}) is None
    assert candidates.open == ["a", "b"]


@pytest.mark.parametrize("reason", FINAL)
def test_a_final_refusal_ends_the_questions_to_that_candidate_alone(reason: Refusal) -> None:
    candidates = Candidates(["a", "b", "c"])
    assert ask(candidates, {"a": Refusal.FULL, "b": reason, "c": Refusal.FULL}) is None
    assert candidates.open == ["a", "c"]


@pytest.mark.parametrize(
    ("answers", "stop"),
    [
        ([Refusal.INVALID, Refusal.INVALID], Stop.INVALID),
        ([Refusal.INVALID], Stop.INVALID),
        ([Refusal.DRAINING, Refusal.DRAINING], Stop.NOBODY_DECODES),
        ([Refusal.DRAINING, Refusal.INVALID], Stop.NOBODY_DECODES),  # another placement may find somebody
        ([Refusal.STALE, Refusal.STALE], Stop.REFUSED),
        ([Refusal.STALE, Refusal.INVALID], Stop.REFUSED),
        ([Refusal.INCOMPATIBLE, Refusal.HANDED_OVER], Stop.REFUSED),
        ([Refusal.OTHER], Stop.REFUSED),
    ],
)
def test_an_attempt_ends_in_the_round_in_which_the_last_candidate_refuses_for_good(
    answers: list[Refusal], stop: Stop
) -> None:
    candidates = Candidates(f"d{index}" for index in range(len(answers)))
    assert ask(candidates, {f"d{index}": answer for index, answer in enumerate(answers)}) is stop
    assert candidates.open == []


@pytest.mark.parametrize(
    ("other", "stop"),
    [
        (SILENT, Stop.NOBODY_ANSWERS),
        (Refusal.INVALID, Stop.NOBODY_ANSWERS),
        (Refusal.DRAINING, Stop.NOBODY_DECODES),
    ],
)
def test_an_attempt_ends_when_all_who_are_left_stay_silent(other: Refusal | None, stop: Stop) -> None:
    candidates = Candidates(["silent", "other"])
    answers = {"silent": SILENT, "other": other}
    assert [ask(candidates, answers) for _ in range(MAX_SILENT_ROUNDS - 1)] == [None] * (MAX_SILENT_ROUNDS - 1)
    assert ask(candidates, answers) is stop


def test_one_that_answers_between_ends_the_silence() -> None:
    candidates = Candidates(["a"])
    for _ in range(3):
        for answer in [SILENT] * (MAX_SILENT_ROUNDS - 1) + [Refusal.FULL]:
            assert ask(candidates, {"a": answer}) is None


def test_the_detail_names_each_worker_and_what_it_said() -> None:
    candidates = Candidates(["a", "b", "c"])
    candidates.refused("a", refusal(Refusal.INVALID, "the sequence has 40 tokens"))
    candidates.refused("b", refusal(Refusal.FULL))
    candidates.refused("c", refusal(Refusal.DRAINING))
    assert candidates.detail == "a: the sequence has 40 tokens; c: draining"
