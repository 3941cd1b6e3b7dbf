"""The choice of models that a host loads and unloads, a pure function."""

from __future__ import annotations

import random

from common.words import HostStatus
from services.host.policy import PATIENCE_S, RETRY_S, TAKES_PLACE, ModelView, Steps, decide

NOW = 1000.0


def idle(status: HostStatus = HostStatus.UNLOADED, *, since: float = 0.0, active_at: float = 0.0) -> ModelView:
    return ModelView(status=status, since=since, active_at=active_at)


def kept(status: HostStatus = HostStatus.READY, *, active_at: float = 0.0, since: float = 0.0) -> ModelView:
    """One that is wanted a while longer, without requests."""
    return ModelView(status=status, since=since, wanted_until=NOW + 100, active_at=active_at)


def asked(status: HostStatus = HostStatus.UNLOADED, *, since: float = 0.0, wanted_since: float = NOW) -> ModelView:
    """One with requests."""
    return ModelView(
        status=status, since=since, wanted_until=NOW + 100, wanted_since=wanted_since, active=True, active_at=NOW
    )


def test_what_is_wanted_is_loaded_and_what_is_not_is_unloaded() -> None:
    models = {"a": asked(), "b": idle(), "c": idle(HostStatus.READY), "d": kept()}
    assert decide(NOW, models, 0) == Steps(load=("a",), unload=("c",))


def test_one_at_a_time_the_first_that_was_asked_for_goes_first() -> None:
    models = {"late": asked(wanted_since=NOW - 1), "early": asked(wanted_since=NOW - 2)}
    assert decide(NOW, models, 1) == Steps(load=("early",))
    for status in (HostStatus.LOADING, HostStatus.UNLOADING):
        assert decide(NOW, models | {"early": asked(status)}, 1) == Steps()


def test_the_model_that_is_idle_longest_gives_way_before_its_time() -> None:
    models = {"new": asked(), "a": kept(active_at=NOW - 5), "b": kept(active_at=NOW - 9)}
    assert decide(NOW, models, 2) == Steps(unload=("b",))
    models["b"] = idle(HostStatus.UNLOADING)
    assert decide(NOW, models, 2) == Steps()  # one is leaving already


def test_a_wish_without_requests_drives_nobody_out() -> None:
    assert decide(NOW, {"new": kept(HostStatus.UNLOADED), "a": kept()}, 1) == Steps()


def test_a_busy_model_gives_way_after_its_turn_to_one_that_waited_as_long() -> None:
    long_ago = NOW - PATIENCE_S
    busy = asked(HostStatus.READY, since=long_ago)
    assert decide(NOW, {"new": asked(wanted_since=NOW - 1), "a": busy}, 1) == Steps()
    waited = asked(wanted_since=long_ago)
    assert decide(NOW, {"new": waited, "a": asked(HostStatus.READY, since=NOW - 1)}, 1) == Steps()
    assert decide(NOW, {"new": waited, "a": busy}, 1) == Steps(unload=("a",))


def test_what_failed_is_tried_again_after_a_while() -> None:
    for since, load in ((NOW - RETRY_S + 1, ()), (NOW - RETRY_S, ("a",))):
        assert decide(NOW, {"a": asked(HostStatus.FAILED, since=since)}, 0) == Steps(load=load)


def test_there_are_never_more_than_allowed_and_nobody_waits_for_ever() -> None:
    """Random wishes: places are bound, and each model that is asked for comes to its turn."""
    chance = random.Random(7)
    for _ in range(50):
        most, now = chance.randint(1, 3), 0.0
        status = dict.fromkeys("abcde", HostStatus.UNLOADED)
        since, wanted = dict.fromkeys("abcde", 0.0), dict.fromkeys("abcde", 0.0)
        served = set[str]()
        for _ in range(600):
            now += 1.0
            models = {
                name: ModelView(
                    status=status[name],
                    since=since[name],
                    wanted_until=now + 5,
                    wanted_since=wanted[name],
                    active=True,
                    active_at=now,
                )
                for name in status
            }
            steps = decide(now, models, most)
            changed = dict.fromkeys(steps.load, HostStatus.LOADING) | dict.fromkeys(steps.unload, HostStatus.UNLOADING)
            for name, old in status.items():
                if name not in changed and old is HostStatus.LOADING:
                    changed[name] = HostStatus.READY
                    served.add(name)
                if name not in changed and old is HostStatus.UNLOADING:
                    changed[name], wanted[name] = HostStatus.UNLOADED, now
            for name, new in changed.items():
                status[name], since[name] = new, now
            assert sum(one in TAKES_PLACE for one in status.values()) <= most
        assert served == set("abcde")


def asleep(*, since: float = 0.0, parks_s: float = 1e9) -> ModelView:
    return ModelView(status=HostStatus.PARKED, since=since, parks_s=parks_s)


def test_who_can_sleep_does_where_others_are_unloaded() -> None:
    sleepy = ModelView(status=HostStatus.READY, since=0.0, parks_s=60.0)
    assert decide(NOW, {"a": sleepy, "b": idle(HostStatus.READY)}, 0) == Steps(park=("a",), unload=("b",))
    victim = ModelView(status=HostStatus.READY, since=0.0, wanted_until=NOW + 9, parks_s=60.0)
    assert decide(NOW, {"a": victim, "b": asked()}, 1) == Steps(park=("a",))


def test_who_sleeps_takes_no_place_wakes_when_wanted_and_is_unloaded_after_its_time() -> None:
    models = {"a": asleep(), "b": asked()}
    assert decide(NOW, models, 1) == Steps(load=("b",))
    assert decide(NOW, {"a": asked(HostStatus.PARKED)}, 1) == Steps(load=("a",))
    for since, unload in ((NOW - 59, ()), (NOW - 60, ("a",))):
        assert decide(NOW, {"a": asleep(since=since, parks_s=60.0)}, 1) == Steps(unload=unload)


def test_memory_for_a_model_is_taken_from_those_that_sleep_the_longest_first() -> None:
    large = ModelView(
        status=HostStatus.UNLOADED, since=0.0, wanted_until=NOW + 9, wanted_since=NOW, active=True, needs_bytes=100
    )
    models = {"large": large, "late": asleep(since=NOW - 1), "early": asleep(since=NOW - 2)}
    assert decide(NOW, models, 0, free_bytes=lambda: 100) == Steps(load=("large",))
    assert decide(NOW, models, 0, free_bytes=lambda: 99) == Steps(unload=("early",))
    models["early"] = idle(HostStatus.UNLOADING)
    assert decide(NOW, models, 0, free_bytes=lambda: 99) == Steps(unload=("late",))
    del models["early"], models["late"]
    assert decide(NOW, models, 0, free_bytes=lambda: 99) == Steps(load=("large",))  # its worker says what it lacks
    wakes = {"wakes": asked(HostStatus.PARKED), "late": asleep()}
    assert decide(NOW, wakes, 0, free_bytes=lambda: 0) == Steps(load=("wakes",))  # its weights are there
