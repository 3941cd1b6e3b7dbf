"""Features: what jobs need, what heartbeats say, and what older and later builds make of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.messages import (
    Feature,
    Generate,
    Grammar,
    SamplingParams,
    WorkerState,
    decode,
    encode,
    features_of,
    said_features,
    worker_state_decoder,
)
from common.messages.jobs import NEEDED
from tests.fakes.workers import a_worker

ANYTHING, FOLLOWED = {"sampling": SamplingParams(max_tokens=4)}, Grammar(allowed=[5])
TYPICAL = SamplingParams(max_tokens=4, typical_p=0.9)


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({}, set()),
        ({"grammar": FOLLOWED}, {"grammars"}),
        ({"sampling": TYPICAL}, {"typical_p"}),
        ({"sampling": TYPICAL, "grammar": FOLLOWED}, {"grammars", "typical_p"}),
        ({"sampling": SamplingParams(max_tokens=4, min_p=0.1)}, {"made up"}),
    ],
)
def test_a_job_needs_what_another_worker_would_ignore(
    asked: dict[str, Any], needed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feature that nobody thought of is a line in `NEEDED`."""
    monkeypatch.setitem(NEEDED, "made up", lambda work: work.sampling.min_p > 0)
    assert features_of(Generate(**(ANYTHING | asked))) == needed


@pytest.mark.parametrize("lacking", [(), (Feature.GRAMMARS,)])
def test_builds_that_read_bools_and_those_that_read_features_learn_the_same(lacking: tuple[Feature, ...]) -> None:
    heard = decode(worker_state_decoder, encode(a_worker("w", "decode", **said_features(lacking=lacking))))
    assert heard.can == set(Feature) - set(lacking)
    before = msgspec.structs.replace(heard, features=frozenset())  # what such a build knows, and says
    assert (before.named, before.grammars, before.typical_p) == (True, not lacking, True)
    assert before.can == {*("named", "typical_p"), *(() if lacking else ("grammars",))}


def test_a_worker_of_the_first_release_has_no_feature() -> None:
    assert _heard(a_worker("w", "decode")).can == frozenset()


def test_a_later_release_s_feature_is_a_word_that_nothing_asks_for() -> None:
    heard = _heard(a_worker("w", "decode", features=frozenset({"grammars", "not yet thought of"})))
    assert heard.can == {"grammars", "not yet thought of"}
    assert features_of(Generate(**ANYTHING, grammar=FOLLOWED)) <= heard.can


def _heard(state: WorkerState) -> WorkerState:
    return decode(worker_state_decoder, encode(state))
