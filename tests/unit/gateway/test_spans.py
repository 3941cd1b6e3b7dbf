"""The gateway's spans: waits for a place between attempts, and what the server span says of an answer that was retried."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from common.messages import Imported, Tokens
from common.tracing import NoTracer, Span
from common.words import Finish
from gateway.answers.answer import Answer
from gateway.observe.spans import RequestSpans, describe_answer
from gateway.request.attempt import AttemptLine
from gateway.request.ends import End
from gateway.request.timeline import Timeline


class Recorded(NoTracer):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wants(self, context: str) -> bool:
        return True

    def record(self, span: Span) -> None:
        self.spans.append(span)


def attempt(number: int, began_at: float) -> AttemptLine:
    return AttemptLine(number=number, began_at=began_at, because="", prefill="p", decode=["d"], reason="load")


def test_the_wait_for_a_place_is_a_span_between_two_attempts() -> None:
    tracer = Recorded()
    line = Timeline(
        request_id="r-0", received_at=0.0, submitted_at=0.0, prompt_tokens=1,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )  # fmt: skip
    line.began(attempt(1, 1.0))
    line.gave_up(End.PREEMPTED.text, 2.0)
    line.began(attempt(2, 5.0))
    line.gave_up(End.WORKER_LOST.text, 6.0)
    line.began(attempt(3, 6.5))
    line.ended("stop", "", 7.0)
    RequestSpans(tracer, "gateway").record(line)
    assert [(span.began_at, span.ended_at) for span in tracer.spans if span.name == "place"] == [(2.0, 5.0)]
    assert [span.error for span in tracer.spans if span.name == "attempt"] == ["", "worker lost", ""]


def choice(line: Timeline) -> Any:
    generation = SimpleNamespace(timeline=line)
    return SimpleNamespace(
        generation=generation, finish="stop", completion_tokens=1, cached_tokens=0, reasoning_tokens=0
    )


def test_an_answer_names_its_workers_and_the_waits_of_the_choice_that_began_first() -> None:
    late, early = (
        Timeline(request_id=f"r-{at}", received_at=10.0, submitted_at=10.0, prompt_tokens=1, phases={"queue": queue_ms})
        for at, queue_ms in enumerate((900.0, 40.0))
    )
    for line, worker, at in ((late, "p1", 12.0), (early, "p0", 10.25)):
        line.began(attempt(1, 10.0))
        line.claimed(worker, 10.1)
        line.took(Tokens(request_id=line.request_id, attempt=1, position=0, token_ids=b""), 1, Finish.STOP, at)
    imported = Imported(
        request_id="r-1", attempt=1, worker="d0", incarnation=1, transferred_blocks=1, transferred_bytes=1,
        reused_blocks=0, transfer_ms=1.0,
    )  # fmt: skip
    early.imported(imported, 10.3)
    early.took(
        Tokens(request_id="r-1", attempt=1, position=1, token_ids=b"", drafted=8, accepted=3), 4, Finish.STOP, 11.0
    )
    late.gave_up(End.WORKER_LOST.text, 12.5)
    late.began(replace(attempt(2, 12.5), decode=[]))
    late.claimed("both", 12.6)
    answer = Answer(
        id="a", model="m", own_model="m", tokenizer=None, choices=[choice(late), choice(early)], prompts=[[1]]
    )  # type: ignore[arg-type]
    said = describe_answer(answer)
    assert said["gen_ai.server.time_to_first_token"] == 0.25
    assert said["baton.queue_ms"] == 40.0
    assert said["baton.prefill.workers"] == ["both", "p0", "p1"]
    assert said["baton.decode.workers"] == ["both", "d0"]
    assert (said["baton.drafted_tokens"], said["baton.accepted_tokens"]) == (8, 3)


def test_an_answer_without_a_token_has_no_time_to_it() -> None:
    line = Timeline(request_id="r-0", received_at=0.0, submitted_at=0.0, prompt_tokens=1)
    answer = Answer(id="a", model="m", own_model="m", tokenizer=None, choices=[choice(line)], prompts=[[1]])  # type: ignore[arg-type]
    said = describe_answer(answer)
    assert "gen_ai.server.time_to_first_token" not in said
    assert said["baton.prefill.workers"] == []
    assert "baton.drafted_tokens" not in said
