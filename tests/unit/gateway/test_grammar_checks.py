"""Troubles of a grammar's check beside the grammar: a child that stands still, dies or never was, and other tenants' checks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from gateway.grammars import checker, checks
from gateway.grammars.checker import Checker, NotCheckedError
from gateway.grammars.checks import Checks
from gateway.grammars.child import Opening, Verdict
from gateway.grammars.maker import KEPT, GrammarMaker
from gateway.grammars.wanted import Choice, Form, Wanted, choice, json_schema
from tests.models import VOCAB_SIZE, build_tokenizer

SMALL = json_schema("f", {"type": "object", "properties": {"age": {"type": "integer"}}})


def slow(number: int) -> Wanted:
    """A grammar that takes some tenths of a second to build."""
    patterns = {f"^p{number}_{i}_[a-z]+x*$": {"type": "string"} for i in range(180)}
    return json_schema("f", {"type": "object", "patternProperties": patterns})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return (folder / "tokenizer.json").read_text()


@pytest.fixture
def maker(text: str) -> Iterator[GrammarMaker]:
    maker = GrammarMaker(text, vocab_size=VOCAB_SIZE, eos_ids=[2], specials=[])
    yield maker
    maker.close()


def child_of(maker: GrammarMaker) -> int:
    """The process of its only child."""
    [process] = [one._child._process for one in maker._checks._idle if one._child._process is not None]
    return process.pid


async def test_a_schema_asked_at_a_slow_moment_is_answered_later(
    maker: GrammarMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await maker.make(choice("f", ["begin"]), "t")
    child = child_of(maker)
    os.kill(child, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(checker, "LONGEST_CHECK_S", 0.2)
        with pytest.raises(UnavailableError, match="f: could not be checked just now: ask again"):
            await maker.make(SMALL, "t")
    assert (await maker.make(SMALL, "t")).text


async def test_a_child_that_is_killed_meanwhile_is_replaced(maker: GrammarMaker) -> None:
    await maker.make(choice("f", ["begin"]), "t")
    child = child_of(maker)
    os.kill(child, signal.SIGSTOP)
    asking = asyncio.ensure_future(maker.make(SMALL, "t"))
    await asyncio.sleep(0)
    os.kill(child, signal.SIGKILL)
    assert (await asking).text


async def test_a_child_that_dies_each_time_refuses_nothing_for_ever(
    maker: GrammarMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        with pytest.raises(UnavailableError):
            await maker.make(SMALL, "t")
        patched.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(UnavailableError):
            await maker.make(SMALL, "t")
    assert (await maker.make(SMALL, "t")).text


def test_what_uses_up_its_processor_time_is_the_grammars_fault_and_not_kept(text: str) -> None:
    impatient = Checker(Opening(text, VOCAB_SIZE, [2], [], cpu_s=0.02))
    verdict = impatient.verdict(slow(0).form)
    assert verdict == Verdict(problem="takes more than 0.02 s to build: make it simpler", is_lasting=False)
    impatient.end()


async def test_verdicts_that_are_kept_have_a_bound(maker: GrammarMaker) -> None:
    for number in range(KEPT + 10):
        await maker.make(choice("f", [f"option {number}"]), "t")
    assert len(maker._verdicts) == KEPT
    with pytest.raises(InvalidRequestError, match="f: is too large: 1100"):
        await maker.make(json_schema("f", {"enum": ["x" * 1_100_000]}), "t")
    assert all(len(key) == 32 for key in maker._verdicts)


async def test_a_tenants_slow_grammars_make_no_neighbour_wait_for_them(maker: GrammarMaker) -> None:
    slow_ones = [asyncio.ensure_future(maker.make(slow(number), "slow")) for number in range(40)]
    for number in range(5):
        assert (await maker.make(choice("f", [f"option {number}"]), "neighbour")).text
        assert not all(one.done() for one in slow_ones)
    for one in slow_ones:
        one.cancel()
    ends = await asyncio.gather(*slow_ones, return_exceptions=True)
    refused = [end for end in ends if isinstance(end, OverloadedError)]
    assert len(refused) == 40 - 1 - checks.MOST_WAITING
    assert not [end for end in ends if isinstance(end, Exception) and not isinstance(end, OverloadedError)]


class Slow(Checker):
    """Answers when it is told to, and says what it was asked."""

    def __init__(self, asked: list[Any]) -> None:
        super().__init__(Opening("", 0, [], []))
        self._asked_of_all = asked
        self.may_answer = threading.Semaphore(0)

    def verdict(self, form: Form) -> Verdict:
        assert isinstance(form, Choice)
        self._asked_of_all.append(form.options[0])
        if not self.may_answer.acquire(timeout=60):
            raise NotCheckedError
        return Verdict(text=form.options[0])


def asked(checks_: Checks, tenant: str, name: str) -> asyncio.Future[Verdict]:
    return asyncio.ensure_future(checks_.verdict(tenant, name.encode(), Choice([name])))


async def test_tenants_have_turns_and_one_check_at_a_time() -> None:
    order: list[Any] = []
    one = Slow(order)
    checks_ = Checks([one])
    waiting = [asked(checks_, tenant, f"{tenant}{number}") for tenant in "abc" for number in range(3)]
    twins = [asked(checks_, "a", "a0"), asked(checks_, "a", "a2")]  # no places of their own
    await asyncio.sleep(0)
    for _ in range(9):
        one.may_answer.release()
    assert [verdict.text for verdict in await asyncio.gather(*twins)] == ["a0", "a2"]
    await asyncio.gather(*waiting)
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    checks_.close()


async def test_a_place_that_nobody_waits_for_is_free_again() -> None:
    order: list[Any] = []
    one, other = Slow(order), Slow(order)
    checks_ = Checks([one, other])
    begun = asked(checks_, "a", "begun")
    waiting = [asked(checks_, "a", f"a{number}") for number in range(checks.MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=f"{checks.MOST_WAITING} grammars of yours wait"):
        await asked(checks_, "a", "one too many")
    for left in waiting:
        left.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    last = asked(checks_, "a", "last")
    begun.cancel()  # its check goes on: what was begun is kept
    for checker_ in (one, other):
        checker_.may_answer.release()
        checker_.may_answer.release()
    assert (await last).text == "last"
    assert order == ["begun", "last"]
    checks_.close()
