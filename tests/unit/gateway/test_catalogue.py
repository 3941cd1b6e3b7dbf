"""Models by name: what is configured, and what heartbeats say of it now."""

from __future__ import annotations

import pytest

from common.messages import WorkerState
from gateway.answers.catalogue import Catalogue
from gateway.answers.tokenizer import ChatTokenizer
from gateway.tenants.shares import Share
from tests.fakes.workers import a_worker


class Fleet:
    """The workers that are ready."""

    def __init__(self, *states: WorkerState) -> None:
        self.states = states

    def ready(self, role: str) -> list[WorkerState]:
        return [state for state in self.states if role in state.roles]

    def weights(self, model: str) -> str:
        return next((one.model_fingerprint for one in self.ready("decode") if one.model == model), "")


def worker(name: str, role: str, model: str, *, weights: str = "", longest: int = 1000) -> WorkerState:
    return a_worker(name, role, model=model, model_fingerprint=weights or f"{model}'s", max_model_len=longest)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(
        worker("p0", "prefill", "small", longest=800),
        worker("d0", "decode", "small", longest=900),
        worker("p1", "prefill", "large", longest=4000),
        worker("d1", "decode", "large", longest=5000),
    )


@pytest.fixture
def catalogue(fleet: Fleet, tokenizer: ChatTokenizer, prefix_space_tokenizer: ChatTokenizer) -> Catalogue:
    return Catalogue({"small": tokenizer, "large": prefix_space_tokenizer}, fleet)


def test_each_model_has_its_own_weights_tokenizer_and_context(
    catalogue: Catalogue, tokenizer: ChatTokenizer, prefix_space_tokenizer: ChatTokenizer
) -> None:
    small, large = catalogue.find("small"), catalogue.find("large")
    assert small is not None
    assert large is not None
    assert (small.fingerprint, small.max_model_len, small.tokenizer) == ("small's", 900, tokenizer)
    assert (large.fingerprint, large.max_model_len, large.tokenizer) == (
        "large's",
        1600,
        prefix_space_tokenizer,
    )  # what the pool holds
    assert catalogue.all() == [small, large]
    assert catalogue.names == ("small", "large")


def test_a_name_that_is_not_configured_is_not_served_whoever_announces_it(catalogue: Catalogue, fleet: Fleet) -> None:
    fleet.states = (*fleet.states, worker("d2", "decode", "another"))
    assert catalogue.find("another") is None
    assert "another" not in catalogue


def test_a_model_without_decode_workers_is_known_and_not_ready(catalogue: Catalogue, fleet: Fleet) -> None:
    fleet.states = fleet.states[:3]
    large = catalogue.find("large")
    assert large is not None
    assert (large.is_ready, large.max_model_len) == (False, None)
    small = catalogue.find("small")
    assert small is not None
    assert small.is_ready


def test_a_model_that_comes_later_has_all_its_names_and_leaves_none(
    fleet: Fleet, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue({"small": tokenizer}, fleet, {"chat": "small"}, patterns=["org/*"])
    assert catalogue.is_coming("hf.co/org/a:Q4_K_M")  # until hosts were heard
    monkeypatch.setattr(catalogue, "_listens_until", 0.0)
    assert not catalogue.is_coming("org/a:Q4_K_M")
    catalogue.take_aliases({"mine": [Share(model="org/a:Q4_K_M", percent=100.0)]})
    assert [catalogue.may_come(name) for name in ("org/a:Q4_K_M", "other/a", "small")] == [True, False, False]
    assert "mine" not in catalogue
    catalogue.add("org/a:Q4_K_M", tokenizer)
    for name in ("org/a:Q4_K_M", "hf.co/org/a:Q4_K_M", "org/a", "hf.co/org/a:latest", "mine"):
        assert catalogue.own_name(name) == "org/a:Q4_K_M"
    assert catalogue.own_name("") == "small"
    assert list(catalogue) == ["small", "org/a:Q4_K_M", "chat", "mine"]
    catalogue.add("org/a:Q8_0", tokenizer)
    assert "org/a" not in catalogue  # which of the two?
    catalogue.drop("org/a:Q8_0")
    catalogue.drop("org/a:Q4_K_M")
    assert list(catalogue) == ["small", "chat"]
    assert "hf.co/org/a:Q4_K_M" not in catalogue
    assert catalogue.labels == ["small", "org/a:Q4_K_M", "org/a:Q8_0"]  # their counts go on
