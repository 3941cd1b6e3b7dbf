"""The head of what a worker says about a request."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from common.messages import Failed, LeaseAborted, SamplingParams, WriterDone
from tests.fakes.worker import new_job
from worker.identity import Identity

ME = Identity("decode-1", 7)
JOB = msgspec.structs.replace(new_job("r", [1, 2], SamplingParams(max_tokens=1)), attempt=3, traceparent="00-11-22-01")


def test_a_message_about_a_job_names_the_attempt_its_trace_and_who_says_it() -> None:
    failed = Failed(**ME.head(JOB), code="worker_failed", message="why", retryable=True)
    assert (failed.request_id, failed.attempt, failed.traceparent) == ("r", 3, "00-11-22-01")
    assert (failed.worker, failed.incarnation) == ("decode-1", 7)


@pytest.mark.parametrize(("trace", "said"), [("00-11-33-01", "00-11-33-01"), (UNSET, UNSET), (None, "00-11-22-01")])
def test_a_span_below_the_attempt_s_takes_its_place_if_there_is_one(trace: str | None, said: str) -> None:
    assert ME.head(JOB, trace=trace)["traceparent"] == said


def test_an_answer_to_a_message_is_about_the_same_attempt_and_said_by_us() -> None:
    aborted = LeaseAborted(
        request_id="r", attempt=2, traceparent="00-44-55-01", worker="other", incarnation=1, lease_id=5, generation=1,
        reason="expired",
    )  # fmt: skip
    done = WriterDone(**ME.head(aborted), lease_id=5, generation=1)
    assert (done.request_id, done.attempt, done.traceparent) == ("r", 2, "00-44-55-01")
    assert (done.worker, done.incarnation) == ("decode-1", 7)


def test_a_job_without_a_trace_leaves_the_field_off_the_wire() -> None:
    head = ME.head(msgspec.structs.replace(JOB, traceparent=""))
    assert head["traceparent"] is UNSET
