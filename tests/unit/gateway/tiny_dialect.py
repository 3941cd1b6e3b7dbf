"""A second dialect, as small as one can be: it has its own path, key header, error form and stream of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import StrictBool, StrictStr

from common.messages import SamplingParams
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Text
from gateway.answers.choice import Choice, Piece
from gateway.answers.start import Answers
from gateway.dialects.dialect import Dialect, Endpoint, Events, View
from gateway.http.api import JSON, ApiPart, fields, get, post
from gateway.http.fields import Count, StrictFields
from gateway.http.keys import KeyForm
from gateway.http.problem import Json, Problem

SAY, NAMES = "/tiny/say", "/tiny/names"
LINES = "application/x-ndjson"
KEY = KeyForm(
    read=lambda headers: headers.get("x-tiny-key", ""),
    hint="`x-tiny-key: KEY`",
    scheme={"type": "apiKey", "in": "header", "name": "x-tiny-key"},
)


class SayRequest(StrictFields):
    """Body of POST /tiny/say."""

    model: StrictStr
    text: StrictStr
    words: Count | None = None
    flowing: StrictBool = False


class Lines:
    """A line a piece, and one for the usage."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def opening(self) -> bytes:
        return b""

    tell_text_alone = True

    def text(self, choice: Choice, text: str) -> bytes:
        return line({"part": text})

    def event(self, choice: Choice, piece: Piece) -> bytes:
        return line({"part": piece.text})

    def closing(self) -> bytes:
        return line({"used": self._answer.usage().completion_tokens})


class Say:
    """A text in, a text out."""

    body = SayRequest
    operation = "say"
    stream_type = LINES
    is_batchable = True

    def ask(self, body: SayRequest) -> Ask:
        return Ask(
            model=body.model,
            answer_prefix="tiny-",
            prompts=[Text(body.text)],
            stream=body.flowing,
            sampling=SamplingParams(max_tokens=body.words or 0),
            field_names={"prompt": "text", "max_tokens": "words"},
        )

    def events(self, body: SayRequest, answer: Answer) -> Events:
        return Lines(answer)

    async def whole(self, body: SayRequest, answer: Answer) -> Json:
        return {"said": [piece.text for piece in await answer.whole()]}

    def stream_error(self, problem: Problem) -> bytes:
        return line({"trouble": problem.message})

    def describe(self, body: SayRequest) -> Attributes:
        return {"tiny.words": body.words or 0}


class Tiny:
    """The whole dialect."""

    name = "tiny"
    key = KEY
    endpoints: Mapping[str, Endpoint[Any]] = {SAY: Say()}

    def __init__(self) -> None:
        self.views: Mapping[str, View] = {NAMES: _names}
        self.api = ApiPart(
            paths={
                SAY: {"post": post(SayRequest, fields({"said": {"type": "array"}}), stream_type=LINES)},
                NAMES: {"get": get(NAMES, "Names.", JSON)},
            },
            bodies=(SayRequest,),
        )

    def error(self, problem: Problem) -> tuple[int, Json]:
        return problem.status, {"trouble": problem.message, "field": problem.param}


def _names(answers: Answers, parameters: Mapping[str, str]) -> Json:
    return {"names": [model.name for model in answers.models()]}


def line(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"


TINY: Dialect = Tiny()
