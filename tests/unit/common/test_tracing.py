"""Contexts of spans, and spans below a parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.settings import ROOT
from common.tracing import Children, NoTracer, Span, child_of, valid

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("header", "is_one"),
    [
        (CONTEXT, True),
        (CONTEXT.replace("00-", "cc-", 1), True),  # a later version
        (CONTEXT.replace("00-", "ff-", 1), False),
        (CONTEXT[:-1], False),
        (CONTEXT.upper(), False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
        (CONTEXT + "\n", False),
        ("", False),
    ],
)
def test_only_a_w3c_header_is_gone_on_with(header: str, is_one: bool) -> None:
    assert valid(header) == (header if is_one else "")


def test_a_child_is_another_span_of_the_same_trace_with_the_same_decision() -> None:
    for context in (CONTEXT, CONTEXT[:-1] + "0", NoTracer().new_trace()):
        child = child_of(context)
        assert valid(child)
        assert (child[:36], child[52:]) == (context[:36], context[52:])
        assert child[36:52] != context[36:52]


FORKED = """
import os
from common.tracing import child_of
for _ in range(2):
    if os.fork() == 0:
        print(child_of("%s"), flush=True)
        os._exit(0)
    os.wait()
"""


def test_processes_that_were_forked_of_one_give_different_ids() -> None:
    command = [sys.executable, "-c", FORKED % CONTEXT]
    one, other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert valid(one) != valid(other)


def test_what_broke_is_an_error_and_what_nobody_needs_any_more_is_none() -> None:
    took: list[Span] = []

    class Keeps(NoTracer):
        def record(self, span: Span) -> None:
            took.append(span)

    children = Children(Keeps(), CONTEXT, {"baton.attempt": 2})
    for outcome in ("", "ok", "cancelled", "worker lost"):
        children.record("decode", 1.0, 2.0, {"baton.tokens": 3}, outcome=outcome)
    children.record("transfer", 1.0, 2.0, {}, context=child_of(CONTEXT), links=[CONTEXT])
    assert [one.error for one in took] == ["", "", "", "worker lost", ""]
    assert {one.parent for one in took} == {CONTEXT}
    assert len({one.context for one in took}) == 5
    assert took[0].attributes == {"baton.attempt": 2, "baton.tokens": 3}
