"""Ollama's answers: an object a line, the last one with the counts; or a single object."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from gateway.answers.answer import Answer
from gateway.answers.choice import Choice, Piece
from gateway.dialects.ollama.calls import WholeCalls
from gateway.dialects.openai.framing import chat_logprobs
from gateway.dialects.timings import Timings
from gateway.http.problem import Json, Problem
from gateway.http.streaming import said

LINES = "application/x-ndjson"
_NS = 1_000_000_000
_MARK = "\x00"
# The fields of a message or response: its text, its reasoning, and its complete calls.
Content = Callable[[str, str, list[Json]], Json]


def stamp(now_ns: int | None = None) -> str:
    """A timestamp: RFC 3339 with nanoseconds, in UTC."""
    seconds, rest = divmod(time.time_ns() if now_ns is None else now_ns, _NS)
    return f"{_second(seconds)}.{rest:09}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def line(value: Json) -> bytes:
    return said(value) + b"\n"


class Lines:
    """One line a piece, and the last one."""

    def __init__(self, answer: Answer, content: Content, *, logprobs: bool, end: Callable[[], Json]) -> None:
        """`end`: further fields of the last line."""
        self._answer = answer
        self._content = content
        self._logprobs = logprobs
        self._end = end
        self._calls = WholeCalls()
        self._reason = ""
        self._second, self._until_ns = b"", 0  # the newest timestamp's
        self._around: dict[bool, list[bytes]] = {}  # bytes around a text, by whether it is reasoning
        self.tell_text_alone = not logprobs

    def opening(self) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        around = self._around.get(choice.is_reasoning)
        if around is None:
            content = self._content(*(("", _MARK) if choice.is_reasoning else (_MARK, "")), [])
            whole = said({"model": self._answer.model} | content | {"done": False})
            around = self._around[choice.is_reasoning] = (b'",' + whole[1:] + b"\n").split(said(_MARK))
        now_ns = time.time_ns()
        if now_ns >= self._until_ns:  # a new second
            self._until_ns = now_ns - now_ns % _NS + _NS
            self._second = _second(now_ns // _NS).encode()
        return b'{"created_at":"%b.%09dZ%b' % (self._second, now_ns % _NS, said(text).join(around))

    def event(self, choice: Choice, piece: Piece) -> bytes:
        self._reason = piece.finish or self._reason
        calls = self._calls.add(piece.calls, is_over=bool(piece.finish))
        if not (piece.text or piece.reasoning or calls or (self._logprobs and piece.logprobs)):
            return b""
        return line(
            _head(self._answer)
            | self._content(piece.text, piece.reasoning, calls)
            | ({"logprobs": logprobs_of(self._answer, piece)} if self._logprobs else {})
            | {"done": False}
        )

    def closing(self) -> bytes:
        return line(_head(self._answer) | self._content("", "", []) | ended(self._answer, self._reason) | self._end())

    def failed(self, problem: Problem) -> bytes:
        return line({"error": problem.message})


async def whole(answer: Answer, content: Content, *, logprobs: bool, end: Callable[[Piece], Json]) -> Json:
    """An unstreamed answer."""
    (piece,) = await answer.whole()
    calls = WholeCalls().add(piece.calls, is_over=True)
    told = _head(answer) | content(piece.text, piece.reasoning, calls) | ended(answer, piece.finish)
    return told | ({"logprobs": logprobs_of(answer, piece)} if logprobs else {}) | end(piece)


def at_once(model: str, content: Json, *, unloads: bool) -> Json:
    """The answer to a request without a prompt, which loads or unloads a model."""
    reason = "unload" if unloads else "load"
    return {"model": model, "created_at": stamp()} | content | {"done": True, "done_reason": reason}


def ended(answer: Answer, reason: str) -> Json:
    """The final fields: done reason, counts, and durations in nanoseconds."""
    found = Timings.of(answer)
    return {
        "done": True,
        "done_reason": str(reason) or "stop",
        "total_duration": _ns(found.total_ms),
        "load_duration": _ns(found.before_prompt_ms),
        "prompt_eval_count": found.usage.prompt_tokens,
        "prompt_eval_duration": _ns(found.prompt_ms),
        "eval_count": found.usage.completion_tokens,
        "eval_duration": _ns(found.predicted_ms),
    }


def logprobs_of(answer: Answer, piece: Piece) -> list[Mapping[str, Any]]:
    content: list[Mapping[str, Any]] = chat_logprobs(answer.tokenizer, piece.token_ids, piece.logprobs, as_ids=False)[
        "content"
    ]
    return content


def _head(answer: Answer) -> Json:
    return {"model": answer.model, "created_at": stamp()}


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1_000_000)
