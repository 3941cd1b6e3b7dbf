"""Triton's generate extension: a JSON object in, a JSON object or server-sent events out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, PrivateAttr, StrictStr, ValidationInfo, model_validator

from common.errors import InvalidRequestError
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.answers.choice import Choice, Piece
from gateway.dialects.dialect import Events
from gateway.dialects.kserve.outputs import VERSION, Outputs, as_fields, head
from gateway.dialects.kserve.wish import STREAM, TEXT_INPUT, TEXT_OUTPUT, Wish, joined
from gateway.dialects.openai.completions import Completions
from gateway.dialects.openai.framing import described
from gateway.http.fields import Reading, StrictFields
from gateway.http.problem import Json, ModelNotFoundError, Problem
from gateway.http.streaming import EVENTS, event, said

_TEXT = Completions()
PREFIX = "infer-"


class KServeBody(StrictFields):
    """The common part of bodies: the model of their path, and the parsed wish."""

    model: StrictStr
    version: StrictStr | None = None
    id: Annotated[StrictStr, Field(max_length=256)] | None = None
    _wish: Wish = PrivateAttr()

    @property
    def wish(self) -> Wish:
        return self._wish

    def ask(self, *, streams: bool) -> Ask:
        """Raises InvalidRequestError."""
        check_version(self.model, self.version)
        asked = _TEXT.ask(self._wish.text)
        return replace(asked, answer_prefix=PREFIX, stream=streams, field_names={"prompt": TEXT_INPUT})

    @property
    def attributes(self) -> Attributes:
        return described(self._wish.text, self._wish.text.max_tokens)


def check_version(model: str, version: str | None) -> None:
    """Check the version. Raises ModelNotFoundError: a model has only one."""
    if version not in (None, "", VERSION):
        raise ModelNotFoundError(
            f"version: the model {model!r} has version {VERSION!r} alone, not {version[:50]!r}", param="version"
        )


def reading_of(info: ValidationInfo) -> Reading | None:
    """Return the reader that a body's validators share."""
    return info.context if isinstance(info.context, Reading) else None


class GenerateRequest(KServeBody):
    """Body of POST /v2/models/{model}/generate and generate_stream.

    Sampling parameters and switches are in `parameters`, or beside `text_input`.
    """

    model_config = ConfigDict(extra="allow")

    text_input: Annotated[StrictStr, Field(min_length=1)]
    parameters: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> GenerateRequest:
        given, reading = joined(self.parameters, self.model_extra or {}), reading_of(info)
        self._wish = Wish.of(self.model, self.text_input, given, reading=reading)
        self._ignored = self._wish.text.ignored
        return self


class Generate:
    """One answer, whole or as events; with `stream` false, as one event.

    A whole one begins with the prompt unless `exclude_input_in_output` says otherwise, as in Triton.
    """

    body = GenerateRequest
    operation = "text_completion"
    stream_type = EVENTS
    is_batchable = False

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams

    def ask(self, body: GenerateRequest) -> Ask:
        if self.streams:
            check_no_input(body.wish)
        elif body.wish.streams:
            raise InvalidRequestError("stream: use generate_stream for a streamed answer", param=STREAM)
        return body.ask(streams=self.streams)

    def events(self, body: GenerateRequest, answer: Answer) -> Events:
        return TextEvents(body, answer)

    async def whole(self, body: GenerateRequest, answer: Answer) -> Json:
        outputs = Outputs(body.wish, answer, includes_input=body.wish.includes_input is not False)
        return head(answer, body.id) | as_fields(outputs.of(dict(enumerate(await answer.whole()))))

    def describe(self, body: GenerateRequest) -> Attributes:
        return {**body.attributes, "gen_ai.request.stream": self.streams}


def check_no_input(wish: Wish) -> None:
    """Refuse `exclude_input_in_output` false. Raises InvalidRequestError: a stream never begins with the prompt."""
    if wish.includes_input and wish.streams is not False:
        raise InvalidRequestError(
            "exclude_input_in_output: a streamed answer never has the input: send true or nothing",
            param="exclude_input_in_output",
        )


class TextEvents:
    """One event a piece, or one for all if `stream` is false. Most differ in their text alone."""

    _MARK: ClassVar[str] = "\x00text\x00"

    def __init__(self, body: KServeBody, answer: Answer) -> None:
        wish = body.wish
        self._head = head(answer, body.id)
        self._gathered: dict[int, Piece] | None = {} if wish.streams is False else None
        self._outputs = Outputs(wish, answer, includes_input=wish.streams is False and wish.includes_input is not False)
        is_plain = wish.outputs == (TEXT_OUTPUT,) and len(answer.choices) == 1
        self.tell_text_alone = is_plain and self._gathered is None
        self._around = said(self._head | {TEXT_OUTPUT: self._MARK}).split(said(self._MARK))
        self._around = [b"data: " + self._around[0], self._around[1] + b"\n\n"]

    def opening(self) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return said(text).join(self._around)

    def event(self, choice: Choice, piece: Piece) -> bytes:
        if self._gathered is not None:
            self._gathered.setdefault(choice.index, Piece(text="")).add(piece)
            return b""
        if self.tell_text_alone:
            return self.text(choice, piece.text) if piece.text else b""
        return self._event({choice.index: piece})

    def closing(self) -> bytes:
        return b"" if self._gathered is None else self._event(self._gathered)

    def failed(self, problem: Problem) -> bytes:
        return event({"error": problem.message})

    def _event(self, pieces: Mapping[int, Piece]) -> bytes:
        return event(self._head | as_fields(self._outputs.of(pieces)))
