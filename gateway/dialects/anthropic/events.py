"""A streamed message: blocks that start, grow and stop, between the message's own start and stop."""

from __future__ import annotations

from common.words import Finish
from gateway.answers.answer import Answer
from gateway.answers.choice import Choice, Piece
from gateway.dialects.anthropic.objects import (
    Stop,
    error_object,
    message_object,
    signature,
    stop_of,
    tool_use,
    usage_object,
)
from gateway.http.problem import Json, Problem
from gateway.http.streaming import named_event, said
from gateway.parsing.parsed import CallDelta

PING = named_event({"type": "ping"})
_TEXT, _THINKING, _CALL = "text", "thinking", "tool_use"
_BEGUN: dict[str, Json] = {
    _TEXT: {"type": _TEXT, "text": ""},
    _THINKING: {"type": _THINKING, "thinking": "", "signature": ""},
}


class MessageEvents:
    """The events of one answer. The message starts with its first token, when its usage is known."""

    tell_text_alone = True

    def __init__(self, answer: Answer, max_tokens: int) -> None:
        self._answer = answer
        self._max_tokens = max_tokens
        self._is_begun = False
        self._index = -1  # the latest block's
        self._open = ""  # its kind; "": none is open
        self._around = (b"", b"")  # the bytes around a delta's text in it
        self._stop = Stop("end_turn")

    def opening(self) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        kind = _THINKING if choice.is_reasoning else _TEXT
        before, after = self._around
        if kind != self._open:
            return self._say(kind, text)
        return before + said(text) + after

    def event(self, choice: Choice, piece: Piece) -> bytes:
        going_on, begun = piece.calls_around
        parts = [self._beginning(), *map(self._call, going_on)]
        if piece.reasoning:
            parts.append(self._say(_THINKING, piece.reasoning))
        if piece.text:
            parts.append(self._say(_TEXT, piece.text))
        parts += map(self._call, begun)
        if piece.finish != Finish.NONE:
            self._stop = stop_of(self._answer, piece.finish, self._max_tokens, has_calls=piece.has_calls)
        return b"".join(parts)

    def closing(self) -> bytes:
        return b"".join(
            (
                self._beginning(),
                self._end_block(),
                named_event({"type": "message_delta", "delta": self._stop.fields, "usage": usage_object(self._answer)}),
                named_event({"type": "message_stop"}),
            )
        )

    def failed(self, problem: Problem) -> bytes:
        return named_event(error_object(problem))

    def _beginning(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        return named_event({"type": "message_start", "message": message_object(self._answer, [], None)}) + PING

    def _say(self, kind: str, text: str) -> bytes:
        begun = b"" if kind == self._open else self._begin_block(kind, _BEGUN[kind])
        before, after = self._around
        return begun + before + said(text) + after

    def _call(self, call: CallDelta) -> bytes:
        """The event of a call's piece; the first one has its name."""
        begun = self._begin_block(_CALL, tool_use(call, {})) if call.name else b""
        if not call.arguments:
            return begun
        before, after = self._around
        return begun + before + said(call.arguments) + after

    def _begin_block(self, kind: str, block: Json) -> bytes:
        ended = self._end_block()
        self._index += 1
        self._open = kind
        delta, name = {
            _TEXT: ("text_delta", "text"),
            _THINKING: ("thinking_delta", "thinking"),
            _CALL: ("input_json_delta", "partial_json"),
        }[kind]
        whole = self._delta({"type": delta, name: ""})
        before, _, after = whole.rpartition(said(""))
        self._around = (before, after)
        return ended + named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _end_block(self) -> bytes:
        """End the open block; thinking is signed last."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signed = {"type": "signature_delta", "signature": signature(self._answer)}
        sign = self._delta(signed) if kind == _THINKING else b""
        return sign + named_event({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: Json) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})
