"""When a worker is asked whether it is there, and what its silence means."""

from __future__ import annotations

from gateway.lifecycle.pulse import (
    BEAT_SILENT_S,
    FORGET_AFTER_S,
    FRAME_SILENT_S,
    GONE_AFTER_S,
    MAX_ANSWER_S,
    MIN_ANSWER_S,
    Pulse,
    Verdict,
)


def asked(pulse: Pulse, worker: str, now: float) -> None:
    assert pulse.ask(worker, now, decodes=True)


def heard_at(now: float, *workers: str) -> Pulse:
    pulse = Pulse()
    for worker in workers:
        pulse.heard(worker, now)
    return pulse


def test_a_worker_is_asked_once_when_its_frames_are_missing_and_later_when_only_its_heartbeat_is() -> None:
    pulse = heard_at(0.0, "d", "p")
    assert not pulse.ask("d", FRAME_SILENT_S, decodes=True)
    assert not pulse.ask("p", BEAT_SILENT_S, decodes=False)
    assert pulse.ask("d", FRAME_SILENT_S + 0.01, decodes=True)
    assert pulse.ask("p", BEAT_SILENT_S + 0.01, decodes=False)
    assert not pulse.ask("d", 9.0, decodes=True)  # the question is on its way
    pulse.answered("d", 9.0)
    assert not pulse.ask("d", 9.0 + FRAME_SILENT_S, decodes=True)


def test_nobody_listens_for_longer_than_connecting_again_takes_means_gone() -> None:
    pulse = heard_at(0.0, "d")
    asked(pulse, "d", 1.0)
    assert pulse.nobody_listens("d", 1.0) is Verdict.WAIT
    asked(pulse, "d", 1.1)
    assert pulse.nobody_listens("d", 1.0 + GONE_AFTER_S) is Verdict.GONE


def test_who_says_something_meanwhile_is_neither_gone_nor_silent() -> None:
    pulse = heard_at(0.0, "d", "other")
    asked(pulse, "d", 1.0)
    assert pulse.nobody_listens("d", 1.0) is Verdict.WAIT
    pulse.heard("d", 1.1)
    asked(pulse, "d", 1.5)
    assert pulse.nobody_listens("d", 1.5) is Verdict.WAIT
    asked(pulse, "d", 1.6)
    pulse.heard("other", 1.7)
    pulse.heard("d", 1.7)
    assert pulse.no_answer("d") is Verdict.WAIT


def test_two_questions_without_an_answer_mean_silent_if_others_are_heard() -> None:
    pulse = heard_at(0.0, "d", "other")
    asked(pulse, "d", 1.0)
    pulse.heard("other", 1.2)
    assert pulse.no_answer("d") is Verdict.WAIT
    asked(pulse, "d", 1.6)
    pulse.heard("other", 1.7)
    assert pulse.no_answer("d") is Verdict.SILENT


def test_while_nobody_is_heard_it_is_rather_the_bus() -> None:
    pulse = heard_at(0.0, "d", "other")
    for now in (1.0, 2.0, 3.0, 4.0):
        asked(pulse, "d", now)
        assert pulse.no_answer("d") is Verdict.WAIT


def test_the_gateway_s_own_standstill_is_nobody_s_silence() -> None:
    pulse = heard_at(0.0, "d", "other")
    asked(pulse, "d", 1.0)
    assert pulse.nobody_listens("d", 1.0) is Verdict.WAIT
    pulse.pardon(5.0)
    assert not pulse.ask("d", 5.1, decodes=True)
    asked(pulse, "d", 5.5)
    assert pulse.nobody_listens("d", 5.5) is Verdict.WAIT


def test_an_answer_about_a_forgotten_worker_says_nothing() -> None:
    pulse = heard_at(0.0, "d", "other")
    asked(pulse, "d", 1.0)
    pulse.forget("d")
    pulse.heard("other", 1.1)
    assert pulse.no_answer("d") is Verdict.WAIT
    assert pulse.nobody_listens("d", 9.0) is Verdict.WAIT


def test_who_only_computes_prompts_has_the_time_of_its_lease_to_answer() -> None:
    pulse = heard_at(0.0, "p", "other")
    for now in (1.0, 2.0, 3.0):
        assert pulse.ask("p", now, decodes=False)
        pulse.heard("other", now + 0.1)
        assert pulse.no_answer("p") is Verdict.WAIT


def test_where_answers_are_slow_or_this_gateway_is_late_there_is_more_time_for_the_next() -> None:
    pulse = heard_at(0.0, "d")
    assert pulse.answer_s == MIN_ANSWER_S
    asked(pulse, "d", 1.0)
    pulse.answered("d", 1.3)
    assert MIN_ANSWER_S < pulse.answer_s < MAX_ANSWER_S
    pulse.was_late(5.0)
    assert pulse.answer_s == MAX_ANSWER_S
    for _ in range(50):
        pulse.was_late(0.0)
    assert pulse.answer_s == MIN_ANSWER_S


def test_what_is_heard_of_a_lost_worker_after_all_is_not_kept_for_ever() -> None:
    pulse = Pulse()
    for number in range(1000):
        pulse.heard(f"d-{number}", float(number))
        pulse.forget(f"d-{number}")
        pulse.heard(f"d-{number}", float(number))  # its last frame, taken after its last heartbeat
    assert len(pulse) == FORGET_AFTER_S
    pulse.heard("d-999", 9999.0)
    pulse.heard("d-1000", 9999.0)
    assert len(pulse) == 2
